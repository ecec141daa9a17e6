"""The same work on all hosts at once, each with a time limit: one that hangs holds up nobody."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spark_node.errors import UserError

Result = TypeVar("Result")


class HostProblem(Exception):
    """What went wrong on one host, in one line."""


@dataclass
class Outcome(Generic[Result]):
    """Per host what came of it, or what went wrong."""

    done: dict[str, Result] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def on_all(hosts: Iterable[str], work: Callable[[str], Result], seconds: float) -> Outcome[Result]:
    """Do `work(host)` on every host at once; who takes longer than `seconds` is given up."""
    outcome: Outcome[Result] = Outcome()
    names = list(hosts)

    def one(host: str) -> None:
        try:
            outcome.done[host] = work(host)
        except (HostProblem, UserError) as problem:
            outcome.problems[host] = " ".join(str(problem).split())
        except Exception as error:
            outcome.problems[host] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    # Daemons: a call that never comes back must not keep the command from ending.
    threads = {host: threading.Thread(target=one, args=(host,), name=host, daemon=True) for host in names}
    for thread in threads.values():
        thread.start()
    end = time.monotonic() + seconds
    for host, thread in threads.items():
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            outcome.problems[host] = f"no answer within {seconds:.0f} s"
    # A copy: a thread that was given up may still come back.
    answered = {host: outcome.done[host] for host in names if host in outcome.done and host not in outcome.problems}
    return Outcome(answered, {host: outcome.problems[host] for host in names if host in outcome.problems})
