"""Models, their shared initialisation, and the flat view of their parameters."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from spark_node.config import ModelSettings
from spark_node.errors import ConfigError
from spark_node.model import ParameterLayout, build, flatten


def test_the_papers_model_has_79510_parameters_and_the_papers_initialisation() -> None:
    module = build(ModelSettings(), (1, 28, 28), 10, seed=0)
    layout = ParameterLayout.of(module)
    assert layout.size == 79_510
    weight, bias = layout.unflatten(flatten(module))["1.weight"], layout.unflatten(flatten(module))["1.bias"]
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / 784), rel=0.01)
    assert not bias.any()


def test_one_seed_gives_one_initialisation_and_another_seed_another() -> None:
    first, again, other = (flatten(build(ModelSettings(), (1, 8, 8), 10, seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_initialisation_does_not_depend_on_torchs_global_generator() -> None:
    torch.manual_seed(1)
    first = [flatten(build(ModelSettings(init=init), (1, 8, 8), 10, 0)) for init in ("kaiming", "torch")]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = [flatten(build(ModelSettings(init=init), (1, 8, 8), 10, 0)) for init in ("kaiming", "torch")]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_initial_weights_are_pinned_for_ever() -> None:
    w = flatten(build(ModelSettings(hidden=(2,)), (1, 2, 2), 2, seed=0))
    torch.testing.assert_close(w[:3], torch.tensor(PINNED), rtol=1e-6, atol=0)


def test_the_flat_view_reads_and_writes_every_parameter() -> None:
    module = build(ModelSettings(kind="cnn", channels=(3, 4), hidden=(5,)), (1, 8, 8), 10, seed=0)
    layout = ParameterLayout.of(module)
    w = torch.arange(layout.size, dtype=torch.float32)
    parts = layout.unflatten(w)
    assert list(parts) == [name for name, _ in module.named_parameters()]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts.values()]), w)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(functional_call(module, layout.unflatten(flatten(module)), (x,)), module(x))


def test_the_signature_tells_models_apart() -> None:
    signatures = {
        ParameterLayout.of(build(ModelSettings(hidden=hidden), (1, 8, 8), 10, 0)).signature
        for hidden in ((10,), (11,), (10, 10))
    }
    assert len(signatures) == 3


def test_a_users_factory_is_built_under_the_runs_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, 10))\n"
        "def wrong(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "def nothing(): return 3\n"
        "def small(): return nn.Linear(9, 10)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, again = (build(ModelSettings(kind="mine:net", init="torch"), (1, 8, 8), 10, 3) for _ in range(2))
    assert torch.equal(flatten(first), flatten(again))
    assert not first.training
    for kind, reason in [
        ("mine:wrong", "10 classes"),
        ("mine:nothing", "not a torch.nn.Module"),
        ("mine:small", "inputs of shape"),
        ("mine:absent", "cannot be imported"),
        ("nowhere.at_all:net", "cannot be imported"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            build(ModelSettings(kind=kind), (1, 8, 8), 10, 0)
    sys.modules.pop("mine")


def test_more_poolings_than_pixels_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer convolutions"):
        build(ModelSettings(kind="cnn", channels=(2, 2, 2, 2)), (1, 8, 8), 10, 0)


def test_an_mlp_may_have_any_depth() -> None:
    module = build(ModelSettings(hidden=(9, 8, 7)), (1, 4, 4), 3, 0)
    assert [m.out_features for m in module.modules() if isinstance(m, nn.Linear)] == [9, 8, 7, 3]


PINNED = [0.7317339777946472, -0.21629196405410767, -0.4071334898471832]
