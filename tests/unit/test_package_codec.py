"""Whole messages as bytes and back: identical where nothing is lossy, within tolerance where something is."""

import copy
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.layers import DenseLayer, FactoredLayer
from spark_node.learning.messages import Message, Package, Weights, check
from spark_node.package.errors import PackageError, Refusal
from spark_node.package.format import Terms
from spark_node.package.reader import decode
from spark_node.package.writer import encode
from tests.golden.make import golden_terms, tensors_of, write
from tests.unit.networks import CLASSES
from tests.unit.packages import (
    MODELS,
    ROUND,
    SENDER,
    Case,
    assert_same,
    blocks_of,
    case,
    header_of,
    kernel_products,
    terms_for,
    vectors,
)

GOLDEN = Path(__file__).parent.parent / "golden"


def sent(message: Message, terms: Terms, seed: int | None = None) -> bytes:
    random = None if seed is None else np.random.default_rng(seed)
    return b"".join(encode(message, terms, k=ROUND, sender=SENDER, random=random).wire())


def arrived(data: bytes, made: Case) -> Package:
    """What the receiver of a package decodes; it knows the weights only where it asked for them."""
    at = made.w if made.package.at is not None else None
    found = decode(data, made.terms, k=ROUND, sender=SENDER, at=at).message
    assert isinstance(found, Package)
    assert check(found, made.terms.layout.size, made.terms.sketched.size, CLASSES) is None
    return found


