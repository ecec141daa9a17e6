"""One client's round: the paper's way and ours, side by side on one thread.

The paper's way materialises the Jacobian of the whole neighbourhood (N x C x d numbers), then the kernel, then takes
800 Euler steps. Ours keeps the Jacobian in factors and integrates with as many kernel products as the error needs.
Each way runs in a process of its own, so that its peak memory is its own. The difference is that of the weight
update, relative to the paper's way.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NEIGHBOURHOOD = 6
ETA = 0.01
GRID = tuple(range(100, 801, 100))
WAYS = {"paper": "the paper's", "euler": "ours, euler", "rkc": "ours, rkc"}


def reset_peak() -> int:
    """Start the kernel's count of this process's peak memory anew, from what it holds now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def neighbourhood(samples: int) -> tuple[list[Any], list[Any], str]:
    """Inputs and labels of six peers with unequal classes: Fashion-MNIST where it is found, else random pixels."""
    import numpy as np
    import torch

    from spark_node.data.datasets import load
    from spark_node.data.partitions import partition
    from spark_node.errors import DataError

    try:
        dataset = load("fashion-mnist")
    except DataError:
        random = np.random.default_rng(0)
        x = torch.from_numpy(random.standard_normal((NEIGHBOURHOOD * samples, 1, 28, 28), dtype=np.float32))
        y = torch.from_numpy(random.integers(0, 10, NEIGHBOURHOOD * samples))
        return list(x.split(samples)), list(y.split(samples)), "random pixels"
    shares = partition("dirichlet:0.5", dataset, NEIGHBOURHOOD, samples_per_node=samples + 10, seed=0)
    chosen = [indices[:samples] for indices in shares.indices]
    xs = [dataset.standardise(dataset.train.pixels[i]) for i in chosen]
    return xs, [torch.from_numpy(dataset.train.labels[i]) for i in chosen], "Fashion-MNIST"


def the_papers_way(kind: str, module: Any, w: Any, xs: list[Any], y: Any) -> Any:
    """Materialised Jacobian, materialised kernel, 800 Euler steps."""
    import torch
    from torch.func import functional_call, jacrev, vmap

    from spark_node.model import ParameterLayout

    layout = ParameterLayout.of(module)

    def one(w: Any, sample: Any) -> Any:
        return functional_call(module, layout.unflatten(w), (sample.unsqueeze(0),)).squeeze(0)

    chunks = [vmap(jacrev(one), (None, 0))(w, part) for x in xs for part in x.split(50)]
    j = torch.cat(chunks).detach()
    del chunks
    n, c, d = j.shape
    f = torch.cat([module(x).detach() for x in xs])
    total = torch.zeros_like(f)
    rows = j.view(n * c, d)
    k = sum(j[:, i] @ j[:, i].T for i in range(c)) / c if kind == "trace" else rows @ rows.T
    for _ in range(GRID[-1]):
        r = torch.softmax(f, 1) - y
        total += r
        f = f - ETA / n * (k @ r if kind == "trace" else (k @ r.reshape(-1)).view(n, c))
    return -ETA / n * torch.einsum("ncd,nc->d", j, total)


def our_way(kind: str, integrator: str, module: Any, w: Any, xs: list[Any], y: Any) -> Any:
    """Factors, a kernel operator, an integrator."""
    import torch

    from spark_node.learning.evolution import evolve
    from spark_node.learning.jacobian import jacobian
    from spark_node.learning.kernel import KERNELS

    found = [jacobian(module, w, x) for x in xs]
    kernel = KERNELS[kind](found)
    f0 = torch.cat([j.logits for j in found])
    trajectory = evolve(kernel, f0, y, eta=ETA, timesteps=GRID, integrator=integrator)
    return kernel.pull_back(trajectory.residual_sums[-1]).mul_(-ETA / kernel.samples)


def measure(kind: str, way: str, samples: int, out: str) -> None:
    """In a process of its own: time and peak memory above what the libraries and the data take."""
    import numpy
    import torch

    from spark_node.config import ModelSettings
    from spark_node.model import build, flatten
    from spark_node.observe.environment import peak_rss

    torch.set_num_threads(1)
    xs, labels, source = neighbourhood(samples)
    module = build(ModelSettings(), (1, 28, 28), 10, seed=0)
    w = flatten(module)
    y = torch.nn.functional.one_hot(torch.cat(labels), 10).float()
    torch.ones(50, 50) @ torch.ones(50, 50)  # the libraries' own first-call costs are nobody's
    our_way(kind, "rkc", module, w, [x[:2] for x in xs], y[:12])
    before = reset_peak()
    start = time.perf_counter()
    delta = the_papers_way(kind, module, w, xs, y) if way == "paper" else our_way(kind, way, module, w, xs, y)
    seconds = time.perf_counter() - start
    numpy.save(out, delta.numpy())
    print(json.dumps({"seconds": seconds, "peak_mb": ((peak_rss() or 0) - before) / 1e6, "source": source}))


def compare(kind: str, samples: int, folder: Path) -> list[dict[str, Any]]:
    """The paper's way and both of ours, as rows."""
    import numpy

    rows: list[dict[str, Any]] = []
    updates = {}
    for way in ("paper", "euler", "rkc"):
        out = folder / f"{kind}-{way}.npy"
        command = [sys.executable, __file__, "--measure", kind, way, str(samples), str(out)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        updates[way] = numpy.load(out, allow_pickle=False)
        first = rows[0] if rows else None
        rows.append(
            {
                "kernel": kind,
                "samples": f"{NEIGHBOURHOOD} x {samples}",
                "way": WAYS[way],
                "seconds": found["seconds"],
                "peak_mb": found["peak_mb"],
                "times_faster": first["seconds"] / found["seconds"] if first else 1.0,
                "times_smaller": first["peak_mb"] / max(found["peak_mb"], 0.1) if first else 1.0,
                "difference": _relative(updates[way], updates["paper"]),
            }
        )
    return rows


def _relative(found: Any, reference: Any) -> float:
    import numpy

    return float(numpy.linalg.norm(found - reference) / numpy.linalg.norm(reference))


def main() -> None:
    from tempfile import TemporaryDirectory

    from benchmarks.common import arguments, report

    options = arguments(__doc__).parse_args()
    trace, full = (40, 10) if options.quick else (200, 50)
    with TemporaryDirectory() as folder:
        rows = compare("trace", trace, Path(folder)) + compare("full", full, Path(folder))
    report("client_round", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
