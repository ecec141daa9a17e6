"""Hostile packages: real messages are mutated and read; each must end in a message or in a refusal, in little memory.

Half of the mutations keep the digests right, so that they reach what lies behind the checksums. Messages that decode
are put through the learner's own check and into a kernel beside an honest package: what is accepted must be usable.

Where atheris is installed it guides the mutations by coverage; else new refusals do. Exit code 1 where anything but a
message or a PackageError comes out, or where decoding takes more than ten times package.max_decoded_bytes.
"""

import json
import math
import random
import re
import struct
import subprocess
import sys
import time
import traceback
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from torch import Tensor, nn

from spark_node.config import Config
from spark_node.generated.spark.v1 import package_pb2 as pb
from spark_node.learning.algorithms import make_projection, make_terms
from spark_node.learning.jacobian import jacobian
from spark_node.learning.kernel import KERNELS
from spark_node.learning.layers import Jacobian
from spark_node.learning.messages import Message as Said
from spark_node.learning.messages import Package, Weights, check
from spark_node.model import ParameterLayout, cnn, flatten, initialise_kaiming, mlp
from spark_node.package.bits import packed_bytes
from spark_node.package.errors import PackageError, Refusal
from spark_node.package.format import DIGEST, MAGIC, PREFIX, Terms, block_digest, digest
from spark_node.package.reader import decode
from spark_node.package.writer import encode

ROOT = Path(__file__).resolve().parent.parent
ROUND, SENDER, CLASSES = 3, "peer-1", 3
LIMIT = 2**20
"""package.max_decoded_bytes of every receiver here."""
BOUND = 10 * LIMIT
"""What one decoding may allocate, temporary arrays included."""
LONGEST = 2**17
"""Mutated messages are cut to this length."""

Random = random.Random


@dataclass(frozen=True)
class Example:
    """A real message, and what its receiver knows and holds."""

    name: str
    data: bytes
    terms: Terms
    at: Tensor | None = None
    own: Jacobian | None = None
    """The receiver's own package, which shares a kernel with what is decoded."""
    held: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)


def examples() -> list[Example]:
    """Every kind of message, coding, pattern and order of bytes, about models of some hundred parameters."""
    shallow, chain = mlp(12, [5], CLASSES), mlp(12, [6, 5], CLASSES, "tanh")
    image = cnn((1, 4, 4), [2], [4], CLASSES)
    normed = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, CLASSES))
    for module in (shallow, chain, image, normed):
        initialise_kaiming(module, seed=1)
    flat, square = (12,), (1, 4, 4)
    return [
        _weights("weights", shallow, velocity=True),
        _weights("weights-bf16", shallow, velocity=True, weights="bf16"),
        _weights("weights-int8", shallow, weights="int8"),
        _weights("request", shallow, request=True, level=0),
        _package("receiver", shallow, flat),
        _package("sender", shallow, flat, asked=False),
        _package("named", shallow, flat, named=True),
        _package("pixels", shallow, flat, samples=90, pixels=True),
        _package("chain", chain, flat),
        _package("chain-sender-plain", chain, flat, asked=False, level=0),
        _package("convolution", image, square, form="factored"),
        _package("convolution-5-bit", image, square, form="auto", bits=5, scale_block=20),
        _package("normed", normed, flat, form="factored", bits=12),
        _package("axis", chain, flat, projection="axis", sketch_size=4, bits=4, rounding="stochastic"),
        _package("masks", shallow, flat, projection="axis", sketch_size=4, level=0),
        _package("flat", shallow, flat, projection="flat", sketch_size=9, max_error=0.02),
        _package("dense-sparse", shallow, flat, samples=9, encoding="dense", bits=6, keep=0.5),
        _package("dense-rare", shallow, flat, samples=9, encoding="dense", keep=0.01),
    ]


def _terms(module: nn.Module, package: dict[str, Any]) -> tuple[Config, Terms]:
    package = {"max_decoded_bytes": LIMIT, **package}
    config = Config().replace(**{f"package__{name}": value for name, value in package.items()})
    return config, make_terms(config, "fuzz", ParameterLayout.of(module), CLASSES)


def _sent(message: Said, terms: Terms, known: tuple[bytes, ...] = ()) -> bytes:
    coded = encode(message, terms, k=ROUND, sender=SENDER, random=np.random.default_rng(1))
    return b"".join(coded.wire(set(known)))


