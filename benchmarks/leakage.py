"""What a package gives away: inputs rebuilt from each kind of package of one peer, and what the setting costs.

The attacker is a neighbour (it knows the run's seed and the weights that packages are taken at) or, where a row says
"outsider", somebody who reads the traffic and knows all that but the sketch secret. "prior": it also has samples of
its own, whose mean and covariance it takes for a Gaussian prior (maximum a posteriori).

Columns: relative error |x' - x| / |x|; mean correlation with the original; share of images whose best match
(correlation) among all candidates is the right one; epsilon of the inputs at delta 1e-5, for a sample that one peer
holds; accuracy of a short training. Full size: 24 images of Fashion-MNIST, 5,000 candidates; training of 12 peers of
200 samples, Dirichlet 0.5, degree 3, 6 rounds. Quick: digits, a small model, no training.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spark_node import model
from spark_node.config import Config, load
from spark_node.data import datasets, partitions
from spark_node.data.datasets import Dataset
from spark_node.launch.memory import MemoryRun
from spark_node.learning.algorithms import make_algorithm, make_terms
from spark_node.learning.layers import DenseLayer, FactoredLayer, Jacobian
from spark_node.learning.messages import Package
from spark_node.learning.spark import Spark
from spark_node.model import ParameterLayout
from spark_node.package.projection import LinearMap, linear_map
from spark_node.package.reader import decode
from spark_node.package.writer import encode
from spark_node.privacy import gaussian_epsilon, privatise, randomness
from spark_node.seeds import derive, stream

EXACT = 1e-6
"""Variance of the error that the attacker expects of lossless numbers."""


@dataclass(frozen=True)
class Prior:
    """Mean [d] and covariance [d, d] of the attacker's own samples."""

    mean: Tensor
    covariance: Tensor

    @staticmethod
    def of(x: Tensor, ridge: float = 1e-2) -> "Prior":
        flat = x.flatten(1).double()
        return Prior(flat.mean(0), torch.cov(flat.T) + ridge * torch.eye(flat.shape[1], dtype=torch.float64))


@dataclass(frozen=True)
class View:
    """What the attacker holds: packages of one peer's samples as they arrived, and the weights of each."""

    config: Config
    layout: ParameterLayout
    packages: list[Jacobian]
    weights: list[Tensor]
    prior: Prior
    length: float
    """Mean norm of the attacker's own samples."""


# Attacks.


def exact_inputs(jacobian: Jacobian) -> Tensor:
    """Read the factor, or divide: the weight's Jacobian is the bias's times the input, in every row."""
    first = jacobian.layers[0]
    if isinstance(first, FactoredLayer):
        return first.inputs[:, 0].double()
    assert isinstance(first, DenseLayer)
    outputs = _outputs(jacobian)
    weight, bias = first.values[:, :, :-outputs].double(), first.values[:, :, -outputs:].double()
    rows = weight.unflatten(2, (outputs, -1))
    return torch.einsum("nco,ncoi->ni", bias, rows) / bias.square().sum((1, 2)).clamp_min(1e-30)[:, None]


def _outputs(jacobian: Jacobian) -> int:
    """Width of the first hidden layer: the inputs of the second."""
    second = jacobian.layers[1]
    if isinstance(second, FactoredLayer):
        return second.inputs.shape[2]
    assert isinstance(second, DenseLayer)
    classes = second.values.shape[1]
    return second.values.shape[2] // classes - 1


def least_squares(equations: Tensor, values: Tensor, prior: Prior | None = None, noise: float = EXACT) -> Tensor:
    """x [n, d] from values = x equations^T [n, m]: the shortest solution or, with a prior, the most probable one."""
    a, b = equations.double(), values.double()
    if prior is None:
        shortest: Tensor = b @ torch.linalg.pinv(a).T
        return shortest
    spread = prior.covariance @ a.T
    inner = a @ spread + noise * torch.eye(len(a), dtype=torch.float64)
    likely: Tensor = prior.mean + torch.linalg.solve(inner, (b - prior.mean @ a.T).T).T @ spread.T
    return likely


def sketch_of(config: Config, layout: ParameterLayout, seed: int) -> LinearMap:
    """P of the first weight, for who believes that this is the seed of the projections."""
    settings, shape = config.package, layout.shapes[0]
    width = int(np.prod(shape[1:])) if settings.projection == "axis" else int(np.prod(shape))
    key = derive(seed, "sketch", layout.names[0])
    return linear_map(settings.sketch, width, min(width, settings.sketch_size), key)


def from_axis_sketch(view: View, prior: Prior | None, noise: float = EXACT) -> Tensor:
    """a P is known, and P by the run's seed: k equations for each input."""
    first = view.packages[0].layers[0]
    assert isinstance(first, FactoredLayer)
    sketch = sketch_of(view.config, view.layout, view.config.run.seed)
    equations = sketch.adjoint(torch.eye(sketch.k, dtype=torch.float64))
    return least_squares(equations, first.inputs[:, 0], prior, noise)


