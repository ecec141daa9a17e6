"""The ranks that torchrun has started, as one group: gloo for what lies in memory, NCCL for what lies on GPUs."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from spark_node.distributed.place import Place
from spark_node.distributed.wire import Said, from_bytes, to_bytes

log = logging.getLogger(__name__)

MOST_SAID, MOST_BYTES = 2**28, 2**40
"""Largest description and largest buffer that a rank takes from another."""
_CPU = torch.device("cpu")


class RankLost(Exception):
    """Another rank has ended or does not answer: what they did together cannot go on."""


@contextmanager
def _together(timeout: float, who: str = "another rank") -> Iterator[None]:
    """Around everything that needs the other ranks."""
    try:
        yield
    except RuntimeError as error:  # of gloo, NCCL and the store, as torch raises them
        said = " ".join(str(error).split("\n")[0].split())[:200]
        raise RankLost(f"{who} is gone, or has not answered for {timeout:g} s ({said})") from None


class Group:
    """What the ranks do together. Collectives are called by all of them, in the same order."""

    def __init__(self, place: Place, device: torch.device, timeout: float) -> None:
        self.place, self.device, self.timeout = place, device, timeout
        self.rank, self.size = place.rank, place.size

    def add(self, tensor: Tensor) -> Tensor:
        with _together(self.timeout):
            dist.all_reduce(tensor)
        return tensor

    def add_at(self, tensor: Tensor, rank: int) -> None:
        with _together(self.timeout):
            dist.reduce(tensor, rank)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with _together(self.timeout):
            dist.all_gather(found, tensor)
        return found

    def agree(self, number: int) -> int:
        """Rank 0's number, on all ranks. Each waits for all others, so it also shows that they are there."""
        said = torch.tensor([number if self.rank == 0 else 0])
        return int(self.add(said))

    def send(self, rank: int, said: Said, tensors: Sequence[Tensor] = (), device: torch.device | None = None) -> None:
        """A description and tensors to one rank, which calls `receive`; the tensors travel from a device."""
        device = device or self.device
        table, buffer = to_bytes(tensors, device)
        text = torch.frombuffer(bytearray(json.dumps([said, table]).encode()), dtype=torch.uint8)
        with _together(self.timeout, f"rank {rank}"):
            dist.send(torch.tensor([len(text), len(buffer)]), rank)
            dist.send(text, rank)
            if len(buffer):
                dist.send(buffer, rank)

    def receive(self, rank: int, device: torch.device | None = None) -> tuple[Said, list[Tensor]]:
        """What a rank sends to this one next."""
        sizes = torch.zeros(2, dtype=torch.int64)
        with _together(self.timeout, f"rank {rank}"):
            dist.recv(sizes, rank)
            said_bytes, buffer_bytes = map(int, sizes)
            if not 0 < said_bytes <= MOST_SAID or not 0 <= buffer_bytes <= MOST_BYTES:
                raise RankLost(f"rank {rank} sends nonsense: {said_bytes} and {buffer_bytes} bytes")
            text = torch.empty(said_bytes, dtype=torch.uint8)
            dist.recv(text, rank)
            buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=device or self.device)
            if buffer_bytes:
                dist.recv(buffer, rank)
        said, table = json.loads(text.numpy().tobytes())
        return said, from_bytes(table, buffer)

    def tell(self, said: Said) -> Said:
        """Rank 0's words, on all ranks."""
        if self.rank != 0:
            return self.receive(0, _CPU)[0]
        for rank in range(1, self.size):
            self.send(rank, said)
        return said


@contextmanager
def joined(place: Place, device: str, timeout: float) -> Iterator[Group]:
    """The group of all ranks, from their meeting on until each has left."""
    chosen = torch.device(device)
    backend = "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl"
    with _together(timeout):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        log.debug("rank %d of %d, %s on %s", place.rank, place.size, backend, chosen)
        yield Group(place, chosen, timeout)
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
