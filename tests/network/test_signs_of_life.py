"""What a peer makes of a neighbour that is late, over real gRPC: it is slow, it hangs, or it has gone on."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
import torch
from grpc import aio

from spark_node.config import NetworkSettings, SecuritySettings, TopologySettings, load
from spark_node.generated.spark.v1 import peer_pb2 as pb
from spark_node.launch.service import Progress, Service
from spark_node.learning.algorithms import make_algorithm, make_terms
from spark_node.learning.messages import Weights
from spark_node.membership import Roster
from spark_node.model import ParameterLayout
from spark_node.node import Node, Timings
from spark_node.package.peer import PeerCodec
from spark_node.security.tls import Plaintext
from spark_node.transport import frames
from spark_node.transport.grpc import GrpcTransport
from spark_node.transport.traffic import Traffic
from tests.network.isolation import isolated

Answer = Callable[[], Awaitable["pb.Receipt"]]


async def in_round(k: int) -> "pb.Receipt":
    return pb.Receipt(round=k)


async def hung() -> "pb.Receipt":
    await asyncio.sleep(3600)
    raise AssertionError


class Neighbour:
    """The port of a neighbour that sends nothing, answers as told where it stands, and takes nothing unless told."""

    def __init__(self, answer: Answer, takes: Answer | None = None) -> None:
        self._answer, self._takes, self.asked, self.heard = answer, takes, 0, 0
        self._server = aio.server()
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "spark.v1.Peer",
                    {
                        "Standing": grpc.unary_unary_rpc_method_handler(
                            self._standing, pb.StandingRequest.FromString, pb.Receipt.SerializeToString
                        ),
                        "DeliverWhole": grpc.unary_unary_rpc_method_handler(self._deliver),
                    },
                ),
            )
        )

    async def start(self, port: int = 0) -> str:
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _standing(self, request: "pb.StandingRequest", context: Any) -> "pb.Receipt":
        self.asked += 1
        return await self._answer()

    async def _deliver(self, request: bytes, context: Any) -> bytes:
        self.heard += 1
        receipt = await (self._takes or hung)()
        return bytes(receipt.SerializeToString())


def play(
    answer: Answer,
    act: Callable[[GrpcTransport], Awaitable[object]],
    takes: Answer | None = None,
    **settings: float,
) -> tuple[Any, Any, float]:
    """What a peer in round 1 counts after an act, the neighbour, and the seconds that it took."""

    async def whole() -> tuple[Any, Any, float]:
        neighbour, traffic = Neighbour(answer, takes), Traffic()
        roster = Roster(0, TopologySettings("regular", 1, True))
        roster.add(1, 1, {"peer-0": "127.0.0.1:1", "peer-1": await neighbour.start()})
        codec = PeerCodec(
            make_terms(load(environment={}), "monday", ParameterLayout.of(torch.nn.Linear(3, 2)), 2), "peer-0", 0
        )
        network = NetworkSettings(**{"deadline_floor": 2.0, **settings})  # type: ignore[arg-type]

        async def compute(work: Callable[..., object], *arguments: object, heavy: bool = False) -> object:
            return work(*arguments)

        transport = GrpcTransport("peer-0", codec, roster, network, traffic, compute, Plaintext(), SecuritySettings())
        await transport.enter(1)
        start = time.monotonic()
        await act(transport)
        took = time.monotonic() - start
        await transport.close()
        await neighbour.stop()
        return traffic, neighbour, took

    return asyncio.run(asyncio.wait_for(whole(), 120))


async def gather(transport: GrpcTransport) -> None:
    assert await transport.gather("package", 1, ["peer-1"], None) == {}


async def send(transport: GrpcTransport) -> None:
    await transport.send("peer-1", "weights", 1, Weights(torch.zeros(8)))


@pytest.mark.parametrize("act", [gather, send])
@isolated
def test_a_neighbour_that_does_not_answer_is_left_out(act: Callable[[GrpcTransport], Awaitable[object]]) -> None:
    traffic, neighbour, took = play(hung, act)
    assert traffic.rejected == {"hanging": 1}
    assert 3 <= neighbour.asked <= 10, "three are enough; calls that this process itself was late for do not count"
    assert took < 60, "that was the ceiling"


@pytest.mark.parametrize("act", [gather, send])
@isolated
def test_a_neighbour_that_has_gone_on_is_left_out(act: Callable[[GrpcTransport], Awaitable[object]]) -> None:
    traffic, neighbour, took = play(lambda: in_round(2), act)
    assert traffic.rejected == {"stale": 1}
    assert neighbour.asked == 1
    assert took < 60, "that was the ceiling"


@pytest.mark.parametrize("settings", [{}, {"sign_of_life": 0.0}], ids=["asked", "never asked"])
@isolated
def test_a_neighbour_that_is_slow_or_never_asked_is_waited_for_until_the_deadline(settings: dict[str, float]) -> None:
    traffic, neighbour, took = play(lambda: in_round(1), gather, deadline_ceiling=6.0, **settings)
    assert took >= 6.0
    assert (neighbour.asked > 1) is (settings == {})
    assert traffic.rejected == {}
    assert traffic.refused == {"late": 1}


@isolated
def test_a_slow_neighbour_is_asked_ever_more_seldom() -> None:
    """300 peers that wait for each other's turns to compute would ask each other a hundred times a second."""
    _, neighbour, took = play(lambda: in_round(1), gather, deadline_floor=0.4, deadline_ceiling=8.0)
    assert took >= 8.0
    assert 3 <= neighbour.asked <= 10, "every 0.1 s that is 76 calls; half as often each time it is 8"