def hidden_equations(view: View, sample: int) -> tuple[Tensor, Tensor]:
    """h = relu(W a + b) is the second layer's input: every h above zero is an equation for a, at each weights."""
    equations, values = [], []
    for package, w in zip(view.packages, view.weights, strict=True):
        second = package.layers[1]
        assert isinstance(second, FactoredLayer)
        weight, bias = (view.layout.unflatten(w)[name].double() for name in view.layout.names[:2])
        h = second.inputs[sample, 0].double()
        equations.append(weight[h > 0])
        values.append((h - bias)[h > 0])
    return torch.cat(equations), torch.cat(values)


def from_hidden(view: View, with_sketch: bool) -> Tensor:
    """The second layer's inputs, which no sketch of the first one hides; and the sketch where its seed is known."""
    first = view.packages[0].layers[0]
    assert isinstance(first, FactoredLayer)
    sketch = sketch_of(view.config, view.layout, view.config.run.seed)
    projection = sketch.adjoint(torch.eye(sketch.k, dtype=torch.float64))
    found = []
    for n in range(first.samples):
        equations, values = hidden_equations(view, n)
        if with_sketch:
            equations = torch.cat([equations, projection])
            values = torch.cat([values, first.inputs[n, 0].double()])
        found.append(least_squares(equations, values[None], view.prior))
    return torch.cat(found)


def from_flat_sketch(jacobian: Jacobian, sketch: LinearMap, iterations: int = 40) -> Tensor:
    """C k equations for each input: sum_o g[c, o] a P[o] with g from the bias; conjugate gradients, all at once."""
    first = jacobian.layers[0]
    assert isinstance(first, DenseLayer)
    values, g = first.values[:, :, : sketch.k], first.values[:, :, sketch.k :]
    known = values != 0  # what a sparse package leaves out is not known to be zero

    def forward(a: Tensor) -> Tensor:
        return sketch.forward((g[..., None] * a[:, None, None, :]).flatten(2)) * known

    def adjoint(r: Tensor) -> Tensor:
        return torch.einsum("nco,ncoi->ni", g, sketch.adjoint(r * known).unflatten(2, (g.shape[2], -1)))

    residual = adjoint(values)
    x, direction, size = torch.zeros_like(residual), residual, residual.square().sum(1, keepdim=True)
    for _ in range(iterations):
        image = adjoint(forward(direction))
        step = size / (direction * image).sum(1, keepdim=True).clamp_min(1e-30)
        x, residual = x + step * direction, residual - step * image
        size, before = residual.square().sum(1, keepdim=True), size
        direction = residual + size / before.clamp_min(1e-30) * direction
        if float((size / x.square().sum(1, keepdim=True).clamp_min(1e-30)).max()) < 1e-12:
            break
    return x.double()


def without_noise(view: View) -> Tensor:
    """Inputs that were shortened and got noise: the most probable ones under the prior (a Wiener filter)."""
    privacy = view.config.privacy
    scale = min(1.0, privacy.clip / view.length)
    inputs = exact_inputs(view.packages[0])
    return least_squares(scale * torch.eye(inputs.shape[1]), inputs, view.prior, privacy.noise**2)


# Rows.


@dataclass(frozen=True)
class Row:
    """A setting and an attack on it."""

    setting: str
    attack: str
    settings: dict[str, Any]
    rebuild: Callable[[View], Tensor]
    rounds: int = 1
    """Packages that the attacker has seen, each at the weights of another round."""
    trained: bool = True
    """Whether the accuracy of the setting is measured."""


def _axis(k: int, **more: Any) -> dict[str, Any]:
    return {"package.projection": "axis", "package.sketch_size": k, **more}


def _flat(k: int, **more: Any) -> dict[str, Any]:
    dense = {"package.encoding": "dense", "package.projection": "flat", "package.sketch": "hadamard"}
    return {**dense, "package.sketch_size": k, **more}


def _noise(clip: float, noise: float) -> dict[str, Any]:
    return {"privacy.clip": clip, "privacy.noise": noise, "privacy.noise_seed": 7}


def _read(view: View) -> Tensor:
    return exact_inputs(view.packages[0])


def _mean_image(view: View) -> Tensor:
    return view.prior.mean.expand(view.packages[0].samples, -1)


def _solve_flat(view: View) -> Tensor:
    return from_flat_sketch(view.packages[0], sketch_of(view.config, view.layout, view.config.run.seed))


