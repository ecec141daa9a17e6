"""Gossip: average weights with the neighbours, then train on one's own samples. The base of such algorithms.

A subclass says what training is, in `train`; everything else of the seam (learning/algorithm.py) is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from spark_node.config import Config
from spark_node.learning.algorithm import Stopwatch, no_stopwatch
from spark_node.learning.messages import Message, Weights
from spark_node.learning.robust import average
from spark_node.learning.state import taken_up
from spark_node.model import ParameterLayout, flatten


class Gossip(ABC):
    """One peer: its samples and its weights. The module stays in evaluation mode, as where SPARK linearises it."""

    def __init__(
        self,
        config: Config,
        peer: str,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        stopwatch: Stopwatch = no_stopwatch,
    ) -> None:
        self.config, self.peer, self.module = config, peer, module.to(inputs.device)
        self.inputs, self.labels = inputs, labels
        self.layout = ParameterLayout.of(module)
        self.w = flatten(module).to(inputs)
        self._stopwatch = stopwatch
        self._facts: dict[str, float] = {}

    @abstractmethod
    def train(self, k: int) -> dict[str, float]:
        """Round k: change self.w, which now is the average with the neighbours, by training; figures such as "loss".

        self.w is this peer's alone: it may be changed in place.
        """

    def parameters(self) -> dict[str, Tensor]:
        """self.w as the module's parameters, ready for torch.func.functional_call and autograd."""
        return self.layout.unflatten(self.w)

    @property
    def stages(self) -> Sequence[str]:
        return ("weights",)

    @property
    def weights(self) -> Tensor:
        return self.w

    @property
    def package_parameters(self) -> int:
        return self.layout.size

    def facts(self) -> dict[str, float]:
        return self._facts

    def state(self) -> dict[str, Tensor]:
        return {"w": self.w}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.w = taken_up(state, self.w)["w"].clone()

    def outgoing(self, stage: str, k: int, neighbours: Sequence[str]) -> dict[str, Message]:
        return dict.fromkeys(neighbours, Weights(self.w))

    def incorporate(self, stage: str, k: int, arrived: Mapping[str, Message]) -> None:
        others = {peer: m.w for peer, m in arrived.items() if isinstance(m, Weights)}
        # A new tensor: neighbours may still hold the one that was sent.
        self.w = average({**others, self.peer: self.w}, self.peer, self.config.robust)
        with self._stopwatch("local training"):
            self._facts = self.train(k)
        self.w = self.w.detach()
