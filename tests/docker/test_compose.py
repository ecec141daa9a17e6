"""docker-compose.yml for real: two containers of six peers, mutual TLS, a Prometheus that sees it all."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.docker.dashboard import Query, queries
from tests.docker.engine import Engine
from tests.docker.stack import Stack, wait_for

PEERS = 12
MAY_BE_EMPTY = {"Heaviest senders", "Stragglers", "Refusals"}
"""Panels of things that a healthy run does not have: a budget, stragglers, refusals."""


@pytest.fixture(scope="module")
def stack(docker: Engine) -> Iterator[Stack]:
    with TemporaryDirectory() as folder:
        found = Stack(docker, f"spark-test-{os.getpid()}", Path(folder))
        try:
            yield found
        finally:
            found.compose("down", "-v", "-t", "5", check=False)


@pytest.fixture(scope="module")
def first(stack: Stack) -> Stack:
    """The stack after a run of three rounds, whose peers still answer and whose last state Prometheus has seen."""
    stack.up()
    wait_for("the first run", lambda: stack.summary("first"), stack)
    done = 'count(spark_round{run="first"} == 3)'
    wait_for("Prometheus to see every peer done", lambda: stack.number(done) == PEERS, stack)
    seen = "last_over_time(spark_observer_round[10m])"
    wait_for("Prometheus to see the observer's last round", lambda: stack.number(seen) == 3, stack)
    return stack


def test_peers_of_two_containers_learn_together_over_mutual_tls(first: Stack) -> None:
    summary = first.summary("first")
    assert summary["peers"] == PEERS
    assert summary["rounds"] == 3
    assert summary["final"]["aggregated_accuracy"] > 0.8
    said = "".join(first.engine.run("docker", "logs", name) for name in first.containers("peers"))
    blocks = {first.sh(name, "cd /tmp/logs && ls *.pid | tr '\\n' ' '").strip() for name in first.containers("peers")}
    halves = [range(6), range(6, 12)]
    assert blocks == {" ".join(f"peer-{i:03}.pid" for i in half) for half in halves}, said
    assert first.number("sum(spark_connections_certified_total) > 0") > 0, "nobody showed a certificate"
    assert 'tls = "on"' in first.run_file("first", "config.toml")


def test_prometheus_finds_every_peer_and_counts_the_bytes_of_the_summary(first: Stack) -> None:
    up = 'count(up{job="peers"} == 1)'  # a scrape of a busy machine may be late once
    wait_for("a scrape of every peer", lambda: first.number(up) == PEERS, first)
    assert first.number('count(count by (peer) (up{job="peers", run="first"}))') == PEERS
    sent = 'sum(last_over_time(spark_sent_bytes_total{role="peer", kind=~"%s"}[10m]))'
    told = {"weights": first.number(sent % "weights|request"), "package": first.number(sent % "package")}
    counted = first.summary("first")["bytes_sent"]
    assert told == {kind: counted[kind] for kind in told}
    recorded = 'last_over_time(spark_observer_bytes_total{kind="package"}[10m])'
    assert first.number(recorded) == counted["package"]
    accuracy = first.number("last_over_time(spark_observer_aggregated_accuracy[10m])")
    assert accuracy == pytest.approx(first.summary("first")["final"]["aggregated_accuracy"])


def test_no_alert_fires_in_a_healthy_run(first: Stack) -> None:
    groups = first.ask("rules")["data"]["groups"]
    broken = [
        (rule["name"], rule.get("lastError")) for group in groups for rule in group["rules"] if rule.get("lastError")
    ]
    assert broken == []
    assert sum(len(group["rules"]) for group in groups) >= 15
    assert first.query('ALERTS{alertname!="PeerDown", alertstate="firing"}') == []


def test_containers_may_do_no_more_than_they_must(first: Stack) -> None:
    for service in ("orchestrator", "peers", "observer", "certificates", "prometheus"):
        for name in first.containers(service):
            settings = first.inspect(name)["HostConfig"]
            assert settings["ReadonlyRootfs"], name
            assert settings["CapDrop"] == ["ALL"], name
            assert settings["SecurityOpt"] == ["no-new-privileges:true"], name
            assert not settings["Privileged"], name
    for name in (*first.containers("peers"), *first.containers("orchestrator")):
        assert first.sh(name, "id -u").strip() == "10001"
        assert first.sh(name, "touch /opt/app/x 2>&1 || echo refused", check=False).strip().endswith("refused")
        assert first.sh(name, "grep CapEff /proc/self/status").split()[1].strip("0") == "", "capabilities are left"


def test_nobody_has_keys_of_another_role(first: Stack) -> None:
    keys = {
        service: set(first.sh(first.containers(service)[0], "find / -name '*.key' 2>/dev/null || true").split())
        for service in ("peers", "orchestrator")
    }
    assert keys["peers"] == {f"/certs/peers/peer/peer-{i:03}.key" for i in range(PEERS)}
    assert keys["orchestrator"] == {"/certs/orchestrator/orchestrator/orchestrator.key"}


def test_the_health_check_tells_a_host_without_peers_from_one_with_peers(first: Stack) -> None:
    peers = first.containers("peers")[0]
    first.sh(peers, "healthcheck")
    first.sh(first.containers("orchestrator")[0], "healthcheck")
    first.sh(peers, "mkdir /tmp/kept && mv /tmp/logs/*.pid /tmp/kept")
    with pytest.raises(AssertionError, match="ended with 1"):
        first.sh(peers, "healthcheck")
    first.sh(peers, "mv /tmp/kept/*.pid /tmp/logs")


@pytest.fixture(scope="module")
def second(first: Stack) -> Stack:
    """The same stack in the middle of a long run."""
    settings = "network.lease=10 network.deadline_floor=5 network.deadline_ceiling=15"
    first.up(SPARK_RUN_ID="second", SPARK_ROUNDS="1000", SPARK_LINGER="0", SPARK_SET=settings)
    wait_for("the second run to begin", lambda: len(first.rounds("second")) >= 3, first)
    return first


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query.panel}: {query.expression[:40]}")
def test_every_query_of_the_dashboard_is_answered(second: Stack, query: Query) -> None:
    expression = query.of_run("second")
    found = second.query(expression)
    if not found and query.panel not in MAY_BE_EMPTY:
        wait_for(f"{query.panel} to show something: {expression}", lambda: second.query(expression), second, 60)


def test_the_run_goes_on_without_a_killed_container_and_its_replacement_takes_its_peers(second: Stack) -> None:
    killed = second.containers("peers")[1]
    block = "cd /tmp/logs && ls *.pid"
    lost = second.sh(killed, block)
    second.engine.run("docker", "kill", killed)
    at = len(second.rounds("second"))
    wait_for("rounds without the lost peers", lambda: len(second.rounds("second")) >= at + 5, second)
    few = 'count(spark_round{run="second"})'
    wait_for("the lost peers to be members no more", lambda: second.number(few) == PEERS / 2, second)
    second.up()
    wait_for("its peers to come back", lambda: second.sh(killed, block, check=False) == lost, second)
    wait_for("Prometheus to see all of them train", lambda: second.number(f"{few[:-1]} > {at})") == PEERS, second)
    rounds = second.rounds("second")
    assert [row["round"] for row in rounds] == list(range(1, len(rounds) + 1)), "a round is missing"
    expected = [row["neighbours"]["expected"] for row in rounds]
    assert expected[0] == PEERS * 4
    assert min(expected) < PEERS * 4, "the lost peers were missed"
    assert max(row["aggregated_accuracy"] for row in rounds) > 0.85


def test_down_leaves_nothing_behind(first: Stack) -> None:
    assert all(first.remains().values()), "there is something to remove"
    first.compose("down", "-v", "-t", "5")
    assert first.remains() == {"containers": [], "networks": [], "volumes": []}
