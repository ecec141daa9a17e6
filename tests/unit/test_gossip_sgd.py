"""The baselines against independent references: numpy, torch.optim and autograd, over real graphs."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spark_node.config import Config, LocalSettings, load
from spark_node.data.datasets import load as load_dataset
from spark_node.data.partitions import partition
from spark_node.launch.memory import MemoryRun
from spark_node.launch.peer import signature
from spark_node.learning.chain import Autograd, ChainRule, links_of
from spark_node.learning.gossip_sgd import Descent, GossipSgd
from spark_node.model import ParameterLayout, flatten
from spark_node.observe.records import RoundRecord, RunInfo
from spark_node.seeds import stream
from tests.unit.networks import CLASSES, Residual, Tied

DIGITS = load_dataset("digits")
BASELINES = ("dpsgd", "dfedavg", "dfedavgm", "dfedsam")


class Recorder:
    """Keeps what a run tells, and every peer's weights after each round."""

    def __init__(self, run: MemoryRun) -> None:
        self.run, self.records = run, list[RoundRecord]()
        self.weights = [self._stacked()]

    def _stacked(self) -> Tensor:
        return torch.stack([node.algorithm.weights for node in self.run.nodes])

    def started(self, info: RunInfo) -> None:
        pass

    def progress(self, round: int, done: int, total: int) -> None:
        pass

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)
        self.weights.append(self._stacked())


def small(algorithm: str, **settings: object) -> Config:
    base: dict[str, object] = {
        "run__nodes": 6,
        "run__rounds": 3,
        "run__workers": 2,
        "data__partition": "dirichlet:0.5",
        "data__samples_per_node": 24,
        "model__hidden": [8],
        "topology__degree": 3,
    }
    return load(environment={}).replace(run__algorithm=algorithm, **{**base, **settings})


def network(config: Config) -> MemoryRun:
    how, count = config.data.partition, config.data.samples_per_node
    return MemoryRun(config, DIGITS, partition(how, DIGITS, config.run.nodes, samples_per_node=count, seed=0))


def run(config: Config) -> Recorder:
    recorder = Recorder(network(config))
    recorder.run.run(recorder)
    return recorder


def peers(recorder: Recorder) -> dict[str, GossipSgd]:
    found = {node.peer: node.algorithm for node in recorder.run.nodes}
    return {name: peer for name, peer in found.items() if isinstance(peer, GossipSgd)}


