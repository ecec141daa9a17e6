"""One host's Docker engine, through the docker SDK. Every failure is a HostProblem: one line, and what to do."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from spark_node.deploy.bundle import USER
from spark_node.deploy.crew import HostProblem
from spark_node.deploy.hosts import HOST_NETWORK, Deployment, Host
from spark_node.deploy.plan import DATA, HOME, OBSERVER, ORCHESTRATOR, PEERS, Container, Plan
from spark_node.errors import UserError

if TYPE_CHECKING:
    import docker

LABEL = "spark-dfl"
RUN_LABEL, ID_LABEL = f"{LABEL}.run", f"{LABEL}.run-id"
ROLE_LABEL, HOST_LABEL, PEERS_LABEL = f"{LABEL}.role", f"{LABEL}.host", f"{LABEL}.peers"
ROUNDS_LABEL = f"{LABEL}.rounds"
STOP_SECONDS = {OBSERVER: 90, PEERS: 25, ORCHESTRATOR: 15}
"""Between SIGTERM and SIGKILL, in this order: the observer writes its report, a host gives its peers ten seconds."""
_RESTARTS = 3
_TAIL = 20
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class MissingSdk(UserError):
    """The docker SDK for Python is an extra."""


def require_sdk() -> None:
    """MissingSdk where the extra is not installed; nothing else of the package needs it."""
    try:
        import docker  # noqa: F401
    except ImportError:
        raise MissingSdk(
            "spark-dfl deploy needs the docker SDK for Python; install it with: pip install 'spark-dfl[deploy]'"
        ) from None


@dataclass(frozen=True)
class Seen:
    """A container as its engine tells of it."""

    name: str
    role: str
    run_id: str
    rounds: str
    peers: str
    state: str
    exit_code: int
    restarts: int
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended, or keeps ending, with an error."""
        over = self.state in ("exited", "dead", "restarting")
        return bool(self.error) or (over and self.exit_code != 0) or (self.restarts > 0 and self.exit_code != 0)


