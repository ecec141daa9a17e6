"""The paper's network as one process a peer, and in one process: what do processes cost?

The same run twice, over gRPC with mutual TLS and in memory: time of the rounds, processor time of all processes of the
run from start to end, memory. Goals: 1.5 times the time, 40 MB a peer and 14 GB in all for 300 peers. Wall time counts
whatever else the machine does meanwhile, processor time does not; so both are told. A virtual machine's processors may
be half as fast an hour later: `product` is a matrix product of the paper's size, timed before and after each run, and
--turns 2 runs both engines twice, in turns. `beside` is the processor time of everything else on the machine meanwhile,
the kernel's own threads included: a monitor of memory (kdamond) has more to look at with every process. `stolen` is
what the machine was not given.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import product_ms, set_flags

QUICK = {"run.nodes": 12, "run.rounds": 3, "topology.degree": 3, "data.samples_per_node": 60}


def machine_s() -> tuple[float, float]:
    """Processor seconds of the whole machine since it started: at work, and taken away by its host (Linux)."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, stolen = map(int, path.read_text().splitlines()[0].split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, stolen / ticks


def measure(transport: str, words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "spark_node", "run", "--transport", transport, *words, "--no-report"]
        speed = [product_ms()]
        before, start = machine_s(), time.perf_counter()
        run = subprocess.Popen([*command, "--out", str(out), "--quiet"])
        _, status, usage = os.wait4(run.pid, 0)
        wall, after = time.perf_counter() - start, machine_s()
        speed.append(product_ms())
        if status:
            raise RuntimeError(f"{transport}: the run ended with {os.waitstatus_to_exitcode(status)}")
        summary = json.loads((out / "summary.json").read_text())
        rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        rounds = [row["seconds"]["round"] for row in rows]
        used, expected = (sum(row["neighbours"][what] for row in rows) for what in ("used", "expected"))
    memory, processor = summary["memory"], usage.ru_utime + usage.ru_stime
    return {
        "transport": transport,
        "product_ms": " ".join(f"{ms:.2f}" for ms in speed),
        "rounds_s": " ".join(f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" for seconds in rounds),
        "wall_s": wall,
        "processor_s": processor,
        "beside_s": max(0.0, after[0] - before[0] - processor),
        "stolen_s": after[1] - before[1],
        "accuracy_%": 100 * summary["final"]["aggregated_accuracy"],
        "neighbours_used_%": 100 * used / expected,
        "sent_GB": summary["bytes_sent"]["total"] / 1e9,
        "PSS_MB_per_peer": memory.get("pss_per_peer_mean", 0) / 1e6 or None,
        "PSS_GB_in_all": memory.get("pss_total", memory.get("peak_rss", 0)) / 1e9,
    }


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--partition", default="dirichlet:0.1", help="default: dirichlet:0.1; the paper's: file:PATH")
    parser.add_argument("--turns", type=int, default=1, help="times that both engines run, in turns; default: 1")
    options = parser.parse_args()
    words = ["--preset", "paper", "--rounds", str(options.rounds), "--partition", options.partition]
    if options.quick:
        words = set_flags(QUICK)
    rows = []
    for transport in ("grpc", "memory") * options.turns:
        rows.append(measure(transport, words))
        print(rows[-1], file=sys.stderr, flush=True)
    wall, processor = (
        statistics.mean(row[what] for row in rows if row["transport"] == "memory") for what in ("wall_s", "processor_s")
    )
    for row in rows:
        row["times_memory"] = row["wall_s"] / wall
        row["times_its_processor"] = row["processor_s"] / processor
    report("processes", rows, options.json)


if __name__ == "__main__":
    main()
