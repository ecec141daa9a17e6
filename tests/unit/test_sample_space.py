"""Descent in sample space against descent in the weights and torch.optim.SGD, in float64; and when it is chosen."""

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spark_node.config import Config, LocalSettings, load
from spark_node.learning.chain import links_of
from spark_node.learning.gossip_sgd import Descent, GossipSgd
from spark_node.learning.sample_space import SampleSpace, pays
from spark_node.model import flatten, mlp
from spark_node.seeds import stream
from tests.unit.networks import CLASSES, Residual

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class InWeights(GossipSgd):
    def _descent(self, eta: float) -> Descent:
        return Descent(self.module, self.w, self.config.local, eta, self.inputs)


class InSamples(GossipSgd):
    def _descent(self, eta: float) -> SampleSpace:
        links = links_of(self.module)
        assert links is not None
        return SampleSpace(self.module, links, self.w, self.config.local, eta, self.inputs)


def chain(widths: list[int], activation: str = "relu", bias: bool = True) -> nn.Module:
    """A chain in float64 with generic weights."""
    torch.manual_seed(7)
    parts: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        parts += [nn.Linear(inputs, outputs, bias=bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts[:-1]).double().eval()


def samples(count: int, width: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(count)
    x = torch.randn(count, 1, width, dtype=torch.float64, generator=random)
    return x, torch.randint(CLASSES, (count,), generator=random)


def configured(**local: Any) -> Config:
    base = {"epochs": 3, "batch_size": 8, "lr": 0.1, **local}
    return Config().replace(run__algorithm="dpsgd", **{f"local__{name}": value for name, value in base.items()})


def trained(kind: type[GossipSgd], module: nn.Module, x: Tensor, y: Tensor, config: Config) -> GossipSgd:
    """A peer after a round on its own."""
    peer = kind(config, "peer-0", copy.deepcopy(module), x, y)
    peer.incorporate("weights", 1, {})
    return peer


def check(module: nn.Module, x: Tensor, y: Tensor, config: Config) -> None:
    found, expected = (trained(kind, module, x, y, config) for kind in (InSamples, InWeights))
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-10, atol=1e-10)
    assert found.facts() == pytest.approx(expected.facts(), rel=1e-10)
    assert not torch.equal(found.weights, flatten(module))
    assert torch.equal(flatten(found.module), found.weights)


# The same steps


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("hidden", [[], [9], [9, 5], [6, 7, 5]], ids=str)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_steps_are_those_of_descent_in_the_weights(
    activation: str, hidden: list[int], bias: bool, momentum: float
) -> None:
    """21 samples in batches of 8: the last one is smaller."""
    check(chain([30, *hidden, CLASSES], activation, bias), *samples(21, 30), configured(momentum=momentum))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("count", "size"), [(21, 0), (21, 21), (21, 50), (21, 1), (1, 8), (1, 0), (40, 7)])
def test_batches_of_any_size(count: int, size: int, momentum: float) -> None:
    """0 = all samples; also one sample, batches of one, and more samples than inputs."""
    check(chain([30, 9, CLASSES]), *samples(count, 30), configured(batch_size=size, momentum=momentum))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 12),
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
    size=st.integers(0, 14),
    epochs=st.integers(1, 4),
    momentum=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_any_small_chain_takes_the_same_steps(
    count: int, widths: list[int], activation: str, bias: bool, size: int, epochs: int, momentum: float
) -> None:
    module = chain([*widths, CLASSES], activation, bias)
    x, y = samples(count, widths[0])
    config = configured(batch_size=size, epochs=epochs, momentum=momentum)
    found, expected = (trained(kind, module, x, y, config) for kind in (InSamples, InWeights))
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-10, atol=1e-10)
    assert found.facts() == pytest.approx(expected.facts(), rel=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_rounds_are_those_of_torch_optim(momentum: float) -> None:
    """Momentum begins anew in the second round, which starts where the first has ended."""
    config = configured(batch_size=8, momentum=momentum)
    module, (x, y) = chain([30, 9, CLASSES]), samples(21, 30)
    peer = InSamples(config, "peer-0", copy.deepcopy(module), x, y)
    for k in (1, 2):
        peer.incorporate("weights", k, {})
        optimiser = torch.optim.SGD(module.parameters(), 0.1, momentum)
        random = stream(config.run.seed, "batches", "peer-0", k)
        for order in [random.permutation(21) for _ in range(3)]:
            for rows in (order[:8], order[8:16], order[16:]):
                optimiser.zero_grad()
                cross_entropy(module(x[rows]), y[rows]).backward()
                optimiser.step()
        torch.testing.assert_close(peer.weights, flatten(module), rtol=1e-10, atol=1e-10)


# The choice


def chosen(module: nn.Module, config: Config, count: int = 200) -> type:
    x, y = torch.zeros(count, 1, 28, 28), torch.zeros(count, dtype=torch.int64)
    return type(GossipSgd(config, "peer-0", module, x, y)._descent(0.1))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("dpsgd", Descent), ("dfedavg", SampleSpace), ("dfedavgm", SampleSpace), ("dfedsam", Descent)],
)
def test_published_settings_choose_the_way_with_less_arithmetic(algorithm: str, expected: type) -> None:
    config = load(environment={}).replace(run__algorithm=algorithm)
    assert chosen(mlp(784, [100], 10).eval(), config) is expected


@pytest.mark.parametrize("local", [{"sam_rho": 0.01}, {"weight_decay": 5e-4}], ids=["sharpness", "decay"])
def test_sharpness_and_weight_decay_stay_in_the_weights(local: dict[str, float]) -> None:
    base = {"epochs": 20, "batch_size": 25}
    assert chosen(mlp(784, [100], 10).eval(), configured(**base)) is SampleSpace
    assert chosen(mlp(784, [100], 10).eval(), configured(**base, **local)) is Descent


def test_a_module_that_is_no_chain_stays_in_the_weights() -> None:
    assert chosen(Residual().eval(), configured(epochs=20, batch_size=25)) is Descent


def test_the_choice_counts_multiplications() -> None:
    """N N d + 2 N d h + E N N h against 2 E N d h + E ceil(N / B) d h."""
    short = LocalSettings(epochs=1, batch_size=10)
    long = LocalSettings(epochs=20, batch_size=25)
    whole = LocalSettings(epochs=20, batch_size=0)
    assert pays(long, 200, 784, 100)
    assert pays(whole, 200, 784, 100)
    assert not pays(short, 200, 784, 100)
    assert not pays(long, 5000, 784, 100)  # more samples than twice the inputs: K alone is more than X and W
    border = [n for n in range(1, 5000) if pays(whole, n, 784, 100)]
    assert border == list(range(1, border[-1] + 1))
    n = border[-1]
    assert n * n * 784 + 2 * n * 78400 + 20 * n * n * 100 < 40 * n * 78400 + 20 * 78400
    n += 1
    assert n * n * 784 + 2 * n * 78400 + 20 * n * n * 100 >= 40 * n * 78400 + 20 * 78400