@isolated
def test_a_peer_whose_own_clock_runs_late_blames_nobody() -> None:
    async def starved(transport: GrpcTransport) -> None:
        async def hog() -> None:
            while True:
                time.sleep(2.5)  # the event loop stands still, as on a machine with too much to do
                await asyncio.sleep(0.01)

        hogging = asyncio.create_task(hog())
        await gather(transport)
        hogging.cancel()

    traffic, neighbour, _ = play(hung, starved, deadline_ceiling=8.0)
    assert neighbour.asked
    assert traffic.rejected == {}
    assert traffic.refused == {"late": 1}


@isolated
def test_a_connection_is_watched_once_however_many_rounds_wait_for_it() -> None:
    """gRPC keeps a watch that was cancelled as long as the state stays what it is: a leak of kilobytes a round."""
    watches: list[object] = []
    wait = aio._channel.Channel.wait_for_state_change

    async def counted(channel: aio.Channel, state: grpc.ChannelConnectivity) -> None:
        watches.append(state)
        await wait(channel, state)

    async def act(transport: GrpcTransport) -> None:
        for _ in range(20):
            await transport.gather("package", 1, ["peer-1"], 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio._channel.Channel, "wait_for_state_change", counted)
        play(lambda: in_round(1), act)
    assert grpc.ChannelConnectivity.READY in watches
    assert len(watches) <= 5, "each state on the way to a connection, and then one more"


async def stage_is_over() -> "pb.Receipt":
    return pb.Receipt(reason=pb.REASON_STALE, round=1)


@isolated
def test_who_hears_a_request_too_late_is_not_waited_for_to_answer_it() -> None:
    """It has left us out of the round; waiting for its package would make all others wait for ours."""

    async def ask(transport: GrpcTransport) -> None:
        await transport.send("peer-1", "consensus", 1, Weights(torch.zeros(8), request=True))
        await gather(transport)

    traffic, neighbour, took = play(lambda: in_round(1), ask, stage_is_over, deadline_ceiling=30.0)
    assert neighbour.heard == 1
    assert traffic.rejected == {"late": 1}
    assert traffic.refused == {}
    assert took < 15