def _weights(name: str, module: nn.Module, velocity: bool = False, request: bool = False, **package: Any) -> Example:
    _, terms = _terms(module, package)
    w = flatten(module)
    return Example(name, _sent(Weights(w, w.flip(0) if velocity else None, request=request), terms), terms)


def _package(
    name: str,
    module: nn.Module,
    shape: tuple[int, ...],
    *,
    samples: int = 5,
    asked: bool = True,
    named: bool = False,
    pixels: bool = False,
    form: str = "factored",
    **package: Any,
) -> Example:
    config, terms = _terms(module, package)
    w = flatten(module)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, *shape, generator=generator)
    if pixels:
        x = torch.randint(0, 256, (samples, *shape), generator=generator) / 256
    found = make_projection(config, terms.layout).apply(jacobian(module, w, x, form=form), ROUND)
    made = Package(found, torch.arange(samples) % CLASSES, w if asked else None)
    coded = encode(made, terms, k=ROUND, sender=SENDER)
    held = {block.block.digest: block.streams for block in coded.blocks if block.static} if named else {}
    return Example(name, _sent(made, terms, tuple(held)), terms, made.at, found, held)


# What becomes of a message.


def read(example: Example, data: bytes) -> Said:
    """What the receiver makes of the bytes, or PackageError."""
    return decode(data, example.terms, k=ROUND, sender=SENDER, at=example.at, held=example.held.get).message


def use(example: Example, message: Said) -> None:
    """The learner's check, and the kernels of a neighbourhood with an honest peer, where they are small."""
    terms = example.terms
    if check(message, terms.layout.size, terms.sketched.size, terms.classes) is not None:
        return
    if isinstance(message, Package) and message.jacobian.samples < 200:
        assert example.own is not None
        for kernel in KERNELS.values():
            operator = kernel([example.own, message.jacobian])
            product = operator.apply(torch.ones(operator.samples, terms.classes))
            assert product.shape == (operator.samples, terms.classes)
            assert operator.pull_back(product).shape == (terms.sketched.size,)


@dataclass
class Tally:
    """What came out so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    details: set[str] = field(default_factory=set)
    crashes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Last line of the traceback -> (traceback, input in hex)."""
    peak: int = 0
    traced: bool = True
    """Whether the memory of some readings is measured."""
    _before: int = 0

    def judge(self, example: Example, data: bytes) -> bool:
        """Read one message; True where its outcome is new."""
        self._trace()
        said = "message"
        try:
            message = read(example, data)
            self._measure()
            use(example, message)
            self.outcomes["message"] += 1
        except PackageError as error:
            self._measure()
            said = f"{error.refusal.value}: {re.sub('[0-9]+', '#', error.detail)[:80]}"
            self.outcomes[error.refusal.value] += 1
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.outcomes["other"] += 1
            self.crashes.setdefault(said, (traceback.format_exc(), f"{example.name} {data.hex()}"))
        new = said not in self.details
        self.details.add(said)
        return new

    def _trace(self) -> None:
        """Fifty of every four hundred messages are read with their memory traced, which takes three times as long."""
        place = sum(self.outcomes.values()) % 400
        if place == 0 and self.traced:
            tracemalloc.start()
        elif place == 50:
            tracemalloc.stop()
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
            self._before = tracemalloc.get_traced_memory()[0]

    def _measure(self) -> None:
        if tracemalloc.is_tracing():
            self.peak = max(self.peak, tracemalloc.get_traced_memory()[1] - self._before)


def confine() -> None:
    """One thread and, on Linux, a gigabyte more than the process has: a message that takes it is a MemoryError."""
    torch.set_num_threads(1)
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# Mutations of bytes.


def flip(data: bytes, rng: Random, _: list[Example]) -> bytes:
    out = bytearray(data)
    for __ in range(rng.choice((1, 1, 2, 8))):
        if out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def truncate(data: bytes, rng: Random, _: list[Example]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(data: bytes, rng: Random, _: list[Example]) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.choice((1, 4, 100))) + data[place:]


def remove(data: bytes, rng: Random, _: list[Example]) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + data[place + rng.choice((1, 4, 100)) :]


