"""Networks of 50 to 600 peers on one machine, each peer a process: what one peer costs in one round.

A small model (64-16-10 on digits, 20 samples a peer, degree 5), so that what grows is the network. The cost is the
processor time of all processes of the run, over the peers and rounds: it does not count what else the machine does, as
wall time would. The first round (connections, first use of every library) is left out. A virtual machine's processors
may be faster in one quarter of an hour than in the next: sizes go up and then down again, each figure is the mean of
both, and `product` is a matrix product that was timed after each of the two. Flat means within 20 % of the mean. A plot
goes beside the JSON file.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import processor_seconds, product_ms, set_flags

ROUNDS = 6


def measure(nodes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = {
            "run.transport": "grpc",
            "topology.degree": 5,
            "model.hidden": [16],
            "data.partition": "dirichlet:0.5",
            "data.samples_per_node": 20,
            "learning.timesteps": [100, 200],
            "network.metrics": False,
        }
        words = [
            "run",
            "--nodes",
            str(nodes),
            "--rounds",
            str(ROUNDS),
            *set_flags(settings),
            "--out",
            str(out),
            "--quiet",
        ]
        run = subprocess.Popen(
            [sys.executable, "-m", "spark_node", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        begin, end = (_at_round(run, out, k) for k in (1, ROUNDS - 1))  # of the last, processes that end are missed
        _, said = run.communicate()
        if run.returncode != 0:
            raise RuntimeError(said)
        summary = json.loads((out / "summary.json").read_text())
        rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()][1:]
    sent = statistics.mean(sum(row["bytes_sent"].values()) for row in rounds)
    neighbours = [row["neighbours"] for row in rounds]
    return {
        "peers": nodes,
        "round_s": statistics.median(row["seconds"]["round"] for row in rounds),
        "ms_per_peer": 1e3 * (end - begin) / (ROUNDS - 2) / nodes,
        "kB_per_peer": sent / nodes / 1e3,
        "PSS_MB_per_peer": summary["memory"].get("pss_per_peer_mean", 0) / 1e6,
        "PSS_GB_in_all": summary["memory"].get("pss_total", 0) / 1e9,
        "neighbours_used_%": 100 * sum(n["used"] for n in neighbours) / sum(n["expected"] for n in neighbours),
        "product_ms": product_ms(),
    }


def both(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    """One size on the way up and on the way down: means, and the two costs and products by themselves."""
    row = {name: (up[name] + down[name]) / 2 for name in up} | {"peers": up["peers"]}
    for name in ("ms_per_peer", "product_ms"):
        row[f"{name}_up_down"] = f"{up[name]:.3g} {down[name]:.3g}"
    del row["product_ms"]
    return row


def _at_round(run: "subprocess.Popen[str]", out: Path, k: int) -> float:
    """Processor time of the run when round k has been recorded."""
    rows = out / "rounds.jsonl"
    while run.poll() is None and (not rows.exists() or rows.read_text().count("\n") < k):
        time.sleep(0.1)
    return processor_seconds(run.pid)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    peers, cost = [row["peers"] for row in rows], [row["ms_per_peer"] for row in rows]
    mean = statistics.mean(cost)
    axis.axhspan(0.8 * mean, 1.2 * mean, alpha=0.15, label="mean ± 20 %")
    axis.plot(peers, cost, "o-", label="cost of a peer and round")
    axis.set(xlabel="peers", ylabel="processor time, ms", ylim=(0, None), title="What one peer costs in one round")
    axis.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    from benchmarks.common import arguments, report

    options = arguments(__doc__).parse_args()
    sizes = (20, 40) if options.quick else (50, 100, 300, 600)
    runs = []
    for nodes in (*sizes, *reversed(sizes)):
        runs.append(measure(nodes))
        print(runs[-1], file=sys.stderr, flush=True)
    rows = [both(up, down) for up, down in zip(runs[: len(sizes)], reversed(runs), strict=False)]
    mean = statistics.mean(row["ms_per_peer"] for row in rows)
    for row in rows:
        row["off_mean_%"] = 100 * (row["ms_per_peer"] / mean - 1)
    report("growth", rows, options.json)
    if options.json is not None:
        plot(rows, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
