"""Whole runs in memory on real digits: the paper's lemmas as invariants, determinism, and learning itself."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from spark_node.config import Config, load
from spark_node.data.datasets import load as load_dataset
from spark_node.data.partitions import partition
from spark_node.launch.memory import MemoryRun
from spark_node.learning.spark import Spark
from spark_node.observe.records import RoundRecord, RunInfo

DIGITS = load_dataset("digits")


class Recorder:
    """Keeps what a run tells, and looks at every peer's state after each round."""

    def __init__(self, run: MemoryRun) -> None:
        self.run, self.records, self.info, self.seen = run, list[RoundRecord](), list[RunInfo](), 0
        self.states = [self._state()]

    def _state(self) -> dict[str, Tensor]:
        peers = [node.algorithm for node in self.run.nodes]
        assert all(isinstance(peer, Spark) for peer in peers)
        return {name: torch.stack([getattr(peer, name) for peer in peers]).double() for name in ("w", "v", "delta")}

    def started(self, info: RunInfo) -> None:
        self.info.append(info)

    def progress(self, round: int, done: int, total: int) -> None:
        self.seen += 1

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.states.append(self._state())


def small(**settings: object) -> Config:
    base: dict[str, object] = {
        "run__nodes": 8,
        "run__rounds": 3,
        "run__workers": 2,
        "data__partition": "dirichlet:0.5",
        "data__samples_per_node": 24,
        "model__hidden": [16],
        "topology__degree": 3,
        "distillation__r_warm": 1,
    }
    return load(environment={}).replace(**{**base, **settings})


def run(config: Config) -> Recorder:
    shares = partition(
        config.data.partition,
        DIGITS,
        config.run.nodes,
        samples_per_node=config.data.samples_per_node,
        seed=config.run.seed,
    )
    network = MemoryRun(config, DIGITS, shares)
    recorder = Recorder(network)
    network.run(recorder)
    return recorder


