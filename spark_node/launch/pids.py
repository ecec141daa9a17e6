"""Which process is which peer: a small file a process beside its log."""

import os
from pathlib import Path


def note_pid(logs: Path, name: str, pid: int) -> None:
    """Remember that `pid` is `name`, with its start time: numbers of processes are used again."""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"{name}.pid"
    fresh = path.with_suffix(".pid.new")
    fresh.write_text(f"{pid} {_started(pid)}\n", encoding="ascii")
    os.replace(fresh, path)


def forget_pid(logs: Path, name: str) -> None:
    """Its process is gone."""
    (logs / f"{name}.pid").unlink(missing_ok=True)


def live_pids(logs: Path) -> dict[str, int]:
    """The processes of a network that are there now, by name."""
    found = {}
    for path in sorted(logs.glob("*.pid")):
        try:
            pid, started = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue
        if started and _started(int(pid)) == started:
            found[path.stem] = int(pid)
    return found


def _started(pid: int) -> str:
    """Clock ticks from the machine's start to the process's; "gone" where there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return "gone"
    fields = after_name.split()
    return "gone" if fields[0] in "ZX" else fields[19]
