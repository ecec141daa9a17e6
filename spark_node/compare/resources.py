"""How many cells fit side by side on this machine, by cores and by memory."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from spark_node.compare.study import Cell
from spark_node.config import Config
from spark_node.observe.history import Run

_MB = 10**6
_PROCESS, _WORKER = 450 * _MB, 250 * _MB
_PEER_IN_MEMORY, _PEER_PROCESS = 3 * _MB, 30 * _MB
_CLASSES = 10
_SHARE = 0.8
"""Part of the free memory that a comparison may take."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can be had without swapping, where the system tells it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def estimated_memory(config: Config) -> int:
    """A generous guess of what one cell takes, from what runs of several sizes took."""
    peers = config.run.nodes
    samples = config.data.samples_per_node or 200
    if config.run.transport == "grpc":
        return _PROCESS + peers * _PEER_PROCESS
    kernel = (samples * (config.topology.degree + 1)) ** 2 * 4
    flat = config.package.sketch_size if config.package.projection == "flat" else 0
    packages = peers * config.topology.degree * samples * _CLASSES * flat * 4 // config.learning.subsample
    return _PROCESS + _WORKER + peers * (_PEER_IN_MEMORY + samples * 8_000) + 4 * kernel + packages


def measured_memory(runs: Iterable[Run]) -> int | None:
    """The most that one of these runs held, where they know it."""
    held = [run.summary["memory"].get(key) for run in runs for key in ("pss_total", "peak_rss")]
    return max((int(count) for count in held if isinstance(count, int | float)), default=None)


def default_jobs(cells: Sequence[Cell], finished: Iterable[Run] = (), free: int | None = None) -> int:
    """As many cells at once as there are cores, if memory allows; at least one."""
    if not cells:
        return 1
    free = available_memory() if free is None else free
    each = max(max(estimated_memory(cell.config) for cell in cells), measured_memory(finished) or 0)
    fitting = len(cells) if free is None else int(free * _SHARE // each)
    return max(1, min(cores(), len(cells), fitting))


def workers(config: Config, jobs: int) -> int:
    """Workers of one cell: its own choice, else its share of the cores."""
    return config.run.workers or max(1, cores() // jobs)
