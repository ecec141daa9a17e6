"""Who talks to whom in a round: a pure function of (kind, number of members, degree, seed, round).

Every peer derives the round's graph by itself, so the same arguments must give the same edges on every
machine. The sampling therefore draws nothing but raw 64-bit words from its stream, and is whole-number
arithmetic from there on: a library may change how it shuffles, but not the words of a Philox generator.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from spark_node.errors import ConfigError
from spark_node.seeds import stream

T = TypeVar("T", bound=Hashable)

Indices = npt.NDArray[np.int64]
"""Members by position; edges are an array of shape (edges, 2)."""


@dataclass(frozen=True)
class Graph(Generic[T]):
    """An undirected simple graph: its edges are pairs (i, j), i < j, of positions in `members`, rising."""

    members: tuple[T, ...]
    edges: tuple[tuple[int, int], ...]

    def neighbours(self, member: T) -> tuple[T, ...]:
        """The members linked to this one, in the order of `members`; KeyError for a stranger."""
        return self._neighbours[member]

    @cached_property
    def _neighbours(self) -> dict[T, tuple[T, ...]]:
        adjacent: list[list[int]] = [[] for _ in self.members]
        for i, j in self.edges:
            adjacent[i].append(j)
            adjacent[j].append(i)
        return {
            member: tuple(self.members[k] for k in sorted(positions))
            for member, positions in zip(self.members, adjacent, strict=True)
        }


def check(kind: str, nodes: int, degree: int) -> None:
    """ConfigError unless there are such graphs. One peer alone is always allowed: it learns by itself."""
    if kind not in _SAMPLERS:
        raise ConfigError(f"topology.kind = {kind!r}: allowed: {', '.join(_SAMPLERS)}")
    if nodes < 1:
        raise ConfigError(f"run.nodes = {nodes}: allowed: at least 1")
    if kind == "ring" and nodes == 2:
        raise ConfigError("topology.kind = 'ring' with 2 peers: allowed: line, or at least 3 peers")
    if nodes == 1 or kind in ("ring", "line"):
        return
    low, step = 1, 1
    if kind in ("regular", "erdos-renyi") and nodes > 2:
        low = 2
    if kind == "regular" and nodes % 2:
        step = 2
    if degree < 1:
        why = "every peer needs a neighbour"
    elif degree >= nodes:
        why = "there are fewer other peers"
    elif degree < low:
        why = "one neighbour each leaves the peers unconnected (kind cluster can pair them anew each round)"
    elif degree % step:
        why = "an odd number of peers cannot each have an odd number of neighbours"
    else:
        return
    span = f"{low}" if low == nodes - 1 else f"{'an even number ' if step == 2 else ''}from {low} to {nodes - 1}"
    raise ConfigError(f"topology.degree = {degree} with {nodes} peers, kind {kind}: {why}; allowed: {span}")


def graph(kind: str, members: Sequence[T], degree: int, seed: int, round: int, fresh: bool = True) -> Graph[T]:
    """The graph of a round. It depends on the members only through their order, which all peers must share.

    regular      every peer has `degree` neighbours; connected
    cluster      groups of about degree + 1 peers, linked within, never across; only fresh rounds mix them
    erdos-renyi  each pair is linked with probability degree / (members - 1); the components are then joined
    ring, line   through all members in random order; `degree` plays no part

    With `fresh` every round has a graph of its own, without it all rounds share one.
    """
    check(kind, len(members), degree)
    if len(set(members)) != len(members):
        raise ValueError("a member occurs twice")
    if len(members) == 1:
        return Graph(tuple(members), ())
    dice = _Dice(stream(seed, "topology", kind, round if fresh else 0))
    pairs = np.sort(_SAMPLERS[kind](dice, len(members), degree), axis=1)
    low, high = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))].T.tolist()
    return Graph(tuple(members), tuple(zip(low, high, strict=True)))


class _Dice:
    """Random choices made of nothing but a bit generator's words, which no library version may change."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._bits = generator.bit_generator

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)

    def below(self, bounds: Indices) -> Indices:
        """For each bound, a number from 0 to bound - 1."""
        return (self.words(bounds.size) % bounds.astype(np.uint64)).astype(np.int64)

    def permutation(self, count: int) -> Indices:
        return np.argsort(self.words(count), kind="stable").astype(np.int64)


def _regular(dice: _Dice, n: int, degree: int) -> Indices:
    if degree == 2:
        return _ring(dice, n, degree)  # the connected 2-regular graphs are the rings
    if 2 * degree > n - 1:  # then any two peers are linked or share a neighbour: connected
        return _complement(n, _pairing(dice, n, n - 1 - degree))
    while True:
        pairs = _pairing(dice, n, degree)
        if not _components(n, pairs).any():
            return pairs


