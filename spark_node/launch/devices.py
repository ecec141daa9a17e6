"""The torch devices of this machine."""

import torch

from spark_node.errors import ConfigError


def check_device(name: str) -> None:
    """Refuse a device that this machine or this build of torch does not have."""
    kinds = ["cpu"]
    kinds += [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    kinds += ["mps"] if torch.backends.mps.is_available() else []
    try:
        device = torch.device(name)
        if device.type in {kind.partition(":")[0] for kind in kinds}:
            torch.empty(1, device=device)
            return
    except (RuntimeError, AssertionError):
        pass
    raise ConfigError(f"run.device = {name!r}: not on this machine; allowed here: {', '.join(kinds)}")
