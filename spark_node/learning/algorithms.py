"""The algorithms by name."""

import hashlib
import json
from dataclasses import asdict

from torch import Tensor, nn

from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.learning.algorithm import Algorithm, Learner, Stopwatch, no_stopwatch
from spark_node.learning.gossip_sgd import GossipSgd
from spark_node.learning.jacobian import Form
from spark_node.learning.solver import HERE, Solver
from spark_node.learning.spark import Spark, without_acceleration
from spark_node.model import ParameterLayout
from spark_node.package import planner
from spark_node.package.format import Terms
from spark_node.package.projection import Projection, ProjectionSpec
from spark_node.plugins import named
from spark_node.privacy import sketch_seed


def make_algorithm(
    config: Config,
    peer: str,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    stopwatch: Stopwatch = no_stopwatch,
    solver: Solver = HERE,
) -> Algorithm:
    """The learner of one peer as run.algorithm names it."""
    if ":" in config.run.algorithm:
        return own_algorithm(config, peer, module, inputs, labels, stopwatch)
    if config.run.algorithm not in ("spark", "ntk-dfl"):
        return GossipSgd(config, peer, module, inputs, labels, stopwatch)
    settings, form = config.package, config.learning.jacobian
    projection = make_projection(config, ParameterLayout.of(module))
    wire_form: Form = planner.forms(module, inputs[0], settings) if form == "auto" else form
    if config.run.algorithm == "ntk-dfl":
        config = without_acceleration(config)
    return Spark(config, peer, module, inputs, labels, stopwatch, projection=projection, form=wire_form, solver=solver)


def own_algorithm(
    config: Config, peer: str, module: nn.Module, inputs: Tensor, labels: Tensor, stopwatch: Stopwatch
) -> Algorithm:
    """What the user's own factory makes, if it is an algorithm."""
    name = config.run.algorithm
    learner: Learner = named("run.algorithm", name)
    made = learner(config, peer, module, inputs, labels, stopwatch)
    check_algorithm(name, made)
    return made


def check_algorithm(name: str, made: object) -> None:
    """Whether it has all that a peer will ask of it."""
    missing = [part for part in _PARTS if not hasattr(made, part)]
    if missing:
        what = type(made).__name__
        raise ConfigError(f"run.algorithm = {name!r}: {what} has no {', '.join(missing)}; see spark_node.Algorithm")


_PARTS = sorted(part for part in vars(Algorithm) if not part.startswith("_"))


def make_projection(config: Config, layout: ParameterLayout) -> Projection:
    """The run's projection as [package] describes it, the same on every peer that knows the run's secret, if any."""
    return Projection(layout, _projection_spec(config), sketch_seed(config.run.seed, config.privacy.sketch_secret))


def _projection_spec(config: Config) -> ProjectionSpec:
    settings = config.package
    return ProjectionSpec(
        kind=settings.projection,
        sketch=settings.sketch,
        k=settings.sketch_size,
        fresh=settings.fresh_sketch,
        dense=settings.encoding == "dense",
    )


def make_terms(config: Config, run: str, layout: ParameterLayout, classes: int) -> Terms:
    """What the messages of a run are about. Sizes only: an observer who knows no secret has the same."""
    sketched = Projection(layout, _projection_spec(config), config.run.seed).layout
    return Terms(run, layout, sketched, classes, config.package)


def signature(config: Config, module: nn.Module) -> str:
    """Of the model and of every setting that all peers of a run must share."""
    sections = ("model", "learning", "momentum", "distillation", "local")
    shared = {name: asdict(getattr(config, name)) for name in sections}
    wire = asdict(config.package)
    for local in ("level", "chunk_bytes", "max_message_bytes", "max_decoded_bytes", "factor_cache_bytes", "in_memory"):
        del wire[local]
    wire["secret"] = bool(config.privacy.sketch_secret)  # that there is one; of itself a digest would help to guess it
    said = {**shared, "package": wire, "algorithm": config.run.algorithm, "rounds": config.run.rounds}
    text = ParameterLayout.of(module).signature + json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
