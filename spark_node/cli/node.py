"""`spark-dfl node`: one peer of a run, in this process."""

import argparse
from pathlib import Path

from spark_node.cli.host import add_peer_flags, jobs_of, peer_config

_EPILOG = """\
example:
  spark-dfl node --orchestrator 10.0.0.1:7000 --index 3 --nodes 60 --config run.toml --certs certs \\
      --set network.host=10.0.0.2

The peer's name and its share of the dataset follow from --index. All peers of a run take the same settings."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "node",
        help="one peer of a run",
        description="Join a run as one peer, train with this round's neighbours, and leave after the last round.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_peer_flags(parser)
    parser.add_argument("--index", metavar="I", type=int, default=0, help="number of this peer (default: 0)")
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Run the peer until it is done or SIGTERM comes."""
    config = peer_config(args)

    from spark_node.launch.logs import log_to
    from spark_node.launch.peer import run_peer

    job = jobs_of(config, args.index, 1, args.linger, Path(args.checkpoints))[0]
    log_to(None, config.network.log, job.name)
    run_peer(job, None)
    return 0
