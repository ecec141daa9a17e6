"""Checkpoints: what comes back is what was kept, or a refusal by name; the newest that can be trusted is used."""

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from spark_node import checkpoint as module
from spark_node.checkpoint import (
    Checkpoint,
    CheckpointRefused,
    Owner,
    Refusal,
    Store,
    from_bytes,
    join_states,
    keep_newest,
    part_of,
    to_bytes,
)
from spark_node.learning.algorithms import make_terms
from spark_node.learning.messages import Weights
from spark_node.learning.spark import Spark
from spark_node.model import ParameterLayout
from spark_node.package.peer import PeerCodec
from tests.unit.test_memory_run import small

OWNER = Owner("monday", "peer-003", "0123abcd")


def made(k: int, size: int = 20) -> Checkpoint:
    generator = torch.Generator().manual_seed(k)
    w, v = torch.randn(2, size, generator=generator)
    return Checkpoint(k, {"algorithm.w": w.clone(), "algorithm.v": v.clone(), "codec.w": torch.zeros(size)})


def same(a: Checkpoint | None, b: Checkpoint) -> bool:
    return (
        a is not None
        and a.round == b.round
        and a.state.keys() == b.state.keys()
        and all(torch.equal(a.state[name], b.state[name]) for name in b.state)
    )


def file_of(folder: Path, k: int) -> Path:
    return folder / f"monday.{k:08d}.safetensors"


# One file


def test_what_was_kept_comes_back_bit_for_bit() -> None:
    odd = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])
    kept = Checkpoint(7, {"a": odd, "b": torch.arange(3).bfloat16(), "c": torch.zeros(0)})
    found = from_bytes(to_bytes(kept, OWNER), OWNER)
    assert found.round == 7
    for name, tensor in kept.state.items():
        assert found.state[name].dtype == tensor.dtype
        assert found.state[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"run": "tuesday"}, Refusal.OTHER_RUN),
        ({"peer": "peer-004"}, Refusal.OTHER_PEER),
        ({"signature": "ffff"}, Refusal.OTHER_SIGNATURE),
    ],
)
def test_somebody_elses_state_is_refused_by_name(change: dict[str, str], refusal: Refusal) -> None:
    with pytest.raises(CheckpointRefused) as caught:
        from_bytes(to_bytes(made(3), replace(OWNER, **change)), OWNER)
    assert caught.value.refusal is refusal
    assert next(iter(change.values())) in str(caught.value)


def test_another_format_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 2)
    data = to_bytes(made(3), OWNER)
    monkeypatch.undo()
    with pytest.raises(CheckpointRefused, match="another format version: 2, not 1"):
        from_bytes(data, OWNER)


WHOLE = to_bytes(made(5), OWNER)


@given(length=st.integers(0, len(WHOLE) - 1))
@effort(deadline=None, max_examples=200)
def test_a_torn_file_is_refused(length: int) -> None:
    with pytest.raises(CheckpointRefused):
        from_bytes(WHOLE[:length], OWNER)


@given(place=st.integers(0, len(WHOLE) - 1), change=st.integers(1, 255))
@effort(deadline=None, max_examples=600)
def test_a_changed_byte_is_refused_or_changes_nothing(place: int, change: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= change
    try:
        found = from_bytes(bytes(data), OWNER)
    except CheckpointRefused:
        return
    assert same(found, made(5))


@given(st.binary(max_size=300))
@effort(deadline=None, max_examples=300)
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointRefused):
        from_bytes(data, OWNER)


# The folder


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "new", OWNER, keep=3)
    assert (store.rounds, store.newest()) == ((), None)
    for k in range(1, 6):
        store.save(made(k))
    assert store.rounds == Store(tmp_path / "new", OWNER, 3).rounds == (3, 4, 5)
    assert len(list((tmp_path / "new").iterdir())) == 3
    assert same(store.load(4), made(4))
    assert same(store.newest(), made(5))
    assert store.load(2) is None


def test_a_torn_newest_is_named_and_the_one_before_it_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path, OWNER, keep=3)
    for k in (1, 2, 3):
        store.save(made(k))
    file_of(tmp_path, 3).write_bytes(file_of(tmp_path, 3).read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        again = Store(tmp_path, OWNER, keep=3)
    assert again.rounds == (1, 2)
    assert same(again.newest(), made(2))
    assert f"{file_of(tmp_path, 3)} is not used: torn" in caplog.text


def test_a_file_that_is_torn_while_we_live_is_passed_over_too(tmp_path: Path) -> None:
    store = Store(tmp_path, OWNER, keep=3)
    for k in (1, 2, 3):
        store.save(made(k))
    file_of(tmp_path, 3).write_bytes(b"")
    assert same(store.newest(), made(2))


def test_a_copy_under_another_rounds_name_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, OWNER, keep=3)
    store.save(made(1))
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 1).read_bytes())
    assert Store(tmp_path, OWNER, keep=3).rounds == (1,)


