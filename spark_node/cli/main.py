"""`spark-dfl`: one command with subcommands. Nothing heavy is imported before a subcommand needs it."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from spark_node import __version__
from spark_node.cli import (
    certs,
    chaos,
    compare,
    dashboard,
    data,
    deploy,
    host,
    node,
    observe,
    orchestrator,
    package,
    report,
    run,
)
from spark_node.errors import OutOfMemory, UserError
from spark_node.memory import ran_out

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130

_DESCRIPTION = """\
Peer-to-peer federated learning with neural tangent kernels: SPARK, NTK-DFL and their baselines.
Peers exchange weights and compressed Jacobians with the neighbours of a round; nothing central sees data
or models."""

_EPILOG = """\
examples:
  spark-dfl run --preset demo                        a minute on a laptop: 20 peers, embedded data, live view
  spark-dfl run --algorithm ntk-dfl --rounds 10      another algorithm, the default everything else
  spark-dfl run --preset demo --dashboard            with a live page for the browser
  spark-dfl run --settings                           every setting there is
  spark-dfl compare --preset demo --algorithms spark,ntk-dfl --seeds 0,1,2
                                                     side by side: tables, plots, one page
  spark-dfl report runs/A runs/B --out compare.html  several runs on one page
  spark-dfl data list                                datasets, and where they are
  spark-dfl package explain --preset paper           what a package costs, loses and reveals
  spark-dfl deploy up --hosts hosts.toml             peers on several (GPU) hosts, through their Docker engines

exit codes: 0 done, 1 the run failed, 2 bad usage or bad input, 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """An argument parser that never guesses and whose complaints are one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """The whole command line."""
    top = Parser(
        prog="spark-dfl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"spark-dfl {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    everyday = (run, compare, observe, dashboard, report, data, package)
    for module in (*everyday, host, node, orchestrator, deploy, certs, chaos):
        module.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages name the fix; its log does not
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's large blocks in huge pages: half the page faults
    try:
        top = parser()
        args = top.parse_args(given)
        if args.command is None:
            top.print_help(sys.stderr)
            return BAD_USAGE
        args.argv = given
        code: int = args.func(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"spark-dfl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print("spark-dfl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has left (`| head`); keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if not isinstance(error, OutOfMemory) and not ran_out(error):
            raise
        print(f"spark-dfl: error: {run.reason(error)}", file=sys.stderr)
        return FAILED
