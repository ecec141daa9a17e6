"""`spark-dfl chaos`: break things in a running local network and see what it does."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from spark_node.chaos.script import FAULTS
from spark_node.errors import ConfigError

_DESCRIPTION = """\
Inject faults into a network that `spark-dfl run` (or `host`) started on this machine, by a script or at random, and
tell what the network did. Whatever is to last a while is mended again, also on Ctrl-C. Faults of messages (cut,
corrupt) need peers that play along: start the run with --set network.chaos=true."""

_EPILOG = """\
examples:
  spark-dfl run --preset demo --rounds 60 --set network.chaos=true --out runs/hard &
  spark-dfl chaos runs/hard --rate 6                            six faults a minute until the run is over
  spark-dfl chaos runs/hard --rate 12 --faults kill,pause --for 60
  spark-dfl chaos runs/hard --script faults.txt --json
  spark-dfl chaos runs/hard --do "at 0s cut peer-000,peer-001 20s" --do "round 9 kill orchestrator"

a script's lines:
  at 10s kill peer-003
  round 4 pause peer-001 5s           once round 4 is finished
  round 6 cut peer-000,peer-001 20s

faults:
""" + "\n".join(f"  {name:10} {text}" for name, text in FAULTS.items())


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `chaos` command."""
    parser = subparsers.add_parser(
        "chaos",
        help="inject faults into a running network",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN", help="run folder of the network")
    what = parser.add_argument_group("what to break, and when")
    what.add_argument("--script", metavar="FILE", help="lines as below")
    what.add_argument("--do", metavar="LINE", action="append", default=[], help="one line of a script; may be repeated")
    what.add_argument("--rate", metavar="N", type=float, help="faults a minute, at random times and peers")
    what.add_argument("--faults", metavar="A,B", default="kill,pause,slow", help="kinds at random (kill,pause,slow)")
    what.add_argument("--last", metavar="SECONDS", type=float, default=5.0, help="how long random ones last (5)")
    what.add_argument("--for", metavar="SECONDS", type=float, dest="seconds", help="stop then (default: with the run)")
    what.add_argument("--seed", metavar="SEED", type=int, default=0, help="of random faults (default: 0)")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON at the end, on stdout")
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Break things until the run is over, the time is up or Ctrl-C comes."""
    from spark_node.chaos.agent import Chaos
    from spark_node.chaos.script import at_random, parse

    script = parse(_read(args.script), args.script) if args.script else []
    script += parse("\n".join(args.do), "--do")
    if args.rate is not None and not 0 < args.rate <= 6000:
        raise ConfigError(f"--rate {args.rate:g}: allowed: faults a minute, above 0 and at most 6000")
    if not script and args.rate is None:
        raise ConfigError("nothing to break: give --rate N, --script FILE or --do LINE")
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {text}", file=sys.stderr, flush=True)

    chaos = Chaos(Path(args.folder), say, args.seed)
    kinds = [kind for kind in args.faults.split(",") if kind]
    random = at_random(kinds, args.rate, args.last, args.seed) if args.rate is not None else None
    try:
        chaos.run(script, random, float("inf") if args.seconds is None else args.seconds)
    except KeyboardInterrupt:
        say("stopped; everything was mended")
    summary = chaos.told.summary()
    say(_in_words(summary))
    if args.json:
        print(json.dumps({"summary": summary, "faults": chaos.told.faults, "rounds": chaos.told.rounds}, indent=2))
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--script {path}: cannot be read ({error}); give a text file") from None


def _in_words(summary: dict[str, Any]) -> str:
    longest, median = _shown(summary["round_seconds_longest"]), _shown(summary["round_seconds_median"])
    neighbours = f"{summary['neighbours_used']} of {summary['neighbours_expected']} neighbours used"
    processes = f"{summary['processes_gone']} processes gone, {summary['processes_back']} back"
    faults = f"{summary['faults']} faults in {summary['rounds']} rounds"
    return f"{faults}; longest round {longest}, median {median}; {neighbours}; {processes}"


def _shown(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.1f} s"
