"""What engines are told, by the real SDK over HTTP: GPUs, keys, limits; and what is said of hosts that fail."""

import io
import json
import os
import re
import stat
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from spark_node.cli.main import main
from spark_node.deploy import bundle
from spark_node.deploy.crew import on_all
from spark_node.deploy.engine import Engine
from spark_node.deploy.fleet import DeploymentFailed, Fleet
from spark_node.deploy.hosts import Deployment, Host, RunSource
from spark_node.deploy.plan import Plan, make_plan
from spark_node.deploy.rollout import Rollout
from spark_node.security.authority import issued
from tests.unit.docker_api import RecordingEngine


def host(name: str, engine: str, **more: Any) -> Host:
    return Host(name, engine, "10.0.0.1", **{"peers": 3, **more})


def planned(*hosts: Host, **more: Any) -> Plan:
    settings = {"topology.degree": 2, "privacy.sketch_secret": "open sesame"}
    source, first = RunSource(set=tuple(settings.items())), hosts[0].name
    known = {"pull": "never", "seconds": 5.0, **more}
    return make_plan(
        Deployment("hosts.toml", "monday", "spark-dfl:latest", source, hosts, first, first, **known), "run-1"
    )


@pytest.fixture
def engine() -> Iterator[RecordingEngine]:
    with RecordingEngine() as made:
        yield made


def create_all(plan: Plan, folder: Path) -> None:
    certificates = bundle.make_certificates(plan, folder)
    for one in plan.deployment.hosts:
        talking = Engine(plan.deployment, one)
        for container in plan.on(one.name):
            talking.create(plan, container, bundle.pack(plan, container, certificates[container.name]))
        talking.close()


def creations(engine: RecordingEngine) -> dict[str, Any]:
    return {r.query["name"][0]: r.json for r in engine.requests if r.path == "/containers/create"}


def test_each_gpu_has_a_container_that_asks_for_this_gpu_alone(engine: RecordingEngine, tmp_path: Path) -> None:
    plan = planned(host("alpha", engine.address, gpus=("0", "GPU-8932f937"), data="/srv/d"))
    create_all(plan, tmp_path)
    asked = creations(engine)
    wanted = {"Driver": "", "Count": 0, "Options": {}, "Capabilities": [["gpu"]]}
    assert {name: made["HostConfig"].get("DeviceRequests") for name, made in asked.items()} == {
        "spark-monday-orchestrator": None,
        "spark-monday-alpha-gpu0": [{**wanted, "DeviceIDs": ["0"]}],
        "spark-monday-alpha-gpu1": [{**wanted, "DeviceIDs": ["GPU-8932f937"]}],
        "spark-monday-observer": None,
    }
    command = asked["spark-monday-alpha-gpu1"]["Cmd"]
    assert command[command.index("--device") + 1] == "cuda"
    assert "--device" not in asked["spark-monday-observer"]["Cmd"]


def test_containers_may_do_nothing_that_they_need_not(engine: RecordingEngine, tmp_path: Path) -> None:
    create_all(planned(host("alpha", engine.address, data="/srv/d")), tmp_path)
    for name, made in creations(engine).items():
        settings = made["HostConfig"]
        assert made["User"] == "10001:10001"
        assert made["Entrypoint"] == ["spark-dfl"]
        assert (settings["ReadonlyRootfs"], settings["CapDrop"]) == (True, ["ALL"])
        assert settings["SecurityOpt"] == ["no-new-privileges"]
        assert settings["NetworkMode"] == "host"
        assert not settings.get("Privileged")
        mounts = {mount["Target"]: mount for mount in settings["Mounts"]}
        assert (mounts["/spark"]["Type"], mounts["/spark"]["Source"]) == ("volume", name)
        if name != "spark-monday-orchestrator":
            assert mounts["/data"] == {"Target": "/data", "Source": "/srv/d", "Type": "bind", "ReadOnly": True}
        assert made["Labels"]["spark-dfl.run"] == "monday"
        assert made["Labels"]["spark-dfl.run-id"] == "run-1"


def test_the_secret_of_the_peers_goes_to_peers_only(engine: RecordingEngine, tmp_path: Path) -> None:
    create_all(planned(host("alpha", engine.address)), tmp_path)
    told = {name: "open sesame" in json.dumps(made) for name, made in creations(engine).items()}
    assert told == {
        "spark-monday-orchestrator": False,
        "spark-monday-alpha-cpu": True,
        "spark-monday-observer": False,
    }
    assert not any(b"sesame" in r.body for r in engine.requests if r.path != "/containers/create")


