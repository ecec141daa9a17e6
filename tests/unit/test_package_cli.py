"""`spark-dfl package explain`: every figure against an independent one, every word on privacy against an attack."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spark_node import config as configuration
from spark_node import model
from spark_node.cli.main import main
from spark_node.config import Config
from spark_node.data.datasets import Dataset, Samples, load
from spark_node.learning.algorithms import make_projection, make_terms
from spark_node.learning.jacobian import jacobian
from spark_node.learning.layers import DenseLayer, Jacobian
from spark_node.learning.messages import Package, Weights
from spark_node.model import ParameterLayout, flatten
from spark_node.package.explain import PEER, ROUND, RUN, Explanation, explain
from spark_node.package.peer import PeerCodec
from spark_node.package.projection import linear_map
from spark_node.seeds import derive, stream
from tests.unit.test_cli import one_line_error

N, CLASSES, INPUTS, HIDDEN = 30, 10, 64, 100
USERS_MODEL = """
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 10))

def broken():
    raise ValueError("no such\\nthing")

def fragile():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)
        def forward(self, x):
            if x.shape[0] == 1:
                raise RuntimeError("one is too few")
            return self.linear(x.flatten(1))
    return Fragile()
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def users_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_a_user.py").write_text(USERS_MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def digits() -> Dataset:
    """So few digits that every one of them is in the package, in order."""
    whole = load("digits")
    return dataclasses.replace(whole, train=Samples(whole.train.pixels[:N], whole.train.labels[:N]))


def settings(*given: str) -> list[str]:
    return [part for assignment in given for part in ("--set", assignment)]


def configured(*given: str) -> Config:
    return configuration.load(environment={}, flags=dict(map(configuration.parse_assignment, given)))