@isolated
def test_who_takes_weights_too_late_may_still_say_its_own_part() -> None:
    async def tell(transport: GrpcTransport) -> None:
        await send(transport)
        await gather(transport)

    traffic, _, took = play(lambda: in_round(1), tell, stage_is_over, deadline_ceiling=6.0)
    assert traffic.rejected == {"late": 1}
    assert traffic.refused == {"late": 1}
    assert took >= 6.0


@isolated
def test_a_neighbour_that_was_started_again_is_found_in_the_next_round() -> None:
    """However often it was looked for in vain: gRPC waits ever longer before it tries a broken connection again."""
    later: list[Neighbour] = []

    async def act(transport: GrpcTransport) -> None:
        with socket.socket() as taken:  # a port that refuses
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
            transport.roster.add(2, 2, {"peer-0": "127.0.0.1:1", "peer-1": f"127.0.0.1:{port}"})
            await transport.enter(2)
            end = time.monotonic() + 6.0  # it now waits for seconds
            while time.monotonic() < end:
                with contextlib.suppress(aio.AioRpcError):
                    await transport.connections.standing_of(transport.connections.to("peer-1"), 1.0)
                await asyncio.sleep(0.05)
        later.append(Neighbour(lambda: in_round(3), lambda: in_round(3)))
        await later[0].start(port)
        await transport.enter(3)
        await transport.send("peer-1", "weights", 3, Weights(torch.zeros(8)))
        await later[0].stop()

    traffic, _, _ = play(lambda: in_round(1), act)
    assert later[0].heard == 1
    assert traffic.rejected == {}


@isolated
def test_who_could_not_be_reached_gets_the_message_when_it_is_there() -> None:
    """It is left out of the round, but it may be just starting: without our part it would wait for its deadline."""
    later: list[Neighbour] = []

    async def act(transport: GrpcTransport) -> None:
        port = a_free_port()
        transport.roster.add(2, 2, {"peer-0": "127.0.0.1:1", "peer-1": f"127.0.0.1:{port}"})
        await transport.enter(2)
        await transport.send("peer-1", "weights", 2, Weights(torch.zeros(8)))
        assert transport.traffic.rejected == {"unreachable": 1}
        later.append(Neighbour(lambda: in_round(2), lambda: in_round(2)))
        await later[0].start(port)
        await transport.enter(3)  # we are done with that round; it is not
        await until(lambda: not transport._offers)  # its answer takes a moment
        assert later[0].heard == 1
        await later[0].stop()

    traffic, _, _ = play(lambda: in_round(1), act)
    assert traffic.rejected == {"unreachable": 1}


@pytest.mark.parametrize("away", [0.0, 2.0], ids=["back at once", "back after it was left out"])
@pytest.mark.parametrize("was_in", [1, 2])
@isolated
def test_who_is_started_again_gets_what_the_process_before_took_too_early(was_in: int, away: float) -> None:
    """It took weights of round 2 in round 1 and was killed: the next one is in round 2 and would wait for them.

    One that was in round 2 itself comes back in a later one.
    """
    later: list[Neighbour] = []

    async def act(transport: GrpcTransport) -> None:
        port = a_free_port()
        transport.roster.add(2, 2, {"peer-0": "127.0.0.1:1", "peer-1": f"127.0.0.1:{port}"})
        before = Neighbour(lambda: in_round(was_in), lambda: in_round(was_in))
        await before.start(port)
        await transport.enter(2)
        await transport.send("peer-1", "weights", 2, Weights(torch.zeros(8)))
        waiting = asyncio.create_task(transport.gather("weights", 2, ["peer-1"], 20.0))
        await asyncio.sleep(0.5)
        await before.stop()
        await asyncio.sleep(away)
        assert bool(away) is waiting.done(), "nobody waits for one that is gone"
        later.append(Neighbour(lambda: in_round(2), lambda: in_round(2)))
        await later[0].start(port)
        if was_in == 1:
            await until(lambda: later[0].heard == 1)
        else:
            await asyncio.sleep(3.0)
            assert later[0].heard == 0
        waiting.cancel()
        await later[0].stop()

    traffic, _, _ = play(lambda: in_round(1), act)
    assert traffic.rejected == ({"unreachable": 1} if away else {})