def test_a_container_gets_the_keys_of_its_own_peers_and_of_nobody_else(engine: RecordingEngine, tmp_path: Path) -> None:
    with RecordingEngine() as second:
        plan = planned(host("alpha", engine.address), host("beta", second.address, peers=2))
        create_all(plan, tmp_path)
        found = {}
        for request in (*engine.requests, *second.requests):
            if request.path.endswith("/archive"):
                assert request.query["path"] == ["/spark"]
                with tarfile.open(fileobj=io.BytesIO(request.body)) as archive:
                    for entry in archive:
                        assert (entry.uid, entry.gid) == (10001, 10001)
                        assert entry.mode == (0o700 if entry.isdir() else 0o600)
                    keys = sorted(entry.name for entry in archive if entry.name.endswith(".key"))
                found[request.path.split("/")[2]] = keys
    assert found == {
        "spark-monday-orchestrator": ["certs/orchestrator/orchestrator.key"],
        "spark-monday-alpha-cpu": [f"certs/peer/peer-00{i}.key" for i in range(3)],
        "spark-monday-observer": ["certs/observer/observer.key"],
        "spark-monday-beta-cpu": [f"certs/peer/peer-00{i}.key" for i in (3, 4)],
    }
    assert stat.S_IMODE((tmp_path / "authority" / "authority.key").stat().st_mode) == 0o600


def test_an_authority_that_is_kept_can_be_used_again(engine: RecordingEngine, tmp_path: Path) -> None:
    plan = planned(host("alpha", engine.address), authority=tmp_path / "authority")
    bundle.make_certificates(plan, tmp_path / "first")
    bundle.make_certificates(plan, tmp_path / "second")
    roots = {(tmp_path / n / "spark-monday-alpha-cpu" / "authority.pem").read_bytes() for n in ("first", "second")}
    assert roots == {(tmp_path / "authority" / "authority.pem").read_bytes()}
    assert len(list(issued(tmp_path / "authority"))) == 5
    assert not list((tmp_path / "authority" / "peer").glob("*.key"))


def roll_out(plan: Plan) -> DeploymentFailed:
    fleet = Fleet(plan.deployment)
    try:
        with pytest.raises(DeploymentFailed) as failed:
            Rollout(fleet, plan, lambda line: None).up(0)
        return failed.value
    finally:
        fleet.close()


def test_every_host_that_fails_its_check_is_named_and_no_host_is_touched(engine: RecordingEngine) -> None:
    with ExitStack() as stack:
        without_image = stack.enter_context(RecordingEngine(images=()))
        silent = stack.enter_context(RecordingEngine(stuck=("/volumes",)))
        taken = stack.enter_context(RecordingEngine())
        taken.volumes["old"] = {"Name": "old"}
        hosts = [
            host("good", engine.address),
            host("empty", without_image.address),
            host("silent", silent.address),
            host("taken", taken.address),
            host("down", "tcp://127.0.0.1:1"),
        ]
        failed = roll_out(planned(*hosts, seconds=2.0))
    assert failed.what == "checking the hosts"
    assert list(failed.problems) == ["empty", "silent", "taken", "down"]
    assert "image spark-dfl:latest is missing" in failed.problems["empty"]
    assert re.search(r"no answer|cannot be reached \(.*timed out", failed.problems["silent"])
    assert "a run named monday is here already" in failed.problems["taken"]
    assert "deploy down --hosts hosts.toml" in failed.problems["taken"]
    assert "engine tcp://127.0.0.1:1 cannot be reached" in failed.problems["down"]
    assert not any(r.method in ("POST", "PUT", "DELETE") for r in engine.requests)


def test_an_image_that_cannot_be_pulled_is_named(engine: RecordingEngine) -> None:
    engine.images = ()
    failed = roll_out(planned(host("alpha", engine.address), pull="missing"))
    said = failed.problems["alpha"]
    assert "image spark-dfl:latest is missing and could not be pulled (pull access denied)" in said
    assert any(r.method == "POST" and r.path == "/images/create" for r in engine.requests)


