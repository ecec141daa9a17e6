"""What runs where: a pure function of the hosts file and the run's settings. No engine is asked."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from spark_node import config as configuration
from spark_node import topology
from spark_node.config import Config
from spark_node.deploy.hosts import HOST_NETWORK, Deployment, Host, HostsError
from spark_node.membership import peer_names
from spark_node.privacy import refuse_hidden

ORCHESTRATOR, PEERS, OBSERVER = "orchestrator", "peers", "observer"
ROLES = (ORCHESTRATOR, PEERS, OBSERVER)
HOME, DATA = "/spark", "/data"
"""Where a container has its own volume, and where the host's dataset."""
CONFIG, CERTS, LOGS, CHECKPOINTS, RUN, PARTITION = (
    f"{HOME}/{name}" for name in ("config.toml", "certs", "logs", "checkpoints", "out/run", "partition.npz")
)
START_TIMEOUT = 600.0
"""Seconds that the first peers wait for the others, unless the settings say so: hosts are not equally quick."""
LINGER = 60
"""Seconds that peers answer the observer after the last round."""
_IN_IMAGE = ("digits", "fashion-mnist")
"""Datasets that need nothing from the host."""
_PORTS = 65_536


@dataclass(frozen=True)
class Slot:
    """A place for peers: one GPU of a host, or a host without one."""

    host: Host
    gpu: str | None
    first: int
    count: int


@dataclass(frozen=True)
class Container:
    """One container, and the volume of the same name that it owns."""

    name: str
    role: str
    host: str
    arguments: tuple[str, ...]
    gpu: str | None = None
    peers: tuple[str, ...] = ()
    data: str = ""
    secret: bool = False
    """Whether it gets the secret that peers share."""


@dataclass(frozen=True)
class Plan:
    """A whole run on its hosts."""

    deployment: Deployment
    run_id: str
    config: Config
    containers: tuple[Container, ...]
    partition: Path | None = None
    """A file with the partition, which goes to every container."""

    def on(self, host: str) -> tuple[Container, ...]:
        """The containers of a host, in the order in which they start."""
        return tuple(container for container in self.containers if container.host == host)

    @property
    def address(self) -> str:
        """Where peers find the orchestrator."""
        return f"{address_of(self.deployment, ORCHESTRATOR)}:{self.deployment.ports.orchestrator}"


def make_plan(deployment: Deployment, run_id: str = "") -> Plan:
    """The containers of a run; HostsError or ConfigError where hosts and settings do not fit together."""
    config = run_config(deployment)
    slots = place(deployment, config.run.nodes)
    config = config.replace(run__nodes=sum(slot.count for slot in slots))
    topology.check(config.topology.kind, config.run.nodes, config.topology.degree)
    _check_data(deployment, config)
    _check_ports(deployment, slots)
    config, partition = _with_partition(deployment, config)
    orchestrator = f"{address_of(deployment, ORCHESTRATOR)}:{deployment.ports.orchestrator}"
    config = config.replace(
        network__orchestrator=orchestrator,
        network__host="127.0.0.1",
        network__port=0,
        security__certs=CERTS,
        data__folder="",
    )
    names = peer_names(config.run.nodes)
    run_id = run_id or f"{deployment.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    containers = (
        _orchestrator(deployment, run_id),
        *(_peers(deployment, slot, slots, names) for slot in slots),
        _observer(deployment),
    )
    return Plan(deployment, run_id, config, containers, partition)


def run_config(deployment: Deployment) -> Config:
    """The settings of the run: preset, file, environment, then `run.set` of the hosts file."""
    source = deployment.run
    config = configuration.load(source.preset, source.config, flags=dict(source.set))
    refuse_hidden(config.privacy.sketch_secret)
    if config.security.tls == "off":
        raise HostsError(f"{deployment.origin}: security.tls = 'off': between hosts every connection is mutual TLS")
    if config.network.start_timeout == configuration.Config().network.start_timeout:
        config = config.replace(network__start_timeout=START_TIMEOUT)
    return config


def place(deployment: Deployment, nodes: int) -> tuple[Slot, ...]:
    """Peers on GPUs and hosts, in the order of the file: as many as each says, the rest of `nodes` evenly."""
    places = [(host, gpu) for host in deployment.hosts for gpu in (host.gpus or (None,))]
    said = sum(host.peers or 0 for host, _ in places)
    silent = sum(host.peers is None for host, _ in places)
    wanted = dict(deployment.run.set).get("run.nodes")
    if not silent and wanted not in (None, said):
        raise HostsError(
            f"{deployment.origin}: run.set has run.nodes = {wanted}, but the hosts say {said} peers in all"
        )
    rest = nodes - said
    if silent and rest < silent:
        raise HostsError(
            f"{deployment.origin}: run.nodes = {nodes}: {rest} peers are left for {silent} GPUs and hosts that do not"
            " say how many they take; give more run.nodes, fewer GPUs, or peers_per_gpu and peers"
        )
    slots, first, turn = [], 0, 0
    for host, gpu in places:
        if host.peers is None:
            count, turn = rest // silent + (turn < rest % silent), turn + 1
        else:
            count = host.peers
        slots.append(Slot(host, gpu, first, count))
        first += count
    return tuple(slots)


