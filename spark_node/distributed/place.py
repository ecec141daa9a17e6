"""Which rank this process is, as torchrun says in the environment. No torch here: every command looks."""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from spark_node.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """One process among those that torchrun has started."""

    rank: int
    size: int
    local_rank: int
    """Among those of this machine: the number of its GPU."""
    local_size: int


def place_of(environment: Mapping[str, str] | None = None) -> Place | None:
    """This process's place; None where it is alone."""
    given = os.environ if environment is None else environment
    if given.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [given.get(name, "") for name in names]
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if missing or not all(number.isdecimal() for number in numbers):
        wrong = ", ".join(missing) or "a number that is none"
        raise ConfigError(f"WORLD_SIZE is set but not {wrong}; start with torchrun, or unset WORLD_SIZE")
    return Place(*map(int, numbers))


def leave(code: int) -> NoReturn:
    """End a rank's process without taking the interpreter down.

    A thread of gloo that frees a tensor at just that time would abort it, and the run would seem to have failed when
    all was done (pytorch/pytorch#179291).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def device_of(name: str, place: Place) -> str:
    """run.device for this rank: `cuda` is the GPU of its LOCAL_RANK."""
    if name.startswith("cuda:"):
        raise ConfigError(f"run.device = {name!r}: under torchrun give cuda; each rank takes the GPU of its LOCAL_RANK")
    return f"cuda:{place.local_rank}" if name == "cuda" else name
