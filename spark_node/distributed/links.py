"""Messages between ranks that compute meanwhile: each way to each rank has its own thread and keeps its order.

They travel by gloo's send and receive, from memory to memory. Where nothing is to be said a rank still shows that it is
there, so that another's silence or end is noticed within the group's time-out.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spark_node.distributed.group import Group, RankLost
from spark_node.distributed.wire import Said

_BEAT: Said = {"beat": True}
_END: Said = {"end": True}
_CPU = torch.device("cpu")

Arrived = Callable[[int, Said, list[Tensor]], None]
Lost = Callable[[RankLost], None]


class Links:
    """This rank's ways to and from all others."""

    def __init__(self, group: Group, arrived: Arrived, lost: Lost) -> None:
        """`arrived(rank, said, tensors)` and `lost(error)` are called in threads of this class."""
        self._group, self._arrived, self._lost = group, arrived, lost
        others = [rank for rank in range(group.size) if rank != group.rank]
        self._waiting: dict[int, queue.SimpleQueue[tuple[Said, Sequence[Tensor]]]]
        self._waiting = {rank: queue.SimpleQueue() for rank in others}
        self._threads = [
            threading.Thread(target=work, args=(rank,), name=f"{work.__name__} {rank}", daemon=True)
            for rank in others
            for work in (self._send, self._receive)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(self, rank: int, said: Said, tensors: Sequence[Tensor] = ()) -> None:
        """Put on its way to a rank, after all that was posted there before; returns at once."""
        self._waiting[rank].put((said, tensors))

    def post_all(self, said: Said) -> None:
        for rank in self._waiting:
            self.post(rank, said)

    def close(self, seconds: float) -> None:
        """Say that nothing more comes, and wait until all others have said so too, or that long."""
        self.post_all(_END)
        for thread in self._threads:
            thread.join(seconds)

    def _send(self, rank: int) -> None:
        said: Said = {}
        try:
            while said is not _END:
                try:
                    said, tensors = self._waiting[rank].get(timeout=self._group.timeout / 3)
                except queue.Empty:
                    said, tensors = _BEAT, ()
                self._group.send(rank, said, tensors, _CPU)
        except RankLost as error:
            self._lost(error)

    def _receive(self, rank: int) -> None:
        try:
            while True:
                said, tensors = self._group.receive(rank, _CPU)
                if said == _END:
                    return
                if said != _BEAT:
                    self._arrived(rank, said, tensors)
        except RankLost as error:
            self._lost(error)