def as_json(capsys: pytest.CaptureFixture[str], *given: str, code: int = 0) -> Any:
    assert main(["package", "explain", "--json", *given]) == code
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(["package", "explain", "--samples", "40", *given]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@dataclasses.dataclass(frozen=True)
class ByHand:
    """The same package without `explain`: from the Jacobian to the bytes and back."""

    x: Tensor
    codec: PeerCodec
    package: Package

    @classmethod
    def of(cls, config: Config, dataset: Dataset) -> "ByHand":
        module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
        x, y = dataset.standardise(dataset.train.pixels), torch.from_numpy(dataset.train.labels)
        layout, w = ParameterLayout.of(module), flatten(module)
        found = jacobian(module, w, x, form="factored")
        at = w if config.learning.linearize_at == "receiver" else None
        package = Package(make_projection(config, layout).apply(found, ROUND), y, at)
        codec = PeerCodec(make_terms(config, RUN, layout, dataset.classes), PEER, config.run.seed)
        return cls(x, codec, package)

    def size(self, message: Package | Weights) -> int:
        return sum(map(len, self.codec.encode(message, ROUND, "another")))

    def arrived(self) -> Jacobian:
        other = PeerCodec(self.codec.terms, "another", 0)
        if self.package.at is not None:
            other.encode(Weights(self.package.at, request=True), ROUND, PEER)
        data = b"".join(self.codec.encode(self.package, ROUND, "another", whole=True))
        found = other.decode(data, ROUND, PEER)
        assert isinstance(found, Package)
        return found.jacobian


def written_out(found: Jacobian) -> Tensor:
    """[N C, d] in float64."""
    return torch.cat([layer.dense(0, found.samples).flatten(0, 1) for layer in found.layers], 1).double()


# Bytes.


@pytest.mark.parametrize("given", [(), ("package.bits=6",), ("learning.linearize_at=sender",), ("package.keep=0.5",)])
def test_bytes_are_those_of_messages_that_a_peer_really_codes(given: tuple[str, ...], digits: Dataset) -> None:
    config = configured(*given)
    found, by_hand = explain(config, digits), ByHand.of(config, digits)
    w = flatten(model.build(config.model, digits.shape, digits.classes, config.run.seed))
    assert found.first.messages["package"] == by_hand.size(by_hand.package)
    assert found.named is not None
    assert found.named.messages["package"] == by_hand.size(by_hand.package)  # the second time
    assert found.first.messages["weights"] == by_hand.size(Weights(w))
    if config.learning.linearize_at == "receiver":
        assert found.first.messages["request"] == by_hand.size(Weights(w, request=True))


def test_a_package_is_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--samples", "50", *settings("package.bits=5", "model.hidden=[20, 15]"))
    layers = found["layers"]
    assert [layer["parameters"] for layer in layers] == [65 * 20, 21 * 15, 16 * 10]
    assert [layer["dense_bytes"] for layer in layers] == [4 * 50 * 10 * d for d in (65 * 20, 21 * 15, 16 * 10)]
    assert found["dense_bytes"] == 4 * 50 * 10 * found["parameters"]
    for layer in layers:
        assert layer["wire_bytes"] == sum(factor["bytes"] for factor in layer["factors"])
        assert layer["ratio"] == layer["dense_bytes"] / layer["wire_bytes"]
    parts = [layer["wire_bytes"] for layer in layers] + [found["labels"]["bytes"], found["logits"]["bytes"]]
    for traffic in (found["first"], found["named"]):
        assert traffic["sent"] == sum(traffic["messages"].values())
        assert traffic["both"] == 2 * traffic["sent"]
    assert found["first"]["messages"]["package"] == sum(parts) + found["header_bytes"]
    saved = found["first"]["messages"]["package"] - found["named"]["messages"]["package"]
    assert abs(saved - layers[0]["factors"][0]["bytes"]) <= 8  # but for the field that says so
    assert found["settings"]["bits"] == 5
    assert found["model"]["hidden"] == [20, 15]


def test_by_default_there_are_200_samples_or_as_many_as_there_are(
    capsys: pytest.CaptureFixture[str], digits: Dataset
) -> None:
    assert as_json(capsys)["samples"] == 200
    assert explain(configured(), digits).samples == N


def test_subsampling_makes_the_package_smaller_and_its_inputs_new_every_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, *settings("learning.subsample=5"))
    assert (found["peer_samples"], found["samples"]) == (200, 40)
    assert found["named"] is None
    assert "learning.subsample" in found["naming"]
    assert "A package of 8 samples (of 40) of digits" in shown(capsys, *settings("learning.subsample=5"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("package.encoding=dense",), "sent dense"),
        (("package.factor_cache_bytes=100",), "package.factor_cache_bytes"),
        (("package.projection=axis", "package.sketch_size=9", "package.fresh_sketch=true"), "package.fresh_sketch"),
    ],
)
def test_where_inputs_are_never_named_it_says_why(given: tuple[str, ...], why: str, digits: Dataset) -> None:
    found = explain(configured(*given), digits)
    assert found.named is None
    assert why in found.naming


def test_a_new_sketch_that_sketches_nothing_leaves_the_inputs_nameable(digits: Dataset) -> None:
    assert explain(configured("package.projection=axis", "package.fresh_sketch=true"), digits).named is not None


# Forms and codings.


def codings(found: Explanation) -> dict[str, str]:
    return {f"{layer.name} {factor.role}": factor.coding for layer in found.layers for factor in layer.factors}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), {"1 inputs": "17-value palette", "1 slopes": "mask follows from the next layer"}),
        (("package.bits=6",), {"1 inputs": "6 bits, a scale a row", "3 inputs": "6 bits, a scale a row"}),
        (("package.bits=6", "package.scale_block=64"), {"1 inputs": "6 bits, a scale every 64"}),
        (("package.bits=6", "package.input_bits=0"), {"1 inputs": "17-value palette"}),
        (
            ("package.projection=axis", "package.sketch_size=20"),
            {"1 inputs": "float32", "1 slopes": "mask, 1 bit each"},
        ),
        (("model.activation=tanh", "package.level=0"), {"1 slopes": "float32", "3 inputs": "float32"}),
        (
            ("package.encoding=dense", "package.keep=0.5", "package.bits=6"),
            {"1 Jacobian": "sparse 50 %, 6 bits, a scale a row"},
        ),
    ],
)
def test_codings_are_said_in_words(given: tuple[str, ...], expected: dict[str, str], digits: Dataset) -> None:
    found = codings(explain(configured(*given), digits))
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ((), "mask follows from the next layer"),
        (("package.projection=axis", "package.sketch_size=20"), "mask"),
        (("model.activation=gelu",), "slopes"),
        (("model.kind=cnn", "package.encoding=factored"), "explicit"),
        (("package.encoding=dense",), ""),
        (("model.hidden=[]",), "none: the last layer's are known"),
    ],
)
def test_it_says_how_the_signals_of_the_first_layer_travel(given: tuple[str, ...], how: str, digits: Dataset) -> None:
    assert explain(configured(*given), digits).layers[0].signals == how


