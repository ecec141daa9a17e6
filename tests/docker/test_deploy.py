"""`spark-dfl deploy` on real engines: one, and two of which the second is reached over TCP with TLS."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import IMAGE, REPOSITORY, Engine, NoEngine
from tests.docker.second_engine import SecondEngine, copy_image, second_engine

pytestmark = pytest.mark.timeout(1200)

SETTINGS = {
    "run.rounds": 3,
    "topology.degree": 3,
    "model.hidden": [16],
    "data.samples_per_node": 40,
    "learning.timesteps": [100, 200],
    "network.deadline_floor": 120.0,
}
PATIENCE = 600.0


@pytest.fixture(scope="module")
def second(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """A second engine that has the image too."""
    try:
        with second_engine(tmp_path_factory.mktemp("engine")) as found:
            copy_image(IMAGE, docker, found.local)
            yield found
    except NoEngine as reason:
        pytest.skip(f"no second engine: {reason}")


@dataclass
class Deployment:
    """A hosts file, and the command on it."""

    folder: Path
    engines: tuple[Engine, ...]
    name: str
    hosts: list[str]
    image: str = IMAGE
    head: str = ""
    rounds: int = 3

    def write(self) -> Path:
        ports = free_ports(2)
        shown = {**SETTINGS, "run.rounds": self.rounds}
        settings = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in shown.items())
        text = f'name = "{self.name}"\nimage = "{self.image}"\npull = "never"\n{self.head}'
        text += f"\n[run]\nset = {{ {settings} }}\n[ports]\norchestrator = {ports[0]}\nhttp = {ports[1]}\n"
        path = self.folder / "hosts.toml"
        path.write_text(text + "".join(f"\n[[hosts]]\n{host}\n" for host in self.hosts))
        return path

    def do(self, action: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "spark_node", "deploy", action, "--hosts", "hosts.toml", *flags]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=900)
        print(" ".join(["deploy", action, *flags]), done.returncode, done.stdout, done.stderr, sep="\n")
        return done

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.do("status", "--json").stdout)
        return found

    def remains(self) -> list[str]:
        """Containers, volumes and networks of this deployment, on any engine."""
        label = f"label=spark-dfl.run={self.name}"
        found = []
        for engine in self.engines:
            found += engine.run("docker", "ps", "-a", "--filter", label, "--format", "{{.Names}}").split()
            for kind in ("volume", "network"):
                found += engine.run("docker", kind, "ls", "-q", "--filter", label).split()
        return found

    def await_observer(self) -> dict[str, Any]:
        """Until the observer has written the whole run."""
        end = time.monotonic() + PATIENCE
        while True:
            status = self.status()
            states = {c["role"]: c for found in status["hosts"].values() for c in found}
            if states["observer"]["state"] == "exited":
                assert states["observer"]["exit_code"] == 0
                return status
            assert time.monotonic() < end, status
            time.sleep(2)


def free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    try:
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
    finally:
        for one in taken:
            one.close()


def alpha(engine: Engine, peers: int = 3, more: str = "") -> str:
    address = engine.address or "unix:///var/run/docker.sock"
    return f'name = "alpha"\nengine = "{address}"\naddress = "127.0.0.1"\npeers = {peers}\n{more}'


def beta(second: SecondEngine, address: str = "127.0.0.2") -> str:
    tls = ", ".join(f'{key} = "{second.file(name)}"' for key, name in TLS_FILES)
    return f'name = "beta"\nengine = "{second.tcp}"\ntls = {{ {tls} }}\naddress = "{address}"\npeers = 3\n'


TLS_FILES = (("ca", "ca.pem"), ("cert", "client.pem"), ("key", "client.key"))


@pytest.fixture
def cleanup() -> Iterator[list[Deployment]]:
    """Whatever a test leaves of these goes with it."""
    made: list[Deployment] = []
    yield made
    for deployment in made:
        deployment.do("down", "--discard")


def accuracies(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [row["aggregated_accuracy"] for row in rows]


def in_memory(folder: Path, peers: int) -> list[float]:
    """The same run in one process: the same seed gives the same models, bit for bit."""
    settings = [f"{key}={json.dumps(value)}" for key, value in {**SETTINGS, "run.nodes": peers}.items()]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    command = [sys.executable, "-m", "spark_node", "run", "--transport", "memory", "--quiet", "--no-report"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*command, *flags, "--out", str(folder)], env=environment, check=True, capture_output=True)
    return accuracies(folder)


def test_a_run_on_one_engine_from_up_to_down(docker: Engine, tmp_path: Path, cleanup: list[Deployment]) -> None:
    deployment = Deployment(tmp_path, (docker,), "one", [alpha(docker, 4)])
    deployment.write()
    cleanup.append(deployment)
    assert deployment.do("up").returncode == 0
    again = deployment.do("up")
    assert again.returncode == 1
    assert "a run named one is here already" in again.stderr
    status = deployment.await_observer()
    assert status["members"] == 4
    assert sorted(status["rounds"]) == [f"peer-00{i}" for i in range(4)]
    assert {c["role"]: c["state"] for c in status["hosts"]["alpha"]}["orchestrator"] == "running"
    logs = deployment.do("logs", "--tail", "5")
    assert "alpha spark-one-orchestrator | " in logs.stdout

    listing = docker.run("docker", "exec", "spark-one-orchestrator", "find", "/spark/certs", "-name", "*.key")
    assert listing.split() == ["/spark/certs/orchestrator/orchestrator.key"]
    modes = docker.run("docker", "exec", "spark-one-orchestrator", "stat", "-c", "%a %u", *listing.split())
    assert modes.split() == ["600", "10001"]

    fetched = deployment.do("fetch", "--out", "results")
    assert fetched.returncode == 0
    assert json.loads((tmp_path / "results" / "summary.json").read_text())["status"] == "complete"
    assert (tmp_path / "results" / "logs" / "spark-one-alpha-cpu" / "peer-003.log").exists()
    down = deployment.do("down", "--out", "results")
    assert down.returncode == 0
    assert deployment.remains() == []
    assert (tmp_path / "results" / "report.html").exists()
    assert deployment.do("down").returncode == 0
    assert "no run named one" in deployment.do("status").stdout


def test_two_engines_learn_what_one_process_learns(
    docker: Engine, second: SecondEngine, tmp_path: Path, cleanup: list[Deployment]
) -> None:
    engines, head = (docker, second.local), 'observer = "beta"\nseconds = 120\n'
    deployment = Deployment(tmp_path, engines, "two", [alpha(docker), beta(second)], head=head)
    deployment.write()
    cleanup.append(deployment)
    assert deployment.do("up").returncode == 0
    status = deployment.await_observer()
    roles = {host: sorted(c["role"] for c in found) for host, found in status["hosts"].items()}
    assert roles == {"alpha": ["orchestrator", "peers"], "beta": ["observer", "peers"]}
    assert (status["problems"], status["failed"]) == ({}, False)
    down = deployment.do("down", "--out", "results")
    assert down.returncode == 0
    assert deployment.remains() == []
    assert accuracies(tmp_path / "results") == in_memory(tmp_path / "memory", 6)


def test_a_host_that_stops_answering_is_named_and_cleaned_up_when_it_is_back(
    docker: Engine, second: SecondEngine, tmp_path: Path, cleanup: list[Deployment]
) -> None:
    engines = (docker, second.local)
    deployment = Deployment(tmp_path, engines, "gone", [alpha(docker), beta(second)], rounds=500)
    path = deployment.write()
    cleanup.append(deployment)
    assert deployment.do("up").returncode == 0
    text = path.read_text()
    path.write_text("seconds = 15\n" + text)
    os.kill(second.process.pid, signal.SIGSTOP)
    try:
        status = deployment.status()
        assert list(status["problems"]) == ["beta"]
        assert status["hosts"]["alpha"]
        up = deployment.do("down", "--keep-data")
        assert up.returncode == 1
        assert "  beta  " in up.stderr
        assert "  alpha  " not in up.stderr
    finally:
        os.kill(second.process.pid, signal.SIGCONT)
    path.write_text(text)
    kept = deployment.remains()
    assert "spark-gone-observer" in kept, "--keep-data keeps the run folder's volume"
    assert "spark-gone-beta-cpu" in kept
    down = deployment.do("down")
    assert down.returncode == 0
    assert deployment.remains() == []
    folder = tmp_path / down.stdout.strip()
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"


def test_a_host_that_is_down_is_named_and_nothing_is_started_anywhere(docker: Engine, tmp_path: Path) -> None:
    nowhere = f'name = "beta"\nengine = "unix://{tmp_path}/no.sock"\naddress = "127.0.0.2"\npeers = 3\n'
    deployment = Deployment(tmp_path, (docker,), "down", [alpha(docker), nowhere])
    deployment.write()
    up = deployment.do("up")
    assert up.returncode == 1
    assert f"  beta  engine unix://{tmp_path}/no.sock cannot be reached" in up.stderr
    assert "  alpha  " not in up.stderr
    assert deployment.remains() == []


def test_an_image_that_only_one_host_has_is_named_for_the_other(
    docker: Engine, second: SecondEngine, tmp_path: Path
) -> None:
    only = "spark-dfl:only-alpha"
    docker.run("docker", "tag", IMAGE, only)
    try:
        engines = (docker, second.local)
        deployment = Deployment(tmp_path, engines, "image", [alpha(docker), beta(second)], image=only)
        deployment.write()
        up = deployment.do("up")
    finally:
        docker.run("docker", "rmi", only)
    assert up.returncode == 1
    assert f"  beta  image {only} is missing" in up.stderr
    assert "  alpha  " not in up.stderr
    assert deployment.remains() == []


def test_peers_that_cannot_begin_are_named_with_their_reason_and_all_is_removed(
    docker: Engine, second: SecondEngine, tmp_path: Path
) -> None:
    hosts = [alpha(docker), beta(second, address="192.0.2.254")]
    deployment = Deployment(tmp_path, (docker, second.local), "reason", hosts)
    deployment.write()
    up = deployment.do("up")
    assert up.returncode == 1
    assert "  beta  spark-reason-beta-cpu ended with 2: " in up.stderr
    assert "192.0.2.254" in up.stderr
    assert deployment.remains() == []
    assert list(tmp_path.glob("runs/*-failed/spark-reason-beta-cpu/peer-003.log"))


def test_a_gpu_that_no_engine_can_give_is_an_error_that_says_what_to_install(docker: Engine, tmp_path: Path) -> None:
    if "nvidia" in docker.run("docker", "info", "--format", "{{json .Runtimes}}"):
        pytest.skip("this engine can give GPUs")
    host = alpha(docker).replace("peers = 3", "gpus = 2\npeers_per_gpu = 3")
    deployment = Deployment(tmp_path, (docker,), "gpu", [host])
    deployment.write()
    up = deployment.do("up")
    assert up.returncode == 1
    assert "could not select device driver" in up.stderr
    assert "install the NVIDIA container toolkit on this host" in up.stderr
    assert deployment.remains() == []


def test_a_dataset_that_is_not_on_the_host_is_named_before_anything_starts(docker: Engine, tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, (docker,), "data", [alpha(docker, 4, 'data = "/no/such/folder"\n')])
    deployment.write()
    up = deployment.do("up")
    assert up.returncode == 1
    assert "bind source path does not exist: /no/such/folder" in up.stderr
    assert deployment.remains() == []
