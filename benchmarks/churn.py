"""60 peers, and in every round a tenth of them is killed and comes back: does the network learn as well as a calm one?

Both runs have the same settings and seed. In the second, `spark-dfl chaos` kills six random peers (SIGKILL) once each
round is finished; their host starts them again, they take up their checkpoints and rejoin. The difference is of the
aggregated accuracy after the last round. Rounds are paced, so that peers are killed in each and not twice in the next.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import set_flags

PACE = 6.0
"""Seconds a round, longer than a lease: `chaos` counts recorded rounds, and a record may wait that long for a peer."""


def start(folder: Path, nodes: int, rounds: int) -> "subprocess.Popen[str]":
    settings = {
        "run.transport": "grpc",
        "run.nodes": nodes,
        "run.rounds": rounds,
        "run.clients_every": 1000,
        "run.pace": PACE,
        "topology.degree": 5,
        "data.partition": "dirichlet:0.5",
        "data.samples_per_node": 24,
        "model.hidden": [64],
        "network.metrics": False,
        "network.restarts": 1000,
        "network.lease": 5.0,
        "network.deadline_floor": 10.0,
    }
    command = [
        sys.executable,
        "-m",
        "spark_node",
        "run",
        *set_flags(settings),
        "--out",
        str(folder),
        "--quiet",
        "--json",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def script(nodes: int, rounds: int) -> str:
    random = Random(0)
    names = [f"peer-{i:03d}" for i in range(nodes)]
    tenth = max(1, nodes // 10)
    return "\n".join(f"round {k} kill {','.join(random.sample(names, tenth))}" for k in range(1, rounds))


def measure(nodes: int, rounds: int, churn: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder, lines = Path(place) / "run", Path(place) / "faults.txt"
        lines.write_text(script(nodes, rounds))
        run = start(folder, nodes, rounds)
        told: dict[str, Any] = {"summary": {"faults": 0, "processes_gone": 0, "processes_back": 0}}
        if churn:
            while not list((folder / "logs").glob("peer-*.pid")) and run.poll() is None:
                time.sleep(0.05)
            chaos = [sys.executable, "-m", "spark_node", "chaos", str(folder), "--script", str(lines), "--json"]
            done = subprocess.run(chaos, stdout=subprocess.PIPE, text=True, check=False)
            told = json.loads(done.stdout)
        out, error = run.communicate()
        if run.returncode != 0:
            raise RuntimeError(error)
        summary = json.loads(out)
        rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    used = sum(row["neighbours"]["used"] for row in rows)
    expected = sum(row["neighbours"]["expected"] for row in rows)
    return {
        "network": "a tenth killed in every round" if churn else "calm",
        "peers": nodes,
        "rounds": len(rows),
        "processes_killed": told["summary"]["processes_gone"],
        "came_back": told["summary"]["processes_back"],
        "accuracy_%": 100 * summary["final"]["aggregated_accuracy"],
        "neighbours_used_%": 100 * used / expected,
        "seconds_a_round": summary["seconds"]["per_round_mean"],
    }


def main() -> None:
    from benchmarks.common import arguments, report

    options = arguments(__doc__).parse_args()
    nodes, rounds = (20, 6) if options.quick else (60, 30)
    rows = []
    for churn in (False, True):
        rows.append(measure(nodes, rounds, churn))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for row in rows:
        row["points_off_calm"] = row["accuracy_%"] - rows[0]["accuracy_%"]
    report("churn", rows, options.json)


if __name__ == "__main__":
    main()
