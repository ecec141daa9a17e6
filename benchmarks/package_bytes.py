"""What a package costs: bytes on the wire, time and error, one row a setting.

One peer's Fashion-MNIST samples (random pixels where the dataset is not found) on the paper's network, 784-100-10.
"Formula" is the prediction before entropy coding: numbers times their bits (and a bit an entry for the pattern of a
sparse block), labels and logits included. Errors are relative, against the exact Jacobian of the same samples: of the
trace kernel (Frobenius norm), and of the weight update that one evolution gives; a sketched update is the true one plus
noise of sqrt(d / k) times its size, so its cosine is shown too. Speeds are of one thread; entries are those of the
Jacobian as it is written. The last layer's dense Jacobian is zero but for one class in ten, and zeros are never kept:
that is why the full stack takes less than the formula says even without entropy coding.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STACK = {"encoding": "dense", "projection": "flat", "sketch_size": 10_000, "keep": 0.5, "bits": 6}


@dataclass(frozen=True)
class Setting:
    """A row: settings of [package], the share 1/m of the samples, whether the inputs are only named."""

    name: str
    package: dict[str, Any] = field(default_factory=dict)
    subsample: int = 1
    named: bool = False
    first_layer: bool = False
    """Count the first layer's block alone: the one that is sketched."""


SETTINGS = (
    Setting("axis-wise k = 500, dense float32", {"encoding": "dense", "projection": "axis", "sketch_size": 500}),
    Setting("axis-wise k = 250, dense float32", {"encoding": "dense", "projection": "axis", "sketch_size": 250}),
    Setting("axis-wise k = 100, dense float32", {"encoding": "dense", "projection": "axis", "sketch_size": 100}),
    Setting("flattened k = 10,000, dense float32", {"encoding": "dense", "projection": "flat", "sketch_size": 10_000}),
    Setting("the paper's full stack, no entropy coding", {**STACK, "level": 0, "logit_bits": 0}, subsample=5),
    Setting(
        "the same, the sketched layer alone", {**STACK, "level": 0, "logit_bits": 0}, subsample=5, first_layer=True
    ),
    Setting("the paper's full stack", STACK, subsample=5),
    Setting("the paper's full stack, Hadamard", {**STACK, "sketch": "hadamard"}, subsample=5),
    Setting("factored, lossless"),
    Setting("factored, lossless, inputs named", named=True),
    Setting("factored, 6 bits", {"bits": 6}),
    Setting("factored, 6 bits, inputs named", {"bits": 6}, named=True),
    Setting("factored, error 1 %", {"max_error": 0.01}),
    Setting("factored, 6 bits, axis-wise k = 250", {"bits": 6, "projection": "axis", "sketch_size": 250}),
    Setting(
        "factored, 6 bits, axis-wise k = 250, orthonormal",
        {"bits": 6, "projection": "axis", "sketch_size": 250, "sketch": "orthonormal"},
    ),
)


def samples(count: int) -> tuple[Any, Any, str]:
    """One peer's inputs and labels."""
    import numpy as np
    import torch

    from spark_node.data.datasets import load
    from spark_node.errors import DataError

    chosen = np.random.default_rng(0).choice(60_000, count, replace=False)
    try:
        dataset = load("fashion-mnist")
    except DataError:
        pixels = np.random.default_rng(0).integers(0, 256, (count, 1, 28, 28)) / 255
        return torch.tensor(pixels, dtype=torch.float32), torch.arange(count) % 10, "random pixels"
    x = dataset.standardise(dataset.train.pixels[chosen])
    return x, torch.from_numpy(dataset.train.labels[chosen]), "Fashion-MNIST"


class Peer:
    """The exact Jacobian of one peer, and what the errors are measured against."""

    def __init__(self, count: int) -> None:
        from spark_node.config import ModelSettings
        from spark_node.learning.jacobian import jacobian
        from spark_node.learning.kernel import TraceKernel
        from spark_node.model import ParameterLayout, build, flatten

        self.x, self.labels, self.source = samples(count)
        self.module = build(ModelSettings(), (1, 28, 28), 10, seed=0)
        self.w, self.layout = flatten(self.module), ParameterLayout.of(self.module)
        self.exact = jacobian(self.module, self.w, self.x)
        self.kernel = TraceKernel([self.exact])

    def update(self, kernel: Any, logits: Any) -> Any:
        """The weight update of one evolution, in the space of the kernel's own parameters."""
        import torch

        from spark_node.learning.evolution import evolve

        hard = torch.nn.functional.one_hot(self.labels, 10).float()
        found = evolve(kernel, logits, hard, eta=0.01, timesteps=(800,))
        return kernel.pull_back(found.residual_sums[-1])