def relative_error(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """The error in units of the way that training has gone."""
    return float((found.double() - expected.double()).norm() / (expected.double() - start.double()).norm())


def batch_rows(config: Config, peer: str, k: int, samples: int) -> list[np.ndarray[Any, Any]]:
    """The samples of every step of a round, from the run's stream."""
    random, size = stream(config.run.seed, "batches", peer, k), config.local.batch_size
    orders = [random.permutation(samples) for _ in range(config.local.epochs)]
    return [order[start : start + size] for order in orders for start in range(0, samples, size)]


# Whole networks


def numpy_gradient(w: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the mean cross-entropy of a 64-8-10 ReLU network, by hand."""
    w1, b1, w2, b2 = np.split(w, np.cumsum([64 * 8, 8, 8 * 10]))
    w1, w2 = w1.reshape(8, 64), w2.reshape(10, 8)
    hidden = np.maximum(x @ w1.T + b1, 0)
    logits = hidden @ w2.T + b2
    residual = np.exp(logits - logits.max(1, keepdims=True))
    residual /= residual.sum(1, keepdims=True)
    residual[np.arange(len(y)), y] -= 1
    residual /= len(y)
    back = (residual @ w2) * (hidden > 0)
    return np.concatenate([(back.T @ x).ravel(), back.sum(0), (residual.T @ hidden).ravel(), residual.sum(0)])


def test_dpsgd_with_full_batches_is_decentralised_gradient_descent() -> None:
    recorder = run(small("dpsgd", run__rounds=5, local__batch_size=0, local__lr=0.2))
    learners, graph = peers(recorder), recorder.run.membership
    data = {n: (p.inputs.flatten(1).double().numpy(), p.labels.numpy()) for n, p in learners.items()}
    w = {name: recorder.weights[0][0].double().numpy() for name in learners}
    for k in range(1, 6):
        mean = {n: np.mean([w[m] for m in (n, *graph.neighbours(n, k))], axis=0) for n in learners}
        w = {n: mean[n] - 0.2 * numpy_gradient(mean[n], *data[n]) for n in learners}
        expected = torch.from_numpy(np.stack([w[n] for n in learners]))
        assert relative_error(recorder.weights[k], expected, recorder.weights[0]) < 1e-5


def test_dfedavg_on_a_complete_graph_is_federated_averaging() -> None:
    config = small("dfedavg", topology__degree=5, local__epochs=3, local__batch_size=10)
    recorder = run(config)
    server = copy.deepcopy(recorder.run.module)
    for k in range(1, 4):
        clients = []
        for name, peer in peers(recorder).items():
            client = copy.deepcopy(server)
            optimiser = torch.optim.SGD(client.parameters(), lr=0.1)
            for rows in batch_rows(config, name, k, len(peer.labels)):
                optimiser.zero_grad()
                cross_entropy(client(peer.inputs[rows]), peer.labels[rows]).backward()
                optimiser.step()
            clients.append(flatten(client))
        assert relative_error(recorder.weights[k], torch.stack(clients), recorder.weights[0]) < 1e-4
        nn.utils.vector_to_parameters(torch.stack(clients).mean(0), server.parameters())


@pytest.mark.parametrize("algorithm", BASELINES)
def test_every_baseline_learns(algorithm: str) -> None:
    shape = {"data__partition": "iid", "data__samples_per_node": 100, "model__hidden": [32]}
    recorder = run(small(algorithm, run__rounds=8, run__clients_every=8, **shape))
    assert recorder.records[-1].aggregated_accuracy > 0.7
    assert recorder.records[-1].aggregated_accuracy > recorder.records[0].aggregated_accuracy


@pytest.mark.parametrize("algorithm", ["dfedavgm", "dfedsam"])
def test_the_same_seed_gives_the_same_weights_whatever_the_number_of_workers(algorithm: str) -> None:
    first = run(small(algorithm, run__workers=1)).weights[-1]
    assert torch.equal(first, run(small(algorithm, run__workers=3)).weights[-1])
    assert not torch.equal(first, run(small(algorithm, run__workers=1, run__seed=1)).weights[-1])


def test_only_weights_travel_once_to_each_neighbour() -> None:
    record = run(small("dfedavg", run__rounds=1)).records[0]
    d = 64 * 8 + 8 + 8 * 10 + 10
    assert record.bytes_sent == {"weights": 6 * 3 * d * 4, "package": 0, "control": 0}
    assert record.neighbours_used == 6 * 3
    assert record.seconds["local training"] > 0


@pytest.mark.parametrize("algorithm", BASELINES)
@pytest.mark.parametrize(("coding", "most"), [("bf16", 0.65), ("int8", 0.4)])
def test_weights_may_travel_quantised(algorithm: str, coding: str, most: float) -> None:
    shape = {"run__rounds": 6, "data__partition": "iid", "data__samples_per_node": 60, "model__hidden": [64]}
    exact = run(small(algorithm, **shape, package__in_memory="encode"))
    coarse = run(small(algorithm, **shape, package__weights=coding))
    assert coarse.run.config.package.encoded_in_memory
    assert not torch.equal(coarse.weights[-1], exact.weights[-1])
    assert coarse.records[-1].bytes_sent["weights"] < most * exact.records[-1].bytes_sent["weights"]
    assert abs(coarse.records[-1].aggregated_accuracy - exact.records[-1].aggregated_accuracy) < 0.03


def test_a_record_has_no_figures_that_the_algorithm_does_not_have() -> None:
    records = run(small("dfedsam")).records
    assert {(r.t_star_mean, r.alpha, r.tau) for r in records} == {(None, None, None)}
    assert [r.eta for r in records] == pytest.approx([0.01, 0.0095, 0.009025])
    assert all(r.loss is not None and 0 < r.loss < 5 for r in records)


def test_clients_are_evaluated_every_nth_round_and_in_the_last() -> None:
    records = run(small("dpsgd", run__rounds=5, run__clients_every=2)).records
    assert [len(r.client_accuracy) for r in records] == [0, 6, 0, 6, 6]
    assert [r.client_accuracy_mean is None for r in records] == [True, False, True, False, False]
    assert all(r.aggregated_accuracy > 0 for r in records)


def test_peers_must_agree_on_local_training_but_not_on_what_is_evaluated() -> None:
    config = small("dfedavg")
    module = network(config).module
    assert signature(config.replace(local__lr=0.2), module) != signature(config, module)
    assert signature(config.replace(run__clients_every=2), module) == signature(config, module)


# One peer


def alone(module: nn.Module, samples: int = 25, **local: Any) -> GossipSgd:
    random = torch.Generator().manual_seed(0)
    config = Config().replace(run__algorithm="dpsgd", **{f"local__{name}": value for name, value in local.items()})
    x = torch.randn(samples, 1, 6, 6, generator=random)
    y = torch.randint(CLASSES, (samples,), generator=random)
    return GossipSgd(config, "peer-0", module, x, y)


def by_torch(
    peer: GossipSgd,
    module: nn.Module,
    rounds: int,
    *,
    reset: bool = True,
    decayed: bool = True,
    weight_decay: float = 0.0,
) -> Tensor:
    """The same training by torch.optim."""
    local = peer.config.local

    def optimiser() -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), local.lr, local.momentum, weight_decay=weight_decay)

    used = optimiser()
    for k in range(1, rounds + 1):
        used = optimiser() if reset else used
        used.param_groups[0]["lr"] = local.lr * local.lr_decay ** (k - 1 if decayed else 0)
        for rows in batch_rows(peer.config, peer.peer, k, len(peer.labels)):
            used.zero_grad()
            cross_entropy(module(peer.inputs[rows]), peer.labels[rows]).backward()
            used.step()
    return flatten(module)


def test_momentum_is_reset_each_round_weights_and_learning_rate_decay() -> None:
    local = {"epochs": 2, "batch_size": 8, "lr": 0.1, "lr_decay": 0.5, "momentum": 0.9, "weight_decay": 0.05}
    module = Residual()
    start = flatten(module)
    peer = alone(copy.deepcopy(module), **local)
    for k in (1, 2, 3):
        peer.incorporate("weights", k, {})

    def expected(**how: Any) -> Tensor:
        return by_torch(peer, copy.deepcopy(module), 3, **{"weight_decay": 0.05, **how})

    assert relative_error(peer.weights, expected(), start) < 1e-4
    for other in ({"reset": False}, {"decayed": False}, {"weight_decay": 0.0}):
        assert relative_error(peer.weights, expected(**other), start) > 1e-2, other


@pytest.mark.parametrize("make", [Residual, Tied, lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES, False))])
def test_any_module_can_be_trained(make: Any) -> None:
    module = make()
    peer = alone(copy.deepcopy(module), epochs=2, batch_size=10, momentum=0.5)
    peer.incorporate("weights", 1, {})
    assert relative_error(peer.weights, by_torch(peer, copy.deepcopy(module), 1), flatten(module)) < 1e-4
    assert torch.equal(flatten(peer.module), peer.weights)


def test_what_was_sent_does_not_change_while_the_sender_trains_on() -> None:
    peer = alone(Residual())
    sent = peer.outgoing("weights", 1, ["peer-1"])["peer-1"]
    before = peer.weights.clone()
    peer.incorporate("weights", 1, {})
    assert sent.kind == "weights"
    assert torch.equal(sent.w, before)  # type: ignore[union-attr]
    assert not torch.equal(peer.weights, before)


def test_an_epoch_sees_every_sample_once_and_keeps_the_last_smaller_batch() -> None:
    peer = alone(Residual(), epochs=2, batch_size=10)
    peer.labels = torch.arange(25)
    epochs = [[y for _, y in batches] for batches in peer._epochs(1, peer.inputs, peer.labels)]
    assert [[len(y) for y in epoch] for epoch in epochs] == [[10, 10, 5]] * 2
    assert [sorted(torch.cat(epoch).tolist()) for epoch in epochs] == [list(range(25))] * 2
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_the_loss_is_the_mean_over_the_samples_of_the_last_epoch() -> None:
    module = Residual()
    peer = alone(copy.deepcopy(module), lr=1e-9, batch_size=10)
    peer.incorporate("weights", 1, {})
    expected = cross_entropy(module(peer.inputs), peer.labels).item()
    assert peer.facts() == {"eta": 1e-9, "loss": pytest.approx(expected, rel=1e-5)}


def test_a_peer_without_samples_only_averages() -> None:
    peer = alone(Residual(), samples=0)
    before = peer.weights.clone()
    peer.incorporate("weights", 1, {})
    assert torch.equal(peer.weights, before)
    assert "loss" not in peer.facts()


# Sharpness-aware minimisation


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
def test_a_sharpness_aware_step_is_its_definition(adaptive: bool) -> None:
    """w - lr (grad L(w + eps) + lambda w), eps = rho T^2 g / ||T g||, T = |w| + eta (1 for plain SAM)."""
    rho, eta, rate, decay = 0.3, 0.05, 0.1, 0.02
    module = Residual().double()
    x, y = torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (9,))
    reference, w = copy.deepcopy(module), flatten(module)

    def gradient(at: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at, reference.parameters())
        loss = cross_entropy(reference(x), y)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(reference.parameters()))])

    scale = w.abs() + eta if adaptive else torch.ones_like(w)
    g = gradient(w)
    eps = rho * scale**2 * g / torch.linalg.vector_norm(scale * g)
    expected = w - rate * (gradient(w + eps) + decay * w)
    plain = w - rate * (g + decay * w)
    found = w.clone()
    settings = LocalSettings(sam_rho=rho, sam_adaptive=adaptive, sam_eta=eta, weight_decay=decay)
    loss = Descent(module, found, settings, rate, x).step(x, y)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert float((expected - plain).norm()) > 1e-4
    assert math.isclose(float(loss), cross_entropy(_at(reference, w)(x), y).item(), rel_tol=1e-12)


def _at(module: nn.Module, w: Tensor) -> nn.Module:
    nn.utils.vector_to_parameters(w, module.parameters())
    return module


def test_momentum_gathers_the_sharpness_aware_gradients_only() -> None:
    """v <- mu v + g(w + eps): the gradient at w itself serves the perturbation alone."""
    module = Residual().double()
    x, y = torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (9,))
    plain = LocalSettings(sam_rho=0.3, sam_adaptive=False)
    w = flatten(module)
    steps = []
    for _ in range(2):  # without momentum, a step is -lr g(w + eps)
        before = w.clone()
        Descent(copy.deepcopy(module), w, plain, 0.1, x).step(x, y)
        steps.append(w - before)
        w = before + steps[0]
    found = flatten(module)
    heavy = Descent(module, found, LocalSettings(sam_rho=0.3, sam_adaptive=False, momentum=0.5), 0.1, x)
    start = found.clone()
    heavy.step(x, y)
    heavy.step(x, y)
    torch.testing.assert_close(found, start + steps[0] + 0.5 * steps[0] + steps[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
@pytest.mark.parametrize("rho", [0.1, 1e3])
def test_a_gradient_of_zero_does_not_break_the_perturbation(rho: float, adaptive: bool) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    w, x = flatten(module), torch.zeros(CLASSES, 1, 6, 6)
    Descent(module, w, LocalSettings(sam_rho=rho, sam_adaptive=adaptive), 0.1, x).step(x, torch.arange(CLASSES))
    assert bool(torch.isfinite(w).all())


@pytest.mark.parametrize("adaptive", [False, True], ids=["sam", "asam"])
def test_a_gradient_whose_squares_are_too_small_for_floats_moves_nothing(adaptive: bool) -> None:
    """A fitted batch: the logit of the right class is ahead by 57, so softmax - one-hot is 1e-25 where it is not 0."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module[1].bias[0] = 57.0
    w, x = flatten(module), torch.ones(4, 1, 6, 6)
    before = w.clone()
    settings = LocalSettings(sam_rho=0.01, sam_adaptive=adaptive, momentum=0.99)
    Descent(module, w, settings, 0.01, x).step(x, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(w, before, rtol=0, atol=1e-12)


# The chain rule by hand


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.GELU(), None], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_the_chain_rule_gives_the_gradient_of_autograd(activation: nn.Module | None, bias: bool, mu: float) -> None:
    """Both add the gradient of the mean cross-entropy to mu v, in place, at weights that have changed meanwhile."""
    parts = [nn.Flatten(), nn.Linear(36, 7, bias=bias), *([activation] if activation else []), nn.Linear(7, CLASSES)]
    module = nn.Sequential(*parts).double()
    links, layout, w = links_of(module), ParameterLayout.of(module), flatten(module)
    assert links is not None
    found = torch.randn_like(w)
    expected = found.clone()
    by_hand, by_autograd = ChainRule(links, layout, w, found), Autograd(module, layout, expected)
    w.add_(torch.randn_like(w), alpha=0.3)
    nn.utils.vector_to_parameters(w, module.parameters())
    x, y = torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.randint(CLASSES, (9,))
    assert math.isclose(float(by_hand(mu, x, y)), float(by_autograd(mu, x, y)), rel_tol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert float(expected.norm()) > 0.1