def _told(
    call: "Callable[Concatenate[Engine, _Arguments], _Result]",
) -> "Callable[Concatenate[Engine, _Arguments], _Result]":
    """Whatever the SDK raises as one line."""

    @wraps(call)
    def wrapped(engine: "Engine", /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        try:
            return call(engine, *arguments, **named)
        except (HostProblem, UserError):
            raise
        except Exception as error:  # requests', urllib3's, the SDK's and paramiko's share no base
            raise HostProblem(engine.explain(error)) from error

    return wrapped


class Engine:
    """What a deployment asks of one engine. The connection is made with the first call."""

    def __init__(self, deployment: Deployment, host: Host) -> None:
        require_sdk()
        self._deployment, self.host = deployment, host
        self._made: docker.DockerClient | None = None

    @property
    def _client(self) -> "docker.DockerClient":
        if self._made is None:
            first = self._connect(None)
            try:
                spoken = str(first.api.version(api_version=False)["ApiVersion"])
            finally:
                first.close()
            self._made = self._connect(spoken)
        return self._made

    def _connect(self, version: str | None) -> "docker.DockerClient":
        """A client for a version of the API; without one, only good for asking which the engine speaks."""
        import docker
        from docker.constants import DEFAULT_DOCKER_API_VERSION
        from docker.tls import TLSConfig

        tls, host = self.host.tls, self.host
        files = tls and TLSConfig(client_cert=(str(tls.cert), str(tls.key)), ca_cert=str(tls.ca), verify=True)
        client = docker.DockerClient(
            base_url=host.engine,
            version=version or DEFAULT_DOCKER_API_VERSION,
            timeout=int(self._deployment.seconds),
            tls=files or False,
            use_ssh_client=host.engine.startswith("ssh://"),  # the user's own ssh: agent, keys and known hosts
        )
        if tls is not None:
            client.api.trust_env = False  # REQUESTS_CA_BUNDLE would take the place of the hosts file's `ca`
        return client

    def close(self) -> None:
        """Give up the connection."""
        if self._made is not None:
            with contextlib.suppress(Exception):
                self._made.close()

    def explain(self, error: Exception) -> str:
        """A failure of the SDK in one line."""
        from docker import errors

        said = " ".join(str(getattr(error, "explanation", None) or error).split())
        where = f"engine {self.host.engine}"
        if "could not select device driver" in said:
            return f"{said}; install the NVIDIA container toolkit on this host, or give it no gpus"
        if isinstance(error, errors.APIError):
            return said
        return f"{where} cannot be reached ({said[:300] or type(error).__name__})"

    @_told
    def check(self, plan: Plan) -> str:
        """That the engine answers, has the image and no run of this name; the engine's version."""
        self._client.ping()
        here = self.containers() or self.volumes()
        if here:
            name = plan.deployment.name
            raise HostProblem(f"a run named {name} is here already ({len(here)} containers or volumes); {_down(plan)}")
        for container in plan.on(self.host.name):
            if self._client.containers.list(all=True, filters={"name": f"^/?{container.name}$"}):
                raise HostProblem(f"a container named {container.name} is here that is not of this run; remove it")
        self._have_image(plan.deployment)
        return str(self._client.version().get("Version", "?"))

    def _have_image(self, deployment: Deployment) -> None:
        from docker import errors

        image = deployment.image
        if deployment.pull != "always":
            with contextlib.suppress(errors.ImageNotFound):
                self._client.images.get(image)
                return
            if deployment.pull == "never":
                raise HostProblem(f"image {image} is missing; {_load(image)}")
        try:
            self._client.images.pull(image) if ":" in image or "@" in image else self._client.images.pull(
                image, "latest"
            )
        except errors.APIError as error:
            said = " ".join(str(error.explanation or error).split())
            raise HostProblem(
                f"image {image} is missing and could not be pulled ({said[:200]}); {_load(image)}"
            ) from None

    @_told
    def create(self, plan: Plan, container: Container, bundle: bytes) -> None:
        """The container and its volume with everything in it that it needs; it is not started."""
        labels = _labels(plan, container)
        self._client.volumes.create(name=container.name, labels=labels)
        made = self._client.containers.create(**create_arguments(plan, container))
        if not made.put_archive(HOME, bundle):
            raise HostProblem(f"{container.name}: its certificates and settings could not be put into its volume")

    @_told
    def start(self, name: str) -> None:
        """Start a container that was created."""
        self._client.containers.get(name).start()

    @_told
    def containers(self) -> list[Seen]:
        """The deployment's containers here, in the order of their names."""
        return [_seen(found.attrs) for found in self._find()]

    @_told
    def volumes(self) -> list[str]:
        """The deployment's volumes here."""
        return sorted(volume.name for volume in self._client.volumes.list(filters={"label": self._filter()}))

    def _find(self) -> list[Any]:
        found = self._client.containers.list(all=True, filters={"label": self._filter()}, ignore_removed=True)
        return sorted(found, key=lambda container: str(container.name))

    def _filter(self) -> str:
        return f"{RUN_LABEL}={self._deployment.name}"

    @_told
    def tail(self, name: str, lines: int = _TAIL) -> list[str]:
        """The last lines that a container wrote."""
        written: bytes = self._client.containers.get(name).logs(tail=lines)
        return written.decode("utf-8", "replace").splitlines()

    @_told
    def follow(self, name: str, lines: int) -> Iterator[str]:
        """The last lines of a container, and then each as it comes."""
        client = self._client
        stream = client.containers.get(name).logs(tail=lines, stream=True, follow=True)
        return (line.decode("utf-8", "replace").rstrip("\n") for line in _lines(stream))

    @_told
    def ask(self, name: str, command: list[str]) -> tuple[int, bytes]:
        """Run a command in a running container; its exit code and what it wrote to stdout."""
        done = self._client.containers.get(name).exec_run(command, stderr=False)
        return done.exit_code or 0, done.output if isinstance(done.output, bytes) else b""

    @_told
    def read(self, volume: str, path: str, take: Callable[[Iterator[bytes]], _Result]) -> "_Result | None":
        """Hand the archive of a path in a volume to `take`; None where the path or the volume is not there."""
        from docker import errors

        if volume not in self.volumes():
            return None
        image = self._deployment.image
        labels = {RUN_LABEL: self._deployment.name, ROLE_LABEL: "reader", HOST_LABEL: self.host.name}
        reader = self._client.containers.create(image, labels=labels, mounts=[_own(volume)], network_mode="none")
        try:
            chunks, _ = reader.get_archive(path)
            return take(chunks)
        except errors.NotFound:
            return None
        finally:
            reader.remove(force=True)

    @_told
    def stop(self) -> None:
        """SIGTERM to all of the deployment's containers here, observer first; a peer so writes its last state."""
        running = [container for container in self._find() if container.status in ("running", "restarting", "paused")]
        for role, seconds in STOP_SECONDS.items():
            group = [container for container in running if _role(container) == role]
            threads = [threading.Thread(target=_stop, args=(container, seconds), daemon=True) for container in group]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds + self._deployment.seconds)

    @_told
    def remove(self, keep: tuple[str, ...] = ()) -> tuple[int, int]:
        """Remove the deployment's containers and volumes here, but for volumes to keep; how many of each."""
        from docker import errors

        containers = self._find()
        for container in containers:
            with contextlib.suppress(errors.NotFound):
                container.remove(force=True)
        volumes = [name for name in self.volumes() if name not in keep]
        for name in volumes:
            with contextlib.suppress(errors.NotFound):
                self._client.volumes.get(name).remove(force=True)
        return len(containers), len(volumes)


