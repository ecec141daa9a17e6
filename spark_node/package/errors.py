"""Why bytes from a peer are not used. Decoding ends in a message or in one of these, never in anything else."""

from enum import Enum


class Refusal(Enum):
    """Every reason, by the name that logs and metrics count it under."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    CHECKSUM = "checksum"
    UNSUPPORTED_FORMAT = "unsupported_format"
    WRONG_RUN = "wrong_run"
    WRONG_ROUND = "wrong_round"
    WRONG_SENDER = "wrong_sender"
    WRONG_KIND = "wrong_kind"
    WRONG_SIGNATURE = "wrong_signature"
    WRONG_SPECIFICATION = "wrong_specification"
    NOT_FINITE = "not_finite"
    MISSING_FACTOR = "missing_factor"


class PackageError(Exception):
    """A message that cannot be decoded or must not be used."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal, self.detail = refusal, detail


class MissingFactor(PackageError):
    """Blocks were only named and this peer does not hold them (any more): the sender is asked for them."""

    def __init__(self, digests: tuple[bytes, ...]) -> None:
        super().__init__(Refusal.MISSING_FACTOR, f"{len(digests)} named blocks are not held here")
        self.digests = digests


def malformed(detail: str) -> PackageError:
    """The commonest refusal."""
    return PackageError(Refusal.MALFORMED, detail)
