"""`spark_node.simulate`: the engine's own results, a user's own model and data, mistakes in one line."""

import asyncio
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spark_node
from spark_node import config as configuration
from spark_node.api.samples import samples_of
from spark_node.data import datasets, partitions
from spark_node.launch.memory import MemoryRun
from spark_node.learning.gossip import Gossip
from tests.network.harness import Log

QUICK = {"model.hidden": [8], "learning.timesteps": [50]}


def blobs(samples: int = 120, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Clouds around the corners of a simplex: easy to learn."""
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % classes
    return torch.randn(samples, 5, generator=random) + 3 * torch.eye(5)[y], y


def simulate(**changes: Any) -> spark_node.SimulationResult:
    given = {"data": blobs(), "nodes": 4, "rounds": 2, "settings": QUICK, **changes}
    return spark_node.simulate(**given)


def test_importing_the_package_brings_in_neither_torch_nor_grpc_and_names_are_found_later() -> None:
    code = """
import sys, spark_node
assert not {"torch", "grpc", "numpy", "matplotlib"} & set(sys.modules)
assert {"simulate", "Peer"} <= set(dir(spark_node))
assert spark_node.simulate.__name__ == "simulate" and "torch" in sys.modules
try:
    spark_node.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "nothing" in done.stdout


def test_it_gives_the_weights_of_the_engine_bit_for_bit() -> None:
    flags = {"run.nodes": 6, "run.rounds": 2, "topology.degree": 3, "data.samples_per_node": 40, "run.seed": 3}
    flags |= {"model.hidden": [16], "learning.timesteps": [100]}
    config = configuration.load(flags=flags)
    digits = datasets.load("digits")
    dealt = partitions.partition("dirichlet:0.5", digits, 6, samples_per_node=40, seed=3)
    run = MemoryRun(config, digits, dealt)
    run.run(Log())
    shares = [(digits.standardise(digits.train.pixels[own]), digits.train.labels[own]) for own in dealt.indices]
    test = digits.standardise(digits.test.pixels), digits.test.labels
    settings = {"model.hidden": [16], "learning.timesteps": [100]}
    result = spark_node.simulate(shares, test=test, rounds=2, degree=3, seed=3, settings=settings)
    for node in run.nodes:
        assert torch.equal(result.weights[node.peer], node.algorithm.weights)


def test_a_result_has_the_curve_the_models_a_plot_and_words(tmp_path: Path) -> None:
    heard: list[int] = []
    x, y = blobs(60, seed=1)
    result = simulate(rounds=4, test=(x, y), on_round=lambda record: heard.append(record.round))
    assert heard == [1, 2, 3, 4]
    assert len(result.curve) == 4
    assert result.accuracy == result.curve[-1] > 0.8
    with torch.no_grad():
        found = (result.model(x).argmax(1) == y).float().mean()
    assert float(found) == pytest.approx(result.accuracy)
    assert result.accuracy_on(x, y) == pytest.approx(result.accuracy)
    assert sorted(result.models) == ["peer-000", "peer-001", "peer-002", "peer-003"]
    mean = torch.stack([nn.utils.parameters_to_vector(m.parameters()) for m in result.models.values()]).mean(0)
    assert torch.allclose(mean, nn.utils.parameters_to_vector(result.model.parameters()), atol=1e-6)
    result.plot(tmp_path / "curve.png", other=result)
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert "SPARK, 4 peers: final" in repr(result)
    assert "<svg" in result._repr_html_()
    assert result.summary()["peers"] == 4
    assert result.bytes_sent > 0


def test_a_module_keeps_its_weights_and_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    before = copy.deepcopy(module.state_dict())
    tiny = {**QUICK, "learning.eta": 1e-9, "momentum.kind": "off"}
    result = simulate(model=module, rounds=1, settings=tiny)
    for name, value in result.model.state_dict().items():
        assert torch.allclose(value, before[name], atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_factory_is_called_under_the_runs_seed() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))

    settings = {**QUICK, "model.init": "torch"}
    first, again, other = (simulate(model=make, seed=seed, settings=settings) for seed in (1, 1, 2))
    assert all(torch.equal(first.weights[peer], again.weights[peer]) for peer in first.weights)
    assert not torch.equal(first.weights["peer-000"], other.weights["peer-000"])


def test_it_ends_at_the_accuracy_that_is_asked_for() -> None:
    assert len(simulate(rounds=50, until=0.5).records) < 50