def test_the_other_form_explains_the_choice(capsys: pytest.CaptureFixture[str], digits: Dataset) -> None:
    first = explain(configured(), digits).layers[0]
    assert (first.form, first.other_form) == ("factored", "dense")
    assert first.predicted["dense"] == 4 * N * CLASSES * (INPUTS + 1) * HIDDEN
    assert first.predicted["factored"] == 4 * N * INPUTS
    assert "dense would take 10.4 MB" in shown(capsys)
    assert "factored would take 10.2 kB" in shown(capsys, *settings("package.encoding=dense"))
    assert "no factors: the sketch mixes them" in shown(capsys, *settings("package.projection=flat"))


def test_only_a_sender_at_its_own_weights_sends_the_weights_above(digits: Dataset) -> None:
    receiver, sender = (explain(configured(f"learning.linearize_at={who}"), digits) for who in ("receiver", "sender"))
    assert list(receiver.first.messages) == ["weights", "request", "package"]
    assert list(sender.first.messages) == ["weights", "package"]
    (above,) = [factor for factor in sender.layers[0].factors if factor.role == "weights above"]
    assert above.shape == (CLASSES, HIDDEN)
    assert 0.5 * 4 * CLASSES * HIDDEN < above.bytes <= 4 * CLASSES * HIDDEN
    assert all(factor.role != "weights above" for factor in receiver.layers[0].factors)


def test_averaged_velocities_double_the_weights_but_not_the_request(digits: Dataset) -> None:
    plain = explain(configured("package.level=0"), digits).first.messages
    found = explain(configured("package.level=0", "momentum.average_velocity=true"), digits).first.messages
    assert found["request"] == plain["request"]
    assert found["weights"] == pytest.approx(2 * plain["weights"], rel=0.02)


@pytest.mark.usefixtures("users_models")
def test_a_users_own_model_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--samples", "20", *settings("model.kind=models_of_a_user:small"))
    layers = as_json(capsys, *given)["layers"]
    assert [(layer["name"], layer["form"], layer["parameters"]) for layer in layers] == [
        ("1", "factored", 65 * 12),
        ("2", "dense", 24),
        ("4", "factored", 13 * 10),
    ]
    assert "no factors for such a layer" in shown(capsys, *settings("model.kind=models_of_a_user:small"))


# Losses.


@pytest.mark.parametrize(
    "given", [(), ("learning.linearize_at=sender",), ("package.weights=bf16",), ("package.encoding=dense",)]
)
def test_a_lossless_package_loses_nothing(given: tuple[str, ...], digits: Dataset) -> None:
    loss = explain(configured(*given), digits).loss
    assert (loss.kernel, loss.update) == (0.0, 0.0)
    assert loss.cosine == pytest.approx(1.0)


@pytest.mark.parametrize(
    "given",
    [
        ("package.bits=6",),
        ("package.encoding=dense", "package.bits=6", "package.keep=0.5"),
        ("package.projection=axis", "package.sketch_size=20", "package.bits=8"),
        ("package.projection=flat", "package.sketch_size=500"),
        ("package.projection=axis", "package.sketch_size=20", "package.fresh_sketch=true"),
    ],
)
def test_losses_are_those_of_jacobians_written_out(given: tuple[str, ...], digits: Dataset) -> None:
    config = configured(*given)
    loss, by_hand = explain(config, digits).loss, ByHand.of(config, digits)
    module = model.build(config.model, digits.shape, digits.classes, config.run.seed)
    exact = written_out(jacobian(module, flatten(module), by_hand.x, form="dense"))
    arrived = written_out(by_hand.arrived())
    residual = stream(config.run.seed, "package", "residual").standard_normal((N, CLASSES), np.float32)
    r = torch.from_numpy(residual).flatten().double()
    kernel, update = exact @ (exact.T @ r), exact.T @ r
    lifted = make_projection(config, ParameterLayout.of(module)).lift((arrived.T @ r).float(), ROUND).double()
    assert loss.kernel == pytest.approx(float((arrived @ (arrived.T @ r) - kernel).norm() / kernel.norm()), rel=1e-3)
    assert loss.update == pytest.approx(float((lifted - update).norm() / update.norm()), rel=1e-3)
    assert loss.cosine == pytest.approx(float(lifted @ update / lifted.norm() / update.norm()), rel=1e-4)


