"""Hours of rounds: do memory, file descriptors, threads or connections of a peer grow?

A network of 20 small peers trains until the time is up (two hours, or --minutes), with a round every 30 s: they get a
processor when they need one, and between two rounds gRPC ends the threads that it does not need (after 20 s without
work). --pace 0 trains without a pause; then ten peers wait for each processor all the time, and gRPC's pools of threads
grow with the work that piles up.

Every peer is looked at from outside, through /proc. Growth is the median over peers of the least-squares slope after
the first tenth of the time (warm-up), as a change over the whole time; `second half` and `last quarter` are the changes
within these: what fills up and then stays (caches, histories of bounded length, gaps in the heap) has none in the end,
a leak has as much as ever. `quarters` are the medians of the four quarters of the time, one after the other. The
history of rounds for observers that were away is kept short here, so that it is full before the measuring begins. A
plot and every single look go beside the JSON file.

Memory is told four times. A peer shares the pages that it was forked with until it writes to them, if only a count of
references: its private memory grows by that without a byte being allocated. Its anonymous memory, shared or not, grows
only by what is allocated, and by gaps between that. `malloc` and `python blocks` are what a peer itself says that it
has asked for and not given back (at /metrics, as Prometheus would read it): without gaps, and the ones to judge a leak
by.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import set_flags

MEASURES = ("private_MB", "anonymous_MB", "malloc_MB", "python_blocks", "descriptors", "threads", "connections")


def look(pid: int, metrics: str | None = None) -> dict[str, float] | None:
    """One process as it is now; `metrics`: where it tells what it has asked for."""
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        files = [os.readlink(file) for file in (place / "fd").iterdir()]
        rollup = [line.split() for line in (place / "smaps_rollup").read_text().splitlines()[1:]]
    except OSError:
        return None
    pages = {name: int(size) * 1024 / 1e6 for name, size, _ in rollup}
    private = pages["Private_Clean:"] + pages["Private_Dirty:"]
    sockets = sum(file.startswith("socket:") for file in files)
    found = {"private_MB": private, "anonymous_MB": pages["Anonymous:"], "descriptors": len(files)}
    found |= {"threads": int(status["Threads"]), "connections": sockets}
    return found | (asked(metrics) if metrics is not None else {})


def asked(metrics: str) -> dict[str, float]:
    """What a peer says at such an address that it holds; nothing where it does not answer."""
    try:
        with urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    told = (("malloc_MB", "spark_memory_malloc_bytes", 1e6), ("python_blocks", "spark_memory_python_blocks", 1))
    return {what: values[series] / unit for what, series, unit in told if series in values}


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has now."""
    for first in range(20_000, 30_000, count):
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports between 20000 and 30000")


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares, a second."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    middle, mean = statistics.mean(x), statistics.mean(y)
    spread = sum((a - middle) ** 2 for a in x)
    return sum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def change(lines: list[list[tuple[float, float]]], begin: float, end: float) -> float | None:
    """How much the middle one of several lines rises from one time to another."""
    parts = [[(t, v) for t, v in line if begin < t <= end] for line in lines]
    slopes = [slope(part) for part in parts if len(part) > 2]
    return statistics.median(slopes) * (end - begin) if slopes else None


Looks = dict[str, list[tuple[float, dict[str, float]]]]
"""Of each process: when it was looked at (seconds from the start), and what was found."""


