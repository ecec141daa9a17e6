"""`spark-dfl deploy`: peers on several (GPU) hosts, as containers of their Docker engines."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_node.errors import ConfigError

if TYPE_CHECKING:
    from spark_node.deploy.fleet import Fleet, Status
    from spark_node.deploy.hosts import Deployment
    from spark_node.deploy.plan import Plan

FAILED = 1

_DESCRIPTION = """\
Run a network on several hosts through their Docker engines: one orchestrator, a container of peers for each GPU (or
one for a host without), and an observer that writes the run folder. All connections are mutual TLS; every container
gets the keys of its own peers only. What runs where is in a hosts file; deploy/gpu_hosts/hosts.toml is an annotated
example."""

_EPILOG = """\
examples:
  spark-dfl deploy up --hosts hosts.toml --dry-run      what would run where; asks no engine
  spark-dfl deploy up --hosts hosts.toml                check all hosts, start everything, or leave nothing behind
  spark-dfl deploy status --hosts hosts.toml            containers, peers and rounds, by host
  spark-dfl deploy logs --hosts hosts.toml --host gpu-2 --follow
  spark-dfl deploy fetch --hosts hosts.toml             the run folder so far, into runs/RUN_ID
  spark-dfl deploy down --hosts hosts.toml              stop, fetch the run folder, remove everything

The engines keep all there is to know: any machine with the hosts file and access to the engines can do all this.
exit codes: 0 done, 1 it failed on some host (each is named), 2 bad usage or a bad hosts file"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `deploy` command."""
    parser = subparsers.add_parser(
        "deploy",
        help="peers on several (GPU) hosts",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    up = _action(actions, "up", "check all hosts and start a run on them, or leave nothing behind", _up)
    up.add_argument("--dry-run", action="store_true", help="only print what would run where; asks no engine")
    wait = "seconds to wait for all peers to join; 0 = do not wait (default: %(default).0f)"
    up.add_argument("--wait", metavar="SECONDS", type=_seconds, default=600.0, help=wait)
    up.add_argument("--json", action="store_true", help="print the plan as JSON")
    status = _action(actions, "status", "containers, peers and rounds, by host", _status)
    status.add_argument("--json", action="store_true", help="print it as JSON")
    logs = _action(actions, "logs", "what the containers write", _logs)
    logs.add_argument("--host", metavar="H", action="append", help="only of this host; may be repeated")
    logs.add_argument("--follow", action="store_true", help="go on with each line as it comes, until Ctrl-C")
    logs.add_argument("--tail", metavar="N", type=_lines, default=50, help="last lines of each (default: %(default)d)")
    fetch = _action(actions, "fetch", "get the run folder and the peers' logs", _fetch)
    fetch.add_argument("--out", metavar="DIR", type=Path, help="where to (default: runs/RUN_ID)")
    down = _action(actions, "down", "stop a run, fetch its run folder, remove it from all hosts", _down)
    down.add_argument("--out", metavar="DIR", type=Path, help="where the run folder goes (default: runs/RUN_ID)")
    what = down.add_mutually_exclusive_group()
    what.add_argument("--keep-data", action="store_true", help="leave the run folder's volume on its host instead")
    what.add_argument("--discard", action="store_true", help="do not fetch the run folder: it is lost")


def _action(actions: Any, name: str, text: str, work: Any) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=description)
    parser.add_argument("--hosts", metavar="FILE", type=Path, required=True, help="the hosts file of the deployment")
    parser.set_defaults(func=work)
    return parser


def _up(args: argparse.Namespace) -> int:
    from spark_node.deploy.hosts import load_hosts
    from spark_node.deploy.plan import make_plan

    plan = make_plan(load_hosts(args.hosts))
    if args.json:
        print(json.dumps(_plan_facts(plan), indent=2))
    else:
        _print_plan(plan)
    if args.dry_run:
        return 0
    from spark_node.deploy.rollout import Rollout

    with _fleet(plan.deployment) as fleet, _reporting() as report:
        Rollout(fleet, plan, _say, Path("runs", f"{plan.run_id}-failed")).up(args.wait)
        status = f"spark-dfl deploy status --hosts {args.hosts}"
        _say(f"run {plan.run_id} is up with {plan.config.run.nodes} peers; see {status}")
    return report.code


def _status(args: argparse.Namespace) -> int:
    from spark_node.deploy.hosts import load_hosts

    with _fleet(load_hosts(args.hosts)) as fleet:
        status = fleet.status()
    if args.json:
        print(json.dumps(status.to_dict(), indent=2))
    else:
        _print_status(fleet.deployment, status)
    return FAILED if status.failed else 0


def _logs(args: argparse.Namespace) -> int:
    from spark_node.deploy.hosts import load_hosts
    from spark_node.deploy.logs import Line, show_logs

    deployment = load_hosts(args.hosts)
    names = [host.name for host in deployment.hosts]
    for host in args.host or []:
        if host not in names:
            raise ConfigError(f"--host {host}: not in {args.hosts}; allowed: {', '.join(names)}")

    def show(line: Line) -> None:
        print(f"{line.host} {line.container} | {line.text}", flush=args.follow)

    with _fleet(deployment) as fleet:
        problems = show_logs(fleet, args.host or names, args.tail, args.follow, show)
    return _complain("reading the logs", problems)


