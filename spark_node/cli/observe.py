"""`spark-dfl observe`: follow a network that others run, show it live, write its run folder."""

import argparse
import asyncio
import contextlib
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spark_node.cli.host import joining_config
from spark_node.cli.run import (
    add_dashboard,
    add_flags,
    add_output,
    add_sources,
    command_line,
    conclude,
    deal,
    label_counts,
    log_failure,
    new_folder,
    open_page,
    port,
    write_report,
)
from spark_node.config import Config, without_sketch_secret
from spark_node.errors import UserError

if TYPE_CHECKING:
    from spark_node.data.datasets import Dataset
    from spark_node.data.partitions import Partition
    from spark_node.launch.observation import LivePage
    from spark_node.observe.display import Display
    from spark_node.observe.history import Run
    from spark_node.observe.records import Watcher
    from spark_node.observe.run_folder import RunFolder

_DESCRIPTION = """\
Follow a network through its orchestrator, as its observer: show its progress live and write a run folder as `run`
does (rounds.jsonl, summary.json, report.html, plots/). Training never waits for it. It may be stopped and started
again with the same --out at any time: it goes on after the last round that is written, from what the peers still
hold (network.model_history rounds of models; of older rounds everything but the accuracy)."""

_EPILOG = """\
examples:
  spark-dfl certs issue authority --role observer --out observer-certs
  spark-dfl observe --orchestrator 10.0.0.1:7000 --config run.toml --certs observer-certs --out runs/monday
  spark-dfl observe --orchestrator 10.0.0.1:7000 --config run.toml --certs observer-certs --out runs/monday \\
      --host 10.0.0.4 --metrics-port 7411          the accuracy for Prometheus as well

It takes the settings that the hosts of the run have: the same --config file is the simplest way.
exit codes: 0 the run is over, 1 it broke off, 2 bad usage or bad input, 130 stopped (finished rounds are kept)"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `observe` command."""
    parser = subparsers.add_parser(
        "observe",
        help="follow a network that others run, and write its run folder",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_observer_flags(parser)
    add_output(parser)
    service = parser.add_argument_group("the service")
    service.add_argument("--host", metavar="HOST", help="listen there (setting network.host; default: 127.0.0.1)")
    metrics = "serve the accuracy, the round and the bytes to Prometheus at /metrics (0 = a free port)"
    service.add_argument("--metrics-port", metavar="PORT", type=port, help=metrics)
    linger = "with --metrics-port: seconds to go on serving after the end, for the last scrape (default: 0)"
    service.add_argument("--linger", metavar="SECONDS", type=_seconds, default=0.0, help=linger)
    add_dashboard(parser)
    parser.set_defaults(func=command)


def add_observer_flags(parser: argparse.ArgumentParser) -> None:
    """What every command takes that follows a network of others."""
    add_sources(parser)
    add_flags(parser, "the network", ["--algorithm", "--nodes", "--rounds", "--topology", "--degree", "--seed"])
    add_flags(parser, "the data", ["--dataset", "--data-dir", "--partition"])
    add_flags(parser, "the machine", ["--certs"])
    line = parser.add_argument_group("the run")
    line.add_argument("--orchestrator", metavar="HOST:PORT", help="where the run's orchestrator listens")
    wait = "seconds to wait for an orchestrator that is not there yet (default: %(default).0f)"
    line.add_argument("--wait", metavar="SECONDS", type=_seconds, default=120.0, help=wait)


@dataclass
class _Session:
    """What becomes known in the course of an observation."""

    config: Config
    path: Path
    dataset: "Dataset"
    partition: "Partition"
    shown: "Display"
    command: str
    patience: float
    metrics_port: int | None
    page: "LivePage | None"
    folder: "RunFolder | None" = field(default=None)
    complete: "Run | None" = field(default=None)


def command(args: argparse.Namespace) -> int:
    """Wait for the orchestrator, follow the peers to the end, write the run folder, give the answer."""
    config = without_sketch_secret(joining_config(args))
    if args.host is not None:
        config = config.replace(network__host=args.host)
    from spark_node.observe import display

    page = open_page(args)
    with display.choose(config, quiet=args.quiet, silent=args.quiet and args.json) as shown:
        path, line = new_folder(args.out, config), command_line(args)
        session = _Session(config, path, *deal(config), shown, line, args.wait, args.metrics_port, page)
        status, failure = _run(session)
        if session.complete is not None:
            return _again(args, session.complete, shown)
        assert session.folder is not None
        code = conclude(args, session.folder, shown, status, failure)
    if args.metrics_port is not None and status == "complete":
        _linger(args.linger)
    return code


def _linger(seconds: float) -> None:
    """Scrapes are still answered, by a thread; SIGTERM ends it at once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(seconds)


def _again(args: argparse.Namespace, run: "Run", shown: "Display") -> int:
    """The folder has the whole run already: the same answer once more."""
    shown.finished(run, None if args.no_report else write_report(run))
    if args.json:
        import json

        print(json.dumps(run.summary, indent=2))
    return 0


def _run(session: _Session) -> tuple[str, Exception | None]:
    """How the observation ended, and why if it failed; an error from before its start is raised as it is."""
    try:
        asyncio.run(_follow(session))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if session.folder is None or not session.folder.has_started:
            raise KeyboardInterrupt from None
        return "interrupted", None
    except Exception as error:
        if session.folder is None or not session.folder.has_started:
            raise
        log_failure(error, session.path)
        return "failed", error
    return "complete", None


async def _follow(session: _Session) -> None:
    import torch

    from spark_node import model
    from spark_node.launch.logs import log_to
    from spark_node.launch.observation import describe, observe
    from spark_node.observe.observer import ask_run
    from spark_node.observe.run_folder import RunFolder, load_observed
    from spark_node.observe.watchers import Together

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    torch.set_num_threads(1)
    config, dataset, partition = session.config, session.dataset, session.partition
    orchestrator = config.network.orchestrator
    session.shown.note(f"Looking for the orchestrator at {orchestrator}, for up to {session.patience:.0f} s")
    run_id = await ask_run(config, orchestrator, session.patience)
    before = load_observed(session.path, run_id)
    if before is not None and before.status == "complete":
        session.complete = before
        return
    counts = label_counts(config, dataset, partition)
    folder = session.folder = RunFolder(
        session.path, config, command=session.command, label_counts=counts, resumed=before, observed=run_id
    )
    watchers: list[Watcher] = [folder, session.shown]
    if session.metrics_port is not None:
        watchers.append(_serve_metrics(session, run_id, before))
    module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
    watcher, info = Together(*watchers), describe(config, dataset, partition, module)
    watcher.started(info)
    log_to(session.path / "logs" / "observer.log", config.network.log, "observer", alone=False)
    session.shown.note("")
    recorded = before.rounds if before is not None else ()
    await observe(config, orchestrator, dataset, module, info, watcher, recorded=recorded, page=session.page)


def _serve_metrics(session: _Session, run_id: str, before: "Run | None") -> "Watcher":
    from spark_node.metrics import serve_from_thread
    from spark_node.observe.series import ObserverMetrics

    metrics, host = ObserverMetrics(session.config, run_id, before), session.config.network.host
    try:
        port = serve_from_thread(metrics, host, session.metrics_port or 0)
    except OSError as error:
        given = f"--metrics-port {session.metrics_port} on {host}"
        raise UserError(f"{given}: {error.strerror}; give another (0 = a free one) or --host") from None
    session.shown.note(f"Metrics at http://{host}:{port}/metrics")
    return metrics


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a number of seconds from 0 to 86400")
    return found
