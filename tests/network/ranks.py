"""What test_distributed.py runs on every rank: `torchrun ... -m tests.network.ranks WHAT OUT`. Rank 0 writes OUT."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from spark_node.distributed.group import Group, joined
from spark_node.distributed.place import place_of
from spark_node.distributed.sharded import leading, serve
from spark_node.learning.evolution import evolve
from spark_node.learning.kernel import KERNELS
from tests.unit.networks import CLASSES, neighbourhood

CASES = [
    ("mlp", "receiver", ["auto"] * 3),
    ("mlp", "sender", ["factored"] * 3),
    ("mlp", "receiver", ["dense"] * 3),
    ("cnn", "receiver", ["factored"] * 3),
    ("cnn", "sender", ["auto"] * 3),
    ("cnn", "receiver", ["factored", "dense", "auto"]),
    ("residual", "sender", ["auto"] * 3),
]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def kernels(group: Group) -> list[dict[str, Any]]:
    """Products, back-projection and evolution of every case on all ranks, against one process."""
    rows = []
    with leading(group) as lead:
        for name, mode, forms in CASES:
            for kind in ("trace", "full"):
                found, dense = neighbourhood(name, mode, forms)
                torch.manual_seed(1)
                residual = torch.randn(len(dense), CLASSES, dtype=torch.float64)
                f0 = torch.cat([j.logits for j in found])
                target = torch.nn.functional.one_hot(torch.randint(CLASSES, (len(f0),)), CLASSES).to(f0)
                one = KERNELS[kind](found)
                terms: dict[str, Any] = {
                    "eta": 0.05,
                    "timesteps": [50, 100],
                    "integrator": "rkc",
                    "tolerance": 0.02,
                    "loss": "cross-entropy",
                }
                alone = evolve(one, f0, target, **terms)
                with lead.kernel(kind, found) as led:
                    applied, pulled = led.apply(residual), led.pull_back(residual)
                    trajectory = lead.evolve(led, f0, target, **terms)
                    again = lead.evolve(led, f0, target, **terms)
                assert torch.equal(trajectory.predictions[-1], again.predictions[-1])  # deterministic
                rows.append(
                    {
                        "case": f"{name} {mode} {forms} {kind}",
                        "samples": [led.samples, one.samples],
                        "apply": difference(applied, one.apply(residual)),
                        "pull_back": difference(pulled, one.pull_back(residual)),
                        "evolution": difference(trajectory.predictions[-1], alone.predictions[-1]),
                        "residuals": difference(trajectory.residual_sums[0], alone.residual_sums[0]),
                    }
                )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    place = place_of()
    assert place is not None
    with joined(place, "cpu", 60.0) as group:
        if place.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(kernels(group)))
        else:
            serve(group)


if __name__ == "__main__":
    main()
