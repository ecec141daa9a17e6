"""Noise at the source: what a peer computes with are privatised samples, and what that guarantees.

    x' = clip(x) + N(0, noise^2 I)      y' = randomised response      once a sample, before anything is computed

All that leaves a peer in all rounds (weights, packages, logits) is post-processing of (x', y'), so one statement holds
for all of it together: whoever sees everything cannot tell one value of a sample from any other, but for

    (epsilon, delta) = (epsilon of the analytic Gaussian mechanism + epsilon of the label, delta).
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_node.config import HIDDEN, PrivacySettings
from spark_node.errors import ConfigError
from spark_node.seeds import derive, stream

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
RandomBytes = Callable[[int], bytes]
"""So many random bytes."""


# The mechanisms.


def randomness(settings: PrivacySettings, peer: str) -> RandomBytes:
    """The operating system's: the run's seed is known to others. A seed of its own makes an experiment repeatable."""
    if settings.noise_seed < 0:
        return os.urandom
    return stream(settings.noise_seed, "privacy", peer).bytes


def privatise(
    x: Floats, y: Integers, settings: PrivacySettings, classes: int, random: RandomBytes
) -> tuple[Floats, Integers]:
    """A peer's samples as everything else will know them."""
    if settings.noise > 0:
        x = noised(clipped(x, settings.clip), settings.noise, random)
    if settings.label_epsilon > 0:
        y = randomised_response(y, classes, settings.label_epsilon, random)
    return x, y


def clipped(x: Floats, norm: float) -> Floats:
    """Each sample scaled down to the norm where it is longer."""
    lengths = np.linalg.norm(x.reshape(len(x), -1).astype(np.float64), axis=1)
    factors = np.minimum(1.0, norm * (1 - 2**-20) / np.maximum(lengths, np.finfo(np.float64).tiny))  # room for rounding
    shape = (-1,) + (1,) * (x.ndim - 1)
    return (x * np.where(lengths <= norm, 1.0, factors).reshape(shape)).astype(np.float32)


def noised(x: Floats, noise: float, random: RandomBytes) -> Floats:
    """x + N(0, noise^2 I)."""
    from scipy.special import ndtri

    drawn = noise * ndtri(_uniform(x.size, random)).reshape(x.shape)
    found: Floats = (x.astype(np.float64) + drawn).astype(np.float32)
    return found


def randomised_response(y: Integers, classes: int, epsilon: float, random: RandomBytes) -> Integers:
    """The label with probability e^epsilon / (e^epsilon + k - 1), else one of the k - 1 others, all alike."""
    stays = _uniform(len(y), random) < truthful(classes, epsilon)
    step = 1 + np.floor(_uniform(len(y), random) * (classes - 1)).astype(np.int64)
    return np.where(stays, y, (y + step) % classes).astype(np.int64)


def truthful(classes: int, epsilon: float) -> float:
    """Share of the labels that randomised response leaves as they are."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _uniform(count: int, random: RandomBytes) -> npt.NDArray[np.float64]:
    """Values strictly between 0 and 1, of 52 random bits each."""
    words = np.frombuffer(random(8 * count), "<u8") >> np.uint64(12)
    return (words.astype(np.float64) + 0.5) * 2.0**-52


# The accountant.


@dataclass(frozen=True)
class Guarantee:
    """What the run promises about one sample, towards whoever sees everything that all peers ever send."""

    epsilon: float
    delta: float
    covers: str
    """input and label | input | label: what may take any other value."""
    input_epsilon: float | None
    """None: inputs in clear."""
    label_epsilon: float | None
    """None: labels in clear."""
    noise: float
    clip: float
    copies: int
    """Peers that hold the same sample, each with noise of its own: what they send together tells more."""
    private: bool
    """False: the noise comes from a seed, so whoever knows that can take it off again."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def in_words(self) -> str:
        """On one line, with what is not covered."""
        if not self.private:
            return "noise from privacy.noise_seed: NOT private, for experiments only"
        clear = {"input": "; labels in clear", "label": "; inputs in clear"}.get(self.covers, "")
        shared = f", held by up to {self.copies} peers" if self.copies > 1 else ""
        return f"epsilon {self.epsilon:.4g}, delta {self.delta:.2g} for the {self.covers} of a sample{shared}{clear}"


def guarantee(settings: PrivacySettings, shares: Sequence[Integers], classes: int) -> Guarantee | None:
    """Of a run whose peers hold these samples (indices of the training set); None where no noise is asked for."""
    if settings.noise == 0 and settings.label_epsilon == 0:
        return None
    held = np.concatenate([np.asarray(own, np.int64) for own in shares])
    copies = int(np.bincount(held).max()) if len(held) else 1
    of_input = None
    if settings.noise > 0:
        of_input = gaussian_epsilon(2 * settings.clip * math.sqrt(copies), settings.noise, settings.delta)
    of_label = copies * settings.label_epsilon if settings.label_epsilon > 0 else None
    covered = [name for name, found in (("input", of_input), ("label", of_label)) if found is not None]
    return Guarantee(
        epsilon=(of_input or 0.0) + (of_label or 0.0),
        delta=settings.delta if of_input is not None else 0.0,
        covers=" and ".join(covered),
        input_epsilon=of_input,
        label_epsilon=of_label,
        noise=settings.noise,
        clip=settings.clip,
        copies=copies,
        private=settings.noise_seed < 0,
    )


def gaussian_delta(sensitivity: float, noise: float, epsilon: float) -> float:
    """The least delta of the Gaussian mechanism at this epsilon (Balle and Wang 2018, theorem 8).

    delta = Phi(D / 2s - e s / D) - e^e Phi(-D / 2s - e s / D),  D the sensitivity, s the noise, e epsilon
    """
    from scipy.special import log_ndtr

    half, tail = sensitivity / (2 * noise), epsilon * noise / sensitivity
    first, second = float(log_ndtr(half - tail)), epsilon + float(log_ndtr(-half - tail))
    return max(0.0, -math.exp(first) * math.expm1(min(0.0, second - first)))


def gaussian_epsilon(sensitivity: float, noise: float, delta: float) -> float:
    """The least epsilon at which the Gaussian mechanism has this delta, rounded up."""
    from scipy.optimize import brentq

    if gaussian_delta(sensitivity, noise, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(sensitivity, noise, high) > delta:
        high *= 2
    found = float(brentq(lambda e: gaussian_delta(sensitivity, noise, e) - delta, 0.0, high, xtol=1e-12))
    while gaussian_delta(sensitivity, noise, found) > delta:
        found += 1e-9 * max(1.0, found)
    return found


# The secret of the sketches.


def sketch_seed(seed: int, secret: str) -> int:
    """The seed of the projections: the run's own or, with a secret, one that nobody else can derive."""
    refuse_hidden(secret)
    return _secret_seed(seed, secret) if secret else seed


@lru_cache(maxsize=4)
def _secret_seed(seed: int, secret: str) -> int:
    """scrypt: who holds a package and tries secrets one by one pays for every try."""
    key = hashlib.scrypt(secret.encode(), salt=f"spark sketch {seed}".encode(), n=2**14, r=8, p=1, dklen=16)
    return derive(int.from_bytes(key, "little"), "sketch-secret")


def refuse_hidden(secret: str) -> None:
    """A configuration that was written down does not hold its secret."""
    if secret == HIDDEN:
        raise ConfigError(
            f"privacy.sketch_secret = {HIDDEN}: it is never written down; give it again, "
            "best in the environment: SPARK_PRIVACY__SKETCH_SECRET"
        )
