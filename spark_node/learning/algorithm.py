"""The seam between a peer and what it learns by.

A round is a few stages. In each the algorithm says what goes to which neighbour, and then folds in what came back
from whoever answered in time. An algorithm holds one peer's state and knows neither clock nor network.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

from spark_node.config import Config
from spark_node.learning.messages import Message

Stopwatch = Callable[[str], AbstractContextManager[object]]
"""Times a named part of the work: `with stopwatch("kernel"): ...`. The caller owns the clock."""


def no_stopwatch(_: str) -> AbstractContextManager[object]:
    """For callers who do not measure."""
    return nullcontext()


class Algorithm(Protocol):
    """One peer's learner."""

    @property
    def stages(self) -> Sequence[str]:
        """The exchanges of a round, in order."""

    @property
    def weights(self) -> Tensor:
        """The peer's model as it is now, flat."""

    @property
    def package_parameters(self) -> int:
        """Columns of the Jacobians that neighbours send: d, or fewer where they are projected."""

    def outgoing(self, stage: str, k: int, neighbours: Sequence[str]) -> dict[str, Message]:
        """Called first in a stage of round k: what to send to which neighbour."""

    def incorporate(self, stage: str, k: int, arrived: Mapping[str, Message]) -> None:
        """Called last in a stage: fold in what came from whoever answered. After the last stage the round is done."""

    def state(self) -> dict[str, Tensor]:
        """Called between rounds: everything that the next round depends on, apart from its number."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state. What is missing but the weights "w" starts anew; ValueError where it does not fit."""

    def facts(self) -> dict[str, float]:
        """Figures of the finished round for logs and metrics: loss, t_star, eta, ..."""


class Learner(Protocol):
    """Makes one peer's algorithm: a class whose constructor takes these, or a function. `run.algorithm` may name one.

    The module has the weights that all peers start from; inputs and labels are the peer's own samples.
    """

    def __call__(
        self, config: Config, peer: str, module: nn.Module, inputs: Tensor, labels: Tensor, stopwatch: Stopwatch, /
    ) -> Algorithm: ...
