"""What monitoring sees over HTTP: /sd (Prometheus service discovery of all members), /metrics, /healthz."""

import asyncio
import json
from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from orchestrator.registry import Event, Refusal, Registry
from spark_node.web import Page, serve


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

    def now(kind: str, body: Callable[[], bytes]) -> Callable[[], Page]:
        def page() -> Page:
            registry.tick()
            return Page(kind, body())

        return page

    pages = {
        "/sd": now("application/json", lambda: json.dumps(targets(registry)).encode()),
        "/metrics": now(CONTENT_TYPE_LATEST, lambda: generate_latest(metrics.series)),
        "/healthz": now("text/plain", lambda: b"ok\n"),
    }
    return await serve((host, port), pages)
