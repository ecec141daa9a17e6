"""A run over gRPC and the same run in memory give the same weights, bit for bit, where packages are lossless."""

from pathlib import Path

import pytest
import torch

from tests.network.harness import Network, in_memory, logs, small
from tests.network.isolation import isolated


@pytest.mark.parametrize("mode", ["receiver", "sender"])
@isolated
def test_twelve_peers_over_grpc_end_with_the_weights_of_the_run_in_memory(tmp_path: Path, mode: str) -> None:
    config = small(run__nodes=12, run__rounds=4, learning__linearize_at=mode)
    expected = in_memory(config)
    network = Network(config, tmp_path)
    found = network.train()
    assert sorted(found) == sorted(expected)
    for peer, w in expected.items():
        assert torch.equal(found[peer], w), f"{peer} differs\n{logs(tmp_path)}"
    assert [record.neighbours_used for record in network.log.records] == [36] * 4


@isolated
def test_lossy_packages_give_the_same_weights_over_grpc_and_in_memory(tmp_path: Path) -> None:
    config = small(package__bits=6, package__weights="int8", package__rounding="stochastic")
    expected = in_memory(config)
    found = Network(config, tmp_path).train()
    for peer, w in expected.items():
        assert torch.equal(found[peer], w), f"{peer} differs\n{logs(tmp_path)}"


@isolated
def test_a_baseline_gives_the_same_weights_over_grpc_and_in_memory(tmp_path: Path) -> None:
    config = small(run__algorithm="dfedavgm", run__clients_every=2, local__epochs=3, local__batch_size=16)
    expected = in_memory(config)
    network = Network(config, tmp_path)
    found = network.train()
    assert sorted(found) == sorted(expected)
    for peer, w in expected.items():
        assert torch.equal(found[peer], w), f"{peer} differs\n{logs(tmp_path)}"
    records = network.log.records
    assert [record.neighbours_used for record in records] == [18] * 3
    assert [len(record.client_accuracy) for record in records] == [0, 6, 6]
    assert [(record.bytes_sent["package"], record.t_star_mean, record.eta) for record in records] == [
        (0, None, 0.01)
    ] * 3
    assert all(record.loss is not None and record.bytes_sent["weights"] > 0 for record in records)


@isolated
def test_bytes_are_counted_by_kind_and_edge(tmp_path: Path) -> None:
    network = Network(small(), tmp_path)
    network.train()
    sent = network.log.records[0].bytes_sent
    edges = 6 * 3
    d = 64 * 16 + 16 + 16 * 10 + 10
    # Two messages an edge: float32 numbers that lose less than half, a header of a few hundred bytes.
    assert 2 * edges * d * 2 < sent["weights"] < 2 * edges * (d * 4 + 500)
    assert 0 < sent["package"] < sent["weights"]
    assert 0 < sent["control"] < 2000 * 6


@isolated
def test_a_pace_spreads_the_rounds_and_costs_no_neighbour(tmp_path: Path) -> None:
    config = small(run__pace=2.0)
    expected = in_memory(config)
    network = Network(config, tmp_path)
    found = network.train()
    assert all(torch.equal(found[peer], w) for peer, w in expected.items()), logs(tmp_path)
    rounds = [record.seconds["round"] for record in network.log.records]
    assert len(rounds) == 3
    assert sum(rounds) > 4.0
    assert [record.neighbours_used for record in network.log.records] == [18] * 3
