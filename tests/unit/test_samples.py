"""Memory of one peer's inputs: mapped by its fork and not copied, and by no fork of another peer."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from spark_node.launch.samples import Room

MAPS = Path("/proc/self/maps")


def fork_writes(inputs: torch.Tensor) -> bool:
    """Whether a fork has these inputs' memory; it writes sevens to it."""
    start = f"{inputs.data_ptr():x}-"
    pid = os.fork()
    if pid == 0:
        mapped = not MAPS.exists() or any(line.startswith(start) for line in MAPS.read_text().splitlines())
        if mapped:
            inputs.fill_(7.0)
        os._exit(0 if mapped else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_inputs_are_the_same_in_a_room_of_their_own() -> None:
    given = torch.randn(3, 1, 4, 4)
    room = Room(given)
    assert torch.equal(room.inputs, given)
    assert room.inputs.is_contiguous()
    assert room.inputs.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0


def test_a_fork_has_the_memory_itself_and_no_copy_of_it() -> None:
    room = Room(torch.zeros(2, 3))
    assert fork_writes(room.inputs)
    assert room.inputs.tolist() == [[7.0] * 3] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all forks have all memory")
@pytest.mark.parametrize("shown", [False, True])
def test_a_hidden_room_is_there_for_the_fork_that_it_is_shown_to_alone(shown: bool) -> None:
    room = Room(torch.zeros(2, 3))
    room.hide()
    with room.shown() if shown else nullcontext():
        assert fork_writes(room.inputs) is shown
    assert not fork_writes(room.inputs)  # the next fork is another peer's
    assert room.inputs.tolist() == [[7.0 if shown else 0.0] * 3] * 2  # the host itself has all


@pytest.mark.parametrize("inputs", [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(0, 3)])
def test_what_cannot_lie_in_a_room_needs_none(inputs: torch.Tensor) -> None:
    assert Room.of(inputs) is None


def test_plain_inputs_get_a_room() -> None:
    room = Room.of(torch.ones(2, 3))
    assert room is not None
    assert room.inputs.sum() == 6