def splice(data: bytes, rng: Random, known: list[Example]) -> bytes:
    other = rng.choice(known).data
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def reorder(data: bytes, rng: Random, _: list[Example]) -> bytes:
    """Chunks that come in another order, twice or not at all."""
    size = rng.choice((16, 100, 1000))
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    if chunks:
        i, j = rng.randrange(len(chunks)), rng.randrange(len(chunks))
        chunks[i] = rng.choice((chunks[j], b"", chunks[i]))
        chunks[j], chunks[i] = chunks[i], chunks[j]
    return b"".join(chunks)


BYTES = [flip, truncate, insert, remove, splice, reorder]


# Mutations of what the bytes mean, sealed again afterwards.


@dataclass
class Opened:
    """A message taken apart: its header, and the streams of each block."""

    header: pb.Header
    streams: list[list[bytes]]

    @classmethod
    def of(cls, data: bytes) -> "Opened | None":
        """None where the bytes are no message any more."""
        header = pb.Header()
        try:
            _, length = PREFIX.unpack_from(data)
            header.ParseFromString(data[PREFIX.size : PREFIX.size + length])
        except (struct.error, DecodeError):
            return None
        offset = PREFIX.size + length + DIGEST
        streams: list[list[bytes]] = []
        for block in header.blocks:
            sizes = [] if block.named else [min(stream.bytes, LONGEST) for stream in block.streams]
            streams.append([])
            for size in sizes:
                streams[-1].append(data[offset : offset + size])
                offset += size
        return cls(header, streams)

    def sealed(self, *, sizes: bool = True) -> bytes:
        """The message as bytes whose digests hold; `sizes`: and whose streams are as long as they are said to be."""
        self.align()
        for block, streams in zip(self.header.blocks, self.streams, strict=True):
            if sizes and not block.named:
                for stream, data in zip(block.streams, streams, strict=True):
                    stream.bytes = len(data)
            if not block.named:
                block.digest = block_digest(block, streams)
        text = self.header.SerializeToString(deterministic=True)
        pieces = [data for streams in self.streams for data in streams]
        return b"".join([PREFIX.pack(MAGIC, len(text)), text, digest(text), *pieces])

    def align(self) -> None:
        """As many streams as each block describes."""
        for block, streams in zip(self.header.blocks, self.streams, strict=True):
            count = 0 if block.named else len(block.streams)
            streams += [b""] * (count - len(streams))
            del streams[count:]

    def stream(self, rng: Random) -> tuple[int, int] | None:
        """Block and place of some stream."""
        self.align()
        places = [(i, j) for i, streams in enumerate(self.streams) for j in range(len(streams))]
        return rng.choice(places) if places else None

    def replace(self, place: tuple[int, int], data: bytes, *, layout: pb.Layout, zstd: bool) -> None:
        described = self.header.blocks[place[0]].streams[place[1]]
        described.layout, described.zstd = layout, zstd
        del described.planes[:]
        self.streams[place[0]][place[1]] = data


NUMBERS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 32, 33, 255, 256, 257, 2**16, 2**20, 2**31 - 1, 2**32 - 1, 2**40, 2**63)
TEXTS = ("", "fuzz", "peer-2", "1.weight", "3.bias", "none", "axis", "flat", "hadamard", "\x00", "ü" * 50, "x" * 5000)


def _value(described: Any, now: Any, rng: Random) -> Any:
    if described.enum_type is not None:
        return rng.choice((*described.enum_type.values_by_number, 99, -1))
    if described.type == FieldDescriptor.TYPE_BOOL:
        return not now
    if described.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if described.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
    top = 2**32 - 1 if described.type == FieldDescriptor.TYPE_UINT32 else 2**64 - 1
    return min(max(0, rng.choice((*NUMBERS, now + 1, now - 1, 2 * now, top))), top)


