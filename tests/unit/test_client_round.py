"""The benchmark's two ways of one client's round are the same mathematics."""

import pytest
import torch

from benchmarks.client_round import our_way, the_papers_way
from spark_node.config import ModelSettings
from spark_node.model import build, flatten


@pytest.mark.parametrize("kind", ["trace", "full"])
def test_our_round_is_the_papers_round(kind: str) -> None:
    module = build(ModelSettings(hidden=(12,)), (1, 6, 6), 10, seed=0)
    xs = list(torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0)).split(4))
    y = torch.nn.functional.one_hot(torch.arange(12) % 10, 10).float()
    reference = the_papers_way(kind, module, flatten(module), xs, y)

    def difference(integrator: str) -> float:
        return float((our_way(kind, integrator, module, flatten(module), xs, y) - reference).norm() / reference.norm())

    assert difference("euler") < 1e-5
    assert difference("rkc") < 0.01
