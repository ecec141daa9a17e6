"""One peer over several ranks: rank 0 is the peer, the others hold slices of its kernel.

Rank 0 says what comes next and sends each rank its slice of the neighbourhood's Jacobians. The evolution itself then
runs on every rank with the same numbers, so that a kernel product needs one collective and no word in between; a
digest at the end of it shows that all ranks have computed the same.
"""

import enum
import logging
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Unpack, cast

import torch
from torch import Tensor

from spark_node.distributed.group import Group, RankLost
from spark_node.distributed.wire import Said, Tensors, describe_jacobian, read_jacobian
from spark_node.learning.evolution import EvolutionTerms, KernelOperator, Trajectory, evolve
from spark_node.learning.layers import Jacobian
from spark_node.learning.sharding import SHARDED, ShardedFull, ShardedTrace, shard

log = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
"""Between two signs of life while rank 0 has no work for the others (or a third of the time-out, if that is less)."""


class Word(enum.IntEnum):
    """What rank 0 wants next."""

    NOTHING = 0
    KERNEL = 1
    EVOLVE = 2
    APPLY = 3
    PULL_BACK = 4
    RELEASE = 5
    END = 6


class Lead:
    """Rank 0's solver: its kernels live on all ranks."""

    def __init__(self, group: Group) -> None:
        self._group, self._lock = group, threading.Lock()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="ranks", daemon=True)
        self.lost: RankLost | None = None
        self.on_lost: Callable[[RankLost], object] = lambda error: None

    def start(self) -> None:
        """Look after the other ranks from now on; `on_lost` is called once if one is gone."""
        self._beating.start()

    def close(self) -> None:
        """Send the other ranks home; RankLost where one has gone before."""
        self._over.set()
        if self.lost is not None:
            raise self.lost
        with self._lock:
            self._group.agree(Word.END)
            self.lost = RankLost("the ranks have been sent home")  # whoever comes now, comes too late
        self._beating.join(self._group.timeout)

    def _beat(self) -> None:
        while not self._over.wait(min(BEAT_SECONDS, self._group.timeout / 3)):
            try:
                with self._in_order():
                    self._group.agree(Word.NOTHING)
            except RankLost:
                return

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """One thread at a time talks to the ranks, and the first failure is the last."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            try:
                yield
            except RankLost as error:
                self.lost = error
                self._over.set()
                self.on_lost(error)
                raise

    def kernel(self, kind: str, jacobians: Sequence[Jacobian]) -> AbstractContextManager[KernelOperator]:
        return self._kernel(kind, jacobians)

    @contextmanager
    def _kernel(self, kind: str, jacobians: Sequence[Jacobian]) -> Iterator[KernelOperator]:
        shards = shard(jacobians, self._group.size)
        with self._in_order():
            self._group.agree(Word.KERNEL)
            for rank in range(1, self._group.size):
                tensors = Tensors()
                described = [describe_jacobian(j, tensors) for j in shards[rank].jacobians]
                self._group.send(rank, {"kind": kind, "jacobians": described}, tensors.list)
            part = SHARDED[kind](shards[0].jacobians, self._group)
        try:
            yield LedKernel(self, part, [s.columns.to(jacobians[0].logits.device) for s in shards])
        finally:
            if self.lost is None:
                with self._in_order():
                    self._group.agree(Word.RELEASE)

    def evolve(self, kernel: KernelOperator, f0: Tensor, target: Tensor, **terms: Unpack[EvolutionTerms]) -> Trajectory:
        assert isinstance(kernel, LedKernel)
        with self._in_order():
            self._ask(Word.EVOLVE, {**terms, "timesteps": list(terms["timesteps"])}, f0, target)
            return _evolve(self._group, kernel.part, f0, target, terms)

    def apply(self, part: ShardedFull | ShardedTrace, residual: Tensor) -> Tensor:
        """K r on all ranks."""
        with self._in_order():
            self._ask(Word.APPLY, {}, residual)
            return part.apply(residual)

    def pull_back(self, part: ShardedFull | ShardedTrace, residual: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """J^T r: every rank's parameters in their places of the flat vector."""
        most = max(map(len, columns))
        with self._in_order():
            self._ask(Word.PULL_BACK, {"most": most}, residual)
            found = self._group.gather(_padded(part.pull_back(residual), most))
        w = residual.new_zeros(sum(map(len, columns)))
        for place, own in zip(columns, found, strict=True):
            w[place] = own[: len(place)]
        return w

    def _ask(self, word: Word, said: Said, *tensors: Tensor) -> None:
        self._group.agree(word)
        for rank in range(1, self._group.size):
            self._group.send(rank, said, tensors)


@contextmanager
def leading(group: Group) -> Iterator[Lead]:
    """The lead of all ranks, which go home at the end; RankLost, whatever else went wrong, where one is lost."""
    lead = Lead(group)
    lead.start()
    try:
        yield lead
    finally:
        lead.close()


class LedKernel:
    """A kernel over all ranks, as rank 0 has it."""

    def __init__(self, lead: Lead, part: ShardedFull | ShardedTrace, columns: Sequence[Tensor]) -> None:
        self._lead, self.part, self._columns = lead, part, columns
        self.samples = part.samples

    def apply(self, residual: Tensor) -> Tensor:
        """K r, by itself; within an evolution nothing has to be asked for."""
        return self._lead.apply(self.part, residual)

    def pull_back(self, residual: Tensor) -> Tensor:
        """J^T r, [d]."""
        return self._lead.pull_back(self.part, residual, self._columns)


def serve(group: Group) -> None:
    """Every other rank: do as rank 0 says until it says END. A SIGTERM to all ranks is rank 0's to act on."""
    ending: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    part: ShardedFull | ShardedTrace | None = None
    try:
        while (word := Word(group.agree(0))) is not Word.END:
            if word is Word.NOTHING:
                continue
            if word is Word.RELEASE:
                part = None
                continue
            said, tensors = group.receive(0)
            if word is Word.KERNEL:
                part = SHARDED[said["kind"]]([read_jacobian(j, tensors) for j in said["jacobians"]], group)
                continue
            assert part is not None
            if word is Word.EVOLVE:
                try:
                    _evolve(group, part, tensors[0], tensors[1], cast(EvolutionTerms, said))
                except ArithmeticError as error:  # rank 0 has met the same, and tells it
                    log.debug("%s", error)
            elif word is Word.APPLY:
                part.apply(tensors[0])
            elif word is Word.PULL_BACK:
                own = part.pull_back(tensors[0])
                group.gather(_padded(own, said["most"]))
    except RankLost:
        if not ending:
            raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _evolve(
    group: Group, part: ShardedFull | ShardedTrace, f0: Tensor, target: Tensor, terms: EvolutionTerms
) -> Trajectory:
    """The evolution on every rank at once; RankLost where the ranks' numbers are not the same bits."""
    found = evolve(part, f0, target, **terms)
    last = torch.stack([found.predictions[-1], found.residual_sums[-1]]).cpu()
    mine = torch.tensor([found.evaluations, zlib.crc32(last.numpy().tobytes())])
    if any(not torch.equal(mine, theirs) for theirs in group.gather(mine)):
        raise RankLost("the ranks' evolutions differ: all ranks of a peer need the same kind of processor")
    return found


def _padded(part: Tensor, size: int) -> Tensor:
    return torch.cat([part, part.new_zeros(size - len(part))])