@pytest.mark.parametrize(
    ("call", "message", "said"),
    [
        ("POST /containers/create", "bind source path does not exist: /srv/d", "bind source path does not exist"),
        (
            "POST /containers/spark-monday-beta-gpu0/start",
            'could not select device driver "" with capabilities: [[gpu]]',
            "install the NVIDIA container toolkit on this host",
        ),
    ],
)
def test_a_host_that_fails_later_is_named_and_nothing_remains_anywhere(
    call: str, message: str, said: str, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "tail", lambda self, name, lines=0: ["orchestrator of run run-1 listens on there"])
    with RecordingEngine(fails={call: message}) as second:
        plan = planned(host("alpha", engine.address), host("beta", second.address, gpus=("0",)))
        failed = roll_out(plan)
        assert list(failed.problems) == ["beta"]
        assert said in failed.problems["beta"]
        assert creations(engine), "the test shows nothing if nothing was made"
        assert (engine.containers, engine.volumes, second.containers, second.volumes) == ({}, {}, {}, {})


def test_a_host_that_hangs_holds_up_nobody_for_longer_than_its_time() -> None:
    begin = time.monotonic()
    outcome = on_all(["quick", "slow"], lambda name: time.sleep(30 if name == "slow" else 0), 0.3)
    assert (list(outcome.done), outcome.problems) == (["quick"], {"slow": "no answer within 0 s"})
    assert time.monotonic() - begin < 20


def test_what_comes_out_of_a_container_stays_in_its_folder(tmp_path: Path) -> None:
    def archive(*entries: tuple[str, bytes | None]) -> list[bytes]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as made:
            for name, content in entries:
                entry = tarfile.TarInfo(name)
                if content is None:
                    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
                entry.size = len(content or b"")
                made.addfile(entry, io.BytesIO(content or b""))
        data = packed.getvalue()
        return [data[i : i + 700] for i in range(0, len(data), 700)]

    target = tmp_path / "target"
    whole = archive(("run/summary.json", b"{}"), ("run/plots/a.png", b"x" * 5000), ("run/plots/etc", None))
    assert bundle.unpack(whole, target) == 2
    assert (target / "plots" / "a.png").read_bytes() == b"x" * 5000
    assert not os.path.lexists(target / "plots" / "etc")
    for name in ("run/../../evil", "/evil", "run/plots/../../../evil"):
        with pytest.raises(ValueError, match="points outside"):
            bundle.unpack(archive((name, b"x")), target)
    assert not (tmp_path / "evil").exists()


def test_without_the_sdk_a_plan_can_be_made_and_the_rest_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts.toml"
    file.write_text(
        'name = "m"\nimage = "i"\n[run]\nset = { "topology.degree" = 2 }\n[[hosts]]\nname = "alpha"\n'
        'engine = "unix:///nowhere.sock"\naddress = "10.0.0.1"\ngpus = 2\npeers_per_gpu = 2\n'
    )
    monkeypatch.setitem(sys.modules, "docker", None)
    assert main(["deploy", "up", "--hosts", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"alpha +spark-m-alpha-gpu1 +peers +1 +2 +peer-002\.\.peer-003", shown)
    assert main(["deploy", "status", "--hosts", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install 'spark-dfl[deploy]'" in said


def test_an_engine_that_is_not_there_is_exit_code_one_with_a_line_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "hosts.toml"
    file.write_text(
        'name = "m"\nimage = "i"\n[run]\nset = { "topology.degree" = 2 }\n[[hosts]]\nname = "alpha"\n'
        f'engine = "unix://{tmp_path}/nowhere.sock"\naddress = "10.0.0.1"\npeers = 4\n'
    )
    for action in (["up"], ["down"], ["logs"], ["fetch"]):
        assert main(["deploy", *action, "--hosts", str(file)]) == 1
        said = capsys.readouterr().err
        assert re.search(rf"^  alpha  engine unix://{tmp_path}/nowhere.sock cannot be reached", said, re.MULTILINE)
    assert not (tmp_path / "runs").exists()
    assert main(["deploy", "status", "--hosts", str(file)]) == 1
    assert "alpha" in capsys.readouterr().out
    assert main(["deploy", "logs", "--hosts", str(file), "--host", "beta"]) == 2
    assert "--host beta: not in" in capsys.readouterr().err
