"""What one package of a configuration costs, loses and reveals: measured on one that is really made and coded."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spark_node import model
from spark_node.config import Config, PackageSettings, PrivacySettings
from spark_node.data.datasets import Dataset
from spark_node.errors import DataError, UserError
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.algorithms import make_algorithm, make_projection, make_terms
from spark_node.learning.kernel import FullKernel
from spark_node.learning.layers import Jacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.model import ParameterLayout
from spark_node.package import planner
from spark_node.package.errors import PackageError
from spark_node.package.format import Terms
from spark_node.package.projection import Projection
from spark_node.package.reader import decode
from spark_node.package.writer import CodedBlock, CodedMessage, encode
from spark_node.privacy import privatise, randomness, truthful
from spark_node.seeds import stream

PEER, NEIGHBOUR, RUN, ROUND = "peer", "neighbour", "explain", 1
DEFAULT_SAMPLES = 200


@dataclass(frozen=True)
class Factor:
    """One block of the package."""

    role: str
    shape: tuple[int, ...]
    coding: str
    """In words."""
    bytes: int
    """On the wire."""


@dataclass(frozen=True)
class Layer:
    """One layer of the Jacobian: as float32 numbers, and as it travels."""

    name: str
    parameters: int
    """d_l."""
    dense_bytes: int
    """4 N C d_l."""
    form: str
    signals: str
    """How the signals of a factored layer travel, in words."""
    factors: tuple[Factor, ...]
    predicted: dict[str, int]
    """Form -> bytes before entropy coding, as the planner expects them."""

    @property
    def wire_bytes(self) -> int:
        return sum(factor.bytes for factor in self.factors)

    @property
    def ratio(self) -> float:
        return self.dense_bytes / max(1, self.wire_bytes)

    @property
    def other_form(self) -> str | None:
        """The form that was not taken, where there is one."""
        return next((form for form in self.predicted if form != self.form), None)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a peer sends to one neighbour in one round, by kind of message; as many come back."""

    messages: dict[str, int]

    @property
    def sent(self) -> int:
        return sum(self.messages.values())

    @property
    def both(self) -> int:
        return 2 * self.sent


@dataclass(frozen=True)
class Loss:
    """What the package has lost when it arrives, against the Jacobian neither coded nor projected."""

    kernel: float
    """|K' r - K r| / |K r| of the full kernel and a fixed random residual r."""
    update: float
    """The same of the weight update J^T r, after the back-projection."""
    cosine: float
    """Of the angle between the two weight updates."""


