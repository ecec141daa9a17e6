"""A whole network on this machine: an orchestrator, a host with its peers, and the observer, each a process."""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from spark_node import model
from spark_node.config import Config, without_sketch_secret
from spark_node.data.datasets import Dataset
from spark_node.data.partitions import Partition
from spark_node.errors import ConfigError
from spark_node.launch.certificates import forget, secured
from spark_node.launch.host import Host, ending, fork
from spark_node.launch.logs import log_to
from spark_node.launch.observation import LivePage, describe, observe
from spark_node.launch.peer import PeerJob
from spark_node.launch.pids import forget_pid, note_pid
from spark_node.launch.samples import Room, peer_samples
from spark_node.membership import peer_names
from spark_node.observe.records import RoundRecord, RunInfo, Watcher
from spark_node.observe.run_folder import CHECKPOINTS, new_run_id

log = logging.getLogger(__name__)


def peer_jobs(
    config: Config,
    dataset: Dataset,
    partition: Partition,
    module: nn.Module,
    chosen: range | None = None,
    checkpoints: Path | None = None,
) -> list[PeerJob]:
    """What every peer, or every chosen one, starts with, in the order of their names."""
    test = _own_test(config, dataset)
    jobs = []
    names = peer_names(config.run.nodes)
    here = chosen or range(len(names))
    for place, i in enumerate(here):
        port = config.network.port + place if config.network.port else 0
        folder = checkpoints / names[i] if checkpoints is not None and config.checkpoint.enabled else None
        samples = peer_samples(config, names[i], dataset, partition.indices[i], folder)
        samples.keep()
        room = Room.of(samples.inputs)
        own = samples.inputs if room is None else room.inputs, samples.labels
        metrics_port = config.network.metrics_port + place if config.network.metrics_port else 0
        job = PeerJob(names[i], config, module, *own, dataset.classes, port, test, checkpoints=folder)
        jobs.append(replace(job, metrics_port=metrics_port, room=room))
    return jobs


def _own_test(config: Config, dataset: Dataset) -> tuple[Tensor, Tensor] | None:
    count = config.network.own_test
    if count == 0:
        return None
    return dataset.standardise(dataset.test.pixels[:count]), torch.from_numpy(dataset.test.labels[:count])


class Child:
    """A forked process that is ended with us."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def stop(self, patience: float = 15.0) -> None:
        end = time.monotonic() + patience
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        while self.poll() is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.02)


class LocalNetwork:
    """Orchestrator and host of one run; leaving the context ends every process that was started.

    A run that is resumed has its old identity; `recorded` says up to which round its folder has records.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        partition: Partition,
        module: nn.Module,
        folder: Path,
        *,
        run_id: str = "",
        recorded: int | None = None,
    ) -> None:
        self.dataset, self.partition, self.module = dataset, partition, module
        self.folder, self._recorded = folder, recorded
        self.run_id = run_id or new_run_id()
        self.config = secured(config, self.run_id, folder)
        self.orchestrator_address = config.network.orchestrator
        self._ports = (0, 0)
        self._restarts = config.network.restarts
        self.orchestrator: Child | None = None
        self.host: Child | None = None

    def __enter__(self) -> "LocalNetwork":
        try:
            if not self.orchestrator_address:
                self._start_orchestrator()
            self._start_host()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for child in (self.host, self.orchestrator):
            if child is not None:
                child.stop()
        for name in ("host", "orchestrator"):
            forget_pid(self.folder / "logs", name)
        forget(self.config, self.folder)

    def _start_orchestrator(self) -> None:
        from orchestrator.main import serve

        reading, writing = os.pipe()

        def work() -> int:
            os.close(reading)
            log_to(self.folder / "logs" / "orchestrator.log", self.config.network.log, "orchestrator")

            def ready(address: str, http_address: str) -> None:
                os.write(writing, f"{address} {http_address}".encode())
                os.close(writing)

            port, http_port = self._ports
            recorded = None if port else self._recorded
            settings = without_sketch_secret(self.config)
            return serve(settings, self.run_id, port=port, http_port=http_port, recorded=recorded, ready=ready)

        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.orchestrator = Child(fork(work, "orchestrator"))
        note_pid(self.folder / "logs", "orchestrator", self.orchestrator.pid)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode().split()
        if not said:
            raise ConfigError(f"the orchestrator could not start; {self.folder / 'logs' / 'orchestrator.log'} says why")
        self.orchestrator_address = said[0]
        self._ports = int(said[0].rpartition(":")[2]), int(said[1].rpartition(":")[2]) if len(said) > 1 else 0

    def supervise(self) -> None:
        """Start an orchestrator that has died again, where it was; the peers find it by themselves."""
        if self.orchestrator is None or self.orchestrator.poll() is None or self._restarts == 0:
            return
        self._restarts -= 1
        log.warning("the orchestrator %s; started again", ending(self.orchestrator.code or 0))
        with contextlib.suppress(ConfigError):  # its port is not free yet: at the next look
            self._start_orchestrator()

    def _start_host(self) -> None:
        config = self.config.replace(network__orchestrator=self.orchestrator_address)
        workers = config.run.workers or os.cpu_count() or 1

        def work() -> int:
            log_to(self.folder / "logs" / "host.log", config.network.log, "host")
            checkpoints = self.folder / CHECKPOINTS
            jobs = peer_jobs(config, self.dataset, self.partition, self.module, checkpoints=checkpoints)
            network = config.network
            host = Host(jobs, self.folder / "logs", workers=workers, restarts=network.restarts, log_form=network.log)
            return host.run()

        self.host = Child(fork(work, "host"))
        note_pid(self.folder / "logs", "host", self.host.pid)

    def over(self) -> str | None:
        """Why nothing more can come, or None."""
        code = self.host.poll() if self.host is not None else 1
        return None if code is None else f"the host of the peers {ending(code)}; see {self.folder / 'logs'}"


