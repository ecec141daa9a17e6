"""What to break, and when: a script of lines, or faults at random at a given rate.

at 10s kill peer-003
round 4 pause peer-001 5s
round 6 cut peer-000,peer-001 20s
round 8 kill orchestrator
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from spark_node.errors import ConfigError

FAULTS = {
    "kill": "SIGKILL; the host starts it again as its policy says, `run` does so with the orchestrator",
    "pause": "SIGSTOP, and SIGCONT after a while",
    "slow": "stopped four fifths of the time for a while",
    "cut": "neither hears nor is heard by the rest for a while; several names are cut off together",
    "corrupt": "half of the messages that it sends have a wrong bit for a while",
    "full-disk": "it can write no file for a while, as on a full disk",
}
LASTING = tuple(name for name in FAULTS if name != "kill")
_SECONDS = 5.0
_FORM = "expected: at SECONDSs | round K, then FAULT NAME[,NAME] [SECONDSs]"


@dataclass(frozen=True)
class Fault:
    """One thing to break."""

    kind: str
    names: tuple[str, ...]
    """Of processes: peer-003, orchestrator, observer."""
    seconds: float = _SECONDS
    at: float | None = None
    """Seconds after the beginning."""
    round: int | None = None
    """Or once that round was finished."""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.kind in LASTING else ""
        return f"{self.kind} {','.join(self.names)}{lasting}"


def parse(text: str, where: str = "script") -> list[Fault]:
    """The faults of a script; ConfigError names the line that is none."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].split()
        if said:
            faults.append(_parse_line(said, f"{where}, line {number}: {line.strip()!r}"))
    return faults


def _parse_line(words: Sequence[str], where: str) -> Fault:
    if len(words) not in (4, 5):
        raise ConfigError(f"{where}: {_FORM}")
    when, moment, kind, names, *rest = words
    if kind not in FAULTS:
        raise ConfigError(f"{where}: no fault {kind!r}; there are: {', '.join(FAULTS)}")
    if rest and kind not in LASTING:
        raise ConfigError(f"{where}: {kind} does not last; leave {rest[0]!r} out")
    seconds = _seconds(rest[0], where) if rest else _SECONDS
    who = tuple(name for name in names.split(",") if name)
    if when == "at":
        return Fault(kind, who, seconds, at=_seconds(moment, where))
    if when == "round" and moment.isdecimal():
        return Fault(kind, who, seconds, round=int(moment))
    raise ConfigError(f"{where}: {_FORM}")


def _seconds(text: str, where: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?s?", text):
        raise ConfigError(f"{where}: {text!r} is no time; for example 2.5s")
    return float(text.rstrip("s"))


def at_random(kinds: Sequence[str], per_minute: float, seconds: float, seed: int) -> Iterator[tuple[float, str, float]]:
    """(pause before it, kind, seconds that it lasts) for ever: independent faults at a mean rate."""
    for kind in kinds:
        if kind not in FAULTS:
            raise ConfigError(f"--faults {kind}: no such fault; there are: {', '.join(FAULTS)}")
    random = Random(f"chaos/{seed}")
    while True:
        yield random.expovariate(per_minute / 60), random.choice(list(kinds)), seconds