def _fetch(args: argparse.Namespace) -> int:
    from spark_node.deploy.fetch import fetch
    from spark_node.deploy.hosts import load_hosts

    with _fleet(load_hosts(args.hosts)) as fleet, _reporting() as report:
        folder = fetch(fleet, args.out, _say)
        if folder is None:
            _say("there is no run folder yet: the observer begins it when training starts")
            return FAILED
        print(folder)
    return report.code


def _down(args: argparse.Namespace) -> int:
    from spark_node.deploy.fetch import fetch
    from spark_node.deploy.fleet import DeploymentFailed
    from spark_node.deploy.hosts import load_hosts

    with _fleet(load_hosts(args.hosts)) as fleet:
        _say("stopping the containers")
        problems = dict(fleet.stop().problems)
        keep, code = args.keep_data, 0
        if not keep and not args.discard and fleet.deployment.observer not in problems:
            try:
                folder = fetch(fleet, args.out, _say)
                if folder is not None:
                    print(folder)
            except DeploymentFailed as failed:
                keep, code = True, _complain(f"{failed.what}; its volume is kept", failed.problems)
        removed = fleet.remove(keep)
        for host, (containers, volumes) in removed.done.items():
            _say(f"{host}: {containers} containers and {volumes} volumes removed")
        return max(code, _complain("removing the run", {**problems, **removed.problems}))


class _Report:
    """Whether what was tried worked."""

    code = 0


@contextmanager
def _reporting() -> Iterator[_Report]:
    """A failure on some hosts as a table, a line for each, and exit code 1."""
    from spark_node.deploy.fleet import DeploymentFailed

    report = _Report()
    try:
        yield report
    except DeploymentFailed as failed:
        report.code = _complain(failed.what, failed.problems)


@contextmanager
def _fleet(deployment: "Deployment") -> "Iterator[Fleet]":
    from spark_node.deploy.fleet import Fleet

    fleet = Fleet(deployment)
    try:
        yield fleet
    finally:
        fleet.close()


def _complain(what: str, problems: dict[str, str]) -> int:
    if not problems:
        return 0
    print(f"spark-dfl: error: {what} failed on {len(problems)} of the hosts:", file=sys.stderr)
    width = max(len(host) for host in problems)
    for host, problem in problems.items():
        print(f"  {host:<{width}}  {problem}", file=sys.stderr)
    return FAILED


def _say(line: str) -> None:
    print(f"spark-dfl: {line}", file=sys.stderr, flush=True)


def _plan_facts(plan: "Plan") -> dict[str, Any]:
    from dataclasses import asdict

    containers = [{k: v for k, v in asdict(container).items() if k != "secret"} for container in plan.containers]
    facts = {"run": plan.run_id, "peers": plan.config.run.nodes, "image": plan.deployment.image}
    return {**facts, "orchestrator": plan.address, "containers": containers}


def _print_plan(plan: "Plan") -> None:
    from spark_node.deploy.engine import peers_text

    deployment, run = plan.deployment, plan.config.run
    print(f"run {plan.run_id}: {run.algorithm} on {plan.config.data.dataset}, {run.nodes} peers, {run.rounds} rounds")
    print(f"image {deployment.image}; network {deployment.network}; orchestrator at {plan.address}")
    rows = [
        (
            container.host,
            container.name,
            container.role,
            container.gpu or "-",
            f"{len(container.peers)}" if container.peers else "-",
            peers_text(container.peers) or "-",
        )
        for container in plan.containers
    ]
    _print_table(("host", "container", "role", "gpu", "peers", "which"), rows)


def _print_status(deployment: "Deployment", status: "Status") -> None:
    if not status.containers and not status.problems:
        print(f"no run named {deployment.name} on any of the {len(deployment.hosts)} hosts")
        return
    rounds = next((f" of {seen.rounds} rounds" for seen in status.containers if seen.rounds), "")
    started = {None: "", True: ", started", False: ", waiting for peers"}[status.started]
    members = "" if status.members is None else f", {status.members} members"
    print(f"run {status.run_id or '?'}{rounds}{members}{started}")
    rows = []
    for host in deployment.hosts:
        if host.name in status.problems:
            rows.append((host.name, "-", "-", f"cannot be asked: {status.problems[host.name]}", "-", "-"))
        for seen in status.hosts.get(host.name, []):
            over = seen.state in ("exited", "dead", "restarting")
            state = f"{seen.state} ({seen.exit_code})" if over else seen.state
            state += f", {seen.restarts} restarts" if seen.restarts else ""
            rows.append((host.name, seen.name, seen.role, state, seen.peers or "-", _rounds(seen.peers, status.rounds)))
    _print_table(("host", "container", "role", "state", "peers", "round"), rows)


def _rounds(peers: str, rounds: dict[str, int | None]) -> str:
    """The rounds that the peers of a container have finished, as lowest..highest."""
    first, _, last = peers.partition("..")
    known = [k for peer, k in rounds.items() if first <= peer <= (last or first) and k is not None]
    if not peers or not known:
        return "-"
    return str(known[0]) if min(known) == max(known) else f"{min(known)}..{max(known)}"


def _print_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a number of seconds from 0 to 86400")
    return found


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a whole number from 0 to 1000000")
    return int(text)
