"""The hosts file: which machines a run has, and what each of them carries. A mistake is one line that names the key."""

import ipaddress
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_node import config as configuration
from spark_node.errors import ConfigError

PULL = ("missing", "never", "always")
HOST_NETWORK = "host"
MOST_HOSTS, MOST_GPUS, MOST_PEERS = 1000, 64, 100_000
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_NAMES = "1 to 32 of a-z, 0-9 and dashes, no dash at an end"
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9:/_-]{0,79}")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ENGINES = "unix:///path/of/docker.sock, tcp://host:port with tls = { ca, cert, key }, or ssh://user@host"


class HostsError(ConfigError):
    """A hosts file that cannot be used."""


@dataclass(frozen=True)
class EngineTls:
    """Files with which we and an engine behind tcp:// know each other."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Host:
    """A machine with a Docker engine. Without GPUs its peers share one container."""

    name: str
    engine: str
    address: str
    tls: EngineTls | None = None
    gpus: tuple[str, ...] = ()
    peers: int | None = None
    """Peers of a GPU (peers_per_gpu), or of the whole host where it has none; None: an even share of run.nodes."""
    workers: int = 0
    data: str = ""


@dataclass(frozen=True)
class RunSource:
    """Where the settings of the run come from, weakest first."""

    preset: str | None = None
    config: Path | None = None
    set: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Ports:
    """Where the orchestrator listens, and from which port on the peers of a host do (0: at free ones)."""

    orchestrator: int = 7400
    http: int = 7401
    peers: int = 0
    metrics: int = 0


@dataclass(frozen=True)
class Deployment:
    """One hosts file."""

    origin: str
    name: str
    image: str
    run: RunSource
    hosts: tuple[Host, ...]
    orchestrator: str
    observer: str
    network: str = HOST_NETWORK
    pull: str = "missing"
    ports: Ports = Ports()
    authority: Path | None = None
    seconds: float = 60.0
    """Longest that a call to an engine may take."""

    def host(self, name: str) -> Host:
        """The host of that name."""
        return next(host for host in self.hosts if host.name == name)


def load_hosts(path: Path) -> Deployment:
    """Read a hosts file; HostsError, one line that names the file, the key and what is allowed, where it is wrong."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HostsError(f"--hosts {path}: cannot be read ({error.strerror}); give a hosts file") from None
    except (ValueError, RecursionError) as error:
        raise HostsError(f"--hosts {path}: not TOML ({error})") from None
    return _Reader(path).deployment(tree)


