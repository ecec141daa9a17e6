"""A peer's samples as it will compute with them: standardised, and privatised once where [privacy] says so."""

import hashlib
import json
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from spark_node.checkpoint import write_durably
from spark_node.config import Config, PrivacySettings
from spark_node.data.datasets import Dataset
from spark_node.data.formats import Integers
from spark_node.errors import DataError, UserError
from spark_node.privacy import privatise, randomness

log = logging.getLogger(__name__)

KEPT = "samples.privatised"


@dataclass(frozen=True)
class PeerSamples:
    """What one peer learns from, on its device."""

    inputs: Tensor
    labels: Tensor
    path: Path | None = None
    """Where they have yet to be kept."""
    digest: str = ""

    def keep(self) -> None:
        """Write privatised samples down before anything computed from them leaves the peer."""
        if self.path is None:
            return
        tensors = {"inputs": self.inputs.cpu(), "labels": self.labels.cpu()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self.path, bytes(save_tensors(tensors, {"of": self.digest})))
        except OSError as error:
            raise UserError(f"{self.path}: privatised samples cannot be kept ({error.strerror})") from None


def peer_samples(
    config: Config, peer: str, dataset: Dataset, indices: Integers, folder: Path | None = None
) -> PeerSamples:
    """The samples of one peer. Test data never come this way.

    Noise that is drawn a second time tells more than the first alone, so privatised samples are kept in the peer's own
    folder of checkpoints: who starts again goes on with them.
    """
    device, settings = torch.device(config.run.device), config.privacy
    x = dataset.standardise(dataset.train.pixels[indices])
    y = torch.from_numpy(dataset.train.labels[indices])
    if settings.noise == 0 and settings.label_epsilon == 0:
        return PeerSamples(x.to(device), y.to(device))
    if settings.noise and not dataset.public:
        said = f"privacy.noise = {settings.noise}: its (epsilon, delta) needs a mean and a std that were not computed"
        raise DataError(f"{said} from the samples of {dataset.name}; put arrays `mean` and `std` into the file")
    if settings.noise_seed >= 0:
        _warn_of_seeded_noise()
    path = None if folder is None else folder / KEPT
    digest = _digest(settings, dataset.classes, x, y)
    kept = None if path is None else _read(path, digest)
    if kept is not None:
        return PeerSamples(kept[0].to(device), kept[1].to(device))
    random = randomness(settings, peer)
    noisy, labels = privatise(x.numpy(), y.numpy().astype(np.int64), settings, dataset.classes, random)
    return PeerSamples(torch.from_numpy(noisy).to(device), torch.from_numpy(labels).to(device), path, digest)


class Room:
    """Memory of one peer's inputs, which a fork maps and does not copy, and which only that peer's fork gets.

    Whoever keeps the kernel from copying and watching what it will never read saves both: of 300 peers of the paper's
    size each would otherwise map the samples of all, 190 MB, and whatever looks at a page of them looks at 300 maps.
    """

    def __init__(self, inputs: Tensor) -> None:
        self._block = mmap.mmap(-1, 4 * inputs.numel())
        self.inputs = torch.frombuffer(self._block, dtype=torch.float32).view(inputs.shape).copy_(inputs)

    @classmethod
    def of(cls, inputs: Tensor) -> "Room | None":
        """A room with these inputs; None for another kind of number, another device, or no samples at all."""
        fits = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and inputs.numel()
        return cls(inputs) if fits else None

    def hide(self) -> None:
        """From forks that come; in them, to touch it ends the process."""
        self._advise("MADV_DONTFORK")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """To forks that are made meanwhile."""
        self._advise("MADV_DOFORK")
        try:
            yield
        finally:
            self.hide()

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):  # Linux; elsewhere all forks have all
            self._block.madvise(getattr(mmap, advice))


@cache
def _warn_of_seeded_noise() -> None:
    """Once a process, not once a peer."""
    log.warning("the samples' noise comes from privacy.noise_seed: it is not private, for experiments only")


def _digest(settings: PrivacySettings, classes: int, x: Tensor, y: Tensor) -> str:
    """Of what was privatised, and how."""
    how = [settings.noise, settings.clip, settings.label_epsilon, settings.noise_seed, classes, list(x.shape)]
    found = hashlib.sha256(json.dumps(how).encode())
    for tensor in (x, y):
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()


def _read(path: Path, digest: str) -> tuple[Tensor, Tensor] | None:
    try:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        if header["__metadata__"]["of"] != digest:
            return None
        tensors = load_tensors(data)
        return tensors["inputs"], tensors["labels"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{path}: privatised samples that cannot be read ({error}); drawn anew they tell more"
        ) from None