def _interrupt(*_: object) -> None:
    """SIGTERM ends a run as Ctrl-C does: what is there is written, every process is ended."""
    raise KeyboardInterrupt


def run_network(
    config: Config,
    dataset: Dataset,
    partition: Partition,
    watcher: Watcher,
    folder: Path,
    *,
    run_id: str = "",
    recorded: int | None = None,
    page: LivePage | None = None,
) -> None:
    """Train over gRPC, every peer a process of its own, and tell the watcher about it.

    The observer has a process too: this one never starts gRPC, so that it can fork again for another run.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
        info = describe(config, dataset, partition, module)
        watcher.started(info)
        network = LocalNetwork(config, dataset, partition, module, folder, run_id=run_id, recorded=recorded)
        with network:
            _watch(_start_observer(network, info, page), network, watcher)
    finally:
        torch.set_num_threads(threads)
        signal.signal(signal.SIGTERM, previous)


class _Telling:
    """A watcher in the observer's process: every event a line of JSON."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe

    def started(self, info: RunInfo) -> None:
        """Told already."""

    def progress(self, round: int, done: int, total: int) -> None:
        self._say(progress=[round, done, total])

    def round_done(self, record: RoundRecord) -> None:
        self._say(record=asdict(record))

    def failed(self, reason: str) -> None:
        self._say(failed=reason)

    def _say(self, **event: Any) -> None:
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()


def _start_observer(network: LocalNetwork, info: RunInfo, page: LivePage | None) -> tuple[Child, int]:
    """The observer's process, and the end of a pipe on which it tells what it sees."""
    reading, writing = os.pipe()

    def work() -> int:
        os.close(reading)
        log_to(network.folder / "logs" / "observer.log", network.config.network.log, "observer")
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            telling = _Telling(pipe)
            try:
                asyncio.run(_observe(network, info, telling, page))
            except Exception as error:
                log.exception("the observer failed")
                telling.failed(str(error) or type(error).__name__)
                return 1
        return 0

    child = Child(fork(work, "observer"))
    note_pid(network.folder / "logs", "observer", child.pid)
    os.close(writing)
    return child, reading


async def _observe(network: LocalNetwork, info: RunInfo, watcher: Watcher, page: LivePage | None) -> None:
    over: list[str] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGUSR1, over.append, "all of them have ended")
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await observe(
            network.config,
            network.orchestrator_address,
            network.dataset,
            network.module,
            info,
            watcher,
            alive=lambda: over[0] if over else None,
            page=page,
        )


def _watch(observer: tuple[Child, int], network: LocalNetwork, watcher: Watcher) -> None:
    """Pass on what the observer tells until it is done; tell it when no peer is left."""
    child, reading = observer
    told = False
    try:
        with os.fdopen(reading, "r", encoding="utf-8") as pipe:
            while True:
                network.supervise()
                ready, _, _ = select.select([pipe], [], [], 0.5)
                if ready:
                    line = pipe.readline()
                    if not line:
                        break
                    event = json.loads(line)
                    if "failed" in event:
                        raise RuntimeError("; ".join(filter(None, (event["failed"], network.over()))))
                    accuracy = _pass_on(event, watcher)
                    if accuracy is not None and network.config.run.ends_with(accuracy):
                        break
                elif not told and network.over() is not None:
                    os.kill(child.pid, signal.SIGUSR1)
                    told = True
    finally:
        child.stop()
        forget_pid(network.folder / "logs", "observer")


def _pass_on(event: dict[str, Any], watcher: Watcher) -> float | None:
    """Tell the watcher; the accuracy of a round that is finished."""
    if "progress" in event:
        watcher.progress(*event["progress"])
        return None
    record = RoundRecord(**{**event["record"], "client_accuracy": tuple(event["record"]["client_accuracy"])})
    watcher.round_done(record)
    return record.aggregated_accuracy
