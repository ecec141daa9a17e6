"""Who owns which training samples: iid, Dirichlet, by writer, or as a file says. Fixed by the seed."""

import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_node.data.datasets import Dataset
from spark_node.data.formats import Integers, read_npz
from spark_node.errors import DataError
from spark_node.seeds import stream

SPECS = "iid, dirichlet:ALPHA, writer or file:PATH"
_LARGEST_ALPHA = 1e6
_LARGEST_ARRAY = 1 << 30


@dataclass(frozen=True, eq=False)
class Partition:
    """Node i owns the samples indices[i] of the training set."""

    spec: str
    indices: tuple[Integers, ...]


def partition(
    spec: str,
    dataset: Dataset,
    nodes: int,
    *,
    samples_per_node: int = 200,
    disjoint: bool = False,
    seed: int = 0,
) -> Partition:
    """Deal the training set out. `samples_per_node` bounds iid and dirichlet shares; 0 is an equal share."""
    if nodes < 1:
        raise DataError(f"{nodes} peers: a partition needs at least one")
    if samples_per_node < 0:
        raise DataError(f"samples_per_node {samples_per_node} is below 0; 0 means an equal share of all")
    kind, _, argument = spec.partition(":")
    if kind == "file" and argument and "\0" not in argument:
        return Partition(spec, _from_file(Path(os.path.expanduser(argument)), len(dataset.train), nodes))
    if nodes > len(dataset.train):
        size = len(dataset.train)
        raise DataError(
            f"run.nodes = {nodes}: {nodes} peers are more than the {size} training samples of {dataset.name}; "
            f"allowed: at most {size}"
        )
    if spec == "iid":
        return Partition(spec, _iid(dataset, nodes, samples_per_node, seed))
    if spec == "writer":
        return Partition(spec, _by_writer(dataset, nodes, seed))
    if kind == "dirichlet" and argument:
        deal = _dirichlet_disjoint if disjoint else _dirichlet
        return Partition(spec, deal(_alpha(argument), dataset, nodes, samples_per_node, seed))
    raise DataError(f"data.partition = {spec!r}: unknown partition; allowed: {SPECS}")


def describe(partition: Partition, dataset: Dataset) -> dict[str, Any]:
    """Figures for reports; `label_counts` has a row a node and a column a class."""
    sizes = [len(own) for own in partition.indices]
    labels = dataset.train.labels
    counts = [np.bincount(labels[own], minlength=dataset.classes) for own in partition.indices]
    return {
        "partition": partition.spec,
        "nodes": len(sizes),
        "samples_min": min(sizes),
        "samples_mean": float(np.mean(sizes)),
        "samples_max": max(sizes),
        "distinct_samples": len(np.unique(np.concatenate(partition.indices))),
        "classes_per_node_mean": float(np.mean([np.count_nonzero(row) for row in counts])),
        "label_counts": [row.tolist() for row in counts],
    }


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = float("nan")
    if not 0 < alpha <= _LARGEST_ALPHA:
        allowed = f"a number above 0 and at most {_LARGEST_ALPHA:g}, as in dirichlet:0.1"
        raise DataError(f"data.partition = {'dirichlet:' + text!r}: ALPHA is {allowed}")
    return alpha


def _iid(dataset: Dataset, nodes: int, most: int, seed: int) -> tuple[Integers, ...]:
    """A shuffle, cut into shares that differ by at most one sample, each cut to `most`."""
    order = stream(seed, "partition", "iid").permutation(len(dataset.train))
    return tuple(_cut(share, most) for share in np.array_split(order, nodes))


def _dirichlet(alpha: float, dataset: Dataset, nodes: int, budget: int, seed: int) -> tuple[Integers, ...]:
    """The paper's: q_i ~ Dir(alpha 1_C), int(budget q_i[c]) samples of class c; nodes may overlap."""
    members = _by_class(dataset)
    budget = budget or len(dataset.train) // nodes
    return tuple(_draw(alpha, members, budget, stream(seed, "partition", "dirichlet", node)) for node in range(nodes))


def _draw(alpha: float, members: Sequence[Integers], budget: int, random: np.random.Generator) -> Integers:
    """One node's samples: without replacement, and at least one of its most likely class."""
    share = random.dirichlet(np.full(len(members), alpha))
    counts = [min(int(budget * q), len(own)) for q, own in zip(share, members, strict=True)]
    if not any(counts):
        counts[max(range(len(members)), key=lambda c: (len(members[c]) > 0, share[c]))] = 1
    chosen = [random.choice(own, count, replace=False) for own, count in zip(members, counts, strict=True)]
    return np.concatenate(chosen)


