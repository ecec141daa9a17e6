"""The seam between a peer's round and where its kernel lives: in this process, or spread over the peer's ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Unpack

from torch import Tensor

from spark_node.learning.evolution import EvolutionTerms, KernelOperator, Trajectory, evolve
from spark_node.learning.kernel import KERNELS
from spark_node.learning.layers import Jacobian


class Solver(Protocol):
    """Builds a neighbourhood's kernel and integrates the evolution under it."""

    def kernel(self, kind: str, jacobians: Sequence[Jacobian]) -> AbstractContextManager[KernelOperator]:
        """The kernel `full` or `trace`, held until the end of the context."""

    def evolve(self, kernel: KernelOperator, f0: Tensor, target: Tensor, **terms: Unpack[EvolutionTerms]) -> Trajectory:
        """The trajectory of the predictions under a kernel that this solver made."""


class LocalSolver:
    """Everything in this process."""

    def kernel(self, kind: str, jacobians: Sequence[Jacobian]) -> AbstractContextManager[KernelOperator]:
        return nullcontext(KERNELS[kind](jacobians))

    def evolve(self, kernel: KernelOperator, f0: Tensor, target: Tensor, **terms: Unpack[EvolutionTerms]) -> Trajectory:
        return evolve(kernel, f0, target, **terms)


HERE = LocalSolver()