@pytest.mark.parametrize("level", [0, 1, 9])
@pytest.mark.parametrize("request_", [False, True], ids=["weights", "request"])
@pytest.mark.parametrize("velocity", [False, True], ids=["alone", "velocity"])
def test_lossless_weights_are_the_same_at_the_other_end(velocity: bool, request_: bool, level: int) -> None:
    terms = terms_for("deep-mlp", level=level)
    size = terms.layout.size
    message = Weights(vectors(size), vectors(size, 1) if velocity else None, request=request_)
    assert_same(decode(sent(message, terms), terms, k=ROUND, sender=SENDER).message, message)


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 2**-8), ("int8", 1 / 250)])
def test_lossy_weights_are_close_at_the_other_end(kind: str, tolerance: float) -> None:
    terms = terms_for("deep-mlp", weights=kind)
    message = Weights(vectors(terms.layout.size), vectors(terms.layout.size, 1))
    data = sent(message, terms)
    found = decode(data, terms).message
    assert isinstance(found, Weights)
    for mine, theirs in ((found.w, message.w), (found.v, message.v)):
        assert mine is not None
        assert theirs is not None
        limit = tolerance * (theirs.abs() if kind == "bf16" else theirs.abs().max())
        assert bool(((mine - theirs).abs() <= limit).all())
        assert not torch.equal(mine, theirs)
    assert len(data) < message.nbytes * (0.5 if kind == "bf16" else 0.25) + 400


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("form", ["factored", "auto", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_a_lossless_package_is_the_same_at_the_other_end(name: str, form: str, mode: str, level: int) -> None:
    made = case(name, mode, form=form, level=level)
    found = arrived(sent(made.package, made.terms), made)
    assert_same(found, made.package)
    for mine, theirs in zip(kernel_products(found.jacobian), kernel_products(made.package.jacobian), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["deep-mlp", "deep-tanh-mlp"])
def test_a_receiver_that_asked_is_not_sent_its_own_weights(name: str) -> None:
    asked, unasked = (case(name, mode) for mode in ("receiver", "sender"))
    for_receiver, for_all = (sent(made.package, made.terms) for made in (asked, unasked))
    assert len(blocks_of(for_receiver, pb.ROLE_WEIGHT_ABOVE)) == 0
    assert len(blocks_of(for_all, pb.ROLE_WEIGHT_ABOVE)) == 3
    found = arrived(for_receiver, asked)
    assert found.at is asked.w
    assert arrived(for_all, unasked).at is None
    with pytest.raises(PackageError, match="neither sent nor known"):
        decode(for_receiver, asked.terms)


@pytest.mark.parametrize(
    "settings", [{}, {"bits": 6}, {"bits": 3, "rounding": "stochastic"}], ids=["lossless", "6", "3-stochastic"]
)
def test_masks_that_follow_from_the_inputs_of_the_next_layer_are_not_sent(settings: dict[str, Any]) -> None:
    made = case("deep-mlp", samples=30, **settings)
    data = sent(made.package, made.terms, seed=1)
    masks = blocks_of(data, pb.ROLE_SLOPES)
    assert [block.coding for block in masks] == [pb.CODING_ABOVE_ZERO] * 3
    assert all(len(block.streams) == 0 for block in masks)
    found = arrived(data, made)
    for mine, theirs in zip(found.jacobian.layers[:-1], made.package.jacobian.layers[:-1], strict=True):
        assert isinstance(mine, FactoredLayer)
        assert isinstance(theirs, FactoredLayer)
        assert torch.equal(mine.signals.tensors[0], theirs.signals.tensors[0])


def test_a_mask_that_does_not_follow_from_the_next_layer_is_sent() -> None:
    made = case("mlp", samples=30)
    below, above = made.package.jacobian.layers
    assert isinstance(below, FactoredLayer)
    assert isinstance(above, FactoredLayer)
    shifted = replace(above, inputs=above.inputs - 1)
    package = replace(made.package, jacobian=replace(made.package.jacobian, layers=(below, shifted)))
    data = sent(package, made.terms)
    (mask,) = blocks_of(data, pb.ROLE_SLOPES)
    assert mask.coding == pb.CODING_MASK
    assert mask.streams[0].bytes <= 30 * 7 / 8 + 1
    assert_same(arrived(data, made), package)


@pytest.mark.parametrize("projection", ["axis", "flat"])
@pytest.mark.parametrize("mode", ["receiver", "sender"])
@pytest.mark.parametrize("encoding", ["auto", "dense"])
@pytest.mark.parametrize("name", ["deep-mlp", "deep-tanh-mlp", "cnn", "grouped"])
def test_a_projected_package_is_the_same_at_the_other_end(name: str, encoding: str, mode: str, projection: str) -> None:
    made = case(name, mode, projection=projection, sketch_size=7, encoding=encoding)
    assert made.terms.sketched.size < made.terms.layout.size
    found = arrived(sent(made.package, made.terms), made)
    assert_same(found, made.package)
    for mine, theirs in zip(kernel_products(found.jacobian), kernel_products(made.package.jacobian), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [4, 6, 8, 12])
@pytest.mark.parametrize("name", ["mlp", "deep-tanh-mlp", "cnn", "grouped"])
def test_a_quantised_package_is_close_at_the_other_end(name: str, bits: int, rounding: str) -> None:
    made = case(name, samples=12, bits=bits, rounding=rounding)
    data = sent(made.package, made.terms, seed=2 if rounding == "stochastic" else None)
    found = arrived(data, made)
    step = (1 if rounding == "nearest" else 2) * 1.01 / (2**bits - 2)  # of the largest number of a row, at most
    for mine, theirs in zip(found.jacobian.layers, made.package.jacobian.layers, strict=True):
        for a, b in zip(mine.tensors, theirs.tensors, strict=True):
            if b.dtype == torch.bool:
                assert torch.equal(a, b)
            else:
                rows = b.flatten(2) if isinstance(theirs, DenseLayer) or b.ndim == 4 else b.flatten(1)
                limit = (rows.amax(-1) - rows.amin(-1)).maximum(2 * rows.abs().amax(-1)) / 2 * step
                assert bool(((a - b).view_as(rows).abs() <= limit.unsqueeze(-1) + 1e-7).all())
    assert (found.jacobian.logits - made.package.jacobian.logits).abs().max() < 1e-3
    product, exact = kernel_products(found.jacobian)[0], kernel_products(made.package.jacobian)[0]
    assert float((product - exact).norm() / exact.norm()) < 4 * step


def test_fewer_bits_take_fewer_bytes_and_lose_more() -> None:
    sizes, errors = [], []
    for bits in (0, 12, 8, 5, 3):
        made = case("deep-tanh-mlp", samples=40, bits=bits)
        data = sent(made.package, made.terms)
        (mine, _), (theirs, _) = kernel_products(arrived(data, made).jacobian), kernel_products(made.package.jacobian)
        sizes.append(len(data))
        errors.append(float((mine - theirs).norm()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert errors[0] == 0


@pytest.mark.parametrize("bits", [0, 6])
def test_a_sparse_package_keeps_the_largest_fraction_of_each_dense_layer(bits: int) -> None:
    made = case("mlp", encoding="dense", keep=0.25, bits=bits)
    found = arrived(sent(made.package, made.terms), made)
    for mine, theirs in zip(found.jacobian.layers, made.package.jacobian.layers, strict=True):
        assert isinstance(mine, DenseLayer)
        assert isinstance(theirs, DenseLayer)
        kept = mine.values != 0
        assert int(kept.sum()) <= np.ceil(0.25 * theirs.values.numel())
        assert float(theirs.values[~kept].abs().max()) <= float(theirs.values[kept].abs().min())


def test_a_package_of_a_model_with_many_classes_takes_labels_of_two_bytes() -> None:
    made = case("mlp")
    wide = replace(made.terms, classes=1000)
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 999, 256, 255, 3, 500])
    package = replace(made.package, jacobian=replace(made.package.jacobian, logits=logits), labels=labels)
    (block,) = blocks_of(sent(package, wide), pb.ROLE_LABELS)
    assert (block.bits, block.coding) == (16, pb.CODING_INTEGER)


def test_the_same_message_is_the_same_bytes() -> None:
    made = case("cnn", bits=5, rounding="stochastic")
    assert sent(made.package, made.terms, seed=3) == sent(copy.deepcopy(made.package), made.terms, seed=3)
    assert sent(made.package, made.terms, seed=3) != sent(made.package, made.terms, seed=4)


def test_the_header_says_what_the_message_is() -> None:
    made = case("mlp", bits=6, keep=0.5)
    header = header_of(sent(made.package, made.terms))
    assert (header.format, header.run, header.round, header.sender) == (1, "test", ROUND, SENDER)
    assert (header.kind, header.samples, header.classes) == (pb.KIND_PACKAGE, 6, CLASSES)
    assert header.signature == made.terms.layout.signature
    assert (header.specification.bits, header.specification.keep) == (6, 0.5)
    assert [layer.name for layer in header.layers] == ["1", "3"]
    assert [list(layer.parameters) for layer in header.layers] == [["1.weight", "1.bias"], ["3.weight", "3.bias"]]


@pytest.mark.parametrize("weights", ["lossless", "bf16", "int8"])
def test_diverged_weights_are_not_sent(weights: str) -> None:
    terms = terms_for("mlp", weights=weights)
    w = vectors(terms.layout.size)
    w[5] = torch.nan
    with pytest.raises(PackageError) as caught:
        encode(Weights(w), terms, k=0, sender=SENDER)
    assert caught.value.refusal is Refusal.NOT_FINITE


def test_numbers_of_another_type_are_a_mistake_of_the_caller() -> None:
    terms = terms_for("mlp")
    with pytest.raises(TypeError, match="float32"):
        encode(Weights(vectors(terms.layout.size).double()), terms, k=0, sender=SENDER)


def test_tensors_arrive_whatever_their_order_in_memory_was() -> None:
    made = case("cnn", form="factored")
    first = made.package.jacobian.layers[0]
    assert isinstance(first, FactoredLayer)
    turned = replace(first, inputs=first.inputs.transpose(0, 1).contiguous().transpose(0, 1))
    assert not turned.inputs.is_contiguous()
    package = replace(
        made.package, jacobian=replace(made.package.jacobian, layers=(turned, *made.package.jacobian.layers[1:]))
    )
    assert sent(package, made.terms) == sent(made.package, made.terms)


EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())


def test_no_golden_file_lacks_an_expectation() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in GOLDEN.glob("*.bin"))


