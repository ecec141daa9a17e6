"""The orchestrator as a process of its own, spoken to over gRPC and HTTP."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from spark_node.generated.spark.v1 import orchestrator_pb2 as pb
from spark_node.generated.spark.v1 import orchestrator_pb2_grpc as rpc
from tests.network.isolation import isolated
from tests.network.test_commands import hear_interrupts

PATIENCE = 60.0
COMMAND = [sys.executable, "-m", "spark_node", "orchestrator", "--set", "security.tls=off"]  # TLS: test_tls.py
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@dataclass
class Running:
    """A living orchestrator: its process, what it said, and a stub."""

    process: "subprocess.Popen[str]"
    said: dict[str, Any]
    log: Path
    channel: grpc.Channel

    @property
    def address(self) -> str:
        return str(self.said["address"])

    @property
    def stub(self) -> rpc.OrchestratorStub:
        return rpc.OrchestratorStub(self.channel)

    def join(self, name: str, **fields: Any) -> pb.JoinReply:
        return self.stub.Join(request(name, **fields), timeout=PATIENCE)

    def renew(self, name: str, round: int = 0, version: int = 0) -> pb.RenewReply:
        asked = pb.RenewRequest(run=self.said["run"], name=name, address=f"{name}:5000", round=round, version=version)
        return self.stub.Renew(asked, timeout=PATIENCE)

    def leave(self, name: str, round: int = 0) -> None:
        self.stub.Leave(pb.LeaveRequest(name=name, address=f"{name}:5000", round=round), timeout=PATIENCE)

    def members(self) -> list[str]:
        reply = self.stub.Describe(pb.DescribeRequest(), timeout=PATIENCE)
        return [member.name for member in reply.members.members]

    def page(self, path: str) -> tuple[str, bytes]:
        with urllib.request.urlopen(f"http://{self.said['http_address']}{path}", timeout=PATIENCE) as answer:
            return answer.headers["Content-Type"], answer.read()

    def series(self) -> dict[str, float]:
        """Samples by name and label values, `spark_orchestrator_` left out."""
        families = text_string_to_metric_families(self.page("/metrics")[1].decode())
        return {
            " ".join([sample.name.removeprefix("spark_orchestrator_"), *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.channel.close()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def request(name: str, signature: str = "sig", round: int = 0, run: str = "", metrics: str = "") -> pb.JoinRequest:
    member = pb.Member(name=name, address=f"{name}:5000", metrics_address=metrics)
    return pb.JoinRequest(run=run, member=member, signature=signature, round=round)


def first_line(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(PATIENCE), f"nothing said: {log.read_text()}"
    line = process.stdout.readline()
    assert line, f"it has ended: {log.read_text()}"
    return line


Start = Callable[..., Running]


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Start orchestrators with any flags; none outlives the block."""
    living: list[Running] = []

    def begin(*flags: str, command: list[str] = COMMAND) -> Running:
        log = folder / f"{len(living)}.log"
        with log.open("w") as err:
            process = subprocess.Popen([*command, "--json", *flags], stdout=subprocess.PIPE, stderr=err, text=True)
        try:
            said = json.loads(first_line(process, log))
        except BaseException:
            process.kill()
            raise
        channel = grpc.insecure_channel(said["address"], options=OWN_CONNECTION)
        living.append(Running(process, said, log, channel))
        return living[-1]

    try:
        yield begin
    finally:
        for running in living:
            running.channel.close()
            running.process.kill()
            running.process.wait()


def speaks(test: Callable[[Start], None]) -> Callable[..., None]:
    """A test that starts orchestrators and speaks gRPC with them, which the process of all tests must not."""

    def run(tmp_path: Path) -> None:
        with starting(tmp_path) as start:
            test(start)

    run.__name__ = test.__name__
    return isolated(run)


