"""Every command and every piece of code in README, SECURITY and docs is run, or checked as far as a test can.

A page is read from top to bottom in an empty folder, its commands and its Python sharing files and names as they do
for a reader. The shrinking rule: `run` and `package explain` keep every setting they give, which the real parser and
configuration take first; then few peers, one round, a small model and, unless it is a file of the page, the embedded
digits take the place of their sizes. What is not run is listed by name, with the reason.
"""

import ast
import glob
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spark_node
from spark_node import config as configuration
from spark_node.cli import compare, main, run
from spark_node.config import Config
from tests.docs.pages import ROOT, blocks, commands, inline, names

NOT_RUN = {
    ". .venv/bin/activate": "changes the reader's shell",
    "spark-dfl run --resume RUN": "needs a run that was interrupted: tests/faults/test_resume.py",
}
"""Commands that are not even parsed, and why."""

PARSED = {
    "orchestrator": "serves until it is told to stop: tests/network/test_commands.py and test_examples.py run it",
    "host": "peers of other machines: tests/network/test_commands.py and test_examples.py run it",
    "node": "the same",
    "compare": "many runs: every cell's configuration is loaded here; tests/unit/test_compare_runner.py runs them",
    "chaos": "needs a network: tests/faults/test_chaos.py runs it",
    "observe": "follows a network until it ends",
    "dashboard": "the same, as a page: tests/network/test_live_page.py looks at it",
    "deploy": "needs other machines",
    "benchmarks": "minutes each; their flags are checked, `make bench` runs them",
    "examples": "tests/network/test_examples.py runs them",
    "make": "sets up an environment; that the target exists is checked",
    "docker": "needs images",
    "kubectl": "needs a cluster",
}
"""What is checked by its real parser and configuration only, and why."""

CHECKED_PYTHON = {
    "spark_node.Peer(": "needs a network: its arguments are checked here; tests/network/test_examples.py runs one",
}
"""Python that is compiled, and its calls of spark_node held against the real signatures."""

GIVEN: dict[str, Callable[[Path], object]] = {
    "authority": lambda path: main.main(["certs", "init", str(path)]),
    "run.toml": lambda path: path.write_text(configuration.to_toml(Config())),
}
"""What a reader of a later page has already: an authority (SECURITY.md makes it), and the settings of the run."""

SMALL = {
    "run.nodes": 6,
    "run.rounds": 1,
    "run.transport": "memory",
    "run.workers": 2,
    "topology.degree": 2,
    "data.samples_per_node": 20,
    "learning.timesteps": (20, 40),
    "local.epochs": 1,
    "model.hidden": (8,),
    "model.channels": (4,),
}


