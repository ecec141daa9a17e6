"""`spark-dfl node`: one peer of a run, in this process."""

import argparse
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spark_node.cli.host import add_peer_flags, jobs_of, peer_config
from spark_node.config import Config
from spark_node.distributed.place import Place, device_of, place_of

if TYPE_CHECKING:
    from spark_node.distributed.sharded import Lead

_EPILOG = """\
examples:
  spark-dfl node --orchestrator 10.0.0.1:7000 --index 3 --nodes 60 --config run.toml --certs certs \\
      --set network.host=10.0.0.2
  torchrun --nproc-per-node 4 -m spark_node node --device cuda --orchestrator 10.0.0.1:7000 ...
                                                     the same peer, its kernels over four GPUs

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
    config, place = peer_config(args), place_of()
    if place is not None:
        return _over_ranks(args, config.replace(run__device=device_of(config.run.device, place)), place)
    return _peer(args, config, None)


def _peer(args: argparse.Namespace, config: Config, lead: "Lead | None") -> int:
    from spark_node.launch.logs import log_to
    from spark_node.launch.peer import run_peer

    job = jobs_of(config, args.index, 1, args.linger, Path(args.checkpoints))[0]
    log_to(None, config.network.log, job.name)
    gc.collect()
    gc.freeze()  # what is there now stays: after each round only what came since is looked at
    run_peer(job, None, lead=lead)
    return 0


def _over_ranks(args: argparse.Namespace, config: Config, place: Place) -> int:
    """Rank 0 is the peer; the others hold slices of its kernels, and end with it."""
    import torch

    from spark_node.distributed.group import RankLost, joined
    from spark_node.distributed.sharded import leading, serve
    from spark_node.launch.devices import check_device

    torch.set_num_threads(1)
    check_device(config.run.device)
    try:
        with joined(place, config.run.device, config.run.rank_timeout) as group:
            if place.rank == 0:
                with leading(group) as lead:
                    return _peer(args, config, lead)
            serve(group)
            return 0
    except RankLost as error:
        print(f"spark-dfl: error: rank {place.rank} of {place.size}: {error}; this peer ends", file=sys.stderr)
        return 1
