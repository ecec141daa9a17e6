"""One orchestrator as a process: listen, keep time, stop on SIGTERM or SIGINT."""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable

import grpc

from orchestrator import discovery, service
from orchestrator.registry import MAX_ROUND, Event, Registry, Terms
from spark_node.config import Config
from spark_node.errors import UserError
from spark_node.security.identity import Role
from spark_node.security.tls import ORCHESTRATOR, Security, security_of

log = logging.getLogger(__name__)

_TROUBLE = ("refusal", "expiry", "wait")


def serve(
    config: Config,
    run_id: str,
    *,
    port: int = 0,
    http_port: int = 0,
    signature: str = "",
    closed: bool = False,
    recorded: int | None = None,
    ready: Callable[[str, str], None] = lambda address, http_address: None,
) -> int:
    """Run until SIGTERM or SIGINT, unless that is ignored; 0. UserError where it cannot listen.

    `ready(address, http_address)` is called once, when peers may join; the second is empty where network.metrics is
    false. It may follow os.fork(), in the child's main thread, if the parent has made no use of gRPC before.
    """
    terms = Terms(
        run=run_id,
        seed=config.run.seed,
        nodes=config.run.nodes,
        topology=config.topology,
        start_timeout=config.network.start_timeout,
        lease=config.network.lease,
        signature=signature,
        closed=closed,
        recorded=MAX_ROUND if recorded is None else recorded,
    )
    metrics = discovery.Metrics()

    def note(event: Event) -> None:
        metrics.note(event)
        log.log(logging.WARNING if event.kind in _TROUBLE else logging.INFO, "%s", event.detail)

    # Versions count from the time of day: a restarted orchestrator's are larger than those before.
    registry = Registry(terms, SteadyClock(terms.lease / 3), first_version=time.time_ns() // 1_000_000, listener=note)
    metrics.watch(registry)
    _allow_many_connections()
    asyncio.run(_serve(config, registry, metrics, (port, http_port), ready))
    return 0


class SteadyClock:
    """Seconds that this process lived through: while it is stopped or starved nobody can renew, so none pass."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._seen, self._lost = clock(), 0.0

    def __call__(self) -> float:
        """The time; of a pause between two questions, no more than `longest` counts."""
        now = self._clock()
        self._lost += max(0.0, now - self._seen - self._longest)
        self._seen = now
        return now - self._lost


async def _serve(
    config: Config,
    registry: Registry,
    metrics: discovery.Metrics,
    ports: tuple[int, int],
    ready: Callable[[str, str], None],
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, http_address, pages = config.network.host, "", None
    security = security_of(config.security, Role.ORCHESTRATOR, ORCHESTRATOR)
    rate = config.security.messages_per_second
    server = await service.make_server(registry, metrics, config.network.keepalive, security, rate)
    try:
        address = _bind(server, host, ports[0], security)
        await server.start()
        if config.network.metrics:
            pages = await _listen_http(host, ports[1], registry, metrics)
            http_address = _authority(host, pages.sockets[0].getsockname()[1])
        ready(address, http_address)
        await _keep_time(registry, stop)
        log.info("run %s: asked to stop", registry.terms.run)
    finally:
        if pages is not None:
            pages.close()
        await server.stop(grace=1.0)


async def _keep_time(registry: Registry, stop: asyncio.Event) -> None:
    """Let leases run out and the start fall due, even while nobody calls."""
    while not stop.is_set():
        registry.tick()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(0.5, registry.terms.lease / 10))


def _bind(server: "grpc.aio.Server", host: str, port: int, security: Security) -> str:
    address = _authority(host, port)
    try:
        _try_to_bind(host, port)  # gRPC would only say that it failed, and log why
        return _authority(host, security.listen(server, address))
    except (OSError, RuntimeError) as error:
        raise _cannot_listen(address, error, "--port") from None


async def _listen_http(host: str, port: int, registry: Registry, metrics: discovery.Metrics) -> asyncio.Server:
    try:
        return await discovery.listen(host, port, registry, metrics)
    except OSError as error:
        raise _cannot_listen(_authority(host, port), error, "--http-port") from None


def _try_to_bind(host: str, port: int) -> None:
    """OSError where another listens, or where none of the host's addresses is ours."""
    failures: list[OSError] = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            failures.append(error)
    for failure in failures:
        if failure.errno == errno.EADDRINUSE or len(failures) == len(found):
            raise failure


def _cannot_listen(address: str, error: Exception, flag: str) -> UserError:
    why = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        why = str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno)
    return UserError(f"cannot listen on {address}: {why.lower()}; give another {flag} (0 = a free one) or --host")


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _allow_many_connections() -> None:
    """Each peer keeps one: as many open files as the system grants."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
