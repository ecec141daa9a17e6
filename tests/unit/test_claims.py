"""Hosts that are replicas share out the peers by themselves, and take over what another left."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from spark_node.errors import ConfigError
from spark_node.launch.claims import claim

SPAWN = multiprocessing.get_context("spawn")


def hold(folder: str, owner: str, telling: Connection, forks: bool) -> None:
    """A host: claims a block, tells which, and lives until it is killed; `forks`: with a child that outlives it."""
    block = claim(Path(folder), 12, 4, owner=owner, patience=20)
    child = os.fork() if forks else -1
    if child:
        telling.send((None if block is None else block.first, child))
    signal.pause()


class Hosts:
    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        self.children: list[int] = []

    def start(self, owner: str, *, forks: bool = False) -> Callable[[], int | None]:
        """Start a host; what is returned waits for its block."""
        reading, writing = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=hold, args=(str(self.folder), owner, writing, forks))
        process.start()
        self.started.append(process)

        def block() -> int | None:
            assert reading.poll(60), "no block and no refusal"
            first, child = reading.recv()
            self.children += [child] if child > 0 else []
            return first

        return block

    def kill(self, index: int) -> None:
        self.started[index].kill()
        self.started[index].join()


@pytest.fixture
def hosts(tmp_path: Path):
    found = Hosts(tmp_path / "claims")
    yield found
    for process in found.started:
        process.kill()
        process.join()
    for child in found.children:
        os.kill(child, signal.SIGKILL)


def test_hosts_that_start_at_once_get_different_blocks(hosts: Hosts) -> None:
    blocks = [hosts.start(f"host-{i}") for i in range(3)]
    assert sorted(block() or 0 for block in blocks) == [0, 4, 8]
    assert claim(hosts.folder, 12, 4, owner="one too many") is None


def test_a_killed_hosts_block_is_free_at_once_and_goes_to_who_waits(hosts: Hosts) -> None:
    blocks = [hosts.start(f"host-{i}")() for i in range(3)]
    replacement = hosts.start("replacement")
    hosts.kill(1)
    assert replacement() == blocks[1]


def test_a_host_that_comes_back_has_its_block_again(hosts: Hosts) -> None:
    first, second = hosts.start("a")(), hosts.start("b")()
    hosts.kill(0)
    hosts.kill(1)
    assert hosts.start("b")() == second
    assert hosts.start("new")() == 8, "blocks that nobody had come before another's"
    assert hosts.start("a")() == first


def test_a_block_is_claimed_while_a_peer_of_it_lives(hosts: Hosts) -> None:
    for i in range(3):
        hosts.start(f"host-{i}", forks=True)()
    hosts.kill(0)
    assert claim(hosts.folder, 12, 4, owner="early") is None
    os.kill(hosts.children.pop(0), signal.SIGKILL)
    end = time.monotonic() + 30
    while (found := claim(hosts.folder, 12, 4, owner="late")) is None and time.monotonic() < end:
        time.sleep(0.05)
    assert found is not None
    found.release()


def test_the_last_block_may_be_smaller(tmp_path: Path) -> None:
    found = [claim(tmp_path, 10, 4, owner=str(i)) for i in range(3)]
    assert [(block.first, block.count) for block in found if block] == [(0, 4), (4, 4), (8, 2)]
    for block in found:
        assert block is not None
        block.release()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--claim .*file"):
        claim(tmp_path / "file", 10, 5)
    with pytest.raises(ConfigError, match="--count 0"):
        claim(tmp_path, 10, 0)
