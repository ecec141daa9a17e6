"""What a peer knows of the run: its members, its seed, and so every round's neighbours."""

from collections.abc import Sequence
from functools import lru_cache

from spark_node.config import TopologySettings
from spark_node.topology import Graph, graph


def peer_names(count: int) -> list[str]:
    """Names whose sorted order is the order of the peers."""
    width = max(3, len(str(count - 1)))
    return [f"peer-{i:0{width}d}" for i in range(count)]


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
