"""`spark-dfl orchestrator`: the member list, the seed, and nothing else."""

import argparse
import json
import secrets
import time

from spark_node.cli.run import add_flags, add_sources, load_config
from spark_node.config import Config

_DESCRIPTION = """\
Serve a run's member list and its seed, from which every peer derives each round's graph by itself. It sees no
data, models, packages or accuracies. It runs until it is told to stop (SIGTERM, Ctrl-C), keeps nothing on disk,
and may be started anew in the middle of a run: with the same settings, --run-id and --port the peers come back."""

_EPILOG = """\
examples:
  spark-dfl orchestrator --certs certs --nodes 20 --port 7400 --http-port 7401
  spark-dfl orchestrator --certs certs --config runs/wide/config.toml --host 10.0.0.1 --port 7400
  spark-dfl orchestrator --certs certs --run-id monday --seed 7 --port 7400
                                                   anew after a crash, for the peers still at work
  spark-dfl orchestrator --set security.tls=off --json
                                                   on the loopback without encryption; where it listens, as JSON

over HTTP: /sd (every peer, for Prometheus' http_sd_configs), /metrics (its own), /healthz
exit codes: 0 stopped, 2 bad usage or a port in use"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `orchestrator` command."""
    parser = subparsers.add_parser(
        "orchestrator",
        help="serve a run's member list and seed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sources(parser)
    add_flags(parser, "the network", ("--nodes", "--topology", "--degree", "--seed"))
    add_flags(parser, "the machine", ("--certs",))
    service = parser.add_argument_group("the service")
    service.add_argument("--run-id", metavar="ID", help="name of the run (default: a new one)")
    service.add_argument("--host", metavar="HOST", help="listen there (setting network.host; default: 127.0.0.1)")
    for flag, text in (("--port", "for peers and observers"), ("--http-port", "for monitoring")):
        service.add_argument(flag, metavar="PORT", type=port, default=0, help=f"{text} (default: a free one)")
    service.add_argument(
        "--closed", action="store_true", help="refuse more than --nodes peers (default: late ones join)"
    )
    service.add_argument("--json", action="store_true", help="print where it listens as a line of JSON")
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    config = load_config(args)
    if args.host is not None:
        config = config.replace(network__host=args.host)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}" if args.run_id is None else args.run_id

    from orchestrator.main import serve
    from spark_node.launch.logs import log_to

    def ready(address: str, http_address: str) -> None:
        say = _as_json if args.json else _as_text
        print(say(config, run_id, address, http_address), flush=True)

    log_to(None, config.network.log, "orchestrator")
    return serve(config, run_id, port=args.port, http_port=args.http_port, closed=args.closed, ready=ready)


def port(text: str) -> int:
    """A port as it is given on the command line."""
    if not (text.isascii() and text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; allowed: 0 (a free one) to 65535")
    return int(text)


def _as_text(config: Config, run_id: str, address: str, http_address: str) -> str:
    where = f"orchestrator of run {run_id} listens on {address}"
    return f"{where}, http://{http_address}/sd, http://{http_address}/metrics" if http_address else where


def _as_json(config: Config, run_id: str, address: str, http_address: str) -> str:
    graphs = {"topology": config.topology.kind, "degree": config.topology.degree, "fresh": config.topology.fresh}
    facts = {"run": run_id, "address": address, "http_address": http_address}
    return json.dumps({**facts, "seed": config.run.seed, "nodes": config.run.nodes, **graphs})