def change_field(opened: Opened, rng: Random, _: Example, __: list[Example]) -> None:
    """Any field of the header."""
    header = opened.header
    inner = [header.specification, *header.layers, *header.blocks, *(s for b in header.blocks for s in b.streams)]
    message = header if rng.random() < 0.2 else rng.choice(inner)
    described = rng.choice([f for f in message.DESCRIPTOR.fields if f.name not in ("blocks", "digest")])
    value = getattr(message, described.name)
    if not described.is_repeated:
        if described.message_type is None:
            setattr(message, described.name, _value(described, value, rng))
        else:
            message.ClearField(described.name)
        return
    way = rng.choice(("add", "remove", "change", "swap", "clear")) if len(value) else "add"
    if described.message_type is not None:
        if way == "add":
            added = value.add()
            added.CopyFrom(rng.choice(value))
        elif way == "remove":
            del value[rng.randrange(len(value))]
        elif way == "clear":
            del value[:]
        else:
            i, j = rng.randrange(len(value)), rng.randrange(len(value))
            kept = type(value[i])()
            kept.CopyFrom(value[i])
            value[i].CopyFrom(value[j])
            value[j].CopyFrom(kept)
    else:
        values = list(value)
        if way == "add":
            values.insert(rng.randrange(len(values) + 1), _value(described, values[0] if values else 0, rng))
        elif way == "remove":
            values.pop(rng.randrange(len(values)))
        elif way == "change":
            i = rng.randrange(len(values))
            values[i] = _value(described, values[i], rng)
        elif way == "swap":
            rng.shuffle(values)
        else:
            values = []
        del value[:]
        value.extend(values)


def change_blocks(opened: Opened, rng: Random, _: Example, known: list[Example]) -> None:
    """Blocks that are missing, doubled, exchanged, or another message's."""
    pairs: list[tuple[pb.Block, list[bytes]]] = []
    for block, streams in zip(opened.header.blocks, opened.streams, strict=True):
        kept = pb.Block()
        kept.CopyFrom(block)
        pairs.append((kept, streams))
    other = Opened.of(rng.choice(known).data)
    way = rng.choice(("remove", "double", "swap", "foreign"))
    if way == "foreign" and other is not None and other.streams:
        i = rng.randrange(len(other.streams))
        pairs.insert(rng.randrange(len(pairs) + 1), (other.header.blocks[i], other.streams[i]))
    elif pairs:
        i, j = rng.randrange(len(pairs)), rng.randrange(len(pairs))
        if way == "remove":
            pairs.pop(i)
        elif way == "double":
            pairs.insert(j, (pairs[i][0], list(pairs[i][1])))
        else:
            pairs[i], pairs[j] = pairs[j], pairs[i]
    del opened.header.blocks[:]
    opened.header.blocks.extend(block for block, _ in pairs)
    opened.streams = [streams for _, streams in pairs]


_SIGNALS = (pb.SIGNALS_UNSPECIFIED, pb.SIGNALS_IDENTITY, pb.SIGNALS_CHAINED, pb.SIGNALS_EXPLICIT)


def change_layers(opened: Opened, rng: Random, example: Example, _: list[Example]) -> None:
    """Parameters that move from one layer to another, and layers of another form, mostly with blocks to match."""
    layers = [pb.Layer.FromString(layer.SerializeToString()) for layer in opened.header.layers]
    if not layers:
        return
    i, j = rng.randrange(len(layers)), rng.randrange(len(layers))
    way = rng.choice(("merge", "split", "swap", "form", "signals", "positions"))
    if way == "merge" and i != j:
        layers[j].parameters.extend(layers[i].parameters)
        layers[j].form = pb.FORM_DENSE
        del layers[i]
    elif way == "split" and len(layers[i].parameters) > 1:
        layers.insert(i + 1, pb.Layer(name="split", form=pb.FORM_DENSE, parameters=layers[i].parameters[1:]))
        layers[i].form = pb.FORM_DENSE
        del layers[i].parameters[1:]
    elif way == "swap":
        layers[i], layers[j] = layers[j], layers[i]
    elif way == "form":
        layers[i].form = rng.choice((pb.FORM_DENSE, pb.FORM_FACTORED))
        layers[i].positions = rng.choice((1, 1, 4))
        layers[i].signals = rng.choice(_SIGNALS)
    elif way == "positions":
        layers[i].positions = rng.choice((0, 1, 2, 7, 1000, 2**20, 2**40))
    else:
        layers[i].signals = rng.choice(_SIGNALS)
    del opened.header.layers[:]
    opened.header.layers.extend(layers)
    if rng.random() < 0.8:
        rebuild(opened, rng, example)


def change_samples(opened: Opened, rng: Random, example: Example, _: list[Example]) -> None:
    """Another number of samples in the header and in every shape, mostly with blocks to match."""
    header = opened.header
    many = rng.choice((0, 1, 4, 7, 1000, 8000, 2**18 - 1, 2**20, 2**31, 2**40, 2**63))
    for block in header.blocks:
        if block.shape and block.shape[0] == header.samples:
            block.shape[0] = many
    header.samples = many
    if rng.random() < 0.8 and header.kind == pb.KIND_PACKAGE:
        rebuild(opened, rng, example)


