"""`spark-dfl dashboard`: the live page of a network that others run; nothing is written."""

import argparse
import asyncio
import signal
import sys

from spark_node.cli.host import joining_config
from spark_node.cli.observe import add_observer_flags
from spark_node.cli.run import ANY_PORT, add_dashboard_host, deal, open_page, port
from spark_node.config import Config, without_sketch_secret

_DESCRIPTION = """\
Serve a live page of a running network to browsers on this machine: this round's graph, accuracy and bytes as they
grow, every peer, where the time goes, and faults as they happen. It joins as the run's observer, and nothing is
written; `observe --dashboard` serves the same page and keeps a run folder as well. It stays until it is stopped."""

_EPILOG = """\
examples:
  spark-dfl dashboard --orchestrator 10.0.0.1:7000 --config run.toml --certs observer-certs
  spark-dfl run --preset demo --dashboard          the page of a run that is started here

It takes the settings that the hosts of the run have: the same --config file is the simplest way.
exit codes: 0 stopped, 1 the run broke off, 2 bad usage or bad input"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `dashboard` command."""
    parser = subparsers.add_parser(
        "dashboard",
        help="a live page of a network that others run",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_observer_flags(parser)
    group = parser.add_argument_group("the live page")
    where = "where it is served (default: 7420, or a free one where that is taken; 0 = a free one)"
    group.add_argument("--port", metavar="PORT", type=port, dest="dashboard", default=ANY_PORT, help=where)
    add_dashboard_host(group)
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Wait for the orchestrator, follow the peers, serve the page until told to stop."""
    config = without_sketch_secret(joining_config(args))
    try:
        asyncio.run(_follow(config, args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 0
    except RuntimeError as error:
        print(f"spark-dfl: error: {error}", file=sys.stderr)
        return 1
    return 0


async def _follow(config: Config, args: argparse.Namespace) -> None:
    import torch

    from spark_node import model
    from spark_node.launch.observation import describe, observe
    from spark_node.observe.display import QuietDisplay
    from spark_node.observe.observer import ask_run

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    torch.set_num_threads(1)
    dataset, partition = deal(config)
    module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
    page = open_page(args, stays=True)
    where = config.network.orchestrator
    print(f"spark-dfl: looking for the orchestrator at {where}, for up to {args.wait:.0f} s", file=sys.stderr)
    await ask_run(config, where, args.wait)
    info = describe(config, dataset, partition, module)
    await observe(config, where, dataset, module, info, QuietDisplay(None), page=page)