def _pairing(dice: _Dice, n: int, degree: int) -> Indices:
    """A random regular graph of at most half the possible edges, connected or not.

    Each node has `degree` open ends. They are paired at random; pairs that are loops or repeat an edge stay
    open and are paired again (Steger and Wormald, 1999). Where none closes, as many random edges are opened.
    """
    edges: Indices = np.empty(0, dtype=np.int64)  # low * n + high, rising
    ends = np.repeat(np.arange(n, dtype=np.int64), degree)
    while ends.size:
        pairs = np.sort(ends[dice.permutation(ends.size)].reshape(-1, 2), axis=1)
        drawn = pairs[:, 0] * n + pairs[:, 1]
        good = (pairs[:, 0] != pairs[:, 1]) & _first_of_each(drawn) & ~_contains(edges, drawn)
        closed = np.sort(drawn[good])
        edges = np.insert(edges, np.searchsorted(edges, closed), closed)
        ends = pairs[~good].ravel()
        if edges.size and not closed.size:
            opened = np.unique(dice.below(np.full(len(pairs), edges.size)))
            ends = np.concatenate([ends, *np.divmod(edges[opened], n)])
            edges = np.delete(edges, opened)
    return np.stack(np.divmod(edges, n), axis=1)


def _first_of_each(values: Indices) -> npt.NDArray[np.bool_]:
    first = np.zeros(values.size, dtype=bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first


def _contains(rising: Indices, values: Indices) -> npt.NDArray[np.bool_]:
    return np.searchsorted(rising, values, side="right") > np.searchsorted(rising, values, side="left")


def _complement(n: int, pairs: Indices) -> Indices:
    absent = np.triu(np.ones((n, n), dtype=bool), k=1)
    absent[pairs[:, 0], pairs[:, 1]] = False
    return np.argwhere(absent).astype(np.int64)


def _components(n: int, pairs: Indices) -> Indices:
    """For every node, the lowest node of its component."""
    label = np.arange(n, dtype=np.int64)
    while True:
        lower = label.copy()
        for here, there in (pairs.T, pairs.T[::-1]):
            np.minimum.at(lower, here, label[there])
        lower = lower[lower]
        if np.array_equal(lower, label):
            return label
        label = lower


def _cluster(dice: _Dice, n: int, degree: int) -> Indices:
    """Groups of degree + 1, or as near as it goes: sizes differ by at most one, and none is below 2."""
    size = degree + 1
    groups = max(1, min((2 * n + size) // (2 * size), n // 2))
    members = np.array_split(dice.permutation(n), groups)
    return np.concatenate([group[np.stack(np.triu_indices(group.size, k=1), axis=1)] for group in members])


def _erdos_renyi(dice: _Dice, n: int, degree: int) -> Indices:
    """G(n, p), p = degree / (n - 1), whose components are joined by as many random edges as that takes.

    From the largest component on, each next one (an isolated node is one, too) is linked, by a random node of
    its own, to a random node of those before. Renaming the nodes at random then favours no position.
    """
    pairs = _bernoulli_pairs(dice, n, degree)
    components = _components(n, pairs)
    sizes = np.bincount(components, minlength=n)
    nodes = np.lexsort((components, -sizes[components]))
    sizes = np.sort(sizes[sizes > 0])[::-1]
    before, size = np.cumsum(sizes)[:-1], sizes[1:]
    bridges = nodes[np.stack([dice.below(before), before + dice.below(size)], axis=1)]
    renamed: Indices = dice.permutation(n)[np.concatenate([pairs, bridges])]
    return renamed


def _bernoulli_pairs(dice: _Dice, n: int, degree: int) -> Indices:
    """Each of the n (n - 1) / 2 pairs with probability p = degree / (n - 1), skipping from hit to hit.

    A word below survival[j] = (1 - p)^j, in units of 2^-64, means that the next j pairs are no hits.
    Where that holds to the end of the table, the next word goes on from there.
    """
    starts = np.concatenate([[0], np.cumsum(np.arange(n - 1, 0, -1, dtype=np.int64))])  # rank of (i, i + 1)
    total = int(starts[-1])
    reach = min(total, 1024)
    survival = [2**64]
    for _ in range(reach):
        survival.append(survival[-1] * (n - 1 - degree) // (n - 1))
    rising = np.array(survival[:0:-1], dtype=np.uint64)
    hits, position = [], 0
    while position < total:
        words = dice.words(min(total, 16384))
        gaps = reach - np.searchsorted(rising, words, side="right").astype(np.int64)
        hit = gaps < reach
        ends = position + np.cumsum(gaps + hit)
        hits.append(ends[hit] - 1)
        position = int(ends[-1])
    rank = np.concatenate(hits)
    rank = rank[rank < total]
    low = np.searchsorted(starts, rank, side="right") - 1
    return np.stack([low, rank - starts[low] + low + 1], axis=1)


def _ring(dice: _Dice, n: int, degree: int) -> Indices:
    order = dice.permutation(n)
    return np.stack([order, np.roll(order, -1)], axis=1)


def _line(dice: _Dice, n: int, degree: int) -> Indices:
    order = dice.permutation(n)
    return np.stack([order[:-1], order[1:]], axis=1)


_SAMPLERS: dict[str, Callable[[_Dice, int, int], Indices]] = {
    "regular": _regular,
    "cluster": _cluster,
    "erdos-renyi": _erdos_renyi,
    "ring": _ring,
    "line": _line,
}