class _Reader:
    """Reads one file; every complaint names it and the key. Paths in it are relative to its folder."""

    def __init__(self, file: Path) -> None:
        self._file, self._folder = file, file.resolve().parent

    def deployment(self, tree: Mapping[str, Any]) -> Deployment:
        known = ("name", "image", "pull", "network", "authority", "seconds", "run", "orchestrator", "observer", "ports")
        self._known(tree, (*known, "hosts"), "")
        hosts = tuple(self._host(entry, f"hosts[{i}]") for i, entry in enumerate(self._list(tree, "hosts"), start=1))
        if not 1 <= len(hosts) <= MOST_HOSTS:
            raise self._error("hosts", len(hosts) or None, f"1 to {MOST_HOSTS} [[hosts]] with name, engine, address")
        names = [host.name for host in hosts]
        for key, values in (("name", names), ("engine", [host.engine for host in hosts])):
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise self._error(f"hosts.{key}", twice, "each once; one [[hosts]] for an engine")
        orchestrator = self._one_of(tree, "orchestrator", names, names[0])
        network = self._matching(tree, "network", _NETWORK, f"{HOST_NETWORK}, or the name of a network of all hosts")
        return Deployment(
            origin=str(self._file),
            name=self._matching(tree, "name", _NAME, _NAMES, required=True),
            image=self._text(tree, "image", required=True),
            run=self._run(self._table(tree, "run")),
            hosts=hosts,
            orchestrator=orchestrator,
            observer=self._one_of(tree, "observer", names, orchestrator),
            network=network or HOST_NETWORK,
            pull=self._one_of(tree, "pull", PULL, "missing"),
            ports=self._ports(self._table(tree, "ports")),
            authority=self._path(tree, "authority"),
            seconds=self._seconds(tree),
        )

    def _run(self, tree: Mapping[str, Any]) -> RunSource:
        self._known(tree, ("preset", "config", "set"), "run.")
        preset = self._one_of(tree, "preset", configuration.presets(), "", "run.") or None
        config = self._path(tree, "config", "run.")
        if config is not None and not config.is_file():
            raise self._error("run.config", str(tree["config"]), f"a TOML file; there is none at {config}")
        assigned = configuration.flatten(_nested(self._table(tree, "set", "run.")), f"{self._file}, run.set")
        return RunSource(preset, config, tuple(assigned.items()))

    def _host(self, tree: Any, where: str) -> Host:
        if not isinstance(tree, dict):
            raise self._error(where, tree, "a table with name, engine and address")
        keys = ("name", "engine", "tls", "address", "gpus", "peers_per_gpu", "peers", "workers", "data")
        self._known(tree, keys, f"{where}.")
        name = self._matching(tree, "name", _NAME, _NAMES, f"{where}.", required=True)
        where = f"hosts.{name}"
        gpus = self._gpus(tree, where)
        wrong, right = ("peers", "peers_per_gpu") if gpus else ("peers_per_gpu", "peers")
        if wrong in tree:
            kind = "has GPUs" if gpus else "has no GPUs"
            raise self._error(f"{where}.{wrong}", tree[wrong], f"{right}, since this host {kind}")
        engine = self._engine(tree, where)
        return Host(
            name=name,
            engine=engine,
            address=self._address(tree, where),
            tls=self._tls(tree, engine, where),
            gpus=gpus,
            peers=self._whole(tree, right, 1, MOST_PEERS, None, f"{where}."),
            workers=self._whole(tree, "workers", 0, 1024, 0, f"{where}.") or 0,
            data=self._data(tree, where),
        )

    def _engine(self, tree: Mapping[str, Any], where: str) -> str:
        engine = self._text(tree, "engine", f"{where}.", required=True)
        try:
            parts = urlsplit(engine)
            port = parts.port
        except ValueError:
            raise self._error(f"{where}.engine", engine, _ENGINES) from None
        good = {
            "unix": not parts.netloc and parts.path.startswith("/"),
            "tcp": bool(parts.hostname) and port is not None and not parts.path,
            "ssh": bool(parts.hostname) and not parts.path and parts.password is None,
        }
        if not good.get(parts.scheme, False):
            raise self._error(f"{where}.engine", engine, _ENGINES)
        return engine

    def _tls(self, tree: Mapping[str, Any], engine: str, where: str) -> EngineTls | None:
        """An engine is root on its machine: over the network only with both sides known."""
        if "tls" not in tree:
            if engine.startswith("tcp://") and not configuration.is_loopback(urlsplit(engine).hostname or ""):
                raise self._error(
                    f"{where}.tls", None, "{ ca = FILE, cert = FILE, key = FILE } for an engine at tcp://"
                )
            return None
        if not engine.startswith("tcp://"):
            raise self._error(f"{where}.tls", tree["tls"], "only beside engine = 'tcp://host:port'")
        files = self._table(tree, "tls", f"{where}.")
        self._known(files, ("ca", "cert", "key"), f"{where}.tls.")
        found = {}
        for key in ("ca", "cert", "key"):
            path = self._path(files, key, f"{where}.tls.", required=True)
            assert path is not None
            if not path.is_file():
                raise self._error(f"{where}.tls.{key}", files[key], f"a file; there is none at {path}")
            found[key] = path
        return EngineTls(**found)

    def _address(self, tree: Mapping[str, Any], where: str) -> str:
        """Where others reach the host: peers listen at this very address, so it is one of the host's own."""
        address = self._text(tree, "address", f"{where}.", required=True)
        try:
            plain = ipaddress.ip_address(address)
            wrong = plain.version != 4 or plain.is_unspecified or plain.is_multicast
        except ValueError:
            wrong = not _HOST_NAME.fullmatch(address)
        if wrong:
            allowed = "an IPv4 address or a name of the host, as the other hosts reach it, without a port"
            raise self._error(f"{where}.address", address, allowed)
        return address

    def _gpus(self, tree: Mapping[str, Any], where: str) -> tuple[str, ...]:
        gpus = tree.get("gpus", 0)
        allowed = f"how many (0 to {MOST_GPUS}), or a list of ids like ['0', '1'] or ['GPU-3a23c669'], each once"
        if type(gpus) is int and 0 <= gpus <= MOST_GPUS:
            return tuple(str(i) for i in range(gpus))
        if not isinstance(gpus, list) or not 1 <= len(gpus) <= MOST_GPUS:
            raise self._error(f"{where}.gpus", gpus, allowed)
        ids = [str(gpu) if type(gpu) is int else gpu for gpu in gpus]
        if not all(isinstance(gpu, str) and _DEVICE.fullmatch(gpu) for gpu in ids) or len(set(ids)) < len(ids):
            raise self._error(f"{where}.gpus", gpus, allowed)
        return tuple(ids)

    def _data(self, tree: Mapping[str, Any], where: str) -> str:
        data = self._text(tree, "data", f"{where}.")
        if data and (not data.startswith("/") or ".." in data.split("/")):
            raise self._error(f"{where}.data", data, "the dataset's folder on that host, as a path from /")
        return data

    def _ports(self, tree: Mapping[str, Any]) -> Ports:
        names = ("orchestrator", "http", "peers", "metrics")
        self._known(tree, names, "ports.")
        default = Ports()
        lowest = {"orchestrator": 1, "http": 1, "peers": 0, "metrics": 0}
        found = {
            name: self._whole(tree, name, lowest[name], 65_535, getattr(default, name), "ports.") or 0 for name in names
        }
        if found["orchestrator"] == found["http"]:
            raise self._error("ports.http", found["http"], "another than ports.orchestrator")
        return Ports(**found)

    def _seconds(self, tree: Mapping[str, Any]) -> float:
        value = tree.get("seconds", 60)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 3600:
            raise self._error("seconds", value, "a number from 1 to 3600")
        return float(value)

    def _whole(
        self, tree: Mapping[str, Any], key: str, low: int, high: int, default: int | None, prefix: str
    ) -> int | None:
        value = tree.get(key, default)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self._error(f"{prefix}{key}", value, f"a whole number from {low} to {high}")
        return value

    def _one_of(self, tree: Mapping[str, Any], key: str, allowed: Sequence[str], default: str, prefix: str = "") -> str:
        value = tree.get(key, default)
        if not isinstance(value, str) or (key in tree and value not in allowed):
            raise self._error(f"{prefix}{key}", value, ", ".join(allowed))
        return value

    def _matching(
        self,
        tree: Mapping[str, Any],
        key: str,
        form: re.Pattern[str],
        allowed: str,
        prefix: str = "",
        required: bool = False,
    ) -> str:
        value = tree.get(key, "")
        if not isinstance(value, str) or ((value or key in tree or required) and not form.fullmatch(value)):
            raise self._error(f"{prefix}{key}", tree.get(key), allowed)
        return value

    def _path(self, tree: Mapping[str, Any], key: str, prefix: str = "", required: bool = False) -> Path | None:
        text = self._text(tree, key, prefix, required)
        return self._folder / Path(text).expanduser() if text else None

    def _text(self, tree: Mapping[str, Any], key: str, prefix: str = "", required: bool = False) -> str:
        value = tree.get(key, "")
        printable = isinstance(value, str) and value.isprintable()
        if not printable or ((required or key in tree) and not value.strip()):
            raise self._error(f"{prefix}{key}", tree.get(key), "a text on one line")
        return str(value)

    def _table(self, tree: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
        value = tree.get(key, {})
        if not isinstance(value, dict):
            raise self._error(f"{prefix}{key}", value, "a table")
        return value

    def _list(self, tree: Mapping[str, Any], key: str) -> list[Any]:
        value = tree.get(key, [])
        if not isinstance(value, list):
            raise self._error(key, value, "a list of tables, [[hosts]]")
        return value

    def _known(self, tree: Mapping[str, Any], allowed: Sequence[str], prefix: str) -> None:
        for key, value in tree.items():
            if key not in allowed:
                said = f"{self._file}: {prefix}{key} = {value!r}: unknown key"
                raise HostsError(f"{said[:300]}; allowed: {', '.join(allowed)}")

    def _error(self, key: str, value: Any, allowed: str) -> HostsError:
        given = "is missing" if value is None else f"= {value!r}"
        return HostsError(f"{self._file}: {key} {given[:300]}; allowed: {allowed}")


def _nested(assigned: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} and {section: {key: value}} alike as sections."""
    tree: dict[str, Any] = {}
    for name, value in assigned.items():
        section, dot, key = name.partition(".")
        entries = {key: value} if dot else value
        if isinstance(entries, dict) and isinstance(tree.get(section, {}), dict):
            tree.setdefault(section, {}).update(entries)
        else:
            tree[section] = value
    return tree