def small(nodes: int = 3, lease: float = 15.0) -> list[str]:
    return ["--nodes", str(nodes), "--degree", "2", "--set", f"network.lease={lease}"]


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@speaks
def test_a_run_from_the_first_join_to_the_last_farewell(start: Start) -> None:
    it = start(*small(), "--run-id", "monday", "--seed", "7", "--topology", "cluster")
    replies = [it.join(name) for name in ("b", "c", "a")]
    run = replies[-1].run
    assert (run.run, run.seed, run.topology, run.degree, run.fresh) == ("monday", 7, "cluster", 2, True)
    assert [reply.run.started for reply in replies] == [False, False, True]
    assert [reply.lease_seconds for reply in replies] == [15.0] * 3
    assert [member.name for member in replies[-1].members.members] == ["a", "b", "c"]
    assert not any(reply.HasField("members") for reply in replies[:-1])
    version = replies[-1].members.version
    renewed = it.renew("b")
    assert (renewed.known, renewed.started, renewed.members.version) == (True, True, version)
    assert not it.renew("b", round=4, version=version).HasField("members")
    late = it.join("late").members
    assert (late.version, late.from_round, len(late.members)) == (version + 1, 6, 4)
    it.leave("c", round=4)
    assert it.members() == ["a", "b", "late"]
    assert not it.renew("c", round=5).known
    assert it.stop() == 0
    log = it.log.read_text()
    for words in ("join of b", "the run starts with 3 of 3 peers", "c leaves", "asked to stop"):
        assert words in log


@speaks
def test_a_peer_that_is_silent_is_left_out_even_if_nobody_asks(start: Start) -> None:
    it = start(*small(lease=0.5))
    it.join("a")
    until(lambda: "the lease of a ran out" in it.log.read_text())
    assert not it.renew("a").known
    assert it.members() == []
    assert it.series()["expiries_total"] == 1


@speaks
def test_the_run_starts_without_the_missing_after_the_timeout(start: Start) -> None:
    it = start(*small(nodes=10), "--set", "network.start_timeout=0.5")
    for name in "abc":
        it.join(name)
    until(lambda: "the run starts with 3 of 10 peers" in it.log.read_text())
    assert it.renew("a").started


@speaks
def test_a_pause_of_the_orchestrator_costs_nobody_the_lease(start: Start) -> None:
    it = start(*small(lease=3.0))
    it.join("a")
    it.process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    it.process.send_signal(signal.SIGCONT)
    assert it.renew("a").known


@speaks
def test_after_a_crash_peers_come_back_to_the_same_port(start: Start) -> None:
    flags = [*small(lease=3.0), "--run-id", "monday", "--seed", "7"]
    before = start(*flags)
    for name in "abc":
        old = before.join(name).members.version
    assert before.stop(signal.SIGKILL) == -signal.SIGKILL
    it = start(*flags, "--port", before.address.rpartition(":")[2])
    assert it.address == before.address
    assert not it.renew("a", round=7, version=old).known
    back = it.join("a", round=7)
    assert (back.run.started, back.run.seed, back.members.from_round) == (True, 7, 9)
    assert back.members.version > old
    again = request("b", round=8)
    again.version = old
    assert not it.stub.Join(again, timeout=PATIENCE).HasField("members")  # it has a list, and holds on to that
    it.join("c", round=8)

    def heard() -> bool:
        replies = [it.renew(name, round=9, version=old) for name in "abc"]
        assert all(reply.known and reply.started for reply in replies)
        return all(reply.HasField("members") for reply in replies)

    until(heard)
    settled = it.renew("b", round=9, version=old).members
    assert ([member.name for member in settled.members], settled.from_round) == (["a", "b", "c"], 11)


@speaks
def test_runs_do_not_mix(start: Start) -> None:
    monday, tuesday = start(*small(), "--run-id", "monday"), start(*small(), "--run-id", "tuesday")
    assert not monday.join("a", run="monday").refusal
    wrong = tuesday.join("a", run="monday")
    assert wrong.refusal == pb.JOIN_REFUSAL_WRONG_RUN
    assert "tuesday" in wrong.detail
    assert not wrong.HasField("members")
    tuesday.join("b", run="tuesday")
    assert (monday.members(), tuesday.members()) == (["a"], ["b"])
    asked = pb.RenewRequest(run="monday", name="b", address="b:5000")
    assert not tuesday.stub.Renew(asked, timeout=PATIENCE).known