def address_of(deployment: Deployment, role: str) -> str:
    """Where others reach a container: at its host's address, or at its name in a network that all hosts share."""
    if deployment.network != HOST_NETWORK:
        return container_name(deployment, role)
    return deployment.host(deployment.orchestrator).address


def container_name(deployment: Deployment, *parts: str) -> str:
    """The name of a container and of its volume."""
    return "-".join(("spark", deployment.name, *parts))


def settings_file(plan: Plan) -> str:
    """What every container reads; no secret is in it."""
    return configuration.to_toml(plan.config)


def _orchestrator(deployment: Deployment, run_id: str) -> Container:
    ports = deployment.ports
    arguments = ["orchestrator", "--config", CONFIG, "--run-id", run_id]
    arguments += ["--host", address_of(deployment, ORCHESTRATOR)]
    arguments += ["--port", str(ports.orchestrator), "--http-port", str(ports.http)]
    name = container_name(deployment, ORCHESTRATOR)
    return Container(name, ORCHESTRATOR, deployment.orchestrator, tuple(arguments))


def _peers(deployment: Deployment, slot: Slot, slots: Sequence[Slot], names: Sequence[str]) -> Container:
    host, ports = slot.host, deployment.ports
    name = container_name(deployment, host.name, "cpu" if slot.gpu is None else f"gpu{host.gpus.index(slot.gpu)}")
    before = slot.first - min(other.first for other in slots if other.host is host)
    arguments = ["host", "--config", CONFIG, "--first", str(slot.first), "--count", str(slot.count)]
    arguments += ["--logs", LOGS, "--checkpoints", CHECKPOINTS, "--linger", str(LINGER)]
    arguments += ["--device", "cuda"] if slot.gpu is not None else []
    arguments += ["--workers", str(host.workers)] if host.workers else []
    arguments += ["--data-dir", DATA] if host.data else []
    address = host.address if deployment.network == HOST_NETWORK else name
    arguments += ["--set", f"network.host={address}"]
    if ports.peers:
        arguments += ["--set", f"network.port={ports.peers + before}"]
    if ports.metrics:
        arguments += ["--set", f"network.metrics_port={ports.metrics + before}"]
    own = tuple(names[slot.first : slot.first + slot.count])
    return Container(name, PEERS, host.name, tuple(arguments), slot.gpu, own, host.data, secret=True)


def _observer(deployment: Deployment) -> Container:
    host = deployment.host(deployment.observer)
    arguments = ["observe", "--config", CONFIG, "--out", RUN]
    arguments += ["--data-dir", DATA] if host.data else []
    return Container(container_name(deployment, OBSERVER), OBSERVER, host.name, tuple(arguments), data=host.data)


def _check_data(deployment: Deployment, config: Config) -> None:
    """Every dataset that the image does not hold lies on the hosts."""
    if config.data.dataset in _IN_IMAGE:
        return
    for host in deployment.hosts:
        if not host.data:
            raise HostsError(
                f"{deployment.origin}: hosts.{host.name}.data is missing: the run's dataset {config.data.dataset} is"
                " not in the image; give the folder on that host that holds its files"
            )


def _check_ports(deployment: Deployment, slots: Sequence[Slot]) -> None:
    """Every port of a host is somebody's alone."""
    ports = deployment.ports
    for host in deployment.hosts:
        peers = sum(slot.count for slot in slots if slot.host is host)
        taken = {"ports.peers": range(ports.peers, ports.peers + peers) if ports.peers else range(0)}
        taken["ports.metrics"] = range(ports.metrics, ports.metrics + peers) if ports.metrics else range(0)
        taken["ports.orchestrator"] = range(ports.orchestrator, ports.orchestrator + 1)
        taken["ports.http"] = range(ports.http, ports.http + 1)
        for (name, first), (other, second) in combinations(taken.items(), 2):
            if max(first.start, second.start) < min(first.stop, second.stop):
                said = f"{deployment.origin}: {name} = {first.start}: host {host.name} has {peers} peers"
                raise HostsError(f"{said}, whose ports overlap with {other} = {second.start}; move one of them")
        for name, those in taken.items():
            if those.stop > _PORTS:
                said = f"{deployment.origin}: {name} = {those.start}: host {host.name} has {peers} peers"
                raise HostsError(f"{said}; allowed: at most {_PORTS - peers}")


def _with_partition(deployment: Deployment, config: Config) -> tuple[Config, Path | None]:
    """A partition from a file of this machine goes along with the settings."""
    kind, _, path = config.data.partition.partition(":")
    if kind != "file":
        return config, None
    file = Path(path).expanduser()
    if not file.is_file():
        raise HostsError(f"{deployment.origin}: data.partition = {config.data.partition!r}: no file at {file}")
    return config.replace(data__partition=f"file:{PARTITION}"), file
