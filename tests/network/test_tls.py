"""Strangers, impostors and the impatient at the open ports of a real network: refused by name, and nobody notices.

Each attack runs beside a network whose peers end with the weights of the same run without it, bit for bit.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc import aio

from spark_node.generated.spark.v1 import orchestrator_pb2, orchestrator_pb2_grpc, peer_pb2, peer_pb2_grpc
from spark_node.launch.peer import signature
from spark_node.learning.messages import Weights
from spark_node.package.peer import PeerCodec
from spark_node.security.authority import Authority, make_run_folder
from spark_node.security.identity import Role
from spark_node.security.tls import MutualTls, Plaintext
from spark_node.transport.frames import deliveries
from tests.network.harness import Network, in_memory, logs, small
from tests.network.isolation import isolated
from tests.network.test_commands import PEER, start

ROOT = Path(__file__).resolve().parents[2]
VICTIM, LIAR = "peer-001", "peer-002"
ROUNDS = 8


def reason(receipt: "peer_pb2.Receipt") -> str:
    return peer_pb2.Reason.Name(receipt.reason).removeprefix("REASON_").lower()


@dataclass
class Attack:
    """A network in training, and the means to attack one of its peers."""

    network: Network
    addresses: dict[str, str]
    run: str
    version: int
    metrics: str

    def series(self) -> dict[str, float]:
        """The victim's metrics: by name, or by reason of a refusal."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as page:
            lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
        found = {}
        for line in lines:
            label = re.search(r'spark_refused_total{.*reason="(\w+)"', line)
            found[label[1] if label else line.partition("{")[0]] = float(line.rpartition(" ")[2])
        return found

    @property
    def certs(self) -> Path:
        return Path(self.network.config.security.certs)

    def channel(self, folder: Path, role: Role, name: str, to: str = VICTIM) -> aio.Channel:
        """With a certificate that may not load for its owner: expired ones, revoked ones."""
        key, pem = ((folder / role.value / f"{name}.{end}").read_bytes() for end in ("key", "pem"))
        credentials = grpc.ssl_channel_credentials((self.certs / "authority.pem").read_bytes(), key, pem)
        override = [("grpc.ssl_target_name_override", f"{to}.1.peer.spark"), ("grpc.use_local_subchannel_pool", 1)]
        return aio.secure_channel(self.addresses[to], credentials, options=override)

    def message(self, sender: str, k: int, stage: str = "weights", run: str = "") -> bytes:
        """A sound message with weights that would spoil the victim's model."""
        from spark_node.learning.algorithms import make_terms
        from spark_node.model import ParameterLayout

        layout = ParameterLayout.of(self.network.module)
        terms = make_terms(self.network.config, self.run, layout, self.network.dataset.classes)
        pieces = PeerCodec(terms, sender, 0).encode(Weights(torch.full((layout.size,), 7.0)), k, VICTIM)
        envelope = peer_pb2.Envelope(
            run=run or self.run, round=k, stage=stage, sender=sender, members_version=self.version
        )
        return next(deliveries(envelope, pieces, 2**20))

    async def deliver(self, channel: aio.Channel, raw: bytes) -> str:
        call = channel.unary_unary("/spark.v1.Peer/DeliverWhole", response_deserializer=peer_pb2.Receipt.FromString)
        try:
            return reason(await call(raw, timeout=10.0))
        except aio.AioRpcError as error:
            return str(error.code().name)

    def neighbours(self, k: int) -> tuple[str, ...]:
        from spark_node.membership import Roster

        roster = Roster(self.network.config.run.seed, self.network.config.topology)
        roster.add(1, 1, self.addresses)
        return roster.neighbours(VICTIM, k)


async def find(network: Network) -> Attack:
    """Wait for the start, as an observer does."""
    security = MutualTls(Path(network.config.security.certs), Role.OBSERVER, "observer")
    async with security.channel(network.local.orchestrator_address, Role.ORCHESTRATOR, "orchestrator", []) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
        while True:
            reply = await stub.Describe(orchestrator_pb2.DescribeRequest(), wait_for_ready=True, timeout=60.0)
            if reply.run.started:
                addresses = {member.name: member.address for member in reply.members.members}
                metrics = next(member.metrics_address for member in reply.members.members if member.name == VICTIM)
                return Attack(network, addresses, reply.run.run, reply.members.version, metrics)
            await asyncio.sleep(0.02)