def create_arguments(plan: Plan, container: Container) -> dict[str, Any]:
    """What the SDK is told to create: an ordinary user, no capability, nothing writable but its volume and /tmp."""
    from docker.types import DeviceRequest, LogConfig, Mount

    mounts = [_own(container.name)]
    if container.data:
        mounts.append(Mount(target=DATA, source=container.data, type="bind", read_only=True))
    environment = {"HOME": "/tmp", "MPLCONFIGDIR": "/tmp/matplotlib"}
    secret = plan.config.privacy.sketch_secret
    if container.secret and secret:
        environment["SPARK_PRIVACY__SKETCH_SECRET"] = secret
    arguments: dict[str, Any] = {
        "image": plan.deployment.image,
        "name": container.name,
        "command": list(container.arguments),
        "entrypoint": ["spark-dfl"],
        "user": f"{USER}:{USER}",
        "working_dir": HOME,
        "environment": environment,
        "labels": _labels(plan, container),
        "mounts": mounts,
        "tmpfs": {"/tmp": "rw,nosuid,nodev,mode=1777"},
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart_policy": {"Name": "on-failure", "MaximumRetryCount": _RESTARTS},
        "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "10m", "max-file": "3"}),
        "stop_signal": "SIGTERM",
        "healthcheck": {"test": ["NONE"]},
    }
    if plan.deployment.network == HOST_NETWORK:
        arguments["network_mode"] = HOST_NETWORK
    else:
        arguments |= {"network": plan.deployment.network, "hostname": container.name}
    if container.gpu is not None:
        arguments["device_requests"] = [DeviceRequest(device_ids=[container.gpu], capabilities=[["gpu"]])]
    return arguments


def _own(volume: str) -> Any:
    from docker.types import Mount

    return Mount(target=HOME, source=volume, type="volume", no_copy=True)


def _labels(plan: Plan, container: Container) -> dict[str, str]:
    return {
        RUN_LABEL: plan.deployment.name,
        ID_LABEL: plan.run_id,
        ROLE_LABEL: container.role,
        HOST_LABEL: container.host,
        PEERS_LABEL: peers_text(container.peers),
        ROUNDS_LABEL: str(plan.config.run.rounds),
    }


def peers_text(peers: tuple[str, ...]) -> str:
    """peer-000..peer-007, for labels and tables."""
    return "" if not peers else peers[0] if len(peers) == 1 else f"{peers[0]}..{peers[-1]}"


def _seen(attributes: Mapping[str, Any]) -> Seen:
    labels, state = attributes["Config"].get("Labels") or {}, attributes["State"]
    return Seen(
        name=str(attributes["Name"]).removeprefix("/"),
        role=labels.get(ROLE_LABEL, ""),
        run_id=labels.get(ID_LABEL, ""),
        rounds=labels.get(ROUNDS_LABEL, ""),
        peers=labels.get(PEERS_LABEL, ""),
        state=str(state.get("Status", "")),
        exit_code=int(state.get("ExitCode") or 0),
        restarts=int(attributes.get("RestartCount") or 0),
        error=" ".join(str(state.get("Error") or "").split()),
    )


def _role(container: Any) -> str:
    return str(container.labels.get(ROLE_LABEL, ""))


def _stop(container: Any, seconds: int) -> None:
    with contextlib.suppress(Exception):  # who did not stop is removed by force
        container.stop(timeout=seconds)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _down(plan: Plan) -> str:
    return f"end it with: spark-dfl deploy down --hosts {plan.deployment.origin}"


def _load(image: str) -> str:
    return f"bring it there with: docker save {image} | docker -H ENGINE load"