@dataclass(frozen=True)
class Explanation:
    """Everything that `spark-dfl package explain` says."""

    dataset: str
    peer_samples: int
    samples: int
    """N of the package: fewer than the peer has where learning.subsample is above 1."""
    classes: int
    parameters: int
    linearize_at: str
    layers: tuple[Layer, ...]
    labels: Factor
    logits: Factor
    header_bytes: int
    first: Traffic
    named: Traffic | None
    """The same where the inputs are only named; None where they never are."""
    naming: str
    """When the inputs are only named, or why they never are."""
    loss: Loss
    reveals: dict[str, str]
    refusals: tuple[str, ...]
    """Why a neighbour with the same settings would not take a message."""

    @property
    def dense_bytes(self) -> int:
        """4 N C d."""
        return 4 * self.samples * self.classes * self.parameters

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.first.messages["package"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with what is derived from them."""
        layers = [
            {**dataclasses.asdict(layer), "wire_bytes": layer.wire_bytes, "ratio": layer.ratio} for layer in self.layers
        ]
        return {
            **dataclasses.asdict(self),
            "dense_bytes": self.dense_bytes,
            "ratio": self.ratio,
            "layers": layers,
            "first": _traffic(self.first),
            "named": None if self.named is None else _traffic(self.named),
        }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    return {"messages": traffic.messages, "sent": traffic.sent, "both": traffic.both}


def explain(config: Config, dataset: Dataset, samples: int | None = None) -> Explanation:
    """The package that a peer with so many samples sends in its first round, taken apart."""
    device = torch.device(config.run.device)
    module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed).to(device)
    x, y = _draw(config, dataset, samples, device)
    layout = ParameterLayout.of(module)
    terms = make_terms(config, RUN, layout, dataset.classes)
    sent, at = _first_round(config, module, x, y, terms)
    package, coded, arrived = sent[-1].message, sent[-1].coded, sent[-1].arrived
    assert isinstance(package, Package)
    assert isinstance(arrived, Package)
    exact = _exact(config, module, x, y, package, at)
    first = {_KINDS[s.coded.header.kind]: _size(s.coded) for s in sent}
    naming, named = _naming(config, coded, terms)
    return Explanation(
        dataset=dataset.name,
        peer_samples=len(y),
        samples=package.jacobian.samples,
        classes=dataset.classes,
        parameters=layout.size,
        linearize_at=config.learning.linearize_at,
        layers=_layers(coded, terms, planner.plan(module, x[0], config.package)),
        labels=_factor(coded.blocks[0]),
        logits=_factor(coded.blocks[1]),
        header_bytes=_size(coded) - sum(map(_payload, coded.blocks)),
        first=Traffic(first),
        named=Traffic({**first, "package": named}) if named else None,
        naming=naming,
        loss=_loss(exact, arrived.jacobian, make_projection(config, layout), config.run.seed),
        reveals=_reveals(module, coded, terms, config.privacy),
        refusals=tuple(s.refusal for s in sent if s.refusal),
    )


def _draw(config: Config, dataset: Dataset, samples: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Some of the training set, always the same, privatised as a peer's would be."""
    held = len(dataset.train)
    count = min(DEFAULT_SAMPLES, held) if samples is None else samples
    if not 1 <= count <= held:
        raise DataError(f"--samples {count}: {dataset.name} has 1 to {held:,} training samples to choose from")
    chosen = np.sort(stream(config.run.seed, "package", "samples").choice(held, count, replace=False))
    pixels = dataset.standardise(dataset.train.pixels[chosen]).numpy()
    labels = dataset.train.labels[chosen].astype(np.int64)
    x, y = privatise(pixels, labels, config.privacy, dataset.classes, randomness(config.privacy, PEER))
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


# A round.


@dataclass(frozen=True)
class _Sent:
    """A message of the round: as it was meant, as it travels, as it arrives."""

    message: Message
    coded: CodedMessage
    arrived: Message
    refusal: str | None


_KINDS = {pb.KIND_WEIGHTS: "weights", pb.KIND_REQUEST: "request", pb.KIND_PACKAGE: "package"}


def _first_round(config: Config, module: nn.Module, x: Tensor, y: Tensor, terms: Terms) -> tuple[list[_Sent], Tensor]:
    """What a peer says to a neighbour who is its twin, and the weights at which its package was taken."""
    algorithm = make_algorithm(config, PEER, module, x, y)
    sent: list[_Sent] = []
    for stage in algorithm.stages:
        (message,) = algorithm.outgoing(stage, ROUND, [NEIGHBOUR]).values()
        if isinstance(message, Weights) and message.v is not None:
            message = dataclasses.replace(message, v=_moving(message.v, config.run.seed))
        sent.append(_send(message, config, terms, x.device))
        if isinstance(message, Package):
            return sent, algorithm.weights if message.at is None else message.at
        algorithm.incorporate(stage, ROUND, {NEIGHBOUR: sent[-1].arrived})
    raise UserError(f"run.algorithm = {config.run.algorithm!r}: its peers send no packages")


def _moving(v: Tensor, seed: int) -> Tensor:
    """A velocity that costs as much as later ones: the first is zero, and zeros cost nothing."""
    return torch.from_numpy(stream(seed, "package", "velocity").standard_normal(len(v), np.float32)).to(v)


def _send(message: Message, config: Config, terms: Terms, device: torch.device) -> _Sent:
    random = None
    if config.package.rounding == "stochastic":
        random = stream(config.run.seed, "rounding", PEER, ROUND, type(message).__name__)
    try:
        coded = encode(message, terms, k=ROUND, sender=PEER, random=random)
    except PackageError as error:
        raise UserError(f"this model's first {message.kind} cannot be sent: {error.detail}") from None
    data = b"".join(coded.wire())
    at = message.at if isinstance(message, Package) else None
    try:
        return _Sent(message, coded, decode(data, terms, at=at, device=device).message, None)
    except PackageError as error:
        arrived = decode(data, _without_limits(terms), at=at, device=device).message
        return _Sent(message, coded, arrived, f"{_KINDS[coded.header.kind]}: {error}")


def _without_limits(terms: Terms) -> Terms:
    settings = dataclasses.replace(terms.settings, max_message_bytes=2**62, max_decoded_bytes=2**62)
    return dataclasses.replace(terms, settings=settings)


def _exact(config: Config, module: nn.Module, x: Tensor, y: Tensor, package: Package, at: Tensor) -> Jacobian:
    """The Jacobian of the package's samples at its weights, before any projection and coding."""
    if config.package.projection == "none":
        return package.jacobian
    plain = dataclasses.replace(
        config, package=PackageSettings(), learning=dataclasses.replace(config.learning, linearize_at="receiver")
    )
    algorithm = make_algorithm(plain, PEER, module, x, y)
    algorithm.incorporate("consensus", ROUND, {NEIGHBOUR: Weights(at, request=True)})
    (found,) = algorithm.outgoing("package", ROUND, [NEIGHBOUR]).values()
    assert isinstance(found, Package)
    return found.jacobian


def _naming(config: Config, coded: CodedMessage, terms: Terms) -> tuple[str, int]:
    """When the inputs are only named, or why never; and the package's bytes then, or 0."""
    static = [block for block in coded.blocks if block.static]
    if not static:
        return "never, the first layer is sent dense", 0
    if config.learning.subsample > 1:
        return "never, learning.subsample draws other samples every round", 0
    if config.package.fresh_sketch and terms.sketched.shapes[0] != terms.layout.shapes[0]:
        return "never, package.fresh_sketch draws a new sketch every round", 0
    if sum(map(_payload, static)) > config.package.factor_cache_bytes:
        return "never, they are larger than package.factor_cache_bytes, so no neighbour keeps them", 0
    return "from the second time that two peers meet", _size(coded, coded.factors)


def _size(coded: CodedMessage, known: tuple[bytes, ...] = ()) -> int:
    return sum(map(len, coded.wire(known)))


def _payload(block: CodedBlock) -> int:
    return sum(map(len, block.streams))


# The layers.

_ROLES = {
    pb.ROLE_LABELS: "labels",
    pb.ROLE_LOGITS: "logits",
    pb.ROLE_INPUTS: "inputs",
    pb.ROLE_SLOPES: "slopes",
    pb.ROLE_SIGNALS: "signals",
    pb.ROLE_WEIGHT_ABOVE: "weights above",
    pb.ROLE_DENSE: "Jacobian",
}


def _layers(coded: CodedMessage, terms: Terms, plans: list[planner.LayerPlan]) -> tuple[Layer, ...]:
    header = coded.header
    sizes = {name: math.prod(shape) for name, shape in zip(terms.layout.names, terms.layout.shapes, strict=True)}
    planned = {plan.name: plan for plan in plans}
    layers = []
    for i, layer in enumerate(header.layers):
        blocks = [b for b in coded.blocks if b.block.layer == i and b.block.role not in _ABOUT_THE_WHOLE]
        parameters = sum(sizes[name] for name in layer.parameters)
        expected = planned[layer.name].forms if layer.name in planned else {}
        layers.append(
            Layer(
                name=layer.name,
                parameters=parameters,
                dense_bytes=4 * header.samples * header.classes * parameters,
                form="dense" if layer.form == pb.FORM_DENSE else "factored",
                signals=_signals(layer, blocks),
                factors=tuple(map(_factor, blocks)),
                predicted={form: round(header.samples * each) for form, each in expected.items()},
            )
        )
    return tuple(layers)


_ABOUT_THE_WHOLE = (pb.ROLE_LABELS, pb.ROLE_LOGITS)


def _factor(coded: CodedBlock) -> Factor:
    return Factor(_ROLES[coded.block.role], tuple(coded.block.shape), in_words(coded.block), _payload(coded))


def _signals(layer: pb.Layer, blocks: list[CodedBlock]) -> str:
    """How the signals of a layer travel."""
    if layer.form == pb.FORM_DENSE:
        return ""
    if layer.signals == pb.SIGNALS_IDENTITY:
        return "none: the last layer's are known"
    if layer.signals == pb.SIGNALS_EXPLICIT:
        return "explicit"
    slopes = next(b.block for b in blocks if b.block.role == pb.ROLE_SLOPES)
    if slopes.coding == pb.CODING_ABOVE_ZERO:
        return "mask follows from the next layer"
    return "mask" if slopes.coding == pb.CODING_MASK else "slopes"


def in_words(block: pb.Block) -> str:
    """The coding of a block."""
    match block.coding:
        case pb.CODING_FLOAT32:
            return "float32"
        case pb.CODING_BFLOAT16:
            return "bfloat16"
        case pb.CODING_INTEGER:
            return f"{block.bits}-bit integers"
        case pb.CODING_MASK:
            return "mask, 1 bit each"
        case pb.CODING_PALETTE:
            return f"{block.kept}-value palette"
        case pb.CODING_ABOVE_ZERO:
            return "mask follows from the next layer"
        case pb.CODING_SPARSE:
            share = 100 * block.kept / max(1, math.prod(block.shape))
            return f"sparse {share:.3g} %, {'float32' if block.bits == 0 else _levels(block)}"
        case _:
            return _levels(block)


def _levels(block: pb.Block) -> str:
    return f"{block.bits} bits, a scale {f'every {block.group:,}' if block.group else 'a row'}"


# What it loses.


def _loss(exact: Jacobian, arrived: Jacobian, projection: Projection, seed: int) -> Loss:
    residual = stream(seed, "package", "residual").standard_normal(tuple(exact.logits.shape), np.float32)
    r = torch.from_numpy(residual).to(exact.logits)
    before, after = FullKernel([exact]), FullKernel([arrived])
    wanted, found = before.pull_back(r), projection.lift(after.pull_back(r), ROUND)
    cosine = float(torch.nn.functional.cosine_similarity(wanted.double(), found.double(), dim=0))
    return Loss(_relative(after.apply(r), before.apply(r)), _relative(found, wanted), min(1.0, cosine))


def _relative(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.double().norm())
    return float((found.double() - wanted.double()).norm()) / norm if norm else 0.0


# What it reveals.


def _reveals(module: nn.Module, coded: CodedMessage, terms: Terms, privacy: PrivacySettings) -> dict[str, str]:
    labels, logits, first = (coded.blocks[i].block for i in range(3))
    factored = coded.header.layers[0].form == pb.FORM_FACTORED
    part = module.get_submodule(coded.header.layers[0].name)
    inputs = _of_factors(first, terms) if factored else _of_dense(part, first, terms)
    if terms.layout.shapes[0] != terms.sketched.shapes[0] and len(coded.header.layers) > 1:
        inputs += "; what the next layer gets follows from the inputs too and tells more at each new weights"
    if privacy.noise > 0:
        inputs = f"of inputs of norm {privacy.clip:g} at most with noise {privacy.noise:g} a number: {inputs}"
    if privacy.sketch_secret:
        inputs += "; privacy.sketch_secret keeps the sketch, and nothing else, from who is no peer"
    told, cut = f"in clear ({in_words(labels)})", f"in clear ({in_words(logits)})"
    if privacy.label_epsilon > 0:
        share = truthful(terms.classes, privacy.label_epsilon)
        told = f"after randomised response: {share:.0%} are the true ones ({in_words(labels)})"
    if privacy.logit_bound > 0:
        cut += f", cut off at {privacy.logit_bound:g}; the last layer's inputs tell them all the same"
    return {"inputs": inputs, "labels": told, "logits": cut}


_SEED = "who knows the run's seed, as every peer does,"


def _precision(block: pb.Block, settings: PackageSettings) -> str:
    """How well the numbers of a block are known."""
    if block.coding == pb.CODING_SPARSE and settings.keep < 1:
        return f"{f'to {block.bits} bits' if block.bits else 'exactly'} where entries were kept"
    return f"to {block.bits} bits" if block.coding == pb.CODING_QUANTISED else "exactly"


def _of_factors(first: pb.Block, terms: Terms) -> str:
    """A factored first layer carries its inputs, or their sketch."""
    precision, (_, positions, sketched) = _precision(first, terms.settings), first.shape
    if sketched < _fan_in(terms):
        return _sketch(sketched, _fan_in(terms), precision, terms)
    if positions > 1:
        return f"the inputs, patch by patch, {precision}: they are a factor of the Jacobian"
    return f"the inputs, {precision}: they are a factor of the Jacobian, and dense it would hold them too"


def _of_dense(part: nn.Module, first: pb.Block, terms: Terms) -> str:
    """A first layer written out hides less than it seems to."""
    precision, width = _precision(first, terms.settings), _fan_in(terms)
    before, after = terms.layout.shapes[0], terms.sketched.shapes[0]
    if not isinstance(part, nn.Linear):
        what = "sums of the input's patches" if isinstance(part, nn.Conv2d) else "the first layer's derivatives"
        return f"{what}{'' if before == after else ', in a sketch'}; the inputs may be rebuilt from them"
    if before == after:
        if part.bias is None:
            return f"the inputs up to a factor, {precision}: each row of the Jacobian is a multiple of one"
        return f"the inputs, {precision}: the weight's Jacobian divided by the bias's is the input itself"
    if terms.settings.projection == "axis":
        return _sketch(after[1], width, precision, terms)
    equations = terms.classes * after[0]
    if equations < width or part.bias is None:
        return _sketch(equations, width, precision, terms)
    noise = "exactly" if precision == "exactly" else "but for the noise of the coding"
    return (
        f"the inputs, {noise}: a sketch has {equations:,} numbers ({terms.classes} classes x k) for {width:,} "
        f"unknowns; {_SEED} solves for them (least squares)"
    )


def _sketch(numbers: int, width: int, precision: str, terms: Terms) -> str:
    how = "" if precision == "exactly" else f", {precision}"
    more = "; every round adds another sketch" if terms.settings.fresh_sketch else ""
    return (
        f"a sketch of {numbers:,} numbers of each input of {width:,}{how}; "
        f"{_SEED} can estimate the inputs from it (least squares){more}"
    )


def _fan_in(terms: Terms) -> int:
    return math.prod(terms.layout.shapes[0][1:])
