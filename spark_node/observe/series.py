"""Every Prometheus series of the observer: what no peer can know alone."""

import math

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_node.config import Config
from spark_node.observe.history import KINDS, Round, Run
from spark_node.observe.records import RoundRecord, RunInfo


class ObserverMetrics(Collector):
    """A watcher whose latest round a scrape sees; series of figures that are not known yet are left out."""

    def __init__(self, config: Config, run_id: str, before: Run | None = None) -> None:
        self._config, self._labels = config, {"run": run_id}
        self._latest: Round | None = None
        self._clients = math.nan
        self._bytes = dict.fromkeys(KINDS, 0)
        self._done, self._total = 0, config.run.nodes
        for finished in before.rounds if before is not None else ():
            self._take(finished)

    def started(self, info: RunInfo) -> None:
        self._total = info.peers

    def progress(self, round: int, done: int, total: int) -> None:
        self._done, self._total = done, total

    def round_done(self, record: RoundRecord) -> None:
        self._take(Round.of(record))

    def _take(self, finished: Round) -> None:
        self._latest = finished
        if not math.isnan(finished.client_accuracy_mean):
            self._clients = finished.client_accuracy_mean
        for kind, count in finished.bytes_sent.items():
            self._bytes[kind] = self._bytes.get(kind, 0) + count

    def collect(self) -> list[Metric]:
        run, latest = self._config.run, self._latest
        found: list[Metric] = [
            self._gauge("rounds_planned", "Rounds that the run is to have", run.rounds),
            self._gauge("target_accuracy", "The aggregated accuracy that is wanted", run.target_accuracy),
            self._gauge("round", "The last round that every peer has finished", latest.round if latest else 0),
            self._gauge("peers", "Peers that are waited for", self._total),
            self._gauge("peers_done", "Peers that have finished the round that is under way", self._done),
            self._by_kind("bytes", "Bytes that all peers have sent in recorded rounds"),
        ]
        if latest is not None:
            expected, used = latest.neighbours_expected, latest.neighbours_used
            known = {
                "aggregated_accuracy": ("Test accuracy of the mean of all peers' models", latest.aggregated_accuracy),
                "client_accuracy_mean": ("Mean test accuracy of the peers' own models", self._clients),
                "loss": ("Mean training loss that the peers told", latest.loss),
                "round_seconds": ("Wall time of the last round", latest.wall),
                "neighbours_used_ratio": ("Neighbours used of those expected", used / expected if expected else 1.0),
            }
            found += [self._gauge(name, text, v) for name, (text, v) in known.items() if not math.isnan(v)]
        return found

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"spark_observer_{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _by_kind(self, name: str, text: str) -> Metric:
        family = CounterMetricFamily(f"spark_observer_{name}", text, labels=[*self._labels, "kind"])
        for kind, value in self._bytes.items():
            family.add_metric([*self._labels.values(), kind], value)
        return family
