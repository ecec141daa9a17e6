"""A Docker engine for tests: one that runs here already, or one of our own that ends with the tests.

Nothing needs to be pulled: the base image is made from Debian's packages, wheels are downloaded on the host (whose pip
knows the index) and Prometheus is Debian's. Images stay in the engine's data root, so the next time is quick.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SOCKET, PID_FILE = Path("/run/spark-docker.sock"), Path("/run/spark-docker.pid")
DATA, EXEC, LOG = Path("/var/lib/spark-docker"), Path("/run/spark-docker"), Path("/var/log/spark-docker.log")
PACKAGES = {
    "docker": "docker.io",
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "prometheus": "prometheus",
}
SUITE = "bookworm"
BASE, IMAGE, PROMETHEUS = "spark-base:bookworm", "spark-dfl:test", "spark-prometheus:test"


class NoEngine(Exception):
    """Why no engine can be had here."""


@dataclass(frozen=True)
class Engine:
    """Where an engine listens; commands are run with its address in the environment."""

    address: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *command: str, check: bool = True, timeout: float = 900, **variables: str) -> str:
        """A command's output; its complaints are in the error."""
        env = {**os.environ, **self.environment, **variables}
        if self.address:
            env["DOCKER_HOST"] = self.address
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def answers(self) -> bool:
        if shutil.which("docker") is None:
            return False
        return bool(self.run("docker", "info", "--format", "{{.ServerVersion}}", check=False, timeout=60).strip())

    def has(self, image: str) -> bool:
        return bool(self.run("docker", "images", "-q", image).strip())


@contextmanager
def engine() -> Iterator[Engine]:
    """One that runs, or one that is started and ended here; NoEngine says why there is none."""
    own = Engine(f"unix://{SOCKET}")
    for running in (Engine(), own):
        if running.answers():
            if os.geteuid() == 0:
                install({name for name in PACKAGES if name != "dockerd"})
            yield running
            return
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can start one")
    install(set(PACKAGES))
    process = _start()
    try:
        yield own
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def install(programs: set[str]) -> None:
    """The Debian packages of programs that are not here."""
    missing = sorted({PACKAGES[name] for name in programs if shutil.which(name) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise NoEngine(f"no apt-get to install {', '.join(missing)} with")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    policy = Path("/usr/sbin/policy-rc.d")  # installed services are not to be started: tests start their own
    quiet = not policy.exists()
    if quiet:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing]):
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            if done.returncode:
                raise NoEngine(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    finally:
        if quiet:
            policy.unlink()


def _start() -> "subprocess.Popen[bytes]":
    """Our own dockerd, with a storage driver that this machine has."""
    reasons = []
    for driver in ("overlay2", "vfs"):
        command = ["dockerd", "--data-root", str(DATA), "--exec-root", str(EXEC), "--pidfile", str(PID_FILE)]
        command += ["--host", f"unix://{SOCKET}", "--storage-driver", driver]
        with LOG.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            if SOCKET.exists() and Engine(f"unix://{SOCKET}").answers():
                return process
            time.sleep(0.3)
        process.kill()
        process.wait()
        last = LOG.read_text(errors="replace").strip().splitlines()[-1:]
        reasons.append(f"{driver}: {' '.join(last)[-300:]}")
    raise NoEngine(f"dockerd does not start ({'; '.join(reasons)})")


def images(found: Engine) -> None:
    """Make the images that the tests run, as far as they are not there."""
    command = [sys.executable, "deploy/docker/wheels.py"]
    wheels = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        base = _base(found)
        said, _ = wheels.communicate(timeout=600)
        assert wheels.returncode == 0, said.decode(errors="replace")[-3000:]
    finally:
        wheels.kill()
    build = ["docker", "build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}"]
    found.run(*build, "-f", "deploy/docker/Dockerfile", "-t", IMAGE, ".")
    with tempfile.TemporaryDirectory() as context:
        shutil.copy("/usr/bin/prometheus", context)
        found.run(*build, "-f", "tests/docker/prometheus/Dockerfile", "-t", PROMETHEUS, context)


def _base(found: Engine) -> str:
    """Debian with Python, from its packages: no registry is needed. The host's apt settings go along (mirrors)."""
    if found.has(BASE):
        return BASE
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder, "root")
        unsafe = root / "etc/dpkg/dpkg.cfg.d/unsafe-io"  # a crash costs a temporary folder: no sync after each file
        unsafe.parent.mkdir(parents=True)
        unsafe.write_text("force-unsafe-io\n", encoding="ascii")
        include = "--include=python3,python3-venv"
        found.run("debootstrap", "--variant=minbase", include, SUITE, str(root))
        for part in (
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            shutil.rmtree(root / part)
            (root / part).mkdir()
        (root / "var/cache/apt/archives/partial").mkdir()
        unsafe.unlink()
        shutil.rmtree(root / "etc/apt")
        shutil.copytree("/etc/apt", root / "etc/apt", symlinks=True)
        with subprocess.Popen(["tar", "-C", str(root), "--numeric-owner", "-c", "."], stdout=subprocess.PIPE) as tar:
            env = {**os.environ, **({"DOCKER_HOST": found.address} if found.address else {})}
            subprocess.run(["docker", "import", "-", BASE], stdin=tar.stdout, env=env, check=True, capture_output=True)
    return BASE
