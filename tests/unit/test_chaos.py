"""Faults on purpose: the script, the order of the day, the processes of a network."""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_node.chaos.order import Order, StandingOrder, read_order
from spark_node.chaos.script import FAULTS, Fault, at_random, parse
from spark_node.chaos.transport import damage
from spark_node.errors import ConfigError
from spark_node.launch.pids import live_pids, note_pid


def test_a_script_says_when_what_and_whom() -> None:
    text = """
    # first a killing
    at 10s kill peer-003
    round 4 pause peer-001 2.5s     # then a rest
    round 6 cut peer-000,peer-001 20s
    """
    assert parse(text) == [
        Fault("kill", ("peer-003",), at=10.0),
        Fault("pause", ("peer-001",), 2.5, round=4),
        Fault("cut", ("peer-000", "peer-001"), 20.0, round=6),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill peer-003", "expected: at SECONDSs"),
        ("at 3s burn peer-003", "no fault 'burn'; there are: kill, pause"),
        ("at soon kill peer-003", "'soon' is no time"),
        ("round x kill peer-003", "expected: at SECONDSs"),
        ("at 3s kill peer-003 5s", "kill does not last"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse(f"\n{line}", "faults.txt")
    assert "faults.txt, line 2" in str(error.value)


def test_random_faults_come_at_their_rate_and_again_the_same() -> None:
    def first(count: int, seed: int) -> list[tuple[float, str, float]]:
        faults = at_random(["kill", "pause"], 30, 2.0, seed)
        return [next(faults) for _ in range(count)]

    assert first(50, 1) == first(50, 1)
    assert first(50, 1) != first(50, 2)
    pauses = [pause for pause, _, _ in first(2000, 0)]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.1)
    with pytest.raises(ConfigError, match="no such fault"):
        next(at_random(["burn"], 1, 1, 0))
    assert set(FAULTS) == {"kill", "pause", "slow", "cut", "corrupt", "full-disk"}


def test_an_order_separates_groups_until_its_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    standing = StandingOrder(path, every=0.0)
    assert not standing.now().separates("a", "b")
    Order((("a",), ("b", "c")), {"c": 0.5}, time.time() + 60).write(path)
    order = standing.now()
    assert order.separates("a", "b")
    assert order.separates("c", "a")
    assert not order.separates("b", "c")
    assert not order.separates("a", "somebody else")
    assert order.corrupt == {"c": 0.5}
    Order((("a",), ("b", "c")), {}, time.time() - 1).write(path)
    assert not standing.now().separates("a", "b")
    path.unlink()
    assert standing.now() == Order()


@given(st.binary(max_size=200))
def test_a_file_that_is_no_order_orders_nothing(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "chaos-garbage.json"
    path.write_bytes(data)
    assert isinstance(read_order(path), Order)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 1000))
def test_damage_is_one_bit(data: bytes, seed: int) -> None:
    bent = damage(data, Random(seed))
    assert len(bent) == len(data)
    assert sum((a ^ b).bit_count() for a, b in zip(data, bent, strict=True)) == 1


def test_processes_are_known_while_they_live(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note_pid(tmp_path, "peer-000", child.pid)
    note_pid(tmp_path, "peer-001", os.getpid())
    assert live_pids(tmp_path) == {"peer-000": child.pid, "peer-001": os.getpid()}
    child.kill()
    child.wait()
    assert live_pids(tmp_path) == {"peer-001": os.getpid()}
    (tmp_path / "peer-001.pid").write_text(f"{os.getpid()} 12345\n")
    assert live_pids(tmp_path) == {}, "another process that got the same number later"