def test_six_bits_lose_little_and_four_lose_more(digits: Dataset) -> None:
    six, four = (explain(configured(f"package.bits={bits}"), digits).loss for bits in (6, 4))
    assert 0 < six.kernel < 0.02
    assert 0 < six.update < four.update < 0.2


def test_it_is_the_same_every_time(digits: Dataset) -> None:
    config = configured("package.bits=6", "package.rounding=stochastic")
    assert explain(config, digits) == explain(config, digits)


# What it reveals, proven by doing it.


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("given", "said", "worst"),
    [((), "the inputs, exactly", 0.0), (("package.bits=6",), "the inputs, to 6 bits", 0.02)],
)
def test_a_factored_package_carries_the_inputs(
    given: tuple[str, ...], said: str, worst: float, digits: Dataset
) -> None:
    config = configured(*given)
    by_hand = ByHand.of(config, digits)
    raw = by_hand.arrived().raw_inputs()
    assert raw is not None
    assert error_of(raw, by_hand.x.flatten(1)) <= worst
    assert explain(config, digits).reveals["inputs"].startswith(said)


@pytest.mark.parametrize(
    ("given", "said", "worst"),
    [((), "the inputs, exactly", 1e-6), (("package.bits=6",), "the inputs, to 6 bits", 0.05)],
)
def test_a_dense_package_carries_the_inputs_just_as_well(
    given: tuple[str, ...], said: str, worst: float, digits: Dataset
) -> None:
    config = configured("package.encoding=dense", *given)
    by_hand = ByHand.of(config, digits)
    first = by_hand.arrived().layers[0]
    assert isinstance(first, DenseLayer)
    weight, bias = first.values.split([HIDDEN * INPUTS, HIDDEN], 2)
    weight, bias = weight.reshape(N, CLASSES * HIDDEN, INPUTS), bias.reshape(N, CLASSES * HIDDEN, 1)
    divided = (weight * bias).sum(1) / bias.square().sum(1)  # of all quotients the weighted mean
    assert error_of(divided, by_hand.x.flatten(1)) < worst
    assert explain(config, digits).reveals["inputs"].startswith(said)


