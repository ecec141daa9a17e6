"""What a peer has sent, taken and refused, counted; and the names of refusals."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.package.errors import Refusal


@dataclass
class Traffic:
    """Bytes as they leave for gRPC and come from it, by edge and kind; refusals by reason."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    raw: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Messages that this peer did not take."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Messages of this peer that a neighbour did not take."""
    observed: Counter[str] = field(default_factory=Counter)
    """Bytes handed to observers, by kind."""
    suspected: Counter[str] = field(default_factory=Counter)
    """Waits for a neighbour that were shortened because it had failed before."""


def reason_name(reason: "pb.Reason") -> str:
    """REASON_TOO_LARGE -> too_large, as metrics and logs say it."""
    return str(pb.Reason.Name(reason)).removeprefix("REASON_").lower()


REASONS: dict[Refusal, Any] = {refusal: pb.Reason.Value(f"REASON_{refusal.name}") for refusal in Refusal}
"""What a codec's refusal is called on the wire."""
REASON_BY_NAME: dict[str, Any] = {name.removeprefix("REASON_").lower(): number for name, number in pb.Reason.items()}
