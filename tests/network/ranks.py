"""What test_distributed.py runs on every rank: `torchrun ... -m tests.network.ranks WHAT OUT`. Rank 0 writes OUT."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spark_node.data import datasets, partitions
from spark_node.distributed.group import Group, joined
from spark_node.distributed.place import leave, place_of
from spark_node.distributed.sharded import leading, serve
from spark_node.distributed.spread import SpreadRun
from spark_node.launch.memory import MemoryRun
from spark_node.learning import sharding
from spark_node.learning.evolution import evolve
from spark_node.learning.kernel import KERNELS
from spark_node.observe.records import RoundRecord
from tests.network.harness import Log, small
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


RUNS: dict[str, dict[str, Any]] = {
    "receiver": {},
    "sender, full kernel, cnn": {
        "learning__linearize_at": "sender",
        "learning__kernel": "full",
        "model__kind": "cnn",
        "model__channels": [3],
        "model__hidden": [8],
    },
    "dfedavg": {"run__algorithm": "dfedavg", "local__epochs": 2},
    "encoded": {"package__bits": 6, "package__weights": "int8", "package__factor_cache_bytes": 0},
    "cluster, averaged velocities": {"topology__kind": "cluster", "momentum__average_velocity": True},
    "until its target": {"run__until_target": True, "run__target_accuracy": 0.3, "run__rounds": 6},
}


def spread(group: Group) -> list[dict[str, Any]]:
    """Memory runs over all ranks, and on rank 0 the same in one process."""
    rows = []
    for name, changes in RUNS.items():
        config = small(**{"run__transport": "memory", "run__nodes": 9, "topology__degree": 4, **changes})
        dataset = datasets.load("digits")
        dealt = partitions.partition("iid", dataset, config.run.nodes, samples_per_node=40, seed=0)
        run, log = SpreadRun(config, dataset, dealt, group), Log()
        run.run(log)
        own = torch.stack([node.algorithm.weights for node in run.nodes])
        if group.rank > 0:
            group.send(0, {}, [own])
            continue
        models = torch.cat([own, *(group.receive(rank)[1][0] for rank in range(1, group.size))])
        alone, alone_log = MemoryRun(config, dataset, dealt), Log()
        alone.run(alone_log)
        expected = torch.stack([node.algorithm.weights for node in alone.nodes])
        rows.append(
            {
                "case": name,
                "peers": [len(run.nodes), len(models)],
                "same_weights": torch.equal(models, expected),
                "moved": float((expected - expected.mean(0)).norm()),
                "records": [figures(record) for record in log.records],
                "expected": [figures(record) for record in alone_log.records],
            }
        )
    return rows


def figures(record: RoundRecord) -> dict[str, Any]:
    """Everything but times."""
    return {**asdict(record), "seconds": sorted(record.seconds)}


def main() -> None:
    torch.set_num_threads(1)
    place = place_of()
    assert place is not None
    what, out = sys.argv[1:]
    if what == "kernels by rows":
        sharding.WHOLE_SAMPLES = 0
    with joined(place, "cpu", 300.0) as group:
        if what == "spread":
            rows = spread(group)
        elif place.rank == 0:
            rows = kernels(group)
        else:
            serve(group)
    if place.rank == 0:
        Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
    leave(0)
