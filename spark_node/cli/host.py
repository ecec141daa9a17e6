"""`spark-dfl host`: several peers of a run on this machine, from one preloaded parent."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spark_node.cli.run import add_flags, add_sources, deal, load_config
from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.privacy import refuse_hidden

if TYPE_CHECKING:
    from spark_node.launch.peer import PeerJob

_CLAIM_SECONDS = 5.0
"""A host that takes over from one that is just ending waits so long for its block."""

_EPILOG = """\
examples:
  spark-dfl orchestrator --nodes 60 --host 10.0.0.1 --port 7000 --certs certs          on one machine
  spark-dfl host --orchestrator 10.0.0.1:7000 --nodes 60 --first 0  --count 30 \\
      --certs certs --set network.host=10.0.0.2                                        on a second one
  spark-dfl host --orchestrator 10.0.0.1:7000 --nodes 60 --first 30 --count 30 \\
      --certs certs --set network.host=10.0.0.3                                        on a third one

  spark-dfl host --orchestrator 10.0.0.1:7000 --nodes 60 --claim /shared/claims --count 30 --certs certs \\
      --set network.host=10.0.0.4                         one of several replicas, which share out the peers themselves

All hosts of a run take the same settings: the same --config file is the simplest way. The dataset is looked for on
each host; a peer only reads its own share of it. SIGTERM ends all peers cleanly."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "host",
        help="several peers of a run on this machine",
        description="Start peers of a run on this machine, watch them, and start those that crash again.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_peer_flags(parser)
    own = parser.add_argument_group("this host")
    own.add_argument("--first", metavar="I", type=int, help="number of its first peer (default: 0)")
    own.add_argument("--count", metavar="K", type=int, help="peers on this host (default: all from --first on)")
    own.add_argument(
        "--claim",
        metavar="DIR",
        type=Path,
        help="instead of --first: the first free block of --count peers, by locks in a folder that the hosts share",
    )
    own.add_argument("--logs", metavar="DIR", default="host-logs", help="folder of logs (default: host-logs)")
    parser.set_defaults(func=command)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    """What `host` and `node` share."""
    add_sources(parser)
    add_flags(parser, "the network", ["--algorithm", "--nodes", "--rounds", "--seed"])
    add_flags(parser, "the data", ["--dataset", "--data-dir", "--partition"])
    add_flags(parser, "the machine", ["--device", "--workers", "--certs"])
    line = parser.add_argument_group("the run")
    line.add_argument("--orchestrator", metavar="HOST:PORT", help="where the run's orchestrator listens")
    linger = "seconds to go on answering after the last round (default: 30)"
    checkpoints = "folder of checkpoints; peers that are started again go on from them (default: %(default)s)"
    line.add_argument("--checkpoints", metavar="DIR", default="host-checkpoints", help=checkpoints)
    line.add_argument("--linger", metavar="SECONDS", type=float, default=30.0, help=linger)


def peer_config(args: argparse.Namespace) -> Config:
    """The configuration of peers that join a run."""
    config = joining_config(args)
    refuse_hidden(config.privacy.sketch_secret)
    return config


def joining_config(args: argparse.Namespace) -> Config:
    """The configuration of whoever joins a run: it names an orchestrator, and certificates unless they are off."""
    config = load_config(args)
    if args.orchestrator:
        config = config.replace(network__orchestrator=args.orchestrator)
    if not config.network.orchestrator:
        raise ConfigError("network.orchestrator = '': give --orchestrator HOST:PORT of the run's orchestrator")
    check_folder(config)
    return config


def check_folder(config: Config) -> None:
    """One line where there are no certificates at all, instead of one a peer; each peer looks closely at its own."""
    from spark_node.security.identity import AUTHORITY, CertificateError
    from spark_node.security.tls import require_folder

    if config.security.tls == "off":
        return
    place = require_folder(config.security)
    if not (place / f"{AUTHORITY}.pem").exists():
        raise CertificateError(
            f"security.certs = {str(place)!r}: no certificates there; make them with spark-dfl certs"
        )


def jobs_of(config: Config, first: int, count: int, linger: float, checkpoints: Path) -> "list[PeerJob]":
    """The chosen peers of the run, with their data and the run's model."""
    import dataclasses

    if not 0 <= first < config.run.nodes or not 1 <= count <= config.run.nodes - first:
        raise ConfigError(f"peers {first} to {first + count - 1}: the run has peers 0 to {config.run.nodes - 1}")

    from spark_node import model
    from spark_node.launch.devices import check_device
    from spark_node.launch.network import peer_jobs

    check_device(config.run.device)
    dataset, partition = deal(config)
    module = model.build(config.model, dataset.shape, dataset.classes, config.run.seed)
    jobs = peer_jobs(config, dataset, partition, module, range(first, first + count), checkpoints)
    return [dataclasses.replace(job, linger=linger) for job in jobs]


def _chosen(args: argparse.Namespace, config: Config) -> tuple[int, int] | None:
    """The first of this host's peers and how many they are; None where replicas of this host have them all."""
    if args.claim is None:
        first = args.first or 0
        return first, config.run.nodes - first if args.count is None else args.count
    if args.first is not None or args.count is None:
        raise ConfigError("--claim DIR: give --count K with it, and leave out --first")

    from spark_node.launch.claims import claim

    block = claim(args.claim, config.run.nodes, args.count, patience=_CLAIM_SECONDS)
    return None if block is None else (block.first, block.count)


def command(args: argparse.Namespace) -> int:
    """Fork the peers and watch them until they are done."""
    config = peer_config(args)
    chosen = _chosen(args, config)
    if chosen is None:
        print(f"every peer has a host already ({args.claim}): nothing to do here", file=sys.stderr)
        return 0
    first, count = chosen

    import torch

    from spark_node.launch.host import Host
    from spark_node.launch.logs import log_to

    torch.set_num_threads(1)
    jobs = jobs_of(config, first, count, args.linger, Path(args.checkpoints))
    log_to(None, config.network.log, "host")
    workers = config.run.workers or os.cpu_count() or 1
    network = config.network
    host = Host(jobs, Path(args.logs), workers=workers, restarts=network.restarts, log_form=network.log)
    print(f"{len(jobs)} peers, {jobs[0].name} to {jobs[-1].name}; logs in {args.logs}", file=sys.stderr)
    return host.run()
