"""A peer's state on disk: what it needs to go on as if it had never stopped.

A checkpoint is taken between two rounds, when nothing is half done: weights, velocity, and what the coding of weights
still owes. Random choices come from streams that are named by (seed, peer, round), so the number of the round says all
about them; messages that were on their way are said again. One file a round: safetensors, whose metadata says whose
state it is and holds a digest of everything. A file that is torn, altered or somebody else's is refused by name.
"""

import enum
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".safetensors"
_HALF = ".tmp"
"""The ending of a file that is being written."""


class Refusal(enum.Enum):
    """Why a file is not used."""

    TORN = "torn"
    ALTERED = "altered"
    OTHER_FORMAT = "of another format version"
    OTHER_RUN = "of another run"
    OTHER_PEER = "of another peer"
    OTHER_SIGNATURE = "of another model or other settings"
    OTHER_ROUND = "of another round than its name says"


class CheckpointRefused(Exception):
    """A file that is no checkpoint of this peer in this run."""

    def __init__(self, refusal: Refusal, detail: str = "") -> None:
        super().__init__(f"{refusal.value}: {detail}" if detail else refusal.value)
        self.refusal = refusal


@dataclass(frozen=True)
class Owner:
    """Whose state a checkpoint is."""

    run: str
    peer: str
    signature: str


@dataclass(frozen=True)
class Checkpoint:
    """A peer's state after a round."""

    round: int
    state: Mapping[str, Tensor]


def to_bytes(checkpoint: Checkpoint, owner: Owner) -> bytes:
    """The checkpoint as a safetensors file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.state.items()}
    said = {"format": str(FORMAT), **vars(owner), "round": str(checkpoint.round)}
    return bytes(save_tensors(tensors, {**said, "digest": _digest(said, tensors)}))


def from_bytes(data: bytes, owner: Owner) -> Checkpoint:
    """The checkpoint in a file of this owner; CheckpointRefused, and nothing else, where it is none."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        said = {str(name): str(value) for name, value in header["__metadata__"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointRefused(Refusal.TORN, f"no header ({type(error).__name__})") from None
    _check_owner(said, owner)
    try:
        tensors = load_tensors(data)
        round = int(said["round"])
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointRefused(Refusal.TORN, " ".join(str(error).split())[:120]) from None
    if said.pop("digest", "") != _digest(said, tensors):
        raise CheckpointRefused(Refusal.ALTERED, "its digest is of other content")
    return Checkpoint(round, tensors)


def _check_owner(said: Mapping[str, str], owner: Owner) -> None:
    if said.get("format") != str(FORMAT):
        raise CheckpointRefused(Refusal.OTHER_FORMAT, f"{said.get('format', 'none')[:20]}, not {FORMAT}")
    for name, refusal in (
        ("run", Refusal.OTHER_RUN),
        ("peer", Refusal.OTHER_PEER),
        ("signature", Refusal.OTHER_SIGNATURE),
    ):
        expected = getattr(owner, name)
        if said.get(name) != expected:
            raise CheckpointRefused(refusal, f"{said.get(name, 'none')[:64]}, not {expected}")


def _digest(said: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Of everything that a checkpoint says; safetensors itself does not notice a changed byte."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    found = hashlib.sha256(json.dumps([dict(said), shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(tensors[name].flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Store:
    """One peer's checkpoints of a run: a folder with the last few, the newest of which can be trusted."""

    def __init__(self, folder: Path, owner: Owner, keep: int) -> None:
        self.folder, self.owner, self._keep = folder, owner, keep
        self._rounds: set[int] = set()
        for half in folder.glob(f".{owner.run}.{'[0-9]' * 8}{SUFFIX}{_HALF}"):  # whose writer was killed
            with suppress(OSError):
                half.unlink()
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            checkpoint = self._read(path)
            if checkpoint is not None:
                self._rounds.add(checkpoint.round)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds after which this peer can go on, rising."""
        return tuple(sorted(self._rounds))

    def load(self, round: int) -> Checkpoint | None:
        """The state after a round; None where there is none that can be trusted."""
        return self._read(self._path(round)) if round in self._rounds else None

    def newest(self) -> Checkpoint | None:
        """The newest state that can be trusted."""
        return next((found for k in reversed(self.rounds) if (found := self.load(k)) is not None), None)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write it, whole or not at all, and then let the oldest go. OSError leaves what was there as it was."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._path(checkpoint.round), to_bytes(checkpoint, self.owner))
        self._rounds = {k for k in self._rounds if k < checkpoint.round} | {checkpoint.round}
        for old in self.rounds[: -self._keep]:
            self._path(old).unlink(missing_ok=True)
            self._rounds.discard(old)

    def forget_after(self, round: int) -> None:
        """The run goes on from this round: what came after it the last time must never meet what comes now."""
        for k in [k for k in self._rounds if k > round]:
            self._path(k).unlink(missing_ok=True)
            self._rounds.discard(k)

    def _path(self, round: int) -> Path:
        return self.folder / f"{self.owner.run}.{round:08d}{SUFFIX}"

    def _read(self, path: Path) -> Checkpoint | None:
        try:
            checkpoint = from_bytes(path.read_bytes(), self.owner)
            if path != self._path(checkpoint.round):
                raise CheckpointRefused(Refusal.OTHER_ROUND, f"it is of round {checkpoint.round}")
        except (CheckpointRefused, OSError) as error:
            log.warning("checkpoint %s is not used: %s", path, error)
            return None
        return checkpoint


def write_durably(path: Path, data: bytes) -> None:
    """Whoever reads sees the old file or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}{_HALF}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def keep_newest(folder: Path) -> None:
    """A run that is over needs no other checkpoint than each peer's last."""
    for peer in folder.glob("*/"):
        for path in sorted(peer.glob(f"*{SUFFIX}"))[:-1]:
            path.unlink(missing_ok=True)


def join_states(**parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Several states as one: {"algorithm.w": ..., "codec.w": ...}."""
    return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}


def part_of(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """One of the states that `join_states` has put together."""
    return {name.removeprefix(f"{part}."): tensor for name, tensor in state.items() if name.startswith(f"{part}.")}
