"""What a peer knows of the run: its members, its seed, and so every round's neighbours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from spark_node.config import TopologySettings
from spark_node.errors import ConfigError
from spark_node.topology import Graph, check, graph


def peer_names(count: int) -> list[str]:
    """Names whose sorted order is the order of the peers."""
    width = max(3, len(str(count - 1)))
    return [f"peer-{i:0{width}d}" for i in range(count)]


def fitting(settings: TopologySettings, members: int) -> TopologySettings:
    """The topology with the nearest degree that a graph of so many members can have."""
    degrees = sorted(range(1, max(members, 2)), key=lambda d: (abs(d - settings.degree), -d))
    for degree in degrees:
        try:
            check(settings.kind, members, degree)
        except ConfigError:
            continue
        return replace(settings, degree=degree)
    return settings


class Membership:
    """The member list and the seed. Each round's graph follows from them, with no message to anyone."""

    def __init__(self, members: Sequence[str], seed: int, topology: TopologySettings) -> None:
        self.members = tuple(sorted(members))
        self._seed, self._topology = seed, topology
        self.graph = lru_cache(maxsize=4)(self._graph)

    def neighbours(self, peer: str, k: int) -> tuple[str, ...]:
        """N_i of round k."""
        return tuple(self.graph(k).neighbours(peer))

    def _graph(self, k: int) -> Graph[str]:
        if len(self.members) == 1:
            return Graph(self.members, ())
        settings = self._topology
        return graph(settings.kind, self.members, settings.degree, self._seed, k, settings.fresh)


class Roster:
    """Member lists as they follow each other: each holds from a round on, until the next one does."""

    def __init__(self, seed: int, topology: TopologySettings) -> None:
        self._seed, self._topology = seed, topology
        self._lists: list[tuple[int, Membership]] = []
        self._addresses: dict[str, str] = {}
        self.version = 0

    def add(self, version: int, from_round: int, addresses: Mapping[str, str]) -> None:
        """A newer list; lists that were to hold from that round or a later one are replaced by it."""
        if version <= self.version:
            return
        self.version = version
        self._addresses.update(addresses)
        self._lists = [entry for entry in self._lists if entry[0] < from_round]
        settings = fitting(self._topology, len(addresses))
        self._lists.append((from_round, Membership(tuple(addresses), self._seed, settings)))

    def round_with(self, peer: str, k: int) -> int:
        """The first round from k on in which the peer takes part, as far as lists say; k itself where none has it."""
        if peer in self.members(k):
            return k
        return min((start for start, found in self._lists if start > k and peer in found.members), default=k)

    def members(self, k: int) -> tuple[str, ...]:
        """Who takes part in round k."""
        found = self._at(k)
        return found.members if found else ()

    def neighbours(self, peer: str, k: int) -> tuple[str, ...]:
        """N_i of round k; nobody while the peer takes no part."""
        found = self._at(k)
        return () if found is None or peer not in found.members else found.neighbours(peer, k)

    def address(self, peer: str) -> str:
        return self._addresses[peer]

    def _at(self, k: int) -> Membership | None:
        return next((members for start, members in reversed(self._lists) if start <= k), None)
