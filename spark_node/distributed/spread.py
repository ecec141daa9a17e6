"""A whole network in memory, spread over ranks: each has a block of the peers, and the same weights come out.

Peers on one rank hand each other messages as in one process. Messages to other ranks travel bit for bit, or as the
bytes of the package codec where messages are encoded. Sums over all peers are passed from rank to rank and grow in the
order of the peers, as they do in one process.
"""

import asyncio
import hashlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from spark_node.config import Config, to_toml
from spark_node.data.datasets import Dataset
from spark_node.data.partitions import Partition
from spark_node.distributed.group import Group, RankLost, joined
from spark_node.distributed.links import Links
from spark_node.distributed.place import Place, device_of
from spark_node.distributed.wire import Said, describe_message, read_message
from spark_node.errors import ConfigError
from spark_node.launch.memory import Finished, MemoryRun
from spark_node.learning.messages import Message
from spark_node.learning.sharding import bounds
from spark_node.membership import peer_names
from spark_node.node import RoundResult
from spark_node.observe.accuracy import add_weights, mean_of
from spark_node.observe.records import RoundRecord, RunInfo, Watcher
from spark_node.observe.run_folder import CHECKPOINTS
from spark_node.transport.memory import Compute, MemoryNetwork

_CLOSING_SECONDS = 10.0


class Unwatched:
    """The watcher of ranks that tell rank 0."""

    def started(self, info: RunInfo) -> None:
        pass

    def progress(self, round: int, done: int, total: int) -> None:
        pass

    def round_done(self, record: RoundRecord) -> None:
        pass


class SpreadNetwork(MemoryNetwork):
    """A memory network some of whose mailboxes are on other ranks."""

    def __init__(self, config: Config, group: Group) -> None:
        super().__init__()
        self._device = torch.device(config.run.device)
        names = peer_names(config.run.nodes)
        blocks = [range(*bounds(len(names), group.size, rank)) for rank in range(group.size)]
        self.own = blocks[group.rank]
        self._rank_of = {names[i]: rank for rank, block in enumerate(blocks) for i in block}
        self._rank = group.rank
        self._posted: dict[tuple[int, str], Message] = {}
        self._read: dict[str, Message] = {}
        self._answers: dict[tuple[str, str, str, int], asyncio.Future[bool]] = {}
        self._taking: set[asyncio.Task[None]] = set()
        self.links: Links | None = None
        self.compute: Compute | None = None
        self.failed: Callable[[Exception], None] = lambda error: None

    async def deliver(self, peer: str, sender: str, stage: str, k: int, message: Message) -> None:
        rank = self._rank_of[peer]
        if rank == self._rank:
            return await super().deliver(peer, sender, stage, k, message)
        assert self.links is not None
        address = [peer, sender, stage, k]
        if self._posted.get((rank, sender)) is message:  # one for several neighbours there: it travels once
            return self.links.post(rank, {"to": address, "again": True})
        self._posted[rank, sender] = message
        said, tensors = describe_message(message)
        return self.links.post(rank, {"to": address, "message": said}, tensors)

    async def deliver_bytes(self, peer: str, sender: str, stage: str, k: int, data: bytes, compute: Compute) -> bool:
        rank = self._rank_of[peer]
        if rank == self._rank:
            return await super().deliver_bytes(peer, sender, stage, k, data, compute)
        assert self.links is not None
        key = (peer, sender, stage, k)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        coded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.links.post(rank, {"to": list(key), "coded": True}, [coded])
        return await answer

    def arrived(self, rank: int, said: Said, tensors: list[Tensor]) -> None:
        """A message of another rank; called in the event loop."""
        peer, sender, stage, k = said["to"]
        if "taken" in said:
            self._answers.pop((peer, sender, stage, k)).set_result(said["taken"])
        elif "coded" in said:
            task = asyncio.get_running_loop().create_task(self._take(rank, (peer, sender, stage, k), tensors[0]))
            self._taking.add(task)
            task.add_done_callback(self._taken)
        else:
            if "message" in said:
                self._read[sender] = read_message(said["message"], [t.to(self._device) for t in tensors])
            self.slot((peer, sender, stage, k)).set_result(self._read[sender])

    async def _take(self, rank: int, key: tuple[str, str, str, int], coded: Tensor) -> None:
        assert self.compute is not None
        assert self.links is not None
        peer, sender, stage, k = key
        taken = await super().deliver_bytes(peer, sender, stage, k, coded.numpy().tobytes(), self.compute)
        self.links.post(rank, {"to": list(key), "taken": taken})

    def _taken(self, task: "asyncio.Task[None]") -> None:
        self._taking.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.failed(error)

    def forget(self) -> None:
        """Between rounds: nothing of this one is sent or read again."""
        self._posted.clear()
        self._read.clear()


