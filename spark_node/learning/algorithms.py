"""The algorithms by name."""

from torch import Tensor, nn

from spark_node.config import Config
from spark_node.learning.algorithm import Algorithm, Stopwatch, no_stopwatch
from spark_node.learning.spark import Spark, without_acceleration


def make_algorithm(
    config: Config,
    peer: str,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    stopwatch: Stopwatch = no_stopwatch,
) -> Algorithm:
    """The learner of one peer as run.algorithm names it."""
    if config.run.algorithm == "ntk-dfl":
        config = without_acceleration(config)
    return Spark(config, peer, module, inputs, labels, stopwatch)
