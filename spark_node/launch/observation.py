"""Watching a network, whoever runs it: what is known of it beforehand, and the observer that follows it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from spark_node.config import Config, without_sketch_secret
from spark_node.data.datasets import Dataset
from spark_node.data.partitions import Partition
from spark_node.learning.algorithms import make_terms
from spark_node.model import ParameterLayout
from spark_node.observe import dashboard
from spark_node.observe.history import Round
from spark_node.observe.live import Live
from spark_node.observe.observer import Observer
from spark_node.observe.records import RunInfo, Watcher
from spark_node.observe.watchers import Together
from spark_node.privacy import guarantee

_LAST_WORDS = 0.7
"""Seconds in which pages that are open hear how the run ended."""


def describe(config: Config, dataset: Dataset, partition: Partition, module: nn.Module) -> RunInfo:
    """What watchers are told before the first round."""
    samples = tuple(len(indices) for indices in partition.indices)
    privacy = guarantee(config.privacy, partition.indices, dataset.classes)
    parameters = ParameterLayout.of(module).size
    return RunInfo(parameters, config.run.nodes, samples, len(dataset.test.labels), privacy)


@dataclass(frozen=True)
class LivePage:
    """Where the live page is served."""

    listener: socket.socket
    host: str
    stays: bool = False
    """Whether it is there until it is stopped, however long the run has been over."""


async def observe(
    config: Config,
    orchestrator: str,
    dataset: Dataset,
    module: nn.Module,
    info: RunInfo,
    watcher: Watcher,
    *,
    recorded: Sequence[Round] = (),
    alive: Callable[[], str | None] | None = None,
    page: LivePage | None = None,
) -> None:
    """Follow the run at an orchestrator to its end, and serve its live page; no secret of the peers is known here."""
    layout, classes = ParameterLayout.of(module), dataset.classes
    config = without_sketch_secret(config)
    terms = cache(lambda run: make_terms(config, run, layout, classes))
    test = dataset.standardise(dataset.test.pixels), torch.from_numpy(dataset.test.labels)
    live = None if page is None else Live(config, info, recorded)
    told = watcher if live is None else Together(live, watcher)
    observer = Observer(config, orchestrator, terms, module, test, told, recorded=recorded, live=live)
    async with _served(live, page):
        await observer.follow(alive)


@contextlib.asynccontextmanager
async def _served(live: Live | None, page: LivePage | None) -> AsyncIterator[None]:
    """The page for as long as the run is followed, and how that ended for a moment more."""
    if live is None or page is None:
        yield
        return
    server = await dashboard.start(page.listener, page.host, live)
    try:
        yield
        live.over("complete")
        if page.stays:
            await asyncio.Event().wait()
    except Exception:
        live.over("failed")
        raise
    finally:
        live.over()
        await asyncio.sleep(_LAST_WORDS)
        server.close()