def watch(minutes: float, peers: int, pace: float) -> tuple[Looks, int]:
    """Train for so long and look at every process every few seconds; also how many rounds were finished."""
    from spark_node.launch.pids import live_pids

    settings = {
        "run.transport": "grpc",
        "run.nodes": peers,
        "run.rounds": 1_000_000,
        "run.clients_every": 1_000_000,
        "run.pace": pace,
        "network.report_history": 16,
        "data.samples_per_node": 20,
        "model.hidden": [16],
        "learning.timesteps": [100],
        "package.weights": "int8",
        "network.metrics_port": (ports := free_ports(peers)),
    }
    seen: Looks = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, "-m", "spark_node", "run", *set_flags(settings), "--out", str(folder), "--quiet"]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        start = time.monotonic()
        try:
            while (elapsed := time.monotonic() - start) < 60 * minutes:
                if run.poll() is not None:
                    raise RuntimeError(run.stderr.read() if run.stderr is not None else "")
                for name, pid in live_pids(folder / "logs").items():
                    number = name.removeprefix("peer-")
                    found = look(pid, f"127.0.0.1:{ports + int(number)}" if number.isdigit() else None)
                    if found is not None:
                        seen.setdefault(name, []).append((elapsed, found))
                time.sleep(min(15.0, 60 * minutes / 60))
            rounds = len((folder / "rounds.jsonl").read_text().splitlines())
        finally:
            run.send_signal(signal.SIGTERM)
            run.communicate()
    return seen, rounds


def judge(seen: Looks, minutes: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of process and each thing that might grow."""
    rows = []
    for kind, names in (("peer", [n for n in seen if n.startswith("peer-")]), ("orchestrator", ["orchestrator"])):
        for what in MEASURES:
            lines = [[(t, values[what]) for t, values in seen[name] if what in values] for name in names]
            tails = [tail for line in lines if len(tail := [(t, v) for t, v in line if t > 6 * minutes]) > 2]
            if not tails:
                continue
            growth = [slope(tail) * 60 * minutes for tail in tails]
            level = statistics.median(statistics.median(v for _, v in tail) for tail in tails)
            points = [point for line in lines for point in line]
            quarters = [[v for t, v in points if q <= t / (15 * minutes) < q + 1] for q in range(4)]
            rows.append({
                "process": kind, "what": what, "rounds": rounds, "median": level,
                "growth": statistics.median(growth), "growth_%": 100 * statistics.median(growth) / max(level, 1e-9),
                "largest_growth": max(growth), "second_half": change(tails, 30 * minutes, 60 * minutes),
                "last_quarter": change(tails, 45 * minutes, 60 * minutes),
                "quarters": " ".join(f"{statistics.median(quarter):.4g}" for quarter in quarters if quarter),
            })  # fmt: skip
    return rows


def measure(minutes: float, peers: int, pace: float) -> list[dict[str, Any]]:
    """The rows of one soak."""
    seen, rounds = watch(minutes, peers, pace)
    return judge(seen, minutes, rounds)


def plot(seen: Looks, path: Path) -> None:
    """Medians over the peers, and the middle half of them, as the time goes by."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peers = [looks for name, looks in seen.items() if name.startswith("peer-")]
    figure, axes = plt.subplots(len(MEASURES), 1, figsize=(7, 8), sharex=True, layout="constrained")
    for axis, what in zip(axes, MEASURES, strict=True):
        at = [(looks[0][0], [v[what] for _, v in looks if what in v]) for looks in zip(*peers, strict=False)]
        at = [(t, values) for t, values in at if len(values) > 1]
        minutes = [t / 60 for t, _ in at]
        low, middle, high = zip(*(statistics.quantiles(values, n=4) for _, values in at), strict=True)
        axis.fill_between(minutes, low, high, alpha=0.2, linewidth=0)
        axis.plot(minutes, middle)
        axis.set(ylabel=what.replace("_", "\n"), ylim=(0, 1.15 * max(high)))
    axes[0].set_title("A peer as time goes by: median and middle half of the peers", fontsize=11)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=130)


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, help="how long (default: 120; with --quick: 1.5)")
    parser.add_argument("--peers", type=int, default=20, help="default: 20")
    parser.add_argument("--pace", type=float, help="seconds a round takes at the least (default: 30; with --quick: 1)")
    options = parser.parse_args()
    pace = (1.0 if options.quick else 30.0) if options.pace is None else options.pace
    minutes = options.minutes or (1.5 if options.quick else 120)
    seen, rounds = watch(minutes, options.peers, pace)
    print(json.dumps({"minutes": minutes, "pace": pace}), file=sys.stderr)
    report("soak", judge(seen, minutes, rounds), options.json)
    if options.json is not None:
        options.json.with_suffix(".looks.json").write_text(json.dumps(seen))
        plot(seen, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
