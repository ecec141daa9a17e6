"""The paper's network as one process a peer, and in one process: what do processes cost?

The same run twice, over gRPC with mutual TLS and in memory: time of the rounds, processor time of all processes of the
run from start to end, memory. Goals: 1.5 times the time, 40 MB a peer and 14 GB in all for 300 peers. Wall time counts
whatever else the machine does meanwhile, processor time does not; so both are told.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import set_flags

QUICK = {"run.nodes": 12, "run.rounds": 3, "topology.degree": 3, "data.samples_per_node": 60}


def measure(transport: str, words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "spark_node", "run", "--transport", transport, *words, "--no-report"]
        start = time.perf_counter()
        run = subprocess.Popen([*command, "--out", str(out), "--quiet"])
        _, status, used = os.wait4(run.pid, 0)
        wall = time.perf_counter() - start
        if status:
            raise RuntimeError(f"{transport}: the run ended with {os.waitstatus_to_exitcode(status)}")
        summary = json.loads((out / "summary.json").read_text())
        rounds = [json.loads(line)["seconds"]["round"] for line in (out / "rounds.jsonl").read_text().splitlines()]
    memory = summary["memory"]
    return {
        "transport": transport,
        "rounds_s": " ".join(f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" for seconds in rounds),
        "wall_s": wall,
        "processor_s": used.ru_utime + used.ru_stime,
        "accuracy_%": 100 * summary["final"]["aggregated_accuracy"],
        "sent_GB": summary["bytes_sent"]["total"] / 1e9,
        "PSS_MB_per_peer": memory.get("pss_per_peer_mean", 0) / 1e6 or None,
        "PSS_GB_in_all": memory.get("pss_total", memory.get("peak_rss", 0)) / 1e9,
    }


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--partition", default="dirichlet:0.1", help="default: dirichlet:0.1; the paper's: file:PATH")
    options = parser.parse_args()
    words = ["--preset", "paper", "--rounds", str(options.rounds), "--partition", options.partition]
    if options.quick:
        words = set_flags(QUICK)
    rows = []
    for transport in ("grpc", "memory"):
        rows.append(measure(transport, words))
        print(rows[-1], file=sys.stderr, flush=True)
    for row in rows:
        row["times_memory"] = row["wall_s"] / rows[-1]["wall_s"]
        row["times_its_processor"] = row["processor_s"] / rows[-1]["processor_s"]
    report("processes", rows, options.json)


if __name__ == "__main__":
    main()
