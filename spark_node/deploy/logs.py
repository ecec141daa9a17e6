"""What the containers of a deployment write, line by line as it comes."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from spark_node.deploy.engine import Engine
from spark_node.deploy.fleet import Fleet

_WAITING = 10_000
"""Lines that wait to be shown; then the reading waits."""


@dataclass(frozen=True)
class Line:
    """A line of a log, and whose it is."""

    host: str
    container: str
    text: str


def show_logs(fleet: Fleet, hosts: list[str], lines: int, follow: bool, show: Callable[[Line], None]) -> dict[str, str]:
    """Show the last lines of every container of these hosts, and with `follow` all that come; problems by host."""
    outcome = fleet.on(lambda engine: engine.containers(), None, hosts)
    pending: queue.Queue[Line | None] = queue.Queue(_WAITING)

    def read(engine: Engine, name: str) -> None:
        try:
            source = engine.follow(name, lines) if follow else iter(engine.tail(name, lines))
            for text in source:
                pending.put(Line(engine.host.name, name, text))
        except Exception as error:
            pending.put(Line(engine.host.name, name, f"(the log breaks off: {error})"))
        finally:
            pending.put(None)

    left = 0
    for host, found in outcome.done.items():
        for seen in found:
            threading.Thread(target=read, args=(fleet.engines[host], seen.name), daemon=True).start()
            left += 1
    while left:
        line = pending.get()
        if line is None:
            left -= 1
        else:
            show(line)
    return outcome.problems
