"""Several ranks (torch.distributed, gloo): one peer's kernel in slices, and a memory run spread out.

Kernel: a neighbourhood of six peers at the paper's size (784-100-10). For 1, 2 and 4 ranks: the time of a kernel
product (median), of building the kernel and of an evolution, what a rank holds, and how far the weight update is from
that of one process. The trace kernel's matrix is measured in both forms, whole on every rank and divided by rows, and
at three times the samples too; learning/sharding.py chooses by the number of samples.
Engine: rounds a minute of `spark-dfl run --transport memory` under torchrun, and whether its figures are those of one
process (a difference of 0: bit for bit). Ranks share this machine's cores: with more ranks than cores nothing can get
faster, and times beside other work say little; the processor time of rank 0 (cpu) says what a rank's share of the
work is.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 2, 4)
KINDS = ("full", "trace, whole matrix", "trace, by rows")
LARGER = 3
"""Times as many samples: trace kernels are measured at this size too."""
TERMS: dict[str, Any] = {
    "eta": 0.01,
    "timesteps": list(range(100, 801, 100)),
    "integrator": "rkc",
    "tolerance": 0.02,
    "loss": "cross-entropy",
}


def held_bytes(kernel: Any) -> int:
    """Bytes of the tensors that an operator holds, each storage once."""
    import torch

    found: dict[int, int] = {}
    seen: set[int] = set()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for one in value:
                look(one)
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("spark_node.learning"):
            for one in vars(value).values():
                look(one)

    look(kernel)
    return sum(found.values())


def problem(samples: int) -> tuple[list[Any], Any, Any]:
    """Jacobians, f0 and targets of six peers at one point of weight space."""
    import torch

    from benchmarks.client_round import neighbourhood
    from spark_node.config import ModelSettings
    from spark_node.learning.jacobian import jacobian
    from spark_node.model import build, flatten

    xs, labels, _ = neighbourhood(samples)
    module = build(ModelSettings(), (1, 28, 28), 10, seed=0)
    found = [jacobian(module, flatten(module), x) for x in xs]
    f0 = torch.cat([j.logits for j in found])
    return found, f0, torch.nn.functional.one_hot(torch.cat(labels), 10).to(f0)


def measure(samples: int, products: int, out: str) -> None:
    """On every rank, all in step: each cuts its own slice, so that only the work itself is timed."""
    import torch

    from spark_node.distributed.group import joined
    from spark_node.distributed.place import Place
    from spark_node.learning import sharding

    torch.set_num_threads(1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rows = []
    with joined(Place(*(int(os.environ[name]) for name in names)), "cpu", 300.0) as group:
        for kind, each in [*((kind, samples) for kind in KINDS), *((kind, LARGER * samples) for kind in KINDS[1:])]:
            sharding.WHOLE_SAMPLES = 10**9 if kind == "trace, whole matrix" else 0
            found, f0, target = problem(each)
            mine = sharding.shard(found, group.size)[group.rank]
            timed = time_kernel(sharding.SHARDED[kind.partition(",")[0]], mine, group, f0, target, products)
            rows.append({"what": kind, "samples": len(f0), "ranks": group.size, **timed})
            if group.rank == 0:
                numpy.save(f"{out}.{kind}.{len(f0)}.npy", rows[-1].pop("update"))
        if group.rank == 0:
            Path(out).write_text(json.dumps(rows))


def time_kernel(make: Any, mine: Any, group: Any, f0: Any, target: Any, products: int) -> dict[str, Any]:
    """Build, product, evolution; and the weight update of all ranks."""
    import torch

    from spark_node.learning.evolution import evolve

    make(mine.jacobians, group)
    group.agree(0)
    start = time.perf_counter()
    kernel = make(mine.jacobians, group)
    built = time.perf_counter()
    times, worked = [], time.process_time()
    for _ in range(products):
        began = time.perf_counter()
        kernel.apply(f0)
        times.append(time.perf_counter() - began)
    worked = time.process_time() - worked
    before = time.perf_counter()
    trajectory = evolve(kernel, f0, target, **TERMS)
    after = time.perf_counter()
    update = torch.zeros(int(group.add(torch.tensor(len(mine.columns)))))
    update[mine.columns] = kernel.pull_back(trajectory.residual_sums[-1])
    held = group.gather(torch.tensor(held_bytes(kernel)))
    return {
        "build_ms": 1e3 * (built - start),
        "product_ms": 1e3 * statistics.median(times),
        "product_cpu_ms": 1e3 * worked / products,
        "evolution_s": after - before,
        "rank_mb": max(map(int, held)) / 1e6,
        "update": group.add(update).numpy(),
    }


def torchrun(ranks: int, *words: str) -> None:
    """Start a command on several ranks and wait for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*launcher, *words], check=True, env=environment, capture_output=True, text=True)


def kernel_rows(samples: int, products: int, folder: Path) -> list[dict[str, Any]]:
    """One row a kernel and number of ranks."""
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        out = folder / f"{ranks}.json"
        torchrun(ranks, __file__, "--measure", str(samples), str(products), str(out))
        for row in json.loads(out.read_text()):
            kind = f"{row['what']}.{row['samples']}"
            one, here = (numpy.load(f"{folder / f'{r}.json'}.{kind}.npy") for r in (1, ranks))
            difference = float(numpy.linalg.norm(here - one) / numpy.linalg.norm(one))
            rows.append({**row, "difference": difference})
    return sorted(rows, key=lambda row: (row["samples"], KINDS.index(row["what"])))


def engine_rows(words: list[str], folder: Path) -> list[dict[str, Any]]:
    """One row a number of ranks."""
    rows, first = [], None
    for ranks in RANKS:
        out = folder / f"run-{ranks}"
        run = ["run", "--transport", "memory", *words, "--out", str(out), "--quiet", "--no-report"]
        torchrun(ranks, "-m", "spark_node", *run)
        lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        seconds = sum(line["seconds"]["round"] for line in lines)
        figures = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        first = first or figures
        rows.append(
            {
                "what": "engine",
                "ranks": ranks,
                "rounds_per_minute": 60 * len(lines) / seconds,
                "difference": 0.0 if figures == first else float("nan"),
            }
        )
    return rows


def main() -> None:
    from tempfile import TemporaryDirectory

    from benchmarks.client_round import neighbourhood
    from benchmarks.common import arguments, report

    options = arguments(__doc__).parse_args()
    samples, products = (60, 20) if options.quick else (200, 50)
    found = neighbourhood(2)[2] == "Fashion-MNIST" and not options.quick
    words = ["--preset", "paper", "--nodes", "40", "--rounds", "3", "--partition", "dirichlet:0.1"]
    quick = ["--nodes", "12", "--rounds", "3", "--degree", "4", "--partition", "dirichlet:0.5"]
    with TemporaryDirectory() as folder:
        rows = kernel_rows(samples, products, Path(folder)) + engine_rows(words if found else quick, Path(folder))
    columns = (
        "what",
        "ranks",
        "build_ms",
        "product_ms",
        "product_cpu_ms",
        "evolution_s",
        "rank_mb",
        "rounds_per_minute",
        "difference",
    )
    report("sharded", [{column: row.get(column) for column in columns} for row in rows], options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
