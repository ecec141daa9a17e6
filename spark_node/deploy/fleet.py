"""All engines of a deployment: the same question to each at once, and how the run stands."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_node.deploy.crew import HostProblem, Outcome, Result, on_all
from spark_node.deploy.engine import STOP_SECONDS, Engine, Seen
from spark_node.deploy.hosts import Deployment
from spark_node.deploy.plan import OBSERVER, ORCHESTRATOR, address_of, container_name


class DeploymentFailed(Exception):
    """Something did not work on some hosts: {host: what went wrong}."""

    def __init__(self, what: str, problems: dict[str, str]) -> None:
        super().__init__(what)
        self.what, self.problems = what, problems


@dataclass(frozen=True)
class Status:
    """How a deployment stands."""

    run_id: str
    hosts: dict[str, list[Seen]]
    problems: dict[str, str] = field(default_factory=dict)
    started: bool | None = None
    """Whether training has begun; None: not known, or nobody to ask."""
    members: int | None = None
    rounds: dict[str, int | None] = field(default_factory=dict)
    """The round that each member has finished; None for one that does not answer."""

    @property
    def containers(self) -> list[Seen]:
        """Those of all hosts."""
        return [seen for found in self.hosts.values() for seen in found]

    @property
    def failed(self) -> bool:
        """Whether a host cannot be asked, or a container ended with an error."""
        return bool(self.problems) or any(seen.failed for seen in self.containers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        hosts = {
            host: [{**asdict(seen), "failed": seen.failed} for seen in found] for host, found in self.hosts.items()
        }
        facts = {"run": self.run_id, "started": self.started, "members": self.members, "rounds": self.rounds}
        return {**facts, "hosts": hosts, "problems": self.problems, "failed": self.failed}


class Fleet:
    """The engines of one hosts file."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.engines = {host.name: Engine(deployment, host) for host in deployment.hosts}

    def close(self) -> None:
        """Give up all connections."""
        for engine in self.engines.values():
            engine.close()

    def on(
        self, work: Callable[[Engine], Result], seconds: float | None = None, hosts: list[str] | None = None
    ) -> Outcome[Result]:
        """Do the work on all hosts, or on some, at once; by default each has as long as one call may take."""
        limit = self.deployment.seconds if seconds is None else seconds
        return on_all(hosts or list(self.engines), lambda host: work(self.engines[host]), limit)

    def everywhere(
        self,
        what: str,
        work: Callable[[Engine], Result],
        seconds: float | None = None,
        hosts: list[str] | None = None,
    ) -> dict[str, Result]:
        """As `on`; DeploymentFailed unless it worked on every one."""
        outcome = self.on(work, seconds, hosts)
        if outcome.problems:
            raise DeploymentFailed(what, outcome.problems)
        return outcome.done

    def status(self) -> Status:
        """Every container, and the round of every peer as seen from the orchestrator's container."""
        outcome = self.on(lambda engine: engine.containers())
        seen = [one for found in outcome.done.values() for one in found]
        run_id = next((one.run_id for one in seen if one.run_id), "")
        facts: dict[str, Any] = {}
        if any(one.role == ORCHESTRATOR and one.state == "running" for one in seen):
            with contextlib.suppress(HostProblem, ValueError):
                facts = self._ask_orchestrator()
        return Status(run_id, outcome.done, outcome.problems, **facts)

    def _ask_orchestrator(self) -> dict[str, Any]:
        deployment = self.deployment
        address = f"{address_of(deployment, ORCHESTRATOR)}:{deployment.ports.http}"
        command = ["python3", "-m", "spark_node.deploy.probe", address]
        engine = self.engines[deployment.orchestrator]
        code, written = engine.ask(container_name(deployment, ORCHESTRATOR), command)
        facts: dict[str, Any] = json.loads(written) if code == 0 else {}
        return facts

    def stop(self) -> Outcome[None]:
        """SIGTERM to everything: on each host the observer first, then the peers, then the orchestrator."""
        patience = sum(STOP_SECONDS.values()) + self.deployment.seconds
        return self.on(lambda engine: engine.stop(), patience)

    def remove(self, keep_run: bool = False) -> Outcome[tuple[int, int]]:
        """Containers and volumes, but for the run folder's where it is to be kept; how many, by host."""
        keep = (container_name(self.deployment, OBSERVER),) if keep_run else ()
        return self.on(lambda engine: engine.remove(keep), self.deployment.seconds * 2)
