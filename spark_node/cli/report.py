"""`spark-dfl report`: the report of a finished run, or of several side by side."""

import argparse
import sys
from pathlib import Path

from spark_node.errors import UserError

COMPARISON = Path("comparison.html")

_DESCRIPTION = """\
One run folder: rebuild its plots and its report.html. Several: a page that compares them, with a table
and all runs on the same axes. A run that was interrupted or is still going is reported as far as it got."""

_EPILOG = """\
examples:
  spark-dfl report runs/digits-spark-20260101-120000
  spark-dfl report runs/spark runs/ntk-dfl --out compare.html --plots compare-plots
  spark-dfl report runs/* --json"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `report` command."""
    parser = subparsers.add_parser(
        "report",
        help="the report of finished runs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a folder that `spark-dfl run` wrote")
    parser.add_argument(
        "--out", metavar="FILE", help=f"the page (default: RUN/report.html, or {COMPARISON} here for several)"
    )
    parser.add_argument("--plots", metavar="DIR", help="write the plots there as well, as PNG and SVG")
    parser.add_argument("--json", action="store_true", help="print the runs' summaries as JSON on stdout")
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Read every run, then write the page."""
    from spark_node.observe.run_folder import load_run

    runs = [load_run(path) for path in dict.fromkeys(Path(run) for run in args.runs)]

    from spark_node.observe import report, wording

    out = COMPARISON if args.out is None else Path(args.out)
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; give the file to write, for example {out / 'report.html'}")
    try:
        if len(runs) == 1 and args.out is None:
            out = report.write_report(runs[0], Path(args.plots) if args.plots else None)
        else:
            text = report.report_of(runs, Path(args.plots) if args.plots else None)
            out = report.write_page(text, out)
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written ({error.strerror})") from None
    if args.json:
        print(report.results(runs, out))
        return 0
    for name, run in zip(report.names(runs), runs, strict=True):
        prefix = f"{name}: " if len(runs) > 1 else ""
        print(f"{prefix}{wording.one_line(run)}", file=sys.stderr)
    print(out)
    return 0