def rebuild(opened: Opened, rng: Random, example: Example) -> None:
    """The blocks that a reader expects after such a header, full of zeros, as far as the header makes sense."""
    header, terms = opened.header, example.terms
    shapes = dict(zip(terms.sketched.names, terms.sketched.shapes, strict=True))
    whole = dict(zip(terms.layout.names, terms.layout.shapes, strict=True))
    n, c = header.samples, terms.classes
    due: list[tuple[int, int, tuple[int, ...]]] = [(pb.ROLE_LABELS, 0, (n,)), (pb.ROLE_LOGITS, 0, (n, c))]
    for i, layer in enumerate(header.layers):
        if layer.form == pb.FORM_DENSE:
            columns = sum(math.prod(shapes.get(name, (1,))) for name in layer.parameters)
            due.append((pb.ROLE_DENSE, i, (n, c, columns)))
            continue
        shape = shapes.get(f"{layer.name}.weight", (1, 1))
        due.append((pb.ROLE_INPUTS, i, (n, layer.positions, math.prod(shape[1:]))))
        if layer.signals == pb.SIGNALS_EXPLICIT:
            due.append((pb.ROLE_SIGNALS, i, (n, c, layer.positions, shape[0])))
        elif layer.signals == pb.SIGNALS_CHAINED:
            due.append((pb.ROLE_SLOPES, i, (n, shape[0])))
            above = header.layers[i + 1].name if i + 1 < len(header.layers) else ""
            if example.at is None or rng.random() < 0.5:
                due.append((pb.ROLE_WEIGHT_ABOVE, i, whole.get(f"{above}.weight", (1, 1))))
    del header.blocks[:]
    opened.streams = []
    for role, at, shape in due:
        block, streams = zeros(role, shape, rng, derived=terms.sketched == terms.layout)
        block.layer = at
        header.blocks.append(block)
        opened.streams.append(streams)


_OF_NUMBERS = (pb.CODING_FLOAT32, pb.CODING_BFLOAT16, pb.CODING_PALETTE, pb.CODING_QUANTISED, pb.CODING_SPARSE)


