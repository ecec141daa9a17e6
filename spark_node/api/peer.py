"""One peer of a real network, in a user's own process: a script, a service, a notebook."""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages name the fix; its log does not

import numpy as np
import torch
from torch import Tensor, nn

from spark_node.api import background
from spark_node.api.models import Model, load_config, own_learner, own_module, settings_layer, with_weights
from spark_node.api.samples import Array, Pair, as_dataset, check_classes, samples_of
from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.devices import check_device
from spark_node.launch.peer import PeerJob, PeerProcess
from spark_node.launch.samples import peer_samples
from spark_node.learning.algorithm import Learner
from spark_node.observe.accuracy import accuracy
from spark_node.privacy import refuse_hidden
from spark_node.security.identity import Role

_OVER = ("finished", "stopped", "failed")
_PATIENCE = 30.0
"""Seconds that `stop` waits for a peer in the middle of its work."""


@dataclass(frozen=True)
class PeerRound:
    """A round that this peer has finished."""

    round: int
    loss: float | None
    """Of the algorithm's own choice: at t*, or of local training."""
    accuracy: float | None
    """On the peer's test samples, where it has any."""
    neighbours: int
    """Whose messages were used."""
    expected: int
    """Neighbours that the round had."""
    bytes_sent: int
    seconds: float
    facts: Mapping[str, float]
    """Everything that the algorithm tells: eta, t_star, alpha, tau, ..."""


class Peer:
    """One peer: your samples, your model, your certificate; its neighbours are wherever they are.

        peer = spark_node.Peer(x, y, model=make_net, orchestrator="10.0.0.1:7000", certs="my-certs")
        with peer:                                    # joins; leaves at the end of the block
            for done in peer.rounds():                # each round as it ends
                print(done.round, done.loss, peer.accuracy(x_test, y_test))
        net = peer.model                              # a torch module

    The peer works in a thread beside yours: training goes on while you look at it, and never waits for you.
    x, y          this peer's samples, as for `simulate`. What leaves are weights and packages, which by default tell a
                  neighbour as much as the samples do (docs/privacy.md).
    model         as for `simulate`. All peers must start from the same weights: a factory, called under the run's
                  seed, sees to that; of a module, give every peer the same.
    orchestrator  "host:port" of the run's orchestrator.
    certs         folder with this peer's certificate (spark-dfl certs issue); name: which, where it holds several.
    classes       how many there are, where the model does not say it (model = None, "mlp", "cnn").
    host          the address at which others reach this peer.
    test          (x, y) on which each round's model is measured.
    checkpoints   folder in which its state is kept, to go on from after a crash; None: it keeps none.
    preset, config, settings, algorithm, rounds, seed
                  as on the command line. All peers of a run share model, algorithm and learning settings, else the
                  orchestrator refuses the newcomer: the run's config.toml, given as `config`, is the simplest way.
    """

    def __init__(
        self,
        x: Array,
        y: Array,
        model: Model = None,
        *,
        orchestrator: str | None = None,
        certs: str | Path | None = None,
        name: str | None = None,
        classes: int | None = None,
        host: str | None = None,
        test: Pair | None = None,
        checkpoints: str | Path | None = None,
        algorithm: str | Learner | None = None,
        rounds: int | None = None,
        seed: int | None = None,
        preset: str | None = None,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        known, learner = own_learner(algorithm)
        layer = settings_layer(
            settings,
            run__algorithm=known,
            run__rounds=rounds,
            run__seed=seed,
            model__kind=model if isinstance(model, str) else None,
            network__orchestrator=orchestrator,
            network__host=host,
            security__certs=None if certs is None else str(certs),
        )
        self.config = load_config(preset, config, layer)
        refuse_hidden(self.config.privacy.sketch_secret)
        if not self.config.network.orchestrator:
            raise ConfigError('orchestrator: give "host:port" of the run\'s orchestrator (spark-dfl orchestrator)')
        check_device(self.config.run.device)
        self.name = _name(self.config, name)
        self._job = self._make_job(samples_pair=(x, y), test=test, model=model, classes=classes, folder=checkpoints)
        self._job = replace(self._job, learner=learner)
        self._module = with_weights(self._job.module, _flat(self._job.module))
        self._w = _flat(self._job.module)
        self._process: PeerProcess | None = None
        self._work: Future[None] | None = None
        self._change = threading.Condition()
        self._state = "new"
        self._failure: BaseException | None = None
        self._history: list[PeerRound] = []
        self._told = 0

    def _make_job(
        self, *, samples_pair: Pair, test: Pair | None, model: Model, classes: int | None, folder: str | Path | None
    ) -> PeerJob:
        own, device = samples_of(samples_pair, "data"), self.config.run.device
        module, classes = own_module(model, self.config, own.pixels.shape[1:], classes)
        dataset = as_dataset(self.name, own, own, classes)
        kept = None if folder is None else Path(folder) / self.name
        samples = peer_samples(self.config, self.name, dataset, np.arange(len(own)), kept)
        samples.keep()
        measured = None
        if test is not None:
            held = samples_of(test, "test")
            check_classes("test", held.labels, classes)
            measured = torch.from_numpy(held.pixels).to(device), torch.from_numpy(held.labels).to(device)
        port = self.config.network.port
        return PeerJob(
            self.name,
            self.config,
            module.to(device),
            samples.inputs,
            samples.labels,
            classes,
            port,
            measured,
            checkpoints=kept,
        )

    def start(self) -> "Peer":
        """Join the run; returns once the orchestrator has taken the peer, and raises its reason if it does not."""
        if self._work is not None:
            raise ConfigError(f"{self.name} has been started already; make a new Peer to join again")
        loop = background.loop()
        self._work = asyncio.run_coroutine_threadsafe(self._run(), loop)
        _alive.add(self)
        with self._change:
            self._change.wait_for(lambda: self._state not in ("new", "joining"))
        if self._state == "failed":
            self._raise()
        return self

    def stop(self) -> None:
        """Leave the run: the neighbours hear of it through the orchestrator, and this peer's port is closed."""
        if self._work is None:
            return
        background.loop().call_soon_threadsafe(self._leave)
        try:
            self._work.result(_PATIENCE)
        except StillRunning:
            self._work.cancel()
        except Exception:
            if self._state != "failed":
                raise
        _alive.discard(self)

    def __enter__(self) -> "Peer":
        return self.start()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def rounds(self) -> Iterator[PeerRound]:
        """Each finished round, once, as it ends; the iteration ends with the run, or when the peer is stopped."""
        if self._work is None:
            self.start()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._told < len(self._history) or self._state in _OVER)
                if self._told == len(self._history):
                    break
                done = self._history[self._told]
                self._told += 1
            yield done
        if self._state == "failed":
            self._raise()

    @property
    def history(self) -> list[PeerRound]:
        """All rounds so far."""
        return list(self._history)

    @property
    def state(self) -> str:
        """new, joining, waiting (for the common start), training, finished, stopped or failed."""
        return self._state

    @property
    def round(self) -> int:
        """The last round that this peer has finished; 0 before the first."""
        return self._history[-1].round if self._history else 0

    @property
    def weights(self) -> Tensor:
        """The newest weights, flat."""
        return self._w.cpu().clone()

    @property
    def model(self) -> nn.Module:
        """The newest model as a torch module, yours to keep: a copy, which training does not touch."""
        return with_weights(self._module, self._w)

    def accuracy(self, x: Array, y: Array) -> float:
        """Of the newest model on these samples."""
        samples = samples_of((x, y), "data")
        parts = torch.from_numpy(samples.pixels), torch.from_numpy(samples.labels)
        w = self._w.cpu()
        return accuracy(with_weights(self._module, w), w, *parts)

    def __repr__(self) -> str:
        return f"<Peer {self.name}, {self._state}, round {self.round}>"

    async def _run(self) -> None:
        """The peer's life, in the background's loop."""
        following: asyncio.Task[None] | None = None
        try:
            self._process = PeerProcess(self._job)
            following = asyncio.create_task(self._follow(self._process))
            await self._process.run()
            state: tuple[str, BaseException | None] = ("finished" if self._state == "finished" else "stopped", None)
        except BaseException as error:
            state = "failed", error
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        self._set(*state)

    async def _follow(self, process: PeerProcess) -> None:
        async for data in process.progress.follow(0):
            said = pb.Progress.FromString(data)
            for report in said.rounds:
                found = process.progress.model(report.round)
                with self._change:
                    self._w = self._w if found is None else found[1]
                    self._history.append(_told(report))
                    self._change.notify_all()
            self._set(said.state)

    def _set(self, state: str, failure: BaseException | None = None) -> None:
        with self._change:
            self._state, self._failure = state, failure
            self._change.notify_all()

    def _leave(self) -> None:
        if self._process is not None:
            self._process.leave()

    def _raise(self) -> None:
        assert self._failure is not None
        raise self._failure


