"""What a scrape of a peer says, read by Prometheus' own parser."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from spark_node.config import Config, PackageSettings
from spark_node.metrics import PeerMetrics
from spark_node.security.tls import Plaintext
from spark_node.transport.traffic import Traffic

Sample = tuple[dict[str, str], float]


def scrape(metrics: PeerMetrics) -> dict[str, list[Sample]]:
    registry = CollectorRegistry()
    registry.register(metrics)
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: list[Sample], **labels: str) -> float:
    matching = [number for its, number in samples if labels.items() <= its.items()]
    assert len(matching) == 1, samples
    return matching[0]


@pytest.fixture
def metrics() -> PeerMetrics:
    traffic = Traffic()
    traffic.sent.update({("b", "weights"): 100, ("b", "package"): 50, ("c", "weights"): 100})
    traffic.raw.update({("b", "weights"): 400, ("b", "package"): 5000, ("c", "weights"): 400})
    traffic.messages.update({("b", "weights"): 1, ("b", "package"): 1, ("c", "weights"): 1})
    traffic.received.update({("c", "package"): 70})
    traffic.refused.update({"stale": 2})
    traffic.observed.update({"model": 300, "progress": 20})
    found = PeerMetrics("a", traffic, Plaintext(), PackageSettings(weights="int8", bits=6).codec)
    found.of_run("monday")
    found.control = lambda: (64, 90)
    return found


def test_bytes_are_told_by_kind_codec_and_role(metrics: PeerMetrics) -> None:
    found = scrape(metrics)
    sent = found["spark_sent_bytes_total"]
    assert value(sent, kind="weights", codec="int8", role="peer", neighbour="b", peer="a", run="monday") == 100
    assert value(sent, kind="package", codec="auto-6bit", role="peer", neighbour="b") == 50
    assert value(sent, kind="control", role="orchestrator") == 64
    assert value(sent, kind="model", codec="lossless", role="observer") == 300
    assert value(sent, kind="progress", role="observer") == 20
    got = found["spark_received_bytes_total"]
    assert value(got, kind="package", role="peer", neighbour="c") == 70
    assert value(got, kind="control", role="orchestrator") == 90


def test_raw_bytes_stand_beside_wire_bytes(metrics: PeerMetrics) -> None:
    found = scrape(metrics)
    assert value(found["spark_sent_raw_bytes_total"], kind="package", neighbour="b") == 5000
    assert value(found["spark_sent_messages_total"], kind="package", neighbour="b") == 1
    assert value(found["spark_compression_ratio"]) == pytest.approx(5800 / 250)


def test_rounds_and_what_they_found(metrics: PeerMetrics) -> None:
    assert "spark_own_accuracy" not in scrape(metrics), "a peer without test samples says nothing of its accuracy"
    metrics.finished(3, expected=5, used=4, seconds=2.5, stages={"kernel": 0.02, "waiting, weights": 1.5})
    metrics.facts, metrics.accuracy = {"loss": 0.5, "t_star": 800.0}, 0.75
    found = scrape(metrics)
    assert value(found["spark_round"]) == 3
    assert value(found["spark_neighbours_expected_total"]) == 5
    assert value(found["spark_neighbours_used_total"]) == 4
    assert value(found["spark_loss"]) == 0.5
    assert value(found["spark_t_star"]) == 800
    assert value(found["spark_own_accuracy"]) == 0.75
    assert value(found["spark_refused_total"], reason="stale") == 2
    assert value(found["spark_stage_seconds_bucket"], stage="kernel", le="0.03") == 1
    assert value(found["spark_stage_seconds_bucket"], stage="kernel", le="0.01") == 0
    assert value(found["spark_round_seconds_sum"]) == 2.5
    assert value(found["spark_memory_pss_bytes"]) > 1e6
    assert value(found["spark_memory_python_blocks"]) > 1e4


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (PackageSettings(), "auto-lossless"),
        (PackageSettings(encoding="dense", projection="flat", sketch_size=10_000, keep=0.1, bits=6),
         "dense-flat10000-keep0.1-6bit"),
        (PackageSettings(encoding="factored", max_error=0.05), "factored-error0.05"),
    ],
    ids=["lossless", "the paper's stack", "error"],
)  # fmt: skip
def test_codec_in_a_word(settings: PackageSettings, name: str) -> None:
    assert settings.codec("package") == name
    assert settings.codec("weights") == "lossless"


def test_a_large_run_does_not_get_a_series_for_each_pair_of_peers() -> None:
    traffic = Traffic()
    others = [f"peer-{i:03}" for i in range(1, 300)]
    traffic.sent.update({(name, kind): 10 for name in others for kind in ("weights", "package")})
    traffic.suspected.update(dict.fromkeys(others, 1))
    few, many = Config().replace(run__nodes=32), Config().replace(run__nodes=300)
    summed = scrape(PeerMetrics("peer-000", traffic, Plaintext(), config=many))
    assert len([1 for labels, _ in summed["spark_sent_bytes_total"] if labels["role"] == "peer"]) == 2
    assert value(summed["spark_sent_bytes_total"], kind="weights", neighbour="all") == 2990
    assert value(summed["spark_suspected_total"], neighbour="all") == 299
    named = scrape(PeerMetrics("peer-000", traffic, Plaintext(), config=few))
    assert value(named["spark_sent_bytes_total"], kind="weights", neighbour="peer-299") == 10
    assert sum(map(len, summed.values())) < 100


def test_bytes_by_edge_are_a_histogram_of_each_round_and_neighbour(metrics: PeerMetrics) -> None:
    metrics.sent_in_round({("b", "weights"): 900, ("c", "weights"): 250_000, ("b", "package"): 40})
    metrics.sent_in_round({("d", "weights"): 1_000})
    found = scrape(metrics)
    assert value(found["spark_edge_bytes_bucket"], kind="weights", le="1000.0") == 2
    assert value(found["spark_edge_bytes_bucket"], kind="weights", le="300000.0") == 3
    assert value(found["spark_edge_bytes_sum"], kind="weights") == 251_900
    assert value(found["spark_edge_bytes_count"], kind="package") == 1


def test_what_alerts_need_to_know_of_the_settings() -> None:
    config = Config().replace(run__rounds=30, network__bandwidth_budget=5e6)
    found = scrape(PeerMetrics("a", Traffic(), Plaintext(), config=config))
    assert value(found["spark_rounds"]) == 30
    assert value(found["spark_bandwidth_budget"]) == 5e6