@isolated
def test_what_nobody_took_is_given_up_after_a_few_rounds() -> None:
    async def act(transport: GrpcTransport) -> None:
        transport.roster.add(2, 2, {"peer-0": "127.0.0.1:1", "peer-1": f"127.0.0.1:{a_free_port()}"})
        await transport.enter(2)
        await transport.send("peer-1", "weights", 2, Weights(torch.zeros(8)))
        for k in (3, 4):
            await transport.enter(k)
            await asyncio.sleep(0.1)
            assert len(transport._offers) == 1
        await transport.enter(5)
        await asyncio.sleep(0.1)
        assert not transport._offers

    play(lambda: in_round(1), act)


@isolated
def test_a_late_starter_does_not_wait_for_one_that_has_done_the_round_without_it() -> None:
    """Two peers of a real round: the first finds nobody at the other's port, and is through before that one starts."""
    config = load(flags={"network.deadline_floor": 60.0, "model.hidden": [8]}, environment={})
    layout = ParameterLayout.of(torch.nn.Linear(3, 2))

    async def compute(work: Callable[..., object], *arguments: object, heavy: bool = False) -> object:
        return work(*arguments)

    async def whole() -> None:
        ports = {name: a_free_port() for name in ("peer-0", "peer-1")}
        servers, nodes = dict[str, Any](), dict[str, tuple[GrpcTransport, Node]]()
        for i, name in enumerate(ports):
            roster, traffic = Roster(0, TopologySettings("regular", 1, True)), Traffic()
            roster.add(1, 1, {peer: f"127.0.0.1:{port}" for peer, port in ports.items()})
            codec = PeerCodec(make_terms(config, "monday", layout, 2), name, 0)
            transport = GrpcTransport(
                name, codec, roster, config.network, traffic, compute, Plaintext(), config.security
            )
            module, timings = torch.nn.Linear(3, 2), Timings()
            torch.nn.init.constant_(module.weight, float(i))
            samples = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
            algorithm = make_algorithm(config, name, module, *samples, timings)
            nodes[name] = transport, Node(name, algorithm, roster, transport, compute, timings, classes=2)
            service = Service(Progress(name, 1, 1), 2**20, Plaintext(), traffic)
            service.transport = transport
            servers[name] = aio.server()
            servers[name].add_generic_rpc_handlers((service.handler(),))
        results = []
        for name, (transport, node) in nodes.items():
            servers[name].add_insecure_port(f"127.0.0.1:{ports[name]}")  # until then it refuses
            await servers[name].start()
            await transport.enter(1)
            start = time.monotonic()
            results.append(await node.round(1))
            assert time.monotonic() - start < 30, f"{name} waited for the deadline"
        assert results[0].used == 0
        assert nodes["peer-1"][0].traffic.received["peer-0", "weights"] > 0
        for transport, _ in nodes.values():
            await transport.close()
        for server in servers.values():
            await server.stop(None)

    asyncio.run(asyncio.wait_for(whole(), 120))


@isolated
def test_what_comes_in_time_counts_even_if_nobody_waited_for_it() -> None:
    """The request of a neighbour whose weights were late: without an answer it would wait for its deadline."""

    async def act(transport: GrpcTransport) -> None:
        request = Weights(torch.zeros(8), request=True)
        pieces = PeerCodec(transport.codec.terms, "peer-1", 0).encode(request, 1, "peer-0")
        envelope = pb.Envelope(run="monday", round=1, stage="consensus", sender="peer-1", members_version=1)
        for raw in frames.deliveries(envelope, pieces, 2**20):
            assert (await transport.reception.receive(raw, None, "h:1")).reason == pb.REASON_NONE
        found = await transport.gather("consensus", 1, [], None)
        assert set(found) == {"peer-1"}

    play(lambda: in_round(1), act)


async def until(there: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not there():
            await asyncio.sleep(0.05)


def a_free_port() -> int:
    """One that refuses until somebody takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
