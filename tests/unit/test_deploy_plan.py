"""What runs where: every peer once, evenly, the same every time; and commands that our own command line accepts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_node.cli.main import parser
from spark_node.cli.run import given_settings
from spark_node.config import load
from spark_node.deploy.hosts import Deployment, Host, HostsError, Ports, RunSource
from spark_node.deploy.plan import CONFIG, OBSERVER, ORCHESTRATOR, PEERS, make_plan, place, settings_file
from spark_node.errors import ConfigError
from spark_node.membership import peer_names


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin"})


def host(name: str, gpus: int = 0, peers: int | None = None, **more: Any) -> Host:
    ids = tuple(str(i) for i in range(gpus))
    return Host(name, f"unix:///run/{name}.sock", f"10.0.0.{ord(name[0]) - 96}", gpus=ids, peers=peers, **more)


def deployment(*hosts: Host, settings: dict[str, Any] | None = None, **more: Any) -> Deployment:
    run = RunSource(set=tuple((settings or {}).items()))
    first = hosts[0].name
    return Deployment("hosts.toml", "monday", "spark-dfl:latest", run, hosts, first, first, **more)


def counts(found: Deployment, nodes: int) -> list[int]:
    return [slot.count for slot in place(found, nodes)]


def test_each_gpu_takes_as_many_as_it_says() -> None:
    slots = place(deployment(host("alpha", 2, 3), host("beta", 1, 4), host("gamma", 0, 5)), 20)
    assert [(slot.host.name, slot.gpu, slot.first, slot.count) for slot in slots] == [
        ("alpha", "0", 0, 3),
        ("alpha", "1", 3, 3),
        ("beta", "0", 6, 4),
        ("gamma", None, 10, 5),
    ]


def test_what_nobody_claims_is_shared_evenly() -> None:
    assert counts(deployment(host("alpha", 2), host("beta", 2), host("gamma")), 12) == [3, 3, 2, 2, 2]
    assert counts(deployment(host("alpha", 2, 5), host("beta", 2)), 17) == [5, 5, 4, 3]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 200)
)
def test_every_peer_has_one_place_whatever_the_hosts(shapes: list[tuple[int, int | None]], extra: int) -> None:
    hosts = [host(chr(97 + i), gpus, peers) for i, (gpus, peers) in enumerate(shapes)]
    places = [one.peers for one in hosts for _ in range(max(1, len(one.gpus)))]
    nodes = sum(peers or 1 for peers in places) + (extra if None in places else 0)
    found = deployment(*hosts)
    slots = place(found, nodes)
    assert [i for slot in slots for i in range(slot.first, slot.first + slot.count)] == list(range(nodes))
    shared = [slot.count for slot in slots if slot.host.peers is None]
    assert max(shared, default=0) - min(shared, default=0) <= 1
    assert slots == place(found, nodes)


def test_too_few_peers_for_the_gpus_is_said() -> None:
    with pytest.raises(HostsError, match=r"run.nodes = 3: 3 peers are left for 4 GPUs"):
        place(deployment(host("alpha", 4)), 3)


def test_hosts_and_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(HostsError, match=r"run.nodes = 10, but the hosts say 6 peers in all"):
        make_plan(deployment(host("alpha", 2, 3), settings={"run.nodes": 10}))
    with pytest.raises(HostsError, match=r"security.tls = 'off'"):
        make_plan(deployment(host("alpha", 0, 6), settings={"security.tls": "off"}))
    with pytest.raises(ConfigError, match="degree"):
        make_plan(deployment(host("alpha", 0, 4), settings={"topology.degree": 5}))
    there = host("alpha", 0, 6, data="/d")
    with pytest.raises(HostsError, match=r"hosts.beta.data is missing: the run's dataset cifar10"):
        make_plan(deployment(there, host("beta", 0, 6), settings={"data.dataset": "cifar10"}))
    with pytest.raises(ConfigError, match=r"run.colour"):
        make_plan(deployment(host("alpha", 0, 6), settings={"run.colour": "red"}))


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (Ports(peers=7500, metrics=7505), "ports.peers = 7500: host alpha has 12 peers, whose ports overlap"),
        (Ports(peers=7395), "overlap with ports.orchestrator = 7400"),
        (Ports(metrics=65530), "ports.metrics = 65530: host alpha has 12 peers; allowed: at most 65524"),
    ],
)
def test_ports_that_collide_are_found_before_anything_starts(ports: Ports, said: str) -> None:
    with pytest.raises(HostsError, match=said):
        make_plan(deployment(host("alpha", 2, 6), ports=ports))


def test_a_plan_has_an_orchestrator_a_container_a_gpu_and_an_observer() -> None:
    found = replace(deployment(host("alpha", 2, 3), host("beta", 0, 4)), observer="beta")
    plan = make_plan(found, "run-1")
    assert [(c.name, c.role, c.host, c.gpu) for c in plan.containers] == [
        ("spark-monday-orchestrator", ORCHESTRATOR, "alpha", None),
        ("spark-monday-alpha-gpu0", PEERS, "alpha", "0"),
        ("spark-monday-alpha-gpu1", PEERS, "alpha", "1"),
        ("spark-monday-beta-cpu", PEERS, "beta", None),
        ("spark-monday-observer", OBSERVER, "beta", None),
    ]
    assert [peer for c in plan.containers for peer in c.peers] == peer_names(10)
    assert plan.config.run.nodes == 10
    assert plan.address == "10.0.0.1:7400"
    assert [c.secret for c in plan.containers] == [False, True, True, True, False]


def test_every_command_is_one_that_the_command_line_accepts(tmp_path: Path) -> None:
    hosts = host("alpha", 2, 3, data="/srv/d", workers=2), host("beta", 0, 4, data="/srv/e")
    plan = make_plan(deployment(*hosts, ports=Ports(peers=7500, metrics=7700)), "run-1")
    file = tmp_path / "config.toml"
    file.write_text(settings_file(plan))
    firsts = []
    for container in plan.containers:
        arguments = [str(file) if argument == CONFIG else argument for argument in container.arguments]
        args = parser().parse_args(arguments)
        config = load(None, Path(args.config), environment={}, flags=given_settings(args))
        assert (config.run.nodes, config.security.certs) == (10, "/spark/certs")
        if container.role == PEERS:
            assert config.run.device == ("cpu" if container.gpu is None else "cuda")
            assert tuple(peer_names(10)[args.first : args.first + args.count]) == container.peers
            firsts.append((config.network.host, config.network.port, config.network.metrics_port, config.run.workers))
            assert config.data.folder == "/data"
    assert firsts == [("10.0.0.1", 7500, 7700, 2), ("10.0.0.1", 7503, 7703, 2), ("10.0.0.2", 7500, 7700, 0)]


def test_on_a_network_of_their_own_containers_are_reached_by_name() -> None:
    plan = make_plan(deployment(host("alpha", 1, 6), network="overlay"), "run-1")
    assert plan.address == "spark-monday-orchestrator:7400"
    assert "network.host=spark-monday-alpha-gpu0" in plan.containers[1].arguments


def test_hosts_get_time_to_come_unless_the_settings_say_so() -> None:
    assert make_plan(deployment(host("alpha", 0, 6))).config.network.start_timeout == 600
    settings = {"network.start_timeout": 5.0}
    assert make_plan(deployment(host("alpha", 0, 6), settings=settings)).config.network.start_timeout == 5


def test_a_partition_file_goes_along(tmp_path: Path) -> None:
    file = tmp_path / "shares.npz"
    np.savez(file, indices=np.arange(12), offsets=np.arange(0, 13, 2))
    plan = make_plan(deployment(host("alpha", 0, 6), settings={"data.partition": f"file:{file}"}))
    assert (plan.partition, plan.config.data.partition) == (file, "file:/spark/partition.npz")
    with pytest.raises(HostsError, match="no file at"):
        make_plan(deployment(host("alpha", 0, 6), settings={"data.partition": "file:/nowhere.npz"}))


def test_a_secret_is_in_no_file() -> None:
    plan = make_plan(deployment(host("alpha", 0, 6), settings={"privacy.sketch_secret": "open sesame"}))
    assert plan.config.privacy.sketch_secret == "open sesame"
    assert "sesame" not in settings_file(plan)
