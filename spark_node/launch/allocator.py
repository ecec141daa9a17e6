"""Keep freed memory in the process: kernels of a few megabytes come and go with every peer of every round."""

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEEP = 512 * 2**20
_LARGE = 32 * 2**20  # glibc's own upper bound for this setting


def keep_freed_memory() -> None:
    """Tell glibc to hand freed blocks out again instead of returning them: no page faults on the next kernel.

    Elsewhere (musl, macOS) nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_TRIM_THRESHOLD, _KEEP)