@pytest.mark.parametrize(
    ("k", "bits", "said", "best", "worst"),
    [
        (250, 0, "the inputs, exactly: a sketch has 2,500 numbers (10 classes x k) for 64 unknowns", 0.0, 1e-5),
        (250, 6, "the inputs, but for the noise of the coding", 0.0, 0.05),
        (3, 0, "a sketch of 30 numbers of each input of 64; who knows the run's seed", 0.2, 1.0),
    ],
)
def test_a_flat_sketch_hides_the_inputs_only_where_it_has_fewer_numbers(
    k: int, bits: int, said: str, best: float, worst: float, digits: Dataset
) -> None:
    config = configured("package.projection=flat", f"package.sketch_size={k}", f"package.bits={bits}")
    by_hand = ByHand.of(config, digits)
    first = by_hand.arrived().layers[0]
    assert isinstance(first, DenseLayer)
    sketch = linear_map("gaussian", HIDDEN * INPUTS, k, derive(config.run.seed, "sketch", "1.weight"))
    p = sketch.forward(torch.eye(HIDDEN * INPUTS)).view(HIDDEN, INPUTS, k)
    sketched, bias = first.values[0].double().split([k, HIDDEN], 1)
    equations = torch.einsum("co,oik->cki", bias, p.double()).flatten(0, 1)
    estimate = torch.linalg.lstsq(equations, sketched.flatten(), driver="gelsd").solution
    assert best <= error_of(estimate, by_hand.x[0].flatten()) < worst
    assert explain(config, digits).reveals["inputs"].startswith(said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("package.projection=axis", "package.sketch_size=20"),
            "a sketch of 20 numbers of each input of 64; who knows",
        ),
        (("package.projection=axis", "package.sketch_size=20", "package.encoding=dense"), "a sketch of 20 numbers"),
        (
            ("package.projection=axis", "package.sketch_size=20", "package.fresh_sketch=true", "package.bits=6"),
            "a sketch of 20 numbers of each input of 64, to 6 bits; who knows the run's seed, as every peer does, can "
            "estimate the inputs from it (least squares); every round adds another sketch",
        ),
        (("package.projection=axis",), "the inputs, exactly"),  # 250 numbers of 64 are all of them
        (("package.encoding=dense", "package.keep=0.1"), "the inputs, exactly where entries were kept"),
        (("model.kind=cnn",), "sums of the input's patches; the inputs may be rebuilt from them"),
        (("model.kind=cnn", "package.encoding=factored"), "the inputs, patch by patch, exactly"),
    ],
)
def test_what_it_reveals_follows_from_the_settings(given: tuple[str, ...], said: str, digits: Dataset) -> None:
    reveals = explain(configured(*given), digits).reveals
    assert reveals["inputs"].startswith(said)
    assert reveals["labels"] == "in clear (8-bit integers)"
    assert reveals["logits"].startswith("in clear (")


# The command.


def test_the_table_is_plain_text_of_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *settings("model.kind=cnn", "package.bits=6"))
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "A package of 40 samples of digits",
        "6 bits, a scale a row",
        "request",
        "sent and received",
        "in clear",
    ):
        assert part in text


def test_help_teaches_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["package", "explain", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.count("spark-dfl package explain ") >= 4
    assert "package.sketch_size=10000" in text


def test_without_an_action_help_is_shown_and_the_exit_code_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package"]) == 2
    assert "explain" in capsys.readouterr().err


def test_a_message_that_neighbours_would_refuse_is_explained_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    given = settings("package.max_message_bytes=26000", "package.encoding=dense")
    assert main(["package", "explain", *given]) == 1
    captured = capsys.readouterr()
    assert "no error at all" in captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("spark-dfl: a neighbour with these settings would refuse the package: too_large")
    (refusal,) = as_json(capsys, *given, code=1)["refusals"]
    assert "at most 26,000" in refusal


@pytest.mark.usefixtures("users_models")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--set", "package.bits=1"], "package.bits = 1"),
        (["--set", "package.nonsense=1"], "package.nonsense"),
        (["--set", "package.bits=6", "--set", "package.max_error=0.1"], "package.max_error"),
        (["--set", "package.projection=sideways"], "package.projection = 'sideways'"),
        (["--preset", "none"], "preset = 'none'"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--dataset", "imagenet"], "data.dataset = 'imagenet'"),
        (["--dataset", "mnist", "--data-dir", "nowhere"], "nowhere"),
        (["--dataset", "digits", "--set", "data.dataset=mnist"], "given twice"),
        (["--samples", "0"], "--samples 0"),
        (["--samples", "many"], "--samples"),
        (["--samples", "1000000"], "--samples 1000000: digits has 1 to 1,"),
        (["--set", "run.device=toaster"], "run.device = 'toaster'"),
        (["--set", "model.kind=no.such.module:model"], "no.such.module"),
        (["--set", "model.kind=models_of_a_user:broken"], "models_of_a_user:broken': ValueError: no such thing"),
        (["--set", "model.kind=models_of_a_user:fragile"], "models_of_a_user:fragile': RuntimeError: one is too few"),
        (["--set", "learning.jacobian=sparse"], "learning.jacobian"),
        (["--rounds", "3"], "--rounds"),
        (["extra"], "extra"),
    ],
)
def test_bad_input_is_one_line(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package", "explain", *given]) == 2
    assert said in one_line_error(capsys)


def test_an_unknown_action_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["package", "explode"]) == 2
    assert "explode" in one_line_error(capsys)