def config_of(setting: Setting) -> Any:
    from spark_node.config import Config

    large = {"max_message_bytes": 2**33, "max_decoded_bytes": 2**33}
    return Config().replace(**{f"package__{key}": value for key, value in {**large, **setting.package}.items()})


def measure(setting: Setting, peer: Peer, repeats: int) -> dict[str, Any]:
    """One row."""
    from spark_node.generated.spark.v1 import package_pb2 as pb
    from spark_node.learning.algorithms import make_projection, make_terms
    from spark_node.learning.kernel import TraceKernel
    from spark_node.learning.messages import Package
    from spark_node.package.reader import decode
    from spark_node.package.writer import encode

    config = config_of(setting)
    projection = make_projection(config, peer.layout)
    terms = make_terms(config, "benchmark", peer.layout, 10)
    sketched = projection.apply(peer.exact, 1)
    package = Package(sketched, peer.labels, peer.w)
    first = encode(package, terms, k=1, sender="a")
    known = first.factors if setting.named else ()
    held = {block.block.digest: block.streams for block in first.blocks if block.static}
    encoding = decoding = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        coded = encode(package, terms, k=1, sender="a")
        data = b"".join(coded.wire(known))
        middle = time.perf_counter()
        found = decode(data, terms, k=1, sender="a", at=peer.w, held=held.get).message
        encoding, decoding = min(encoding, middle - start), min(decoding, time.perf_counter() - middle)
    assert isinstance(found, Package)
    size = len(data)
    if setting.first_layer:
        size = sum(map(len, next(c for c in coded.blocks if c.block.role == pb.ROLE_DENSE).streams))
    kernel = TraceKernel([found.jacobian])
    update = projection.lift(peer.update(kernel, found.jacobian.logits), 1)
    exact = peer.update(peer.kernel, peer.exact.logits)
    entries = sum(tensor.numel() for layer in sketched.layers for tensor in layer.tensors)
    return {
        "setting": setting.name,
        "samples": len(peer.labels),
        "kB": size / 1e3,
        "formula_kB": formula(setting, peer, config) / 1e3,
        "off_%": 100 * (size / formula(setting, peer, config) - 1),
        "times_smaller": None,
        "encode_ms": 1e3 * encoding,
        "decode_ms": 1e3 * decoding,
        "M_entries/s": min(entries / encoding, entries / decoding) / 1e6,
        "kernel_error": float((kernel.matrix - peer.kernel.matrix).norm() / peer.kernel.matrix.norm()),
        "update_error": float((update - exact).norm() / exact.norm()),
        "update_cosine": float(update @ exact / (update.norm() * exact.norm())),
        "equal": "bit for bit" if bool((kernel.matrix == peer.kernel.matrix).all()) else "",
    }


def formula(setting: Setting, peer: Peer, config: Any) -> float:
    """Numbers times their bits, and labels and logits."""
    from spark_node.package.planner import plan

    layers = plan(peer.module, peer.x[0], config.package)
    if setting.first_layer:
        return len(peer.labels) * layers[0].forms[layers[0].form]
    jacobian = sum(layer.forms[layer.form] for layer in layers)
    if setting.named:
        jacobian -= 784 * (config.package.bits or 32) / 8
    lossy = config.package.bits > 0 and config.package.logit_bits < 0
    return len(peer.labels) * (jacobian + 10 * (2 if lossy else 4) + 1)


def rows(count: int, settings: tuple[Setting, ...], repeats: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    dense = 4 * count * 10 * 79_510
    found: list[dict[str, Any]] = [
        {
            "setting": "dense float32 (computed)",
            "samples": count,
            "kB": dense / 1e3,
            "formula_kB": dense / 1e3,
            "off_%": 0.0,
            "times_smaller": 1.0,
            "encode_ms": None,
            "decode_ms": None,
            "M_entries/s": None,
            "kernel_error": 0.0,
            "update_error": 0.0,
            "update_cosine": 1.0,
            "equal": "",
        }
    ]
    for setting in settings:
        row = measure(setting, Peer(count // setting.subsample), repeats)
        row["times_smaller"] = dense / 1e3 / row["kB"]
        found.append(row)
    return found


def main() -> None:
    from benchmarks.common import arguments, report

    options = arguments(__doc__).parse_args()
    settings: tuple[Setting, ...] = SETTINGS
    if options.quick:  # without the 3.1 GB of a flattened Gaussian, and the largest packages
        slow = ("flattened", "axis-wise k = 500", "the paper's full stack, no", "the paper's full stack")
        settings = tuple(s for s in SETTINGS if not s.name.startswith(slow) or "Hadamard" in s.name)
    report("package_bytes", rows(50 if options.quick else 200, settings, 2 if options.quick else 3), options.json)


if __name__ == "__main__":
    main()
