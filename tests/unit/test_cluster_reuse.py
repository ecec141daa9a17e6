"""Where all members share one consensus weight, one package serves all neighbours."""

from typing import Any

import pytest

import spark_node.learning.spark as spark
import spark_node.package.peer as peer
from spark_node.config import Config
from spark_node.data.datasets import load
from spark_node.data.partitions import partition
from spark_node.launch.memory import MemoryRun
from tests.network.harness import Log


def run(monkeypatch: pytest.MonkeyPatch, kind: str, mode: str) -> tuple[int, int]:
    """(Jacobians taken, packages coded) in two rounds of eight peers with three neighbours each."""
    counts = {"jacobian": 0, "package": 0}
    jacobian, encode = spark.jacobian, peer.encode

    def counted_jacobian(*args: Any, **kwargs: Any) -> Any:
        counts["jacobian"] += 1
        return jacobian(*args, **kwargs)

    def counted_encode(message: Any, *args: Any, **kwargs: Any) -> Any:
        counts["package"] += message.kind == "package"
        return encode(message, *args, **kwargs)

    monkeypatch.setattr(spark, "jacobian", counted_jacobian)
    monkeypatch.setattr(peer, "encode", counted_encode)
    config = Config().replace(
        run__nodes=8,
        run__rounds=2,
        run__workers=1,
        topology__kind=kind,
        topology__degree=3,
        learning__linearize_at=mode,
        learning__timesteps=(100,),
        package__in_memory="encode",
    )
    digits = load("digits")
    MemoryRun(config, digits, partition("iid", digits, 8, samples_per_node=20, seed=0)).run(Log())
    return counts["jacobian"], counts["package"]


@pytest.mark.parametrize("mode", ["receiver", "sender"])
def test_a_cluster_takes_one_jacobian_a_peer_and_codes_it_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    assert run(monkeypatch, "cluster", mode) == (16, 16)


def test_neighbours_with_different_weights_each_get_a_package_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jacobians, packages = run(monkeypatch, "regular", "receiver")
    assert jacobians == 8 + 8 * (3 + 1)  # in the first round all have the initial weights
    assert packages == 8 + 8 * 3