def test_two_runs_in_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    other = Store(tmp_path, replace(OWNER, run="tuesday"), keep=1)
    other.save(made(1))
    mine = Store(tmp_path, OWNER, keep=1)
    assert mine.rounds == ()
    for k in (1, 2):
        mine.save(made(k))
    assert Store(tmp_path, replace(OWNER, run="tuesday"), keep=1).rounds == (1,)


def test_what_came_after_the_round_that_is_gone_back_to_is_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path, OWNER, keep=9)
    for k in (1, 2, 3, 4):
        store.save(made(k))
    store.forget_after(2)
    assert Store(tmp_path, OWNER, keep=9).rounds == store.rounds == (1, 2)


def test_a_finished_run_keeps_each_peers_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "peer-003", OWNER, keep=9)
    for k in (1, 2, 3):
        store.save(made(k))
    keep_newest(tmp_path)
    assert Store(tmp_path / "peer-003", OWNER, keep=9).rounds == (3,)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "spark-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tiny_disk: Path) -> None:
    store = Store(tiny_disk / "peer-003", OWNER, keep=9)
    store.save(made(1, size=4000))
    with pytest.raises(OSError, match="No space"):
        store.save(made(2, size=4000))
    assert store.rounds == (1,)
    again = Store(tiny_disk / "peer-003", OWNER, keep=9)
    assert same(again.newest(), made(1, size=4000))
    assert [path.name for path in (tiny_disk / "peer-003").iterdir()] == ["monday.00000001.safetensors"]
    again.save(made(3, size=10))


def test_what_a_killed_process_was_writing_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, OWNER, keep=9)
    store.save(made(1))
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.kill(os.getpid(), signal.SIGKILL))
    if (child := os.fork()) == 0:
        store.save(made(2))  # which it does not live through
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"monday.00000001.safetensors", ".monday.00000002.safetensors.tmp"}
    Store(tmp_path, replace(OWNER, run="tuesday"), keep=9)
    assert {path.name for path in tmp_path.iterdir()} == left, "another run's writer may be at work"
    assert same(Store(tmp_path, OWNER, keep=9).newest(), made(1))
    assert [path.name for path in tmp_path.iterdir()] == ["monday.00000001.safetensors"]


# States


def test_states_are_put_together_and_taken_apart() -> None:
    joined = join_states(algorithm={"w": torch.ones(1)}, codec={})
    assert joined.keys() == {"algorithm.w"}
    assert part_of(joined, "algorithm").keys() == {"w"}
    assert part_of(joined, "codec") == {}


def learner() -> Spark:
    return Spark(small(), "peer-000", torch.nn.Linear(3, 2), torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


def test_a_learner_goes_on_from_its_state_and_a_newcomer_from_weights_alone() -> None:
    one, other = learner(), learner()
    one.w, one.v = torch.arange(8.0), torch.ones(8)
    other.restore(one.state())
    assert torch.equal(other.w, one.w)
    assert torch.equal(other.v, one.v)
    other.restore({"w": one.w})
    assert float(other.v.abs().sum()) == 0


@pytest.mark.parametrize(
    "state",
    [{}, {"v": torch.ones(8)}, {"w": torch.ones(7)}, {"w": torch.full((8,), torch.nan)}, {"w": torch.ones(8), "x": 1}],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: dict[str, torch.Tensor]) -> None:
    one = learner()
    before = one.w.clone()
    with pytest.raises(ValueError, match=r"state|shape"):
        one.restore(state)
    assert torch.equal(one.w, before)


def test_what_a_coder_owes_survives() -> None:
    layout = ParameterLayout.of(torch.nn.Linear(30, 20))
    terms = make_terms(small(package__weights="int8"), "monday", layout, 20)
    one, other = (PeerCodec(terms, "peer-000", seed=0) for _ in range(2))
    w = [torch.randn(620, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    one.encode(Weights(w[0]), 1, "peer-001")
    other.restore(one.state())
    again = [b"".join(codec.encode(Weights(w[1]), 2, "peer-001")) for codec in (one, other)]
    assert again[0] == again[1]
    other.restore({})
    assert other.feedback == {}