@speaks
def test_refusals_have_names_and_are_counted_by_them(start: Start) -> None:
    it = start(*small(nodes=3), "--closed")
    for name in "abc":
        it.join(name)
    taken = request("a")
    taken.member.address = "elsewhere:1"
    assert it.stub.Join(taken, timeout=PATIENCE).refusal == pb.JOIN_REFUSAL_NAME_TAKEN
    assert it.join("d").refusal == pb.JOIN_REFUSAL_FULL
    assert it.join("a", signature="other").refusal == pb.JOIN_REFUSAL_WRONG_SIGNATURE
    assert it.join("a", run="other").refusal == pb.JOIN_REFUSAL_WRONG_RUN
    assert it.join("a" * 65).refusal == it.stub.Join(pb.JoinRequest()).refusal == pb.JOIN_REFUSAL_MALFORMED
    series = it.series()
    for reason, count in (("name_taken", 1), ("full", 1), ("wrong_signature", 1), ("wrong_run", 1), ("malformed", 2)):
        assert series[f"refusals_total {reason}"] == count


@speaks
def test_a_request_larger_than_64_kilobytes_is_not_read(start: Start) -> None:
    it = start(*small())
    with pytest.raises(grpc.RpcError) as caught:
        it.join("a", signature="s" * 70_000)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not it.join("a").refusal


@speaks
def test_prometheus_finds_every_peer(start: Start) -> None:
    it = start(*small(), "--run-id", "monday")
    it.join("b", metrics="b:9000")
    it.join("a", metrics="[::1]:9001")
    it.join("silent")
    kind, body = it.page("/sd")
    assert kind == "application/json"
    assert json.loads(body) == [
        {"targets": ["[::1]:9001"], "labels": {"peer": "a", "run": "monday"}},
        {"targets": ["b:9000"], "labels": {"peer": "b", "run": "monday"}},
    ]


