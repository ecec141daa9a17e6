"""What a lost peer costs the others: SIGKILL of one of 4 peers, and of 6 of 60, in each stage of a round.

Every peer is a process with its own gRPC service. The victims' processes kill themselves at the named point of round 5
(nobody is told). A stall is the longest round of any surviving peer from then on; a normal round is the median of all
rounds before. The last row of a size hangs the victims (SIGSTOP) instead: their connections stay, so their neighbours
must ask whether they are alive (`network.sign_of_life`). Victims are not started again.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import set_flags

STAGES = ("weights", "after weights", "consensus", "after consensus", "package", "after package")
ROUND = 5
_LINE = re.compile(r"round (\d+): \d+ of \d+ neighbours.*?, ([\d.]+) s$")


class Doomed:
    """An algorithm whose process is hit by a signal when it comes to a point of a round."""

    def __init__(self, inner: Any, point: str, number: int) -> None:
        self._inner, self._point, self._number = inner, point, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def outgoing(self, stage: str, k: int, neighbours: Any) -> Any:
        self._maybe(stage, k)
        return self._inner.outgoing(stage, k, neighbours)

    def incorporate(self, stage: str, k: int, arrived: Any) -> None:
        self._maybe(f"after {stage}", k)
        self._inner.incorporate(stage, k, arrived)

    def _maybe(self, point: str, k: int) -> None:
        if (point, k) == (self._point, ROUND):
            os.kill(os.getpid(), self._number)


def train(case: dict[str, Any], folder: Path) -> None:
    """One network with its victims, in this process."""
    import spark_node.launch.peer as peer_module
    from spark_node.cli.main import main
    from spark_node.learning.algorithms import make_algorithm

    victims = {f"peer-{i:03d}" for i in range(case["killed"])}
    number = signal.SIGSTOP if case["how"] == "hangs" else signal.SIGKILL

    def make(config: Any, peer: str, *arguments: Any, **named: Any) -> Any:
        made = make_algorithm(config, peer, *arguments, **named)
        return Doomed(made, case["point"], number) if peer in victims else made

    vars(peer_module)["make_algorithm"] = make
    settings = {
        "run.transport": "grpc",
        "run.nodes": case["peers"],
        "run.rounds": case["rounds"],
        "run.clients_every": 1000,
        "topology.degree": case["degree"],
        "data.partition": "dirichlet:0.5",
        "data.samples_per_node": case["samples"],
        "model.hidden": [case["hidden"]],
        "learning.kernel": "full",
        "network.metrics": False,
        "network.restarts": 0,
        "network.lease": 5.0,
        "network.deadline_floor": case["floor"],
    }
    sys.exit(main(["run", *set_flags(settings), "--out", str(folder), "--quiet", "--json"]))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [sys.executable, __file__, "--case", json.dumps(case), str(folder)]
        with (Path(place) / "out").open("w") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False, timeout=900).returncode
        if code != 0:
            raise RuntimeError((Path(place) / "out").read_text())
        before, after = list[float](), list[float]()
        for i in range(case["killed"], case["peers"]):
            for line in (folder / "logs" / f"peer-{i:03d}.log").read_text().splitlines():
                if found := _LINE.search(line):
                    k, seconds = int(found[1]), float(found[2])
                    (before if 1 < k < ROUND else after if k >= ROUND else []).append(seconds)
        summary = json.loads((folder / "summary.json").read_text())
    normal = statistics.median(before)
    return {
        "peers": case["peers"],
        "lost": case["killed"],
        "how": case["how"],
        "point": case["point"],
        "normal_round_s": normal,
        "longest_before_s": max(before),
        "longest_after_s": max(after),
        "normal_rounds": max(after) / normal,
        "rounds": summary["rounds"],
    }


def cases(quick: bool) -> list[dict[str, Any]]:
    small = {"peers": 4, "killed": 1, "degree": 3, "samples": 300, "hidden": 256, "rounds": 9, "floor": 30.0}
    large = {"peers": 60, "killed": 6, "degree": 5, "samples": 24, "hidden": 64, "rounds": 9, "floor": 30.0}
    sizes = [small] if quick else [small, large]
    points = STAGES[::3] if quick else STAGES
    found = [{**size, "how": "killed", "point": point} for size in sizes for point in points]
    if not quick:
        found += [{**size, "how": "hangs", "point": "weights", "floor": 5.0} for size in sizes]
    return found


def main() -> None:
    from benchmarks.common import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--case", nargs=2, metavar=("JSON", "DIR"), help="run one network (used by the benchmark)")
    options = parser.parse_args()
    if options.case:
        train(json.loads(options.case[0]), Path(options.case[1]))
    rows = []
    for case in cases(options.quick):
        rows.append(measure(case))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report("faults", rows, options.json)


if __name__ == "__main__":
    main()
