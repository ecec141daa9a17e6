"""The hosts file: what it says, and that every mistake is one line with the key, the value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from spark_node.deploy.hosts import Deployment, EngineTls, HostsError, load_hosts

ROOT = Path(__file__).resolve().parents[2]
HEAD = 'name = "monday"\nimage = "spark-dfl:latest"\n'
HOST = '[[hosts]]\nname = "alpha"\nengine = "unix:///var/run/docker.sock"\naddress = "10.0.0.1"\n'


def host_at(engine: str) -> str:
    return HOST.replace("unix:///var/run/docker.sock", engine)


def read(folder: Path, text: str) -> Deployment:
    path = folder / "hosts.toml"
    path.write_text(text)
    return load_hosts(path)


@pytest.fixture
def example(tmp_path: Path) -> Deployment:
    """The annotated example, with the files that it names beside it."""
    for name in ("docker-ca.pem", "docker-cert.pem", "docker-key.pem"):
        (tmp_path / name).touch()
    return read(tmp_path, (ROOT / "deploy" / "gpu_hosts" / "hosts.toml").read_text())


def test_the_example_says_what_its_comments_say(example: Deployment, tmp_path: Path) -> None:
    first, second, third = example.hosts
    assert (example.name, example.image, example.pull, example.network) == (
        "monday",
        "spark-dfl:latest",
        "missing",
        "host",
    )
    assert (example.orchestrator, example.observer) == ("gpu-1", "gpu-1")
    assert (first.gpus, first.peers, first.data) == (("0", "1", "2", "3"), 8, "/srv/fashion-mnist")
    assert second.gpus == ("0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    assert second.tls == EngineTls(*(tmp_path / f"docker-{name}.pem" for name in ("ca", "cert", "key")))
    assert (third.gpus, third.peers, third.engine) == ((), 16, "ssh://ops@10.0.0.3:2222")
    assert dict(example.run.set) == {"run.rounds": 50, "topology.degree": 5}


def test_what_is_left_out_has_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, HEAD + HOST)
    assert (found.orchestrator, found.observer, found.pull, found.network) == ("alpha", "alpha", "missing", "host")
    assert (found.ports.orchestrator, found.ports.http, found.ports.peers, found.ports.metrics) == (7400, 7401, 0, 0)
    assert (found.hosts[0].peers, found.hosts[0].workers, found.authority) == (None, 0, None)


def test_settings_stand_with_dots_or_in_sections(tmp_path: Path) -> None:
    found = read(tmp_path, HEAD + '[run.set]\n"run.rounds" = 3\n[run.set.run]\nseed = 7\n' + HOST)
    assert dict(found.run.set) == {"run.rounds": 3, "run.seed": 7}


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    found = read(tmp_path, 'authority = "keys"\n' + HEAD + '[run]\nconfig = "run.toml"\n' + HOST)
    assert (found.run.config, found.authority) == (tmp_path / "run.toml", tmp_path / "keys")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOST, "name is missing; allowed: 1 to 32 of a-z"),
        ('name = "Monday"\nimage = "i"\n' + HOST, "name = 'Monday'; allowed: 1 to 32 of a-z"),
        ('name = "m"\n' + HOST, "image is missing; allowed: a text"),
        (HEAD, "hosts is missing; allowed: 1 to 1000 [[hosts]]"),
        (HEAD + "hosts = 3\n", "hosts = 3; allowed: a list"),
        (HEAD + "hosts = [3]\n", "hosts[1] = 3; allowed: a table"),
        (HEAD + 'colour = "red"\n' + HOST, "colour = 'red': unknown key; allowed: name, image"),
        (HEAD + 'pull = "often"\n' + HOST, "pull = 'often'; allowed: missing, never, always"),
        (HEAD + 'orchestrator = "beta"\n' + HOST, "orchestrator = 'beta'; allowed: alpha"),
        (HEAD + "observer = 1\n" + HOST, "observer = 1; allowed: alpha"),
        (HEAD + 'network = "a b"\n' + HOST, "network = 'a b'; allowed: host, or the name"),
        (HEAD + "seconds = 0\n" + HOST, "seconds = 0; allowed: a number from 1 to 3600"),
        (HEAD + '[run]\npreset = "quick"\n' + HOST, "run.preset = 'quick'; allowed: best, demo"),
        (HEAD + '[run]\nconfig = "gone.toml"\n' + HOST, "run.config = 'gone.toml'; allowed: a TOML file"),
        (HEAD + "[run]\nrounds = 3\n" + HOST, "run.rounds = 3: unknown key; allowed: preset, config, set"),
        (HEAD + "[run]\nset = { rounds = 3 }\n" + HOST, "rounds = 3 ("),
        (HEAD + "[ports]\npeers = 70000\n" + HOST, "ports.peers = 70000; allowed: a whole number from 0 to 65535"),
        (HEAD + "[ports]\nhttp = 7400\n" + HOST, "ports.http = 7400; allowed: another than ports.orchestrator"),
        (HEAD + HOST + HOST, "hosts.name = 'alpha'; allowed: each once"),
        (HEAD + HOST + HOST.replace("alpha", "beta"), "hosts.engine = 'unix:///var/run/docker.sock'; allowed"),
        (HEAD + HOST + "gpus = -1\n", "hosts.alpha.gpus = -1; allowed: how many (0 to 64)"),
        (HEAD + HOST + "gpus = [0, 0]\n", "hosts.alpha.gpus = [0, 0]; allowed: how many"),
        (HEAD + HOST + "gpus = ['all gpus']\n", "hosts.alpha.gpus = ['all gpus']; allowed: how many"),
        (HEAD + HOST + "gpus = 2\npeers = 3\n", "hosts.alpha.peers = 3; allowed: peers_per_gpu, since"),
        (HEAD + HOST + "peers_per_gpu = 3\n", "hosts.alpha.peers_per_gpu = 3; allowed: peers, since"),
        (HEAD + HOST + "peers = 0\n", "hosts.alpha.peers = 0; allowed: a whole number from 1"),
        (HEAD + HOST + "peers = true\n", "hosts.alpha.peers = True; allowed: a whole number from 1"),
        (HEAD + HOST + "memory = '3g'\n", "hosts[1].memory = '3g': unknown key; allowed: name, engine"),
        (HEAD + HOST + "data = 'here'\n", "hosts.alpha.data = 'here'; allowed: the dataset's folder on that host"),
        (HEAD + HOST + "data = '/a/../b'\n", "hosts.alpha.data = '/a/../b'; allowed: the dataset's folder"),
        (HEAD + HOST + "tls = {}\n", "hosts.alpha.tls = {}; allowed: only beside engine = 'tcp://host:port'"),
        (HEAD + HOST.replace("10.0.0.1", "0.0.0.0"), "hosts.alpha.address = '0.0.0.0'; allowed: an IPv4 address"),
        (HEAD + HOST.replace("10.0.0.1", "10.0.0.1:7"), "hosts.alpha.address = '10.0.0.1:7'; allowed: an IPv4 address"),
        (HEAD + HOST.replace("10.0.0.1", "fd00::1"), "hosts.alpha.address = 'fd00::1'; allowed: an IPv4 address"),
        (HEAD + host_at("http://h"), "hosts.alpha.engine = 'http://h'; allowed: unix"),
        (HEAD + host_at("tcp://h"), "hosts.alpha.engine = 'tcp://h'; allowed: unix"),
        (HEAD + host_at("tcp://h:x"), "hosts.alpha.engine = 'tcp://h:x'; allowed: unix"),
        (
            HEAD + host_at("tcp://10.0.0.1:2376"),
            "hosts.alpha.tls is missing; allowed: { ca = FILE",
        ),
        (
            HEAD + host_at("tcp://h:1") + "tls = { ca = 'a', cert = 'b', key = 'c' }\n",
            "hosts.alpha.tls.ca = 'a'; allowed: a file; there is none",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(text: str, said: str, tmp_path: Path) -> None:
    from spark_node.errors import ConfigError

    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    line = str(refused.value)
    assert said in line
    assert "hosts.toml" in line
    assert "\n" not in line


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"[" * 5000])
def test_what_is_not_toml_is_said_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(content)
    with pytest.raises(HostsError, match="not TOML"):
        load_hosts(path)
    with pytest.raises(HostsError, match="cannot be read"):
        load_hosts(tmp_path / "gone.toml")


@pytest.mark.parametrize("engine", ["ssh://gpu-1", "ssh://ops@gpu-1:22", "tcp://127.0.0.1:2375", "unix:///run/d.sock"])
def test_engines_that_are_fine(engine: str, tmp_path: Path) -> None:
    found: Any = read(tmp_path, HEAD + host_at(engine))
    assert found.hosts[0].engine == engine