def _told(report: "pb.RoundReport") -> PeerRound:
    facts = dict(report.facts)
    return PeerRound(
        round=report.round,
        loss=facts.get("loss"),
        accuracy=facts.pop("accuracy", None),
        neighbours=report.used,
        expected=report.expected,
        bytes_sent=sum(edge.sent for edge in report.bytes),
        seconds=report.seconds,
        facts=facts,
    )


def _name(config: Config, name: str | None) -> str:
    """The one that was given, or the only one that there is a certificate for."""
    security = config.security
    if security.tls == "on" and not security.certs:
        without = 'on one machine without encryption: settings={"security.tls": "off"}'
        raise ConfigError(f"certs: give the folder of this peer's certificate (spark-dfl certs issue); {without}")
    if name is not None:
        return name
    if security.tls == "off":
        raise ConfigError('name: give this peer a name of its own in the run, for example name="notebook"')
    found = sorted(path.stem for path in (Path(security.certs) / Role.PEER.value).glob("*.pem"))
    if len(found) != 1:
        holds = f"holds certificates of {len(found)} peers" if found else "holds no certificate of a peer"
        raise ConfigError(f'name: {security.certs} {holds}; say which peer this is, for example name="peer-003"')
    return found[0]


def _flat(module: nn.Module) -> Tensor:
    from spark_node.model import flatten

    return flatten(module)


_alive: "weakref.WeakSet[Peer]" = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """A script that forgets to stop its peers leaves the run all the same."""
    for peer in list(_alive):
        with contextlib.suppress(Exception):
            peer.stop()