def _dirichlet_disjoint(alpha: float, dataset: Dataset, nodes: int, most: int, seed: int) -> tuple[Integers, ...]:
    """The classic split: each class is shared out by p_c ~ Dir(alpha 1_nodes); no sample is owned twice."""
    random = stream(seed, "partition", "dirichlet", "disjoint")
    shares: list[list[Integers]] = [[] for _ in range(nodes)]
    for own in _by_class(dataset):
        cuts = np.cumsum(random.dirichlet(np.full(nodes, alpha)))[:-1] * len(own)
        for share, piece in zip(shares, np.split(random.permutation(own), cuts.astype(np.int64)), strict=True):
            share.append(piece)
    dealt = [random.permutation(np.concatenate(share)) for share in shares]
    _give_to_the_empty(dealt)
    return tuple(_cut(share, most) for share in dealt)


def _give_to_the_empty(shares: list[Integers]) -> None:
    """Each node without samples takes one from the node that has most."""
    for node, share in enumerate(shares):
        if not len(share):
            richest = max(range(len(shares)), key=lambda other: len(shares[other]))
            shares[node], shares[richest] = shares[richest][-1:], shares[richest][:-1]


def _by_writer(dataset: Dataset, nodes: int, seed: int) -> tuple[Integers, ...]:
    """Whole writers: the largest first, each to the node that has fewest samples. All are dealt out."""
    writers = dataset.train.writers
    if writers is None:
        raise DataError(f"{dataset.name} does not say who wrote what; `writer` needs mnist-writers or femnist")
    order = np.argsort(writers, kind="stable").astype(np.int64)
    samples = np.split(order, np.flatnonzero(np.diff(writers[order])) + 1)
    if nodes > len(samples):
        raise DataError(
            f"run.nodes = {nodes}: {nodes} peers are more than the {len(samples)} writers of {dataset.name}; "
            f"allowed: at most {len(samples)}"
        )
    stream(seed, "partition", "writer").shuffle(shuffled := list(range(len(samples))))
    shares: list[list[Integers]] = [[] for _ in range(nodes)]
    loads = [(0, node) for node in range(nodes)]
    for writer in sorted(shuffled, key=lambda w: -len(samples[w])):
        load, node = heapq.heappop(loads)
        shares[node].append(samples[writer])
        heapq.heappush(loads, (load + len(samples[writer]), node))
    return tuple(np.concatenate(share) for share in shares)


def _from_file(path: Path, size: int, nodes: int) -> tuple[Integers, ...]:
    """Node i owns indices[offsets[i]:offsets[i+1]]; a run with fewer nodes takes the first ones."""
    arrays = read_npz(path, ("indices", "offsets"), _LARGEST_ARRAY)
    indices, offsets = (_whole_numbers(arrays[name], name, path) for name in ("indices", "offsets"))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(indices):
        raise DataError(f"{path}: offsets do not run from 0 to the {len(indices)} indices")
    if (falls := np.diff(offsets) < 0).any():
        raise DataError(f"{path}: offsets fall after node {int(falls.argmax())}")
    if nodes > len(offsets) - 1:
        most = len(offsets) - 1
        raise DataError(
            f"{path}: run.nodes = {nodes}: {nodes} peers are more than the {most} in the file; allowed: at most {most}"
        )
    if (wrong := (indices < 0) | (indices >= size)).any():
        raise DataError(
            f"data.partition = file:{path}: index {indices[wrong.argmax()]} is outside the training set of {size} "
            f"samples; allowed: 0 to {size - 1}"
        )
    shares = np.split(indices, offsets[1:-1])[:nodes]
    for node, share in enumerate(shares):
        if not len(share):
            raise DataError(f"{path}: node {node} has no samples")
    return tuple(shares)


def _whole_numbers(array: npt.NDArray[Any], name: str, path: Path) -> Integers:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {array.dtype} of shape {array.shape}, not a row of whole numbers")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {name} holds {array.max()}, which is out of range")
    return array.astype(np.int64)


def _by_class(dataset: Dataset) -> list[Integers]:
    return [np.flatnonzero(dataset.train.labels == label) for label in range(dataset.classes)]


def _cut(share: Integers, most: int) -> Integers:
    return share[:most] if most else share