def rows(quick: bool) -> list[Row]:
    """From what hides nothing to what hides most."""
    sizes, flat, usual = ((48, 32, 16), 400, 32) if quick else ((500, 250, 100), 10_000, 250)
    secret = _axis(usual, **{"privacy.sketch_secret": "only for this benchmark"})
    found = [
        Row("nothing sent", "the mean image", {}, _mean_image, trained=False),
        Row("lossless, factored", "read", {}, _read),
        Row("lossless, dense", "divide", {"package.encoding": "dense"}, _read, trained=False),
        Row("6 bits, factored", "read", {"package.bits": 6}, _read),
        Row(f"flat k = {flat:,}", "solve", _flat(flat), _solve_flat, trained=False),
        Row(
            f"flat k = {flat:,}, half kept, 6 bits", "solve", _flat(flat, **{"package.keep": 0.5, "package.bits": 6}),
            _solve_flat, trained=False,
        ),
    ]  # fmt: skip
    for k in sizes:
        found.append(Row(f"axis k = {k}", "pseudo-inverse", _axis(k), lambda v: from_axis_sketch(v, None)))
        found.append(Row(f"axis k = {k}", "prior", _axis(k), lambda v: from_axis_sketch(v, v.prior)))
    coarse = _axis(usual, **{"package.bits": 6})
    found += [
        Row(f"axis k = {usual}, 6 bits", "prior", coarse, lambda v: from_axis_sketch(v, v.prior, 1e-2)),
        Row(f"axis k = {usual}", "prior, hidden layer", _axis(usual), lambda v: from_hidden(v, True)),
        Row(f"axis k = {usual}", "the same, 6 rounds", _axis(usual), lambda v: from_hidden(v, True), rounds=6),
        Row("secret sketch", "outsider: wrong seed, prior", secret, lambda v: from_axis_sketch(v, v.prior)),
        Row("secret sketch", "outsider: hidden layer, prior", secret, lambda v: from_hidden(v, False)),
        Row("secret sketch", "the same, 6 rounds", secret, lambda v: from_hidden(v, False), rounds=6),
    ]
    for clip, noise in ((28.0, 1.0), (7.0, 1.0), (1.9, 2.0)) if not quick else ((8.0, 1.0), (0.8, 1.0)):
        found.append(Row(f"noise {noise:g}, clip {clip:g}", "prior", _noise(clip, noise), without_noise))
    return found


# The peer under attack.


@dataclass(frozen=True)
class Scene:
    """The victim's samples, the attacker's, the candidates of the re-identification, the weights of some rounds."""

    dataset: Dataset
    size: dict[str, Any]
    victim: Tensor
    labels: np.ndarray
    prior: Prior
    length: float
    candidates: Tensor
    """The victim's samples are the first of them."""
    weights: list[Tensor]
    """At which a neighbour asks for packages, round by round."""
    accuracy: float
    """Of the lossless training that these weights are from."""


def make_scene(quick: bool) -> Scene:
    size: dict[str, Any] = {"run.workers": 1, "run.rounds": 6, "run.clients_every": 6}
    size |= {"data.dataset": "digits", "model.hidden": [32], "run.nodes": 4} if quick else _full_size()
    victims, own, others = (12, 600, 400) if quick else (24, 5000, 4976)
    dataset = datasets.load(size["data.dataset"])
    drawn = stream(0, "leakage").permutation(len(dataset.train.labels))[: victims + own + others]
    x = dataset.standardise(dataset.train.pixels[drawn])
    mine = x[victims : victims + own]
    config = load(flags={**size, "topology.degree": 3}, environment={})
    candidates = torch.cat([x[:victims], x[victims + own :]])
    labels, length = dataset.train.labels[drawn[:victims]], float(mine.flatten(1).norm(dim=1).mean())
    curve, prior = _train(config, dataset), Prior.of(mine)
    return Scene(dataset, size, x[:victims], labels, prior, length, candidates, curve.weights[:6], 100 * curve.accuracy)


def _full_size() -> dict[str, Any]:
    return {"data.dataset": "fashion-mnist", "run.nodes": 12, "data.partition": "dirichlet:0.5"}


class Curve:
    """Keeps the weights of one peer and the accuracy of a run."""

    def __init__(self, run: MemoryRun) -> None:
        self._run = run
        self.weights = [run.nodes[0].algorithm.weights]
        self.accuracy = 0.0

    def started(self, info: Any) -> None: ...

    def progress(self, k: int, done: int, total: int) -> None: ...

    def round_done(self, record: Any) -> None:
        self.weights.append(self._run.nodes[0].algorithm.weights)
        self.accuracy = record.aggregated_accuracy


def _train(config: Config, dataset: Dataset) -> Curve:
    dealt = partitions.partition(
        config.data.partition,
        dataset,
        config.run.nodes,
        samples_per_node=min(200, config.data.samples_per_node),
        seed=0,
    )
    run = MemoryRun(config, dataset, dealt)
    curve = Curve(run)
    run.run(curve)
    return curve