def test_the_golden_files_show_every_coding_pattern_and_order_of_bytes() -> None:
    blocks = [block for name in EXPECTED for block in header_of((GOLDEN / name).read_bytes()).blocks]
    streams = [stream for block in blocks for stream in block.streams]
    assert {block.coding for block in blocks} == set(pb.Coding.values()) - {0}
    assert {block.pattern for block in blocks} == set(pb.Pattern.values())
    assert {block.levels for block in blocks} == set(pb.Levels.values())
    assert {stream.layout for stream in streams} == set(pb.Layout.values()) - {0}
    assert {stream.zstd for stream in streams} == {False, True}


def test_a_golden_file_is_not_written_twice(tmp_path: Path) -> None:
    name = "format-1-package-sender.bin"
    write([name], tmp_path)
    with pytest.raises(FileExistsError, match="pinned"):
        write([name], tmp_path)
    assert json.loads((tmp_path / "expected.json").read_text())[name]["tensors"] == EXPECTED[name]["tensors"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_messages_of_earlier_versions_are_still_read(name: str) -> None:
    data, expected = (GOLDEN / name).read_bytes(), EXPECTED[name]
    assert hashlib.sha256(data).hexdigest() == expected["file"]
    terms, at = golden_terms(expected["package"])
    found = decode(data, terms, k=expected["round"], sender=expected["sender"], at=at if expected["at"] else None)
    digests = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in tensors_of(found.message).items()}
    shapes = {n: list(t.shape) for n, t in tensors_of(found.message).items()}
    assert digests == {n: entry["sha256"] for n, entry in expected["tensors"].items()}
    assert shapes == {n: entry["shape"] for n, entry in expected["tensors"].items()}
