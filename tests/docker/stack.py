"""A network of docker-compose.yml under a project name of its own."""

import json
import shutil
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docker.engine import IMAGE, PROMETHEUS, REPOSITORY, Engine

SERVICES = ("certificates", "orchestrator", "peers", "observer", "prometheus")
"""All but Grafana, of which there is no Debian package."""


class Stack:
    """What `docker compose` does, with the variables of a small run."""

    def __init__(self, engine: Engine, project: str, folder: Path) -> None:
        self.engine, self.project = engine, project
        self.variables = {
            "SPARK_IMAGE": IMAGE,
            "PROMETHEUS_IMAGE": PROMETHEUS,
            "PROMETHEUS_PORT": str(_free_port()),
            "PROMETHEUS_CONFIG": str(_hurried(folder)),
            "SPARK_PRESET": "demo",
            "SPARK_NODES": "12",
            "SPARK_CONTAINERS": "2",
            "SPARK_NODES_PER_CONTAINER": "6",
            "SPARK_ROUNDS": "3",
            "SPARK_LINGER": "600",
            "SPARK_RUN_ID": "first",
        }

    def compose(self, *arguments: str, check: bool = True, **changes: str) -> str:
        self.variables.update(changes)
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        return self.engine.run(*program, "-p", self.project, *arguments, check=check, **self.variables)

    def up(self, **changes: str) -> None:
        self.compose("up", "-d", *SERVICES, **changes)

    def containers(self, service: str) -> list[str]:
        """Of a service, running or not, in the order of their numbers."""
        label = f"label=com.docker.compose.service={service}"
        named = ["--format", "{{.Names}}", "--filter", self._own, "--filter", label]
        return sorted(self.engine.run("docker", "ps", "-a", *named).split())

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.engine.run("docker", "inspect", container))[0]
        return found

    def sh(self, container: str, script: str, *, check: bool = True) -> str:
        return self.engine.run("docker", "exec", container, "sh", "-c", script, check=check)

    def run_file(self, run: str, name: str) -> str:
        """A file of a run folder, whether the observer still runs or not."""
        observer = self.containers("observer")[0]
        tar = ["docker", "cp", f"{observer}:/runs/{run}/{name}", "-"]
        return self.engine.run("sh", "-c", f"{' '.join(tar)} | tar -xO", check=False)

    def summary(self, run: str) -> dict[str, Any]:
        """summary.json of a finished run; empty while it is under way."""
        text = self.run_file(run, "summary.json")
        found: dict[str, Any] = json.loads(text) if text else {}
        return found if found.get("status") == "complete" else {}

    def rounds(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run_file(run, "rounds.jsonl").splitlines()]

    def ask(self, path: str, **parameters: str) -> dict[str, Any]:
        """Prometheus' HTTP interface."""
        where = f"http://127.0.0.1:{self.variables['PROMETHEUS_PORT']}/api/v1/{path}?"
        try:
            with urllib.request.urlopen(where + urllib.parse.urlencode(parameters), timeout=20) as page:
                return dict(json.load(page))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = self.ask("query", query=expression)
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def number(self, expression: str) -> float:
        """The value of an expression that gives one; 0 where it gives none."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def remains(self) -> dict[str, list[str]]:
        """What of the project is still in the engine."""
        kinds = {"containers": ["ps", "-a"], "networks": ["network", "ls"], "volumes": ["volume", "ls"]}
        return {
            kind: self.engine.run("docker", *command, "-q", "--filter", self._own).split()
            for kind, command in kinds.items()
        }

    def state(self) -> str:
        """What to look at when a test has failed."""
        return self.compose("ps", check=False) + self.compose("logs", "--no-color", "--tail=40", check=False)

    @property
    def _own(self) -> str:
        return f"label=com.docker.compose.project={self.project}"


def wait_for(what: str, condition: Callable[[], Any], stack: Stack, seconds: float = 240) -> Any:
    """Until the condition holds; what it gave."""
    end = time.monotonic() + seconds
    while True:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}\n{stack.state()}"
        time.sleep(1)


def _hurried(folder: Path) -> Path:
    """deploy/prometheus, but every ten seconds are three."""
    shutil.copytree(REPOSITORY / "deploy" / "prometheus", folder / "prometheus")
    settings = folder / "prometheus" / "prometheus.yml"
    settings.write_text(settings.read_text(encoding="utf-8").replace("10s", "3s"), encoding="utf-8")
    for place in (folder, folder / "prometheus"):
        place.chmod(0o755)  # Prometheus runs as nobody
    return folder / "prometheus"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