@pytest.mark.parametrize("page", names())
def test_every_command_and_example_of_the_page_works(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(os.environ):
        if name.startswith("SPARK_") and "__" in name:
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    reader = Reader(page, tmp_path, monkeypatch)
    for block in blocks(page):
        if block.language == "sh":
            for command in commands(block):
                reader.types(command)
        elif block.language == "python":
            reader.executes(block.text)
        elif block.language == "":
            assert not re.search(r"^(spark-dfl|python|make) ", block.text, re.MULTILINE), f"not marked sh: {block.text}"
    capsys.readouterr()


class Reader:
    """Somebody who does what a page says, in an empty folder beside the examples and benchmarks."""

    def __init__(self, page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self._namespace: dict[str, Any] = {"__name__": page}
        self._runs = 0
        for name in ("benchmarks", "examples"):
            (folder / name).symlink_to(ROOT / name)
        monkeypatch.chdir(folder)

    def types(self, command: str) -> None:
        """One line of a block of commands."""
        if command in NOT_RUN:
            return
        programs = {
            "spark-dfl": self._spark,
            "make": check_make,
            "python": check_python,
            "torchrun": check_torchrun,
            "docker": check_docker,
            "pip": check_pip,
        }
        for part in command.split(" && "):
            words = shlex.split(part)
            if words[0] == "cd":
                self._monkeypatch.chdir(words[1])
                continue
            assert words[0] in programs, f"{command}: say in tests/docs/test_commands.py how this is checked"
            programs[words[0]](words)
        self._monkeypatch.chdir(self.folder)

    def executes(self, text: str) -> None:
        """A block of Python; names live on from one block to the next."""
        tree = ast.parse(text)
        if any(part in text for part in CHECKED_PYTHON):
            check_calls(tree)
        else:
            exec(compile(tree, "<docs>", "exec"), self._namespace)

    def _spark(self, words: list[str]) -> None:
        """Parsed and loaded as it stands; run where that is quick, or once it is made small."""
        arguments = [found for word in words[1:] for found in (sorted(glob.glob(word)) if "*" in word else [word])]
        args = main.parser().parse_args(arguments)
        for name in GIVEN.keys() & set(arguments):
            if arguments[:2] != ["certs", "init"] and not (self.folder / name).exists():
                GIVEN[name](self.folder / name)
        if args.command == "run" and not args.settings:
            out = self.folder / (args.out or f"runs/run-{self._runs}")
            self._run_small(["run", "--quiet", "--no-report", "--out", str(out)], run.load_config(args))
        elif args.command == "package":
            self._run_small(["package", "explain"], run.load_config(args))
        elif args.command == "compare":
            for _, study in compare._studies(args):
                assert study.cells(compare._flags(args))
        elif args.command in PARSED:
            if hasattr(args, "set"):
                run.load_config(args)
        else:
            assert main.main(arguments) == 0, shlex.join(words)

    def _run_small(self, command: list[str], config: Config) -> None:
        """The command with its own settings, but for sizes and for data that a test does not have."""
        changes: dict[str, Any] = {key.replace(".", "__"): value for key, value in SMALL.items()}
        dataset = config.data.dataset
        if not dataset.startswith("file:"):
            changes |= {"data__dataset": "digits", "data__folder": ""}
        if config.data.partition.startswith(("file:", "writer")):
            changes["data__partition"] = "iid"
        self._runs += 1
        path = self.folder / f"small-{self._runs}.toml"
        path.write_text(configuration.to_toml(config.replace(**changes)))
        assert main.main([*command, "--config", str(path)]) == 0, shlex.join(command)


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words[1:]:
        assert "=" in word or word in targets, f"make {word}: no such target"


def check_python(words: list[str]) -> None:
    """The script is there and has the flags."""
    path = words[1]
    assert (ROOT / path).is_file(), f"{path} is not there"
    assert path.partition("/")[0] in PARSED, f"{path}: say in tests/docs/test_commands.py how this is checked"
    flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
    if flags:
        said = subprocess.run(
            [sys.executable, path, "--help"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        for flag in flags:
            assert re.search(rf"{flag}\b", said), f"{shlex.join(words)}: no flag {flag}"


def check_torchrun(words: list[str]) -> None:
    """What the ranks are told parses and loads; tests/network/test_distributed.py runs ranks."""
    start = words.index("spark_node")
    assert words[start - 1] == "-m"
    args = main.parser().parse_args(words[start + 1 :])
    if args.command == "compare":
        for _, study in compare._studies(args):
            assert study.cells(compare._flags(args))
    elif not getattr(args, "resume", None):
        args.config = None if args.config == "run.toml" else args.config
        run.load_config(args)


def check_docker(words: list[str]) -> None:
    """Services that are named are in docker-compose.yml; tests/docker runs it."""
    assert words[1] in ("compose", "cp"), f"{shlex.join(words)}: say in tests/docs/test_commands.py how this is checked"
    services = re.findall(r"^  ([\w-]+):$", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE)
    for name in re.findall(r"--scale (\w+)=|ps -aq (\w+)\)", shlex.join(words)):
        assert "".join(name) in services, f"{shlex.join(words)}: no service {name}"


def check_pip(words: list[str]) -> None:
    """An extra that is named exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\[([\w,]+)\]", shlex.join(words)):
        assert set(extra.split(",")) <= set(extras), f"{shlex.join(words)}: no extra {extra}"


def check_calls(tree: ast.AST) -> None:
    """Every call of something in spark_node has arguments that it takes."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and owner.id == "spark_node":
                words = {str(word.arg): None for word in call.keywords}
                inspect.signature(getattr(spark_node, call.func.attr)).bind(*call.args, **words)


def _known_flags(words: list[str]) -> set[str]:
    """The flags of a subcommand, and of its action where it has some."""
    parser: Any = main.parser()
    for word in words:
        chosen = next(
            (a.choices[word] for a in parser._actions if isinstance(a.choices, dict) and word in a.choices), None
        )
        if chosen is None:
            break
        parser = chosen
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", names())
def test_commands_within_sentences_exist_with_the_flags_they_name(page: str) -> None:
    known = {setting.key for setting in configuration.settings()}
    for text in inline(page):
        words = text.split()
        if words[0] == "make" and len(words) == 2:
            check_make(words)
        elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), f"{page}: {text}"
        elif words[0] == "spark-dfl" and len(words) > 1:
            commands_known = {name for a in main.parser()._actions if isinstance(a.choices, dict) for name in a.choices}
            assert words[1] in commands_known, f"{page}: {text}"
            for flag in re.findall(r"--[a-z][\w-]*", text):
                assert flag in _known_flags(words[1:]), f"{page}: {text}: no flag {flag}"
            for key in re.findall(r"--set ([a-z]+\.\w+)", text):
                assert key in known, f"{page}: {text}: no setting {key}"


@pytest.mark.parametrize("page", names())
def test_settings_that_a_page_names_exist(page: str) -> None:
    known = {setting.key for setting in configuration.settings()}
    sections = {key.partition(".")[0] for key in known}
    for text in inline(page):
        found = re.fullmatch(r"([a-z]+)\.([a-z]\w*)(\s*=.*)?", text)
        if found and found[1] in sections and found[2] not in ("py", "md", "toml", "json", "proto", "state", "restore"):
            assert f"{found[1]}.{found[2]}" in known, f"{page}: there is no setting {text}"


WRONG = {
    "spark-dfl run --nods 3": "--nods",
    "spark-dfl run --preset dmo": "dmo",
    "spark-dfl run --set learning.etta=1": "etta",
    "spark-dfl rum": "rum",
    "spark-dfl host --certs certs --orchestrator 10.0.0.1:7000 --set network.hots=1": "hots",
    "spark-dfl compare --preset demo --vary momentum.mu=2": "momentum.mu",
    "spark-dfl compare benchmarks/studies/nothing.toml": "nothing.toml",
    "make dinner": "dinner",
    "python benchmarks/nothing.py": "nothing.py",
    "python benchmarks/client_round.py --fast": "--fast",
    "curl example.org": "say in tests/docs",
    "torchrun --nproc-per-node 2 -m spark_node run --nods 3": "--nods",
    "docker compose up --scale pears=3": "pears",
    "pip install 'spark-dfl[dply]'": "dply",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_would_be_found(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, spark_node.UserError), match=re.escape(WRONG[command])):
        Reader("a page", tmp_path, monkeypatch).types(command)


def test_a_wrong_argument_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="orchestra"):
        Reader("a page", tmp_path, monkeypatch).executes('spark_node.Peer(x, y, orchestra="10.0.0.1:7000")')


def test_every_exception_is_still_needed() -> None:
    everything = {
        command for page in names() for block in blocks(page) if block.language == "sh" for command in commands(block)
    }
    assert set(NOT_RUN) <= everything
