"""What monitoring sees over HTTP: /sd (Prometheus service discovery of all members), /metrics, /healthz."""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from orchestrator.registry import Event, Refusal, Registry

_HEAD_BYTES, _SECONDS = 8192, 5.0
_Page = Callable[[], tuple[str, bytes]]


class Metrics:
    """Every series of the orchestrator."""

    def __init__(self) -> None:
        self.series = series = CollectorRegistry()
        prefix = "spark_orchestrator"
        refusals = Counter(f"{prefix}_refusals", "joins refused, by reason", ["reason"], registry=series)
        self._refusals = {reason.name.lower(): refusals.labels(reason.name.lower()) for reason in Refusal}
        self._events = {
            "join": Counter(f"{prefix}_joins", "peers that joined", registry=series),
            "return": Counter(f"{prefix}_returns", "joins of peers that were members already", registry=series),
            "leave": Counter(f"{prefix}_leaves", "peers that left of their own accord", registry=series),
            "expiry": Counter(f"{prefix}_expiries", "peers whose lease ran out", registry=series),
        }
        text = "bytes of serialised requests (in) and replies (out)"
        self.bytes = Counter(f"{prefix}_bytes", text, ["method", "direction"], registry=series)

    def note(self, event: Event) -> None:
        """Count what happened."""
        counter = self._refusals.get(event.reason) or self._events.get(event.kind)
        if counter is not None:
            counter.inc()

    def watch(self, registry: Registry) -> None:
        """Show how the registry stands whenever someone looks."""
        prefix = "spark_orchestrator"
        for name, text, value in (
            ("members", "peers with a living lease", lambda: len(registry)),
            ("version", "of the newest member list", lambda: registry.version),
            ("from_round", "round from which the newest member list holds", lambda: registry.newest.from_round),
            ("started", "1 since the common start", lambda: registry.started),
        ):
            Gauge(f"{prefix}_{name}", text, registry=self.series).set_function(value)


def targets(registry: Registry) -> list[dict[str, object]]:
    """The members' metrics addresses as Prometheus' HTTP service discovery wants them."""
    return [
        {"targets": [member.metrics_address], "labels": {"peer": member.name, "run": registry.terms.run}}
        for member in registry.newest.members
        if member.metrics_address
    ]


async def listen(host: str, port: int, registry: Registry, metrics: Metrics) -> asyncio.Server:
    """Serve the pages until closed; OSError where the port is not to be had."""
    pages: dict[str, _Page] = {
        "/sd": lambda: ("application/json", json.dumps(targets(registry)).encode()),
        "/metrics": lambda: (CONTENT_TYPE_LATEST, generate_latest(metrics.series)),
        "/healthz": lambda: ("text/plain", b"ok\n"),
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                registry.tick()
                writer.write(_response(head, pages))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=_HEAD_BYTES)


def _response(head: bytes, pages: dict[str, _Page]) -> bytes:
    status, kind, body = HTTPStatus.OK, "text/plain", b""
    method, _, rest = head.decode("latin-1").partition(" ")
    page = pages.get(rest.partition(" ")[0].partition("?")[0])
    if method not in ("GET", "HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif page is None:
        status, body = HTTPStatus.NOT_FOUND, f"try one of: {', '.join(pages)}\n".encode()
    else:
        kind, body = page()
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else body)
