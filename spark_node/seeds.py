"""One seed drives every random choice: named streams, derived by hash, the same on every platform."""

import hashlib

import numpy as np


def derive(seed: int, *names: str | int) -> int:
    """A 128-bit seed for the stream called `names` of the run seeded with `seed`."""
    if any("/" in name for name in names if isinstance(name, str)):
        raise ValueError(f"a stream's name has no slash: {names}")
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream called `names`. Philox is counter-based and specified bit for bit."""
    return np.random.Generator(np.random.Philox(key=derive(seed, *names)))
