"""The map of docs/architecture.md holds: dependencies point one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FORBIDDEN = {
    "spark_node/learning": (
        "asyncio",
        "grpc",
        "time",
        "torch.distributed",
        "spark_node.transport",
        "spark_node.observe",
        "spark_node.node",
    ),
    "spark_node/package": ("asyncio", "grpc", "spark_node.transport", "spark_node.observe", "spark_node.node"),
    "spark_node/data": ("grpc", "spark_node.learning", "spark_node.transport", "spark_node.observe", "spark_node.cli"),
    "spark_node/transport": ("spark_node.observe", "spark_node.node", "spark_node.cli", "spark_node.launch"),
    "spark_node/observe": ("spark_node.cli", "spark_node.launch", "spark_node.compare"),
    "spark_node/compare": ("torch", "spark_node.cli", "spark_node.launch", "spark_node.node", "spark_node.learning"),
    "spark_node/launch": ("spark_node.cli", "spark_node.compare"),
    "spark_node/distributed": ("spark_node.cli", "spark_node.compare", "grpc"),
    "spark_node/security": ("torch", "spark_node.transport", "spark_node.learning", "spark_node.launch"),
    "spark_node/api": ("spark_node.cli", "spark_node.compare"),
    "spark_node": ("pickle", "spark_node.cli.main"),
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_dependencies_point_one_way(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        if path.name == "__main__.py":
            continue
        bad = {name for name in imports(path) for ban in FORBIDDEN[folder] if name == ban or name.startswith(ban + ".")}
        assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


def test_the_graph_of_a_round_needs_neither_torch_nor_the_learner() -> None:
    for name in ("topology.py", "config.py", "seeds.py", "errors.py"):
        found = imports(ROOT / "spark_node" / name)
        assert not {n for n in found if n.startswith(("torch", "spark_node.learning", "spark_node.model"))}


def _modules(part: str) -> list[Path]:
    return list((ROOT / "spark_node" / part).glob("[a-z]*.py"))


def test_the_orchestrator_knows_neither_torch_nor_the_learner() -> None:
    for path in (ROOT / "orchestrator").glob("*.py"):
        parts = ("topology", "config", "errors", "generated", "security")
        allowed = tuple(f"spark_node.{part}" for part in parts)
        for name in imports(path):
            assert not name.startswith("torch")
            assert not name.startswith("spark_node.") or name.startswith(allowed), f"{path.name} imports {name}"


def test_every_module_of_the_house_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "spark_node").iterdir():
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__", "errors"):
            assert path.name in page, f"docs/architecture.md does not mention {path.name}"
    parts = ("api", "learning", "package", "transport", "launch", "security", "distributed")
    inside = [path for part in parts for path in _modules(part)]
    for path in inside + list((ROOT / "orchestrator").glob("[a-z]*.py")):
        assert path.name in page, f"docs/architecture.md does not mention {path.name}"