def test_what_a_callback_raises_ends_the_run() -> None:
    def stop(record: spark_node.RoundRecord) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        simulate(on_round=stop)


def test_it_runs_where_an_event_loop_is_at_work_as_in_notebooks() -> None:
    async def cell() -> spark_node.SimulationResult:
        return simulate()

    assert torch.equal(asyncio.run(cell()).weights["peer-001"], simulate().weights["peer-001"])


class Lazy(Gossip):
    """Only averages."""

    def train(self, k: int) -> dict[str, float]:
        return {"loss": float(k)}


@pytest.mark.parametrize("algorithm", [Lazy, f"{__name__}:Lazy"])
def test_an_algorithm_of_ones_own_is_taken_as_a_class_or_by_name(algorithm: Any) -> None:
    result = simulate(algorithm=algorithm)
    assert [record.loss for record in result.records] == [1.0, 2.0]
    assert torch.allclose(result.weights["peer-000"], result.weights["peer-003"])
    assert "Lazy, 4 peers" in repr(result)


x, y = blobs()
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "bytes": (lambda: simulate(data=(x.to(torch.uint8), y)), "x is uint8"),
    "labels that are floats": (lambda: simulate(data=(x, y.float())), "whole numbers"),
    "too few labels": (lambda: simulate(data=(x, y[:5])), "y is int64 of shape [5]"),
    "negative labels": (lambda: simulate(data=(x, y - 1)), "number the classes from 0"),
    "not finite": (lambda: simulate(data=(x / 0, y)), "not finite"),
    "no pair": (lambda: spark_node.simulate([x]), "give a pair (x, y)"),
    "nobody": (lambda: spark_node.simulate([]), "no peers"),
    "a list and nodes": (lambda: spark_node.simulate([(x, y)], nodes=3), "the list says"),
    "shapes that differ": (lambda: spark_node.simulate([(x, y), (x[:, :4], y)]), "all must be alike"),
    "a test set of another shape": (lambda: simulate(test=(x[:, :3], y)), "shape [3]"),
    "a model for other inputs": (lambda: simulate(model=nn.Linear(7, 3)), "cannot take inputs"),
    "a model of too few classes": (lambda: simulate(model=nn.Linear(5, 2)), "class 2"),
    "no model": (lambda: simulate(model=3), "neither a torch.nn.Module"),
    "a factory of nothing": (lambda: simulate(model=lambda: None), "not a torch.nn.Module"),
    "an unknown setting": (lambda: simulate(settings={"learning.etta": 1}), "unknown key"),
    "a setting twice": (lambda: simulate(settings={"run.rounds": 3}), "given twice"),
    "a degree that cannot be": (lambda: simulate(degree=9), "allowed: from 2 to 3"),
    "an unknown algorithm": (lambda: simulate(algorithm="sparkle"), "package.module:factory"),
    "an algorithm that is none": (lambda: simulate(algorithm=lambda *a: object()), "has no facts"),
    "an algorithm that is not there": (lambda: simulate(algorithm="no_such:Thing"), "cannot be imported"),
    "a peer without orchestrator": (lambda: spark_node.Peer(x, y, classes=3), 'give "host:port"'),
    "a peer without certificate": (lambda: spark_node.Peer(x, y, orchestrator="a:1", classes=3), "spark-dfl certs"),
    "a peer without a name": (
        lambda: spark_node.Peer(x, y, orchestrator="localhost:1", classes=3, settings={"security.tls": "off"}),
        "give this peer a name",
    ),
    "a peer whose folder is empty": (
        lambda: spark_node.Peer(x, y, orchestrator="localhost:1", classes=3, certs="nowhere"),
        "holds no certificate",
    ),
    "a peer that does not say its classes": (
        lambda: spark_node.Peer(x, y, name="a", orchestrator="localhost:1", settings={"security.tls": "off"}),
        "classes: say how many",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_line(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises(spark_node.UserError) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arrays_and_tensors_of_any_float_are_the_same_samples() -> None:
    expected = samples_of((x, y), "data")
    for form in (np.float64, np.float16, np.float32):
        found = samples_of((x.numpy().astype(form), y.numpy().astype(np.int16)), "data")
        assert np.allclose(found.pixels, expected.pixels, atol=1e-2)
        assert found.pixels.dtype == np.float32
    assert np.array_equal(samples_of((x.bfloat16(), y), "data").labels, expected.labels)
