"""Breaks things in a running network, mends what was to last only a while, and tells what the network did."""

import contextlib
import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from spark_node.chaos.order import FILE, Order
from spark_node.chaos.script import Fault
from spark_node.errors import UserError
from spark_node.launch.pids import live_pids

_TICK = 0.02
_LOOK_EVERY = 0.2
_PERIOD, _STOPPED_PART = 0.1, 0.8
_SHARE = 0.5
_SERVICES = ("orchestrator", "observer", "host")


@dataclass
class Told:
    """What happened, for the end of the day."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    gone: int = 0
    back: int = 0

    def summary(self) -> dict[str, Any]:
        """The figures of the whole time."""
        seconds = [row["seconds"] for row in self.rounds]
        return {
            "faults": len(self.faults),
            "rounds": len(self.rounds),
            "processes_gone": self.gone,
            "processes_back": self.back,
            "round_seconds_median": statistics.median(seconds) if seconds else None,
            "round_seconds_longest": max(seconds, default=None),
            "neighbours_used": sum(row["used"] for row in self.rounds),
            "neighbours_expected": sum(row["expected"] for row in self.rounds),
        }


class Chaos:
    """One network's trouble: faults from a script or at random, until the run is over or time is up."""

    def __init__(self, folder: Path, say: Callable[[str], None], seed: int = 0) -> None:
        self._folder, self._logs, self._say = folder, folder / "logs", say
        self._random = Random(f"victims/{seed}")
        self._mend: list[tuple[float, Callable[[], None], str]] = []
        self._slow: dict[int, bool] = {}
        self._order = Order()
        self._rows = 0
        self._last_round = 0
        self.told = Told()
        self._alive = live_pids(self._logs)
        self._known = set(self._alive)
        if not self._peers():
            raise UserError(f"{folder}: no peer of this run is there; start one: spark-dfl run --out {folder} ...")
        self._follow_rounds(quietly=True)

    def run(self, script: list[Fault], at_random: Iterator[tuple[float, str, float]] | None, seconds: float) -> None:
        """Everything in due time; whatever is still broken at the end is mended."""
        start = time.monotonic()
        waiting = list(script)
        next_random = self._next_random(start, at_random)
        looked = 0.0
        try:
            while time.monotonic() - start < seconds:
                now = time.monotonic()
                if now - looked >= _LOOK_EVERY:
                    looked = now
                    self._follow_rounds()
                    self._follow_processes()
                    if not self._peers() or (self._folder / "summary.json").exists():
                        self._say("the run is over")
                        break
                for fault in [f for f in waiting if self._is_due(f, now - start)]:
                    waiting.remove(fault)
                    self.apply(fault)
                if next_random is not None and now >= next_random[0]:
                    self.apply(self._at_someone(next_random[1], next_random[2]))
                    next_random = self._next_random(now, at_random)
                self._keep_slow(now)
                self._mend_due(now)
                if not waiting and at_random is None and not self._mend and seconds == float("inf"):
                    break
                time.sleep(_TICK)
        finally:
            self._mend_due(float("inf"))
        for fault in waiting:
            self._say(f"never came to it: {fault}")

    def _is_due(self, fault: Fault, elapsed: float) -> bool:
        return self._last_round >= fault.round if fault.round is not None else elapsed >= (fault.at or 0.0)

    @staticmethod
    def _next_random(now: float, found: Iterator[tuple[float, str, float]] | None) -> tuple[float, str, float] | None:
        if found is None:
            return None
        pause, kind, seconds = next(found)
        return now + pause, kind, seconds

    def _at_someone(self, kind: str, seconds: float) -> Fault:
        return Fault(kind, (self._random.choice(sorted(self._peers())),), seconds)

    def _peers(self) -> dict[str, int]:
        return {name: pid for name, pid in self._alive.items() if name not in _SERVICES}

    # Breaking and mending.

    def apply(self, fault: Fault) -> None:
        """Break something now."""
        self._follow_processes()
        missing = [name for name in fault.names if name not in self._alive]
        if missing:
            self._say(f"{fault}: {', '.join(missing)} is not there; left alone")
            return
        self.told.faults.append({**asdict(fault), "after_round": self._last_round, "time": time.time()})
        if fault.kind in ("cut", "corrupt"):
            self._give_order(fault)
        else:
            for name in fault.names:
                self._break(fault, name, self._alive[name])
        self._say(f"after round {self._last_round}: {fault}")

    def _break(self, fault: Fault, name: str, pid: int) -> None:
        """The mending is noted first: Ctrl-C may come at any time."""
        if fault.kind == "kill":
            _signal(pid, signal.SIGKILL)
        elif fault.kind == "pause":
            self._later(fault.seconds, lambda: _signal(pid, signal.SIGCONT), f"{name} goes on")
            _signal(pid, signal.SIGSTOP)
        elif fault.kind == "slow":

            def quick() -> None:
                self._slow.pop(pid, None)
                _signal(pid, signal.SIGCONT)

            self._later(fault.seconds, quick, f"{name} is quick again")
            self._slow[pid] = False
        else:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            self._later(fault.seconds, lambda: _limit_back(pid, before), f"{name} can write again")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))

    def _give_order(self, fault: Fault) -> None:
        until = time.time() + fault.seconds
        if fault.kind == "cut":
            rest = tuple(sorted(set(self._peers()) - set(fault.names)))
            order = replace(self._order, groups=(fault.names, rest))
            mended: dict[str, Any] = {"groups": ()}
        else:
            order = replace(self._order, corrupt={**self._order.corrupt, **dict.fromkeys(fault.names, _SHARE)})
            mended = {"corrupt": {}}

        def mend() -> None:
            self._order = replace(self._order, **mended)
            self._order.write(self._logs / FILE)

        self._later(fault.seconds, mend, f"{fault.kind} of {','.join(fault.names)} is over")
        self._order = replace(order, until=max(until, order.until))
        self._order.write(self._logs / FILE)

    def _later(self, seconds: float, mend: Callable[[], None], text: str) -> None:
        self._mend.append((time.monotonic() + seconds, mend, text))

    def _mend_due(self, now: float) -> None:
        for entry in [e for e in self._mend if e[0] <= now]:
            self._mend.remove(entry)
            entry[1]()
            self._say(entry[2])

    def _keep_slow(self, now: float) -> None:
        wanted = (now % _PERIOD) / _PERIOD < _STOPPED_PART
        for pid, stopped in list(self._slow.items()):
            if stopped != wanted:
                _signal(pid, signal.SIGSTOP if wanted else signal.SIGCONT)
                self._slow[pid] = wanted

    # Watching.

    def _follow_processes(self) -> None:
        now = live_pids(self._logs)
        for name in sorted(self._alive.keys() | now.keys()):
            before, after = self._alive.get(name), now.get(name)
            if before == after:
                continue
            if before is not None:
                self.told.gone += 1
                self._say(f"{name} is gone" if after is None else f"{name} was gone and is back")
            elif name in self._known:
                self._say(f"{name} is back")
            self.told.back += after is not None and name in self._known
        self._alive = now
        self._known |= now.keys()

    def _follow_rounds(self, quietly: bool = False) -> None:
        try:
            lines = (self._folder / "rounds.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        except OSError:
            return
        fresh, self._rows = lines[self._rows :], len(lines)
        for line in fresh:
            row = json.loads(line)
            self._last_round = row["round"]
            if quietly:
                continue
            seconds, neighbours = row["seconds"]["round"], row["neighbours"]
            used = {"used": neighbours["used"], "expected": neighbours["expected"]}
            accuracy = row["aggregated_accuracy"]
            self.told.rounds.append({"round": row["round"], "seconds": seconds, "accuracy": accuracy, **used})
            self._say(
                f"round {row['round']}: {100 * accuracy:.2f} %, {seconds:.1f} s, "
                f"{used['used']} of {used['expected']} neighbours used"
            )


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _limit_back(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