VARIANTS = {
    "receiver-trace": {},
    "receiver-full": {"learning__kernel": "full"},
    "sender-full": {"learning__kernel": "full", "learning__linearize_at": "sender"},
    "averaged-velocity": {"momentum__average_velocity": True},
    "cnn": {"model__kind": "cnn", "model__channels": [3], "model__hidden": [8]},
    "subsampled": {"learning__subsample": 3},
    "model-selected": {"learning__select_by": "model"},
    "cluster": {"topology__kind": "cluster"},
    "ring": {"topology__kind": "ring"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_virtual_iterate_obeys_its_recursion_over_a_real_run(variant: str) -> None:
    """Lemma virtual_rec: z(k+1) = z(k) + mean delta / (1 - mu), z = mean w + mu^2 / (1 - mu) mean v."""
    recorder = run(small(**VARIANTS[variant]))
    mu = 0.9

    def virtual(state: dict[str, Tensor]) -> Tensor:
        return state["w"].mean(0) + mu**2 / (1 - mu) * state["v"].mean(0)

    for before, after in zip(recorder.states, recorder.states[1:], strict=False):
        step = after["delta"].mean(0) / (1 - mu)
        assert float(step.norm()) > 1e-3
        error = (virtual(after) - virtual(before) - step).norm() / step.norm()
        assert float(error) < 1e-5


def test_averaging_over_a_regular_graph_keeps_the_mean_weight() -> None:
    recorder = run(small(momentum__kind="off", distillation__enabled=False))
    for before, after in zip(recorder.states, recorder.states[1:], strict=False):
        moved = after["w"].mean(0) - before["w"].mean(0)
        torch.testing.assert_close(moved, after["delta"].mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", ["receiver-trace", "sender-full"])
def test_the_same_seed_gives_the_same_run_bit_for_bit_whatever_the_number_of_workers(variant: str) -> None:
    first = run(small(**VARIANTS[variant], run__workers=1))
    again = run(small(**VARIANTS[variant], run__workers=3))
    assert torch.equal(first.states[-1]["w"], again.states[-1]["w"])
    assert torch.equal(first.states[-1]["v"], again.states[-1]["v"])
    assert [r.aggregated_accuracy for r in first.records] == [r.aggregated_accuracy for r in again.records]


def test_another_seed_gives_another_run() -> None:
    first, other = run(small(run__rounds=1)), run(small(run__rounds=1, run__seed=1))
    assert not torch.equal(first.states[-1]["w"], other.states[-1]["w"])


def test_all_peers_start_from_one_model() -> None:
    weights = run(small(run__rounds=1)).states[0]["w"]
    assert bool((weights == weights[0]).all())


def test_peers_learn_together_what_none_could_alone() -> None:
    recorder = run(small(run__nodes=12, run__rounds=8, data__samples_per_node=60, distillation__r_warm=8))
    assert recorder.records[-1].aggregated_accuracy > 0.85
    assert recorder.records[-1].aggregated_accuracy > recorder.records[0].aggregated_accuracy


def test_ntk_dfl_is_spark_without_momentum_and_distillation() -> None:
    ntk_dfl = run(small(run__algorithm="ntk-dfl"))
    plain = run(small(momentum__kind="off", distillation__enabled=False))
    assert torch.equal(ntk_dfl.states[-1]["w"], plain.states[-1]["w"])
    assert {record.alpha for record in ntk_dfl.records} == {1.0}


def test_quasi_global_momentum_follows_the_averaged_models_over_a_real_graph() -> None:
    """In plain numpy: c = mean over the neighbourhood, v <- mu v + (1 - mu) (c - c'), w <- c + mu v + Delta w."""
    recorder = run(small(run__rounds=5, momentum__kind="quasi-global", momentum__mu=0.8))
    names = [node.peer for node in recorder.run.nodes]
    states = [{name: part.numpy() for name, part in state.items()} for state in recorder.states]
    w, v, before = states[0]["w"], np.zeros_like(states[0]["w"]), None
    for k, state in enumerate(states[1:], start=1):
        near = [[names.index(n), *map(names.index, recorder.run.membership.neighbours(n, k))] for n in names]
        consensus = np.stack([w[rows].mean(0) for rows in near])
        v = v if before is None else 0.8 * v + 0.2 * (consensus - before)
        w, before = consensus + 0.8 * v + state["delta"], consensus
        assert np.abs(state["w"] - w).max() < 1e-5
        assert np.abs(state["v"] - v).max() < 1e-5
    assert np.abs(v).max() > 0.01


def test_quasi_global_momentum_needs_no_extra_bytes() -> None:
    kinds = ("nesterov", "quasi-global")
    first, second = (run(small(run__rounds=2, momentum__kind=kind)).records[-1].bytes_sent for kind in kinds)
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("integrator", ["dopri5", "euler"])
def test_every_integrator_leads_to_the_same_first_update(integrator: str) -> None:
    default = run(small(run__rounds=1)).states[-1]["delta"]
    other = run(small(run__rounds=1, learning__integrator=integrator)).states[-1]["delta"]
    assert float((default - other).norm() / other.norm()) < 0.01


def test_a_record_says_what_a_round_did() -> None:
    recorder = run(small())
    record = recorder.records[1]
    assert record.round == 2
    assert recorder.info[0].peers == 8
    assert recorder.seen == 3 * 8
    assert len(record.client_accuracy) == 8
    assert record.neighbours_expected == record.neighbours_used == 8 * 3
    weights = 8 * 3 * 2 * recorder.info[0].parameters * 4  # own and consensus weights to three neighbours
    assert record.bytes_sent["weights"] == weights
    assert record.bytes_sent["package"] > 0
    assert {"round", "evaluation", "jacobian", "kernel", "evolution", "back-projection"} <= record.seconds.keys()
    assert (record.alpha, record.tau) != (1.0, 1.0)  # the warm-up is over


def test_a_single_peer_learns_alone() -> None:
    recorder = run(
        small(
            run__nodes=1,
            data__partition="iid",
            data__samples_per_node=200,
            learning__kernel="full",
            distillation__enabled=False,
        )
    )
    assert recorder.records[-1].neighbours_expected == 0
    assert recorder.records[-1].aggregated_accuracy > 0.6


def test_a_failing_peer_ends_the_run_instead_of_hanging_it() -> None:
    config = small()
    shares = partition(config.data.partition, DIGITS, 8, samples_per_node=24)
    network = MemoryRun(config, DIGITS, shares)
    victim = network.nodes[3].algorithm
    assert isinstance(victim, Spark)
    victim.inputs = victim.inputs[:, :, :4]  # no longer fits the model
    with pytest.raises(ExceptionGroup):
        network.run(Recorder(network))


def test_messages_that_are_not_finite_are_left_out_of_the_round() -> None:
    config = small(run__rounds=1, learning__linearize_at="sender")
    shares = partition(config.data.partition, DIGITS, 8, samples_per_node=24)
    network = MemoryRun(config, DIGITS, shares)
    liar = network.nodes[0].algorithm
    assert isinstance(liar, Spark)
    liar.w = torch.full_like(liar.w, float("nan"))
    honest = network.nodes[1:]
    recorder = Recorder(network)
    with pytest.raises(ExceptionGroup):  # the liar itself cannot go on ...
        network.run(recorder)
    assert all(bool(torch.isfinite(node.algorithm.weights).all()) for node in honest)  # ... the others are clean


def test_settings_reach_the_peers() -> None:
    config = small()
    changed = dataclasses.replace(config, learning=dataclasses.replace(config.learning, timesteps=(5, 10)))
    assert all(5 <= record.t_star_mean <= 10 for record in run(changed).records)


def test_a_run_until_its_target_ends_with_the_round_that_reaches_it() -> None:
    free = [record.aggregated_accuracy for record in run(small(run__rounds=5)).records]
    target = free[1]
    wanted = next(k for k, value in enumerate(free, 1) if value >= target)
    ended = run(small(run__rounds=5, run__until_target=True, run__target_accuracy=target)).records
    assert [record.aggregated_accuracy for record in ended] == free[:wanted]