def under(attack: Callable[[Attack], Awaitable[None]], folder: Path, **changes: Any) -> None:
    """Train with the attack beside it; the models are those of the same run in memory."""
    config = small(run__nodes=6, run__rounds=ROUNDS, network__metrics=True, **changes)
    expected = in_memory(config)
    network = Network(config, folder)

    async def both() -> Any:
        observer = network.observer()
        following = asyncio.create_task(observer.follow(network.local.over))
        try:
            async with asyncio.timeout(90):
                await attack(await find(network))
        finally:
            await following
        return observer.models

    with network.local:
        models = asyncio.run(both())
    found = models[max(models)]
    assert [record.neighbours_used for record in network.log.records] == [18] * ROUNDS, logs(folder)
    for peer, w in expected.items():
        assert torch.equal(found[peer], w), f"{peer} differs\n{logs(folder)}"


@isolated
def test_strangers_are_refused_in_the_handshake(tmp_path: Path) -> None:
    async def strangers(it: Attack) -> None:
        foreign = Authority.create(tmp_path / "foreign", f"run-{it.run}", 1)
        foreign.issue(Role.PEER, LIAR, 1)
        Authority.open(it.certs).issue(Role.PEER, "expired", -1, tmp_path / "expired")
        raw = it.message(LIAR, 1)
        async with aio.insecure_channel(it.addresses[VICTIM]) as channel:
            assert await it.deliver(channel, raw) == "UNAVAILABLE"
        roots = (it.certs / "authority.pem").read_bytes()
        override = [("grpc.ssl_target_name_override", f"{VICTIM}.1.peer.spark")]
        bare = grpc.ssl_channel_credentials(roots)
        async with aio.secure_channel(it.addresses[VICTIM], bare, options=override) as channel:
            assert await it.deliver(channel, raw) == "UNAVAILABLE"
        for folder, name in ((foreign.folder, LIAR), (tmp_path / "expired", "expired")):
            async with it.channel(folder, Role.PEER, name) as channel:
                assert await it.deliver(channel, raw) == "UNAVAILABLE", name
        seen = it.series()
        assert seen["spark_connections_total"] >= seen["spark_connections_certified_total"] + 4

    under(strangers, tmp_path / "run")


@isolated
def test_a_client_talks_to_the_very_peer_that_it_means(tmp_path: Path) -> None:
    async def elsewhere(it: Attack) -> None:
        security = MutualTls(it.certs, Role.OBSERVER, "observer")
        for role, name in ((Role.PEER, "peer-003"), (Role.ORCHESTRATOR, "orchestrator")):
            async with security.channel(it.addresses[VICTIM], role, name, []) as channel:
                with pytest.raises(aio.AioRpcError) as caught:
                    await anext(aiter(peer_pb2_grpc.PeerStub(channel).Follow(peer_pb2.FollowRequest(), timeout=10.0)))
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    under(elsewhere, tmp_path)


