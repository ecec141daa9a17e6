"""Every Prometheus series of a peer, in one place."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_node import web
from spark_node.config import Config
from spark_node.memory import MemoryMeter, held
from spark_node.security.tls import Security
from spark_node.transport.traffic import Traffic

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
BYTES = (1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 1e9)


class Histogram:
    """Counts of values by bucket, without the locks of a library's own."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[next((i for i, bound in enumerate(self._bounds) if value <= bound), len(self._bounds))] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        total, found = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


ALL = "all"
"""Stands for the neighbours where they are too many to be told apart."""


class PeerMetrics(Collector):
    """What a scrape sees; values are read when asked for, so that training pays nothing.

    Every peer meets every other in the end, so a series for each pair of them would be a million in a run of 300: above
    `network.named_neighbours` peers, counters sum over the neighbours. The histogram of bytes by edge is always there.
    """

    def __init__(
        self,
        peer: str,
        traffic: Traffic,
        security: Security,
        codec: Callable[[str], str] = lambda _: "",
        config: Config | None = None,
    ) -> None:
        config = config or Config()
        self._labels = {"peer": peer, "run": ""}
        self._traffic, self._security, self._codec = traffic, security, codec
        self._named = config.run.nodes <= config.network.named_neighbours
        self._rounds, self._budget = config.run.rounds, config.network.bandwidth_budget
        self.control: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Bytes sent to the orchestrator, and received from it."""
        self.cut_off: Callable[[], int] = lambda: 0
        self.round = 0
        self.expected = self.used = 0
        self.facts: Mapping[str, float] = {}
        self.accuracy: float | None = None
        self.checkpoints: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """The round of the newest checkpoint, and how many could not be written."""
        self.memory = MemoryMeter()
        self.stages: dict[str, Histogram] = {}
        self.rounds = Histogram()
        self.edges: dict[str, Histogram] = {}

    def of_run(self, run: str) -> None:
        """The run is known once the orchestrator has said it."""
        self._labels["run"] = run

    def finished(self, k: int, expected: int, used: int, seconds: float, stages: Mapping[str, float]) -> None:
        """A round is over."""
        self.round = k
        self.expected += expected
        self.used += used
        self.rounds.observe(seconds)
        for stage, value in stages.items():
            self.stages.setdefault(stage, Histogram()).observe(value)

    def sent_in_round(self, edges: Mapping[tuple[str, str], int]) -> None:
        """What a round has cost: bytes by (neighbour, kind)."""
        for (_, kind), count in edges.items():
            self.edges.setdefault(kind, Histogram(BYTES)).observe(count)

    def collect(self) -> list[Metric]:
        traffic = self._traffic
        found: list[Metric] = [
            self._gauge("spark_round", "The round that the peer has finished", self.round),
            self._gauge("spark_rounds", "Rounds of the run", self._rounds),
            self._gauge("spark_bandwidth_budget", "Bytes a second that the peer should not exceed", self._budget),
            self._counter("spark_neighbours_expected", "Neighbours due in all rounds so far", self.expected),
            self._counter("spark_neighbours_used", "Neighbours whose messages of a whole round were used", self.used),
        ]
        saved, failures = self.checkpoints()
        found.append(self._gauge("spark_checkpoint_round", "The round of the newest checkpoint; 0: none", saved))
        found.append(self._counter("spark_checkpoint_failures", "Checkpoints that could not be written", failures))
        found += self._bytes(traffic)
        found.append(self._reasons("spark_refused", "Messages of neighbours that were not taken", traffic.refused))
        found.append(self._reasons("spark_rejected", "Messages that neighbours did not take", traffic.rejected))
        suspected = CounterMetricFamily(
            "spark_suspected", "Waits for a neighbour that were shortened", labels=[*self._labels, "neighbour"]
        )
        for neighbour, value in self._told([((name,), n) for name, n in list(traffic.suspected.items())]).items():
            suspected.add_metric([*self._labels.values(), *neighbour], value)
        found.append(suspected)
        found += self._strangers()
        found += [self._gauge(f"spark_{name}", f"{name} of the last round", v) for name, v in self.facts.items()]
        if self.accuracy is not None:
            found.append(self._gauge("spark_own_accuracy", "Accuracy of the peer's own model", self.accuracy))
        for name, value in (self.memory.now() | held()).items():
            found.append(self._gauge(f"spark_memory_{name}", f"Memory of the process: {name}", value))
        found.append(self._histogram("spark_round_seconds", "Wall-clock time of a round", {"": self.rounds}, ""))
        text = "Bytes to one neighbour in one round"
        found.append(self._histogram("spark_edge_bytes", text, self.edges, "kind"))
        found.append(self._histogram("spark_stage_seconds", "Time of a part of a round", self.stages, "stage"))
        return found

    def _strangers(self) -> list[Metric]:
        """Over TLS: connections on which no certified caller ever called were refused in the handshake, or idle."""
        made, known = self._security.connections, self._security.authenticated
        return [
            self._counter("spark_connections", "Connections made to this peer", made),
            self._counter("spark_connections_certified", "Those on which a certificate of the run called", known),
            self._gauge("spark_cut_off", "Senders that are refused for breaking limits", self.cut_off()),
        ]

    def _bytes(self, traffic: Traffic) -> list[Metric]:
        names = [*self._labels, "kind", "codec", "role", "neighbour"]
        sent = CounterMetricFamily("spark_sent_bytes", "Bytes handed to gRPC, by who they are for", labels=names)
        raw = CounterMetricFamily("spark_sent_raw_bytes", "The same tensors as plain float32", labels=names)
        count = CounterMetricFamily("spark_sent_messages", "Messages sent", labels=names)
        got = CounterMetricFamily("spark_received_bytes", "Bytes that came from gRPC and were taken", labels=names)
        families = ((sent, traffic.sent), (raw, traffic.raw), (count, traffic.messages), (got, traffic.received))
        for family, counter in families:
            for (neighbour, kind), value in self._told(list(counter.items())).items():
                self._edge(family, kind, self._codec(kind), "peer", neighbour, value)
        for family, value in zip((sent, got), self.control(), strict=True):
            self._edge(family, "control", "protobuf", "orchestrator", "orchestrator", value)
        for kind, value in list(traffic.observed.items()):
            codec = "lossless" if kind == "model" else "protobuf"
            self._edge(sent, kind, codec, "observer", "observer", value)
        wire, plain = sum(traffic.sent.values()), sum(traffic.raw.values())
        ratio = self._gauge("spark_compression_ratio", "Raw bytes over wire bytes so far", plain / wire if wire else 0)
        return [sent, raw, count, got, ratio]

    def _told(self, counts: Iterable[tuple[tuple[str, ...], int]]) -> dict[tuple[str, ...], int]:
        """Counts by (neighbour, ...), with the neighbours summed where they are too many."""
        summed: Counter[tuple[str, ...]] = Counter()
        for (neighbour, *rest), value in counts:
            summed[neighbour if self._named else ALL, *rest] += value
        return dict(summed)

    def _edge(self, family: Metric, kind: str, codec: str, role: str, other: str, value: int) -> None:
        labels = {**self._labels, "kind": kind, "codec": codec, "role": role, "neighbour": other}
        family.add_sample(f"{family.name}_total", labels, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _reasons(self, name: str, text: str, counter: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, "reason"])
        for reason, value in list(counter.items()):
            family.add_metric([*self._labels.values(), reason], value)
        return family

    def _histogram(self, name: str, text: str, parts: Mapping[str, Histogram], label: str) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for part, histogram in list(parts.items()):
            values = [*self._labels.values(), *([part] if label else [])]
            family.add_metric(values, histogram.cumulative(), histogram.sum)
        return family


async def serve(metrics: Collector, host: str, port: int = 0) -> asyncio.Server:
    """Answer scrapes at /metrics; port 0 takes a free one (`port_of` tells which)."""
    registry = _registry_of(metrics)

    async def scraped() -> AsyncIterator[bytes]:
        yield await asyncio.to_thread(generate_latest, registry)  # it may look at every page of the process

    return await web.serve((host, port), {"/metrics": lambda: web.Page(CONTENT_TYPE_LATEST, scraped())})


def serve_from_thread(metrics: Collector, host: str, port: int = 0) -> int:
    """The same for a process whose event loop ends before the last scrape; the port that was taken."""
    found: Any = start_http_server(port, host, _registry_of(metrics))
    return int(found[0].server_port)


def _registry_of(metrics: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry


def port_of(server: asyncio.Server) -> int:
    """Where a server listens."""
    return int(server.sockets[0].getsockname()[1])