def zeros(role: int, shape: tuple[int, ...], rng: Random, *, derived: bool) -> tuple[pb.Block, list[bytes]]:
    """A block of zeros in any coding that fits; where it would be large its streams are too short.

    `derived`: slopes may follow from the layer above.
    """
    count = math.prod(shape)
    block = pb.Block(role=role, shape=shape)  # type: ignore[arg-type]
    if role == pb.ROLE_LABELS:
        block.coding, block.bits = pb.CODING_INTEGER, 8
        sizes = [count]
    elif role == pb.ROLE_SLOPES and rng.random() < 0.5:
        block.coding = rng.choice((pb.CODING_MASK, pb.CODING_ABOVE_ZERO)) if derived else pb.CODING_MASK
        sizes = [(count + 7) // 8] if block.coding == pb.CODING_MASK else []
    else:
        coding = rng.choice(_OF_NUMBERS)
        block.coding, block.pattern = coding, pb.PATTERN_BITMAP
        affine = coding != pb.CODING_SPARSE and rng.random() < 0.5
        block.levels = pb.LEVELS_AFFINE if affine else pb.LEVELS_SYMMETRIC
        block.bits = rng.choice((0, 4, 8, 12)) if coding == pb.CODING_SPARSE else rng.choice((4, 8))
        block.group = rng.choice((1, 1, 7, 2**30))
        scales = 4 * -(-count // block.group) * block.levels
        sizes = {
            pb.CODING_FLOAT32: [4 * count],
            pb.CODING_BFLOAT16: [2 * count],
            pb.CODING_QUANTISED: [scales, packed_bytes(count, block.bits or 1)],
            pb.CODING_PALETTE: [4, packed_bytes(count, block.bits or 1)],
            pb.CODING_SPARSE: [(count + 7) // 8, 0] + ([0] if block.bits else []),
        }[coding]
        block.kept = 1 if coding == pb.CODING_PALETTE else 0
    streams = []
    for i, size in enumerate(sizes):
        size = min(size, 2**22)
        packed = i == len(sizes) - 1 and block.coding in (pb.CODING_QUANTISED, pb.CODING_PALETTE)
        plain = size < 200 and rng.random() < 0.5
        layout = pb.LAYOUT_PACKED if packed or (i == 2) else pb.LAYOUT_PLAIN
        block.streams.add(layout=layout, zstd=not plain)
        streams.append(b"\0" * size if plain else frame(size, size))
    return block, streams


@lru_cache(maxsize=256)
def frame(declared: int | None, content: int, window: int = 17) -> bytes:
    """A zstandard frame of runs of zeros that declares one size and has another."""
    head = struct.pack("<IB", 0xFD2FB528, 0 if declared is None else 0b11000000) + bytes([(window - 10) << 3])
    if declared is not None:
        head += struct.pack("<Q", declared)
    runs, size = [], min(2**17, 2**window)
    while content > 0:
        run = min(content, size)
        content -= run
        runs.append(struct.pack("<I", (run << 3) | (1 << 1) | (content == 0))[:3] + b"\0")
    return head + (b"".join(runs) or b"\x01\x00\x00")


_BOMBS = (frame(None, 2**30), frame(2**30, 2**30))


def plain_bytes(stream: pb.Stream, data: bytes) -> int:
    """Length of a stream before entropy coding, as far as its frames say."""
    sizes, pieces = list(stream.planes) if stream.layout == pb.LAYOUT_PLANES else [len(data)], []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    total = 0
    for piece in pieces:
        try:
            total += min(zstandard.get_frame_parameters(piece).content_size, LONGEST)
        except zstandard.ZstdError:
            total += len(piece)
    return total


def change_stream(opened: Opened, rng: Random, _: Example, __: list[Example]) -> None:
    """Bombs, numbers that are not finite, ones everywhere, noise."""
    place = opened.stream(rng)
    if place is None:
        return
    described = opened.header.blocks[place[0]].streams[place[1]]
    data = opened.streams[place[0]][place[1]]
    plain = plain_bytes(described, data)
    some = rng.choice((pb.LAYOUT_PLAIN, pb.LAYOUT_PACKED, described.layout))
    way = rng.choice(("bomb", "frame", "floats", "ones", "noise", "flip", "plane", "cut"))
    if way == "bomb":
        window = rng.choice((17, 17, 27, 31))
        bomb = rng.choice((*_BOMBS, frame(plain, 2**22, window)))
        opened.replace(place, bomb, layout=described.layout, zstd=True)
    elif way == "frame":
        content = max(0, plain + rng.choice((-1, 0, 0, 0, 1)))
        opened.replace(place, frame(plain, content, rng.choice((10, 17, 27, 31))), layout=some, zstd=True)
    elif way == "floats":
        values = np.array([rng.choice((np.nan, np.inf, -np.inf, 3e38, 0.0)) for _ in range(plain // 4)], "<f4")
        opened.replace(place, values.tobytes(), layout=pb.LAYOUT_PLAIN, zstd=False)
    elif way == "ones":
        opened.replace(place, b"\xff" * plain, layout=some, zstd=False)
    elif way == "noise":
        opened.replace(place, rng.randbytes(plain), layout=some, zstd=False)
    elif way == "flip":
        opened.streams[place[0]][place[1]] = flip(data, rng, [])
    elif way == "plane" and described.planes:
        i = rng.randrange(len(described.planes))
        start = sum(described.planes[:i])
        kept = data[:start], data[start + described.planes[i] :]
        count = plain // len(described.planes)
        piece = rng.choice((*_BOMBS, frame(count, count), frame(count, 2**22), rng.randbytes(count)))
        described.planes[i] = len(piece)
        opened.streams[place[0]][place[1]] = kept[0] + piece + kept[1]
    else:
        opened.streams[place[0]][place[1]] = truncate(data, rng, [])


MEANINGS = [change_field, change_field, change_blocks, change_layers, change_samples, change_stream, change_stream]


def mutate(data: bytes, rng: Random, example: Example, known: list[Example]) -> bytes:
    """One to three mutations: of the meaning with digests made right again, of the bytes, or of both."""
    opened = Opened.of(data) if rng.random() < 0.8 else None
    if opened is None:
        for _ in range(rng.choice((1, 1, 2))):
            data = rng.choice(BYTES)(data, rng, known)
        return data[:LONGEST]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(MEANINGS)(opened, rng, example, known)
    data = opened.sealed(sizes=rng.random() < 0.9)
    return (rng.choice(BYTES)(data, rng, known) if rng.random() < 0.05 else data)[:LONGEST]


# Campaigns.


def by_outcomes(count: int, seed: int) -> tuple[Tally, float]:
    """Mutations of the examples and of what has given a new outcome before."""
    known, rng, tally = examples(), Random(seed), Tally()
    corpus = list(known)
    confine()
    start = time.perf_counter()
    for _ in range(count):
        chosen = rng.choice(corpus if rng.random() < 0.5 else known)
        data = mutate(chosen.data, rng, chosen, known)
        if tally.judge(chosen, data):
            corpus.append(replace(chosen, data=data))
    tracemalloc.stop()
    return tally, time.perf_counter() - start


def by_coverage(count: int, seed: int, out: str) -> None:
    """The same mutations, chosen by atheris; ends the process."""
    import os

    import atheris  # type: ignore[import-untyped]

    known, tally = examples(), Tally()
    folder = Path(out).with_suffix(".corpus")
    folder.mkdir()
    for i, example in enumerate(known):
        (folder / example.name).write_bytes(bytes([i]) + example.data)

    def one(data: bytes) -> None:
        if len(data) > 1:
            tally.judge(known[data[0] % len(known)], data[1:])
        if sum(tally.outcomes.values()) >= count:
            found = {"outcomes": tally.outcomes, "crashes": tally.crashes, "peak": tally.peak}
            seconds = time.perf_counter() - start
            Path(out).write_text(json.dumps({**found, "details": sorted(tally.details), "seconds": seconds}))
            os._exit(0)

    def mutator(data: bytes, longest: int, seed: int) -> bytes:
        rng = Random(seed)
        if len(data) < 2 or rng.random() < 0.1:
            return bytes(atheris.Mutate(data, longest))
        example = known[data[0] % len(known)]
        origin = example.data if rng.random() < 0.4 else data[1:]
        return (data[:1] + mutate(origin, rng, example, known))[:longest]

    flags = [f"-seed={seed + 1}", f"-max_len={LONGEST}", "-len_control=0", "-verbosity=0", "-rss_limit_mb=8192"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], one, custom_mutator=mutator)
    confine()
    start = time.perf_counter()
    atheris.Fuzz()


_GUIDED = """
import sys
import atheris
import torch
with atheris.instrument_imports(include=["spark_node.package"]):
    from benchmarks.package_fuzz import by_coverage
by_coverage(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


def guided(count: int, seed: int) -> tuple[Tally, float]:
    """`by_coverage` in a process of its own, whose imports atheris instruments."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-c", _GUIDED, str(count), str(seed), str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        if not out.exists():
            sys.exit(f"the fuzzer ended early, code {done.returncode}:\n{done.stderr[-3000:]}")
        found = json.loads(out.read_text())
    crashes = {name: (trace, data) for name, (trace, data) in found["crashes"].items()}
    return Tally(Counter(found["outcomes"]), set(found["details"]), crashes, found["peak"]), found["seconds"]


def rows(tally: Tally, seconds: float, guide: str) -> list[dict[str, Any]]:
    total = sum(tally.outcomes.values())
    table: dict[str, str | int | float] = {
        "guided by": guide,
        "mutations": total,
        "messages decoded": tally.outcomes["message"],
        **{f"refused: {refusal.value}": tally.outcomes[refusal.value] for refusal in Refusal},
        "other exceptions": tally.outcomes["other"],
        "different outcomes": len(tally.details),
        "largest allocation, MB": tally.peak / 1e6,
        "mutations a second": total / seconds,
    }
    return [{"measure": name, "value": value} for name, value in table.items()]


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutations")
    options = parser.parse_args()
    count = 20_000 if options.quick else 1_000_000
    if find_spec("atheris") is None:
        (tally, seconds), guide = by_outcomes(count, options.seed), "new outcomes (atheris is not installed)"
    else:
        (tally, seconds), guide = guided(count, options.seed), "coverage (atheris)"
    report("package_fuzz", rows(tally, seconds, guide), options.json)
    for trace, data in list(tally.crashes.values())[:5]:
        print(trace, data[:2000], sep="\n")
    if tally.peak > BOUND:
        print(f"one decoding allocated {tally.peak:,} bytes: more than {BOUND:,}")
    return 1 if tally.crashes or tally.peak > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
