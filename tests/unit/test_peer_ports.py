"""Where the peers of a host listen: one port after the other from the first on, or free ones."""

import asyncio
import socket
from urllib.request import urlopen

import pytest

from spark_node import model
from spark_node.config import load
from spark_node.data import datasets, partitions
from spark_node.errors import ConfigError
from spark_node.launch.network import peer_jobs
from spark_node.launch.peer import PeerJob, PeerProcess


def jobs(**ports: int) -> list[PeerJob]:
    flags = {"run.nodes": 6, "security.tls": "off", "data.samples_per_node": 20}
    config = load(environment={}, flags={**flags, **{f"network.{name}": port for name, port in ports.items()}})
    dataset = datasets.load("digits")
    dealt = partitions.partition("iid", dataset, 6, samples_per_node=20, seed=0)
    module = model.build(config.model, dataset.shape, dataset.classes, 0)
    return peer_jobs(config, dataset, dealt, module, range(2, 5))


def test_peers_of_a_host_have_ports_one_after_the_other() -> None:
    made = jobs(port=7500, metrics_port=7700)
    assert [(job.name, job.port, job.metrics_port) for job in made] == [
        ("peer-002", 7500, 7700),
        ("peer-003", 7501, 7701),
        ("peer-004", 7502, 7702),
    ]
    assert {(job.port, job.metrics_port) for job in jobs()} == {(0, 0)}


def test_metrics_are_served_at_the_port_that_was_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        peer = PeerProcess(jobs(metrics_port=port)[0], None)
        with pytest.raises(ConfigError, match=f"network.metrics_port = {port}: 127.0.0.1:{port} cannot be had"):
            asyncio.run(peer._serve_metrics())

    def scrape() -> bytes:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            return bytes(page.read())

    async def served() -> bytes:
        async with await peer._serve_metrics():
            return await asyncio.to_thread(scrape)

    assert b"spark_round" in asyncio.run(served())