@isolated
def test_members_that_lie_are_refused_by_name(tmp_path: Path) -> None:
    async def lies(it: Attack) -> None:
        near, far = it.neighbours(1), [p for p in it.addresses if p not in (VICTIM, *it.neighbours(1))]
        async with it.channel(it.certs, Role.PEER, far[0]) as channel:
            assert await it.deliver(channel, it.message(near[0], 1)) == "wrong_sender"  # under a neighbour's name
            said = await it.deliver(channel, it.message(far[0], 1))  # under its own, in a round that is not its own
            assert said in ("not_a_neighbour", "stale")
            assert await it.deliver(channel, it.message(far[0], 1, run="another")) == "wrong_run"
            assert await it.deliver(channel, it.message(far[0], 1, stage="x" * 50)) == "wrong_stage"
            later = next(k for k in range(2, 10_000) if far[0] not in it.neighbours(k))
            assert await it.deliver(channel, it.message(far[0], later)) in ("not_a_neighbour", "stale", "early")
        async with it.channel(it.certs, Role.OBSERVER, "observer") as channel:
            assert await it.deliver(channel, it.message(near[0], 1)) == "wrong_role"
        async with it.channel(it.certs, Role.PEER, far[0]) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            with pytest.raises(aio.AioRpcError) as caught:
                await anext(aiter(stub.Follow(peer_pb2.FollowRequest())))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "this is for observer" in (caught.value.details() or "")
        async with it.channel(it.certs, Role.ORCHESTRATOR, "orchestrator") as channel:
            call = peer_pb2_grpc.PeerStub(channel).Model(peer_pb2.ModelRequest(run=it.run, round=1))
            with pytest.raises(aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert "this is for observer or peer" in (caught.value.details() or "")
        seen = it.series()
        assert (seen["wrong_sender"], seen["wrong_run"], seen["wrong_stage"], seen["wrong_role"]) == (1, 1, 1, 3)

    under(lies, tmp_path)


@isolated
def test_a_message_is_never_taken_twice(tmp_path: Path) -> None:
    """The sender's own key sends the copies: nobody else's gets so far."""

    async def replays(it: Attack) -> None:
        while "round 1:" not in (tmp_path / "logs" / f"{VICTIM}.log").read_text():
            await asyncio.sleep(0.02)
        near = it.neighbours(1)
        async with it.channel(it.certs, Role.PEER, near[0]) as channel:
            for stage in ("weights", "consensus", "package"):
                assert await it.deliver(channel, it.message(near[0], 1, stage)) == "stale"
        assert it.series()["stale"] >= 3

    under(replays, tmp_path)


@isolated
def test_a_revoked_peer_is_refused_within_seconds_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    config = small(
        run__nodes=6, run__rounds=60, topology__degree=2, network__lease=2.0,
        network__deadline_floor=1.0, network__deadline_ceiling=10.0,
    )  # fmt: skip
    network = Network(config, tmp_path)
    start_of_all = time.monotonic()

    async def revoke() -> Any:
        observer = network.observer()
        following = asyncio.create_task(observer.follow(network.local.over))
        it = await find(network)
        while "round 2:" not in (tmp_path / "logs" / f"{VICTIM}.log").read_text():
            await asyncio.sleep(0.02)
        Authority.open(it.certs).revoke(Role.PEER, LIAR)
        async with it.channel(it.certs, Role.PEER, LIAR) as channel:
            end = time.monotonic() + 10
            while (said := await it.deliver(channel, it.message(LIAR, 1))) != "revoked":
                assert time.monotonic() < end, said
                await asyncio.sleep(0.1)
        await following
        return observer.models

    with network.local:
        models = asyncio.run(revoke())
    assert len(network.log.records) == 60
    assert set(models[60]) == {f"peer-00{i}" for i in range(6)} - {LIAR}, logs(tmp_path)
    assert time.monotonic() - start_of_all < 55, f"somebody waited for the deadline\n{logs(tmp_path)}"


@isolated
def test_a_neighbour_that_sends_nonsense_is_cut_off_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """The nonsense comes with a living peer's key, so that what it says in earnest is not taken either."""
    config = small(run__nodes=6, run__rounds=ROUNDS, network__metrics=True, network__deadline_floor=60.0)
    network = Network(config, tmp_path)

    async def both() -> None:
        observer = network.observer()
        following = asyncio.create_task(observer.follow(network.local.over))
        it = await find(network)
        async with it.channel(it.certs, Role.PEER, LIAR) as channel:
            answers = [await it.deliver(channel, b"\x0a\x02nonsense" + os.urandom(50)) for _ in range(30)]
        assert answers[0] == "malformed"
        assert "cut_off" in answers
        assert it.series()["cut_off"] > 0
        await following

    start = time.monotonic()
    with network.local:
        asyncio.run(both())
    assert len(network.log.records) == ROUNDS, logs(tmp_path)
    assert f"{LIAR} broke limits too often and is cut off" in (tmp_path / "logs" / f"{VICTIM}.log").read_text()
    assert sum(record.neighbours_used for record in network.log.records) >= 18 * ROUNDS - 2 * 4, "others were left out"
    assert time.monotonic() - start < 55, "somebody waited for the deadline"


@isolated
def test_the_orchestrator_takes_a_name_only_from_its_certificate(tmp_path: Path) -> None:
    async def joins(it: Attack) -> None:
        Authority.open(it.certs).issue(Role.PEER, "peer-9", 1)
        for role, name, refusal in (
            (Role.PEER, "peer-9", "WRONG_IDENTITY"),
            (Role.OBSERVER, "observer", "WRONG_IDENTITY"),
            (Role.PEER, LIAR, "NAME_TAKEN"),  # a second one with the same certificate, while the first lives
        ):
            security = MutualTls(it.certs, role, name)
            address = it.network.local.orchestrator_address
            async with security.channel(address, Role.ORCHESTRATOR, "orchestrator", []) as channel:
                stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
                member = orchestrator_pb2.Member(name=LIAR, address="127.0.0.1:1")
                signed = signature(it.network.config, it.network.module)
                reply = await stub.Join(orchestrator_pb2.JoinRequest(member=member, signature=signed), timeout=10)
                assert orchestrator_pb2.JoinRefusal.Name(reply.refusal) == f"JOIN_REFUSAL_{refusal}"
                if refusal == "WRONG_IDENTITY":
                    renewal = orchestrator_pb2.RenewRequest(run=it.run, name=LIAR, address=it.addresses[LIAR])
                    with pytest.raises(aio.AioRpcError) as caught:
                        await stub.Renew(renewal, timeout=10)
                    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    under(joins, tmp_path)
    assert "the certificate is of peer-9" in logs(tmp_path)


def test_a_peer_of_another_authority_ends_with_one_line_that_says_so(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make_run_folder(tmp_path / name, name, ["peer-000"], 1.0)
    orchestrator = start("orchestrator", "--nodes", "6", "--degree", "3", "--certs", "ours", cwd=tmp_path)
    try:
        assert orchestrator.stdout is not None
        address = re.search(r"listens on (\S+?:\d+)", orchestrator.stdout.readline())
        assert address is not None
        for certs, said in (("theirs", "not of our authority"), ("nowhere", "no certificates there")):
            node = start("node", *PEER, "--orchestrator", address[1], "--certs", certs, cwd=tmp_path)
            _, error = node.communicate(timeout=90)
            assert node.returncode == 2
            assert error.count("\n") == 1
            assert said in error
    finally:
        orchestrator.terminate()
        orchestrator.wait(20)


@isolated
def test_without_certificates_a_token_is_asked_for_where_the_run_has_one(tmp_path: Path) -> None:
    settings = ["--set", "security.tls=off", "--set", "security.token=sesame", "--set", "network.metrics=false"]
    orchestrator = start("orchestrator", "--nodes", "6", "--degree", "3", *settings, cwd=tmp_path)

    async def join(address: str, token: str, name: str) -> str:
        channel = Plaintext(token).channel(address, Role.ORCHESTRATOR, "orchestrator", [])
        async with channel:
            stub = orchestrator_pb2_grpc.OrchestratorStub(channel)
            member = orchestrator_pb2.Member(name=name, address="127.0.0.1:1")
            reply = await stub.Join(orchestrator_pb2.JoinRequest(member=member, signature="s"), timeout=30)
            return str(orchestrator_pb2.JoinRefusal.Name(reply.refusal))

    try:
        assert orchestrator.stdout is not None
        address = re.search(r"listens on (\S+?:\d+)", orchestrator.stdout.readline())
        assert address is not None
        answers = [asyncio.run(join(address[1], token, "a")) for token in ("", "wrong", "sesame")]
        assert answers == [*["JOIN_REFUSAL_UNAUTHENTICATED"] * 2, "JOIN_REFUSAL_NONE"]
    finally:
        orchestrator.terminate()
        orchestrator.wait(20)


def test_hostile_bytes_at_the_port_neither_stop_a_peer_nor_fill_its_memory(tmp_path: Path) -> None:
    found = tmp_path / "fuzz.json"
    command = [sys.executable, "benchmarks/port_fuzz.py", "--quick", "--json", str(found)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, stdout=subprocess.DEVNULL)
    rows = json.loads(found.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["bytes", "tls", "http2", "frames", "content"]
    for row in rows:
        assert row["honest_messages"] > 0, row
        assert row["grown_MiB"] < 16, row
    assert "malformed" in rows[-1]["answers"]
