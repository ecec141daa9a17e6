"""SPARK: peer-to-peer federated learning with neural tangent kernels.

    import spark_node
    result = spark_node.simulate((x, y), nodes=20, rounds=10)                                # a network in this process
    peer = spark_node.Peer(x, y, model=make_net, orchestrator="10.0.0.1:7000", certs="c")    # one peer of a real one

What is below is imported when it is first used, so that `import spark_node` alone brings in neither torch nor gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_node.api.peer import Peer as Peer
    from spark_node.api.peer import PeerRound as PeerRound
    from spark_node.api.simulation import SimulationResult as SimulationResult
    from spark_node.api.simulation import simulate as simulate
    from spark_node.errors import UserError as UserError
    from spark_node.learning.algorithm import Algorithm as Algorithm
    from spark_node.learning.gossip import Gossip as Gossip
    from spark_node.learning.messages import Weights as Weights
    from spark_node.observe.records import RoundRecord as RoundRecord

__version__ = "0.1.0"

_WHERE = {
    "Algorithm": "spark_node.learning.algorithm",
    "Gossip": "spark_node.learning.gossip",
    "Peer": "spark_node.api.peer",
    "PeerRound": "spark_node.api.peer",
    "RoundRecord": "spark_node.observe.records",
    "SimulationResult": "spark_node.api.simulation",
    "UserError": "spark_node.errors",
    "Weights": "spark_node.learning.messages",
    "simulate": "spark_node.api.simulation",
}

__all__ = [
    "Algorithm",
    "Gossip",
    "Peer",
    "PeerRound",
    "RoundRecord",
    "SimulationResult",
    "UserError",
    "Weights",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'spark_node' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