@speaks
def test_its_own_metrics_and_health(start: Start) -> None:
    it = start(*small())
    for name in "abc":
        reply = it.join(name)
    it.join("c")
    it.leave("c")
    series = it.series()
    counted = {name: series[name] for name in ("members", "joins_total", "returns_total", "leaves_total", "started")}
    assert counted == {"members": 2, "joins_total": 3, "returns_total": 1, "leaves_total": 1, "started": 1}
    assert series["version"] == reply.members.version + 1
    assert series["bytes_total in Join"] == sum(request(name).ByteSize() for name in "abcc")
    assert series["bytes_total out Join"] > 4 * 30
    assert it.page("/healthz")[1] == b"ok\n"
    health = health_pb2_grpc.HealthStub(it.channel)
    for service in ("", "spark.v1.Orchestrator"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    listed = next(reflection_pb2_grpc.ServerReflectionStub(it.channel).ServerReflectionInfo(iter([asked])))
    assert "spark.v1.Orchestrator" in {service.name for service in listed.list_services_response.service}


@speaks
def test_http_that_makes_no_sense_is_survived(start: Start) -> None:
    it = start(*small())
    host, _, port = it.said["http_address"].rpartition(":")
    for raw, status in (
        (b"POST /sd HTTP/1.1\r\n\r\n", b" 405 "),
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", b" 200 "),
        (b"GET /sd?x=1 HTTP/1.1\r\nHost: a\r\n\r\n", b" 200 "),
        (b"\r\n\r\n", b" 405 "),
        (b"\xff\xfe\r\n\r\n", b" 405 "),
        (b"GET\r\n\r\n", b" 405 "),
        (b"x" * 20_000, b""),
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
            line.sendall(raw)
            try:
                assert status in line.recv(1000)
            except ConnectionResetError:
                assert not status
    with pytest.raises(urllib.error.HTTPError, match="404"):
        it.page("/nothing")
    assert it.page("/healthz")[1] == b"ok\n"


@speaks
def test_two_hundred_peers_join_at_once(start: Start) -> None:
    it = start("--nodes", "200", "--degree", "6")
    channels = [grpc.insecure_channel(it.address, options=OWN_CONNECTION) for _ in range(200)]
    calls = [
        rpc.OrchestratorStub(channel).Join.future(request(f"peer-{i:03d}"), timeout=PATIENCE)
        for i, channel in enumerate(channels)
    ]
    replies = [call.result() for call in calls]
    assert not any(reply.refusal for reply in replies)
    (last,) = (reply for reply in replies if reply.run.started)
    assert [member.name for member in last.members.members] == [f"peer-{i:03d}" for i in range(200)]
    assert sum(reply.HasField("members") for reply in replies) == 1
    for channel in channels:
        channel.close()


class Tap:
    """A TCP line to an address that counts what passes, both ways."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.bytes = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._far = socket.create_connection((host, int(port)))
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        near, _ = self._door.accept()
        for source, sink in ((near, self._far), (self._far, near)):
            threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            self.bytes += len(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


@speaks
def test_a_renewal_without_news_is_under_300_bytes_on_the_wire(start: Start) -> None:
    it = start("--nodes", "1", "--run-id", "20261116-070111-151411")
    version = it.join("peer-001").members.version
    assert version
    tap = Tap(it.address)
    with grpc.insecure_channel(tap.address, options=OWN_CONNECTION) as channel:
        it.channel, direct = channel, it.channel
        it.renew("peer-001", round=20, version=version)
        before = tap.bytes
        for _ in range(20):
            assert it.renew("peer-001", round=20, version=version).known
        renewal = (tap.bytes - before) / 20
        assert 50 < renewal < 300
    it.channel = direct
    series = it.series()
    assert series["bytes_total in Renew"] + series["bytes_total out Renew"] < 21 * 100


@speaks
def test_a_port_in_use_is_one_line_and_exit_code_two(start: Start) -> None:
    it = start(*small())
    for flag, address in (("--port", it.address), ("--http-port", it.said["http_address"])):
        tried = subprocess.run([*COMMAND, flag, address.rpartition(":")[2]], capture_output=True, text=True)
        assert (tried.returncode, tried.stdout) == (2, "")
        wrong = f"spark-dfl: error: cannot listen on {address}: address already in use; give another {flag} "
        assert tried.stderr.startswith(wrong)
        assert tried.stderr.count("\n") == 1


def test_bad_usage_is_one_line_and_exit_code_two() -> None:
    for flags, word in (
        (["--run-id", "a b"], "run id"),
        (["--port", "70000"], "no port"),
        (["--nodes", "7", "--degree", "5"], "odd number"),
    ):
        tried = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
        assert (tried.returncode, tried.stdout, tried.stderr.count("\n")) == (2, "", 1)
        assert word in tried.stderr


def test_it_says_where_it_listens_in_a_sentence() -> None:
    command = [*COMMAND, "--run-id", "monday", "--set", "network.metrics=false"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=hear_interrupts
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("orchestrator of run monday listens on 127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@speaks
def test_it_never_imports_torch(start: Start) -> None:
    it = start(*small(), command=[sys.executable, "-X", "importtime", *COMMAND[1:]])
    it.join("a")
    it.page("/metrics")
    assert it.stop() == 0
    imported = {line.rpartition("|")[2].strip() for line in it.log.read_text().splitlines() if "|" in line}
    assert {"orchestrator.service", "spark_node.topology"} <= imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "sklearn", "matplotlib", "networkx")}


FORKED = """
import json, os, signal, sys
from orchestrator.main import serve
from spark_node.config import Config

signal.signal(signal.SIGINT, signal.SIG_IGN)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    plain = Config().replace(security__tls="off")
    code = serve(plain, "forked", ready=lambda *where: os.write(writing, json.dumps(where).encode() + b"\\n"))
    os._exit(code + 40)
os.close(writing)
address, http_address = json.loads(os.fdopen(reading).readline())
print(json.dumps({"run": "forked", "address": address, "http_address": http_address, "child": child}), flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@speaks
def test_it_may_run_in_a_forked_child_which_keeps_an_ignored_interrupt_ignored(start: Start) -> None:
    it = start(command=[sys.executable, "-c", FORKED])
    child = int(it.said["child"])
    os.kill(child, signal.SIGINT)
    assert it.join("a").run.run == "forked"
    assert it.page("/healthz")[1] == b"ok\n"
    os.kill(child, signal.SIGTERM)
    assert it.process.stdout is not None
    assert it.process.stdout.readline() == "40\n"


@speaks
def test_who_waits_for_the_start_is_answered_when_it_comes_and_else_after_a_while(start: Start) -> None:
    waits = start(*small(lease=60.0))
    for name in ("a", "b"):
        assert not waits.join(name).refusal
    began = time.monotonic()
    assert not waits.renew("a").started
    held = time.monotonic() - began
    assert held > 1.0, "a renewal that is answered at once is asked again and again"
    answers: list[tuple[bool, int]] = []

    def ask() -> None:
        reply = waits.renew("b")
        answers.append((reply.started, len(reply.members.members)))

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.5)
    began = time.monotonic()
    assert not waits.join("c").refusal
    waiting.join(PATIENCE)
    assert answers == [(True, 3)]
    assert time.monotonic() - began < held, "the start ends the wait"
