"""The committed stubs are what `make proto` makes of proto/."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))
GENERATED = ROOT / "spark_node" / "generated"


def made(folder: Path) -> dict[str, str]:
    """What the Makefile's own recipe writes, into another folder."""
    makefile = (ROOT / "Makefile").read_text()
    found = re.search(r"^proto:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert found is not None
    recipe = found[1].replace("$(BIN)/python", shlex.quote(sys.executable)).replace("$(GENERATED)", str(folder))
    assert "$(" not in recipe
    subprocess.run(["sh", "-ec", recipe], cwd=ROOT, check=True)
    return stubs(folder)


def stubs(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*_pb2*.py*")}


def made_for(stub: str) -> str | None:
    """The version of protobuf or grpc that a stub names."""
    found = re.search(r"# Protobuf Python Version: (\S+)|GRPC_GENERATED_VERSION = '(\S+)'", stub)
    return found and (found[1] or found[2])


@pytest.mark.skipif(find_spec("grpc_tools") is None, reason="grpcio-tools, which makes the stubs, is not installed")
def test_the_stubs_are_made_from_the_protos(tmp_path: Path) -> None:
    expected, committed = made(tmp_path), stubs(GENERATED)
    assert sorted(committed) == sorted(expected), "run make proto"
    versions = {(made_for(expected[name]), made_for(committed[name])) for name in expected}
    different = sorted(f"{installed}, not {named}" for installed, named in versions if installed != named)
    if different:
        pytest.skip(f"the installed grpcio-tools makes stubs for protobuf or grpc {'; '.join(different)}")
    assert committed == expected, "run make proto"


def test_every_proto_has_a_stub() -> None:
    names = {str(p.relative_to(ROOT / "proto").with_suffix("")) for p in PROTOS}
    assert names
    assert {f"{name}_pb2{end}" for name in names for end in (".py", ".pyi")} <= stubs(GENERATED).keys()