class SpreadRun(MemoryRun):
    """One rank's part of a memory run. Rank 0 watches, and decides when it ends."""

    network: SpreadNetwork

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        partition: Partition,
        group: Group,
        checkpoints: Path | None = None,
        run_id: str = "memory",
    ) -> None:
        network = SpreadNetwork(config, group)
        super().__init__(config, dataset, partition, checkpoints, run_id, own=network.own, network=network)
        network.compute, network.failed = self._compute, self._end
        self._group, self._stop = group, _Stop()
        self._mail: dict[tuple[str, int, int], asyncio.Future[tuple[Said, list[Tensor]]]] = {}
        self._watcher: Watcher = Unwatched()
        self._gone: RankLost | None = None
        if not config.run.workers:
            self._workers = max(1, self._workers // group.place.local_size)

    def resume(self, recorded: int) -> int:
        """The newest round that every peer of every rank has."""
        rounds = torch.zeros(recorded + 1, dtype=torch.int64)
        for k in self._held():
            if k <= recorded:
                rounds[k] = 1
        held = (self._group.add(rounds) == self._group.size).nonzero().flatten().tolist()
        k = max(held, default=0)
        self._take_up(k)
        return k

    async def _drive(self, watcher: Watcher, first: int) -> None:
        """The rounds, until they are done, this rank is told to stop, or another one ends."""
        loop = asyncio.get_running_loop()
        self._watcher = watcher
        self._ended: asyncio.Future[None] = loop.create_future()

        def arrived(rank: int, said: Said, tensors: list[Tensor]) -> None:
            loop.call_soon_threadsafe(self._arrived, rank, said, tensors)

        def lost(error: RankLost) -> None:
            self._gone = self._gone or error
            loop.call_soon_threadsafe(self._end, error)

        links = self.network.links = Links(self._group, arrived, lost)
        self._stop.listener = lambda: loop.call_soon_threadsafe(self._end, Interrupted())
        links.start()
        work = loop.create_task(self._rounds(watcher, first))
        try:
            await asyncio.wait({work, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                self._ended.result()
            work.result()
        except Interrupted:
            links.post_all({"interrupted": True})
            await asyncio.to_thread(links.close, _CLOSING_SECONDS)
            if self._gone is not None:  # torchrun also stops the ranks that are left when one has died
                raise self._gone from None
            raise KeyboardInterrupt from None
        except RankLost:
            raise
        except Exception as error:
            links.post_all({"failed": f"rank {self._group.rank}: {_cause(error)}"})
            raise
        finally:
            self._stop.listener = None
            await asyncio.to_thread(links.close, 0.0 if self._gone is not None else _CLOSING_SECONDS)

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _arrived(self, rank: int, said: Said, tensors: list[Tensor]) -> None:
        try:
            self._read(rank, said, tensors)
        except Exception as error:  # nobody else would hear of it, and all would wait
            self._end(error)

    def _read(self, rank: int, said: Said, tensors: list[Tensor]) -> None:
        if "to" in said:
            self.network.arrived(rank, said, tensors)
        elif "mail" in said:
            self._box(said["mail"], said["k"], rank).set_result((said, tensors))
        elif "progress" in said:
            super()._progress(said["progress"], self._watcher)
        elif "failed" in said:
            self._end(RuntimeError(said["failed"]))
        elif "interrupted" in said:
            self._end(Interrupted())

    def _box(self, name: str, k: int, rank: int) -> "asyncio.Future[tuple[Said, list[Tensor]]]":
        key = (name, k, rank)
        if key not in self._mail:
            self._mail[key] = asyncio.get_running_loop().create_future()
        return self._mail[key]

    def _write(self, rank: int, name: str, k: int, tensors: Sequence[Tensor] = (), **said: Any) -> None:
        assert self.network.links is not None
        self.network.links.post(rank, {"mail": name, "k": k, **said}, tensors)

    async def _letter(self, rank: int, name: str, k: int) -> tuple[Said, list[Tensor]]:
        """What a rank writes to this one under a name in round k."""
        found = await self._box(name, k, rank)
        del self._mail[name, k, rank]
        return found

    def _progress(self, k: int, watcher: Watcher) -> None:
        if self._group.rank == 0:
            return super()._progress(k, watcher)
        assert self.network.links is not None
        return self.network.links.post(0, {"progress": k})

    async def _aggregated(self, k: int, models: Sequence[Tensor]) -> float:
        """The sum of all weights goes from rank to rank, in the order of the peers, and its mean back to rank 0."""
        rank, last = self._group.rank, self._group.size - 1
        device = models[0].device if models else torch.device(self.config.run.device)
        before = None if rank == 0 else (await self._letter(rank - 1, "sum", k))[1][0].to(device)
        total = add_weights(before, models)
        self._write(rank + 1 if rank < last else 0, "sum", k, [total])
        if rank > 0:
            return 0.0
        total = (await self._letter(last, "sum", k))[1][0].to(device)
        mean = mean_of(total, self.config.run.nodes, models[0])
        score: float = await self._compute(self._score, mean)
        return score

    async def _conclude(self, k: int, finished: Finished, watcher: Watcher, start: float, trained: float) -> bool:
        """Rank 0 hears all parts, tells of the round, and says whether there is another."""
        self.network.forget()
        if self._group.rank > 0:
            self._write(0, "part", k, part=asdict(finished))
            verdict, _ = await self._letter(0, "verdict", k)
            return bool(verdict["go_on"])
        parts = [finished]
        for rank in range(1, self._group.size):
            said = (await self._letter(rank, "part", k))[0]["part"]
            parts.append(Finished(**{**said, "results": [RoundResult(**result) for result in said["results"]]}))
        whole = Finished(
            results=[result for part in parts for result in part.results],
            aggregated=finished.aggregated,
            clients=[accuracy for part in parts for accuracy in part.clients],
            sent={kind: sum(part.sent[kind] for part in parts) for kind in finished.sent},
        )
        go_on = await super()._conclude(k, whole, watcher, start, trained)
        for rank in range(1, self._group.size):
            self._write(rank, "verdict", k, go_on=go_on)
        return go_on


class Interrupted(Exception):
    """This rank, or another, was told to stop."""


class _Stop:
    """SIGINT and SIGTERM, from the start of a spread run on: torchrun sends them to all ranks, also when one failed.

    Outside of the rounds they are not acted upon: what is being written then is written to its end.
    """

    def __init__(self) -> None:
        self.listener: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.listener is not None:
            self.listener()


def run_spread(
    config: Config,
    dataset: Dataset,
    partition: Partition,
    place: Place,
    watcher: Watcher | None = None,
    folder: Path | None = None,
    run_id: str = "memory",
    recorded: int | None = None,
) -> None:
    """This rank's part of a run over all ranks. Rank 0 has the watcher and the folder, and tells the others where."""
    digest = hashlib.sha256(to_toml(config).encode()).hexdigest()
    local = config.replace(run__device=device_of(config.run.device, place))
    with joined(place, "cpu", config.run.rank_timeout) as group:
        where = None if folder is None else str(folder.resolve())
        begun = group.tell({"folder": where, "run_id": run_id, "recorded": recorded, "settings": digest})
        if begun["settings"] != digest:
            raise ConfigError(f"rank {place.rank} has other settings than rank 0; give all ranks the same command")
        checkpoints = None if begun["folder"] is None else Path(begun["folder"]) / CHECKPOINTS
        run = SpreadRun(local, dataset, partition, group, checkpoints, begun["run_id"])
        run.run(watcher or Unwatched(), first=1 + run.resume(begun["recorded"] or 0))


def check_spread(config: Config, place: Place) -> None:
    """Refuse what cannot be spread."""
    if config.run.transport != "memory":
        raise ConfigError(
            f"run.transport = {config.run.transport!r}: torchrun spreads runs in memory; give --transport memory"
        )
    if config.run.nodes < place.size:
        raise ConfigError(f"run.nodes = {config.run.nodes}: fewer than the {place.size} ranks; start fewer ranks")
    device_of(config.run.device, place)


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
