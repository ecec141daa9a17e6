"""Memory that a host's peers share: the same inputs, mapped by forks and not copied."""

import os

import pytest
import torch

from spark_node.launch.samples import SharedRoom


def test_inputs_are_the_same_in_shared_memory_and_lie_side_by_side() -> None:
    first, second = torch.randn(3, 1, 4, 4), torch.randn(2, 1, 4, 4)
    room = SharedRoom(5, (1, 4, 4))
    kept = room.put(first), room.put(second)
    assert torch.equal(kept[0], first)
    assert torch.equal(kept[1], second)
    assert all(inputs.is_contiguous() for inputs in kept)
    assert kept[1].data_ptr() == kept[0].data_ptr() + 4 * first.numel()


def test_a_fork_has_the_memory_itself_and_no_copy_of_it() -> None:
    kept = SharedRoom(2, (3,)).put(torch.zeros(2, 3))
    pid = os.fork()
    if pid == 0:
        kept.fill_(7.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert kept.tolist() == [[7.0] * 3] * 2


@pytest.mark.parametrize("inputs", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 3), torch.zeros(2, 4)])
def test_what_does_not_fit_is_handed_back_as_it_is(inputs: torch.Tensor) -> None:
    assert SharedRoom(2, (3,)).put(inputs) is inputs


def test_peers_without_samples_need_no_room() -> None:
    assert SharedRoom(0, (3,)).put(torch.zeros(0, 3)).shape == (0, 3)
