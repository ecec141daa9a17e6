"""What an algorithm keeps between rounds, taken up again from a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor


def taken_up(state: Mapping[str, Tensor], like: Tensor, optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The weights "w" and what else there is, all of the shape of `like` and finite; ValueError says what is not."""
    if "w" not in state or not state.keys() <= {"w", *optional}:
        raise ValueError(f"a state of {', '.join(state) or 'nothing'}; expected: {', '.join(('w', *optional))}")
    if any(t.shape != like.shape or not bool(torch.isfinite(t).all()) for t in state.values()):
        raise ValueError("weights or velocity of another shape, or not finite")
    return {name: tensor.to(like) for name, tensor in state.items()}
