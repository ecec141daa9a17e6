"""Bringing a run up: check all, create all, start all, see the peers join. Where anything fails, nothing remains."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from spark_node.deploy import bundle
from spark_node.deploy.crew import HostProblem
from spark_node.deploy.engine import Engine
from spark_node.deploy.fetch import save_logs
from spark_node.deploy.fleet import DeploymentFailed, Fleet, Status
from spark_node.deploy.plan import LOGS, ORCHESTRATOR, PEERS, Plan

_POLL = 1.0
_ORCHESTRATOR_SECONDS = 120.0
_PULL_SECONDS = 1800.0
"""An image may be gigabytes."""
_LISTENS = "listens on"
_PEER_LOG = re.compile(rf"{LOGS}/[a-z0-9._-]+\.log")


class Rollout:
    """One `up`. `say` is told what goes on, a line at a time; `logs` is a folder for those of a failure."""

    def __init__(self, fleet: Fleet, plan: Plan, say: Callable[[str], None], logs: Path | None = None) -> None:
        self._fleet, self._plan, self._say, self._logs = fleet, plan, say, logs
        self._started = False

    def up(self, wait: float) -> None:
        """Up to `wait` seconds for all peers to join; 0: do not wait. DeploymentFailed names hosts and reasons."""
        fleet, plan = self._fleet, self._plan
        self._say(f"checking {len(fleet.engines)} hosts")
        pull = 0.0 if plan.deployment.pull == "never" else _PULL_SECONDS
        fleet.everywhere("checking the hosts", lambda engine: engine.check(plan), plan.deployment.seconds + pull)
        try:
            self._create()
            self._start()
            if wait > 0:
                self._await_peers(wait)
        except BaseException as error:
            self._roll_back(error)
            raise

    def _create(self) -> None:
        plan = self._plan
        with TemporaryDirectory(prefix="spark-deploy-") as private:  # 0700, and gone once the keys are in their volumes
            self._say("making certificates")
            certificates = bundle.make_certificates(plan, Path(private))
            self._say(f"creating {len(plan.containers)} containers")

            def create(engine: Engine) -> None:
                for container in plan.on(engine.host.name):
                    engine.create(plan, container, bundle.pack(plan, container, certificates[container.name]))

            self._fleet.everywhere("creating the containers", create, self._seconds())

    def _start(self) -> None:
        plan, fleet = self._plan, self._fleet
        self._say("starting the orchestrator")
        self._started = True
        first = next(container for container in plan.containers if container.role == ORCHESTRATOR)
        what = "starting the orchestrator"
        fleet.everywhere(what, lambda engine: self._start_orchestrator(engine, first.name), None, [first.host])
        self._say("starting the peers and the observer")

        def start(engine: Engine) -> None:
            for container in plan.on(engine.host.name):
                if container is not first:
                    engine.start(container.name)

        fleet.everywhere("starting the peers", start, self._seconds())

    def _start_orchestrator(self, engine: Engine, name: str) -> None:
        engine.start(name)
        end = time.monotonic() + _ORCHESTRATOR_SECONDS
        while not any(_LISTENS in line for line in engine.tail(name)):
            _check_alive(engine)
            if time.monotonic() > end:
                raise HostProblem(f"{name}: the orchestrator does not listen after {_ORCHESTRATOR_SECONDS:.0f} s")
            time.sleep(_POLL / 2)

    def _await_peers(self, wait: float) -> None:
        """Until training is on, or over already; whoever ends with an error ends the waiting."""
        plan, what = self._plan, "waiting for the peers"
        end, said = time.monotonic() + wait, ""
        while True:
            self._fleet.everywhere(what, _check_alive)
            status = self._fleet.status()
            if status.problems:
                raise DeploymentFailed(what, status.problems)
            states = {seen.state for seen in status.containers if seen.role == PEERS}
            unseen = not plan.config.network.metrics  # then nobody can be asked who has joined
            if status.started or states == {"exited"} or (unseen and states == {"running"}):
                return
            now = f"{status.members or 0} of {plan.config.run.nodes} peers have joined"
            if now != said:
                self._say(now)
                said = now
            if time.monotonic() > end:
                raise DeploymentFailed(what, self._missing(status, wait))
            time.sleep(_POLL)

    def _missing(self, status: Status, wait: float) -> dict[str, str]:
        plan, problems = self._plan, {}
        for host in self._fleet.engines:
            peers = [peer for container in plan.on(host) for peer in container.peers]
            absent = [peer for peer in peers if peer not in status.rounds]
            if absent:
                few = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
                hint = f"is {plan.address} reached from there?"
                problems[host] = f"{len(absent)} of {len(peers)} peers have not joined in {wait:.0f} s ({few}); {hint}"
        return problems or {plan.deployment.orchestrator: f"training has not started within {wait:.0f} s"}

    def _roll_back(self, error: BaseException) -> None:
        """Remove what there is of the run; a host where that fails is named."""
        if self._started and self._logs is not None:
            save_logs(self._fleet, self._logs, self._say)
            self._say(f"something went wrong: the logs are in {self._logs}")
        self._say("removing what was made")
        origin = self._plan.deployment.origin
        for host, problem in self._fleet.remove().problems.items():
            left = f"containers may remain there ({problem}): spark-dfl deploy down --hosts {origin}"
            if isinstance(error, DeploymentFailed):
                before = error.problems.get(host)
                error.problems[host] = f"{before}; {left}" if before else left
            else:
                self._say(f"{host}: {left}")

    def _seconds(self) -> float:
        """For work on every container of a host, one after the other."""
        most = max(len(self._plan.on(host)) for host in self._fleet.engines)
        return self._plan.deployment.seconds * max(1, most)


def _check_alive(engine: Engine) -> None:
    """HostProblem with a container's last words where one has ended with an error."""
    for seen in engine.containers():
        if seen.failed:
            why = seen.error or _last_words(engine, seen.name)
            raise HostProblem(f"{seen.name} ended with {seen.exit_code}: {why}")


def _last_words(engine: Engine, container: str) -> str:
    """The last line that a container wrote; where that only names a peer's log, the last line of this one."""
    words = [line.strip() for line in engine.tail(container) if line.strip()]
    said = words[-1] if words else "it said nothing"
    named = _PEER_LOG.search(said)
    if named is None:
        return said
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "log"
        engine.read(container, named[0], lambda chunks: bundle.unpack(chunks, copy))
        lines = copy.read_text(encoding="utf-8", errors="replace").splitlines() if copy.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), said)