def attack(row: Row, scene: Scene) -> Tensor:
    """The images that the attacker believes in."""
    config = load(flags={**scene.size, **row.settings}, environment={})
    module = model.build(config.model, scene.dataset.shape, scene.dataset.classes, config.run.seed)
    layout = ParameterLayout.of(module)
    x, y = privatise(
        scene.victim.numpy(), scene.labels.astype(np.int64), config.privacy, scene.dataset.classes,
        randomness(config.privacy, "victim"),
    )  # fmt: skip
    victim = make_algorithm(config, "victim", module, torch.from_numpy(x), torch.from_numpy(y))
    assert isinstance(victim, Spark)
    terms = make_terms(config, "leakage", layout, scene.dataset.classes)
    arrived = []
    for k, w in enumerate(scene.weights[: row.rounds], start=1):
        sent = b"".join(encode(Package(victim._linearise(w, k).jacobian, victim.labels), terms, k=k, sender="v").wire())
        message = decode(sent, terms, at=w).message
        assert isinstance(message, Package)
        arrived.append(message.jacobian)
    return row.rebuild(View(config, layout, arrived, scene.weights[: row.rounds], scene.prior, scene.length))


def judge(found: Tensor, scene: Scene) -> dict[str, float]:
    """How close the images are to the originals."""
    true, pool = scene.victim.flatten(1).double(), scene.candidates.flatten(1).double()
    likeness = _centred(found) @ _centred(pool).T
    own = torch.arange(len(true))
    return {
        "relative_error": float(((found - true).norm(dim=1) / true.norm(dim=1)).mean()),
        "correlation": float(likeness[own, own].mean()),
        "re_identified_%": 100 * float((likeness.argmax(1) == own).double().mean()),
    }


def _centred(x: Tensor) -> Tensor:
    x = x.double() - x.double().mean(1, keepdim=True)
    unit: Tensor = x / x.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return unit


def draw(pictures: list[tuple[str, Tensor]], scene: Scene, path: Path, columns: int = 10) -> None:
    """A line a setting, the originals on top."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = [("original", scene.victim.flatten(1).double()), *pictures]
    columns = min(columns, len(scene.victim))
    size = (4.2 + 0.62 * columns, 0.62 * len(lines))
    figure, axes = pyplot.subplots(len(lines), columns, figsize=size, squeeze=False)
    channels, height, width = scene.dataset.shape
    for (name, images), line in zip(lines, axes, strict=True):
        for i, cell in enumerate(line):
            true = scene.victim[i].mean(0)
            image = images[i].reshape(channels, height, width).mean(0)
            noisy = float(image.abs().max()) > 4 * float(true.abs().max())
            low, high = (float(image.min()), float(image.max())) if noisy else (float(true.min()), float(true.max()))
            cell.imshow(image, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            cell.set_axis_off()
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=3.9 / size[0], right=0.99, top=0.995, bottom=0.005, wspace=0.06, hspace=0.06)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _epsilon(config: Config) -> float | None:
    privacy = config.privacy
    return gaussian_epsilon(2 * privacy.clip, privacy.noise, privacy.delta) if privacy.noise > 0 else None


def _accuracy(row: Row, scene: Scene, known: dict[str, float]) -> float | None:
    """Of a training with the setting, once a setting; a secret changes no accuracy but by chance."""
    if not row.trained:
        return None
    chosen = {key: value for key, value in row.settings.items() if key != "privacy.sketch_secret"}
    if not chosen:
        return scene.accuracy
    key = repr(sorted(chosen.items()))
    if key not in known:
        config = load(flags={**scene.size, "topology.degree": 3, **chosen}, environment={})
        known[key] = 100 * _train(config, scene.dataset).accuracy
    return known[key]


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--no-training", action="store_true", help="only the accuracy of the lossless training")
    parser.add_argument("--without", metavar="TEXT", default="\n", help="no rows whose setting holds this text")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose setting holds this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scene = make_scene(options.quick)
    table, pictures, known = [], [], dict[str, float]()
    chosen = [r for r in rows(options.quick) if options.only in r.setting and options.without not in r.setting]
    for row in chosen:
        found = attack(row, scene)
        pictures.append((f"{row.setting}: {row.attack}", found))
        figures = {"setting": row.setting, "attack": row.attack, **judge(found, scene)}
        figures["epsilon"] = _epsilon(load(flags=row.settings, environment={}))
        trains = not (options.quick or options.no_training) or not row.settings
        figures["accuracy_%"] = _accuracy(row, scene, known) if trains else None
        table.append(figures)
        print(f"{row.setting}, {row.attack}: error {figures['relative_error']:.3g}", file=sys.stderr, flush=True)
    report("leakage", table, options.json)
    if options.json is not None:
        draw(pictures, scene, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
