"""`spark-dfl data`: list, locate, fetch and verify datasets."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from spark_node.data import catalogue, lookup
from spark_node.data.catalogue import Entry
from spark_node.data.lookup import Place
from spark_node.errors import DataError

if TYPE_CHECKING:
    from spark_node.data.fetch import Report

_DESCRIPTION = """\
Datasets on this machine. `digits` is embedded and needs nothing; the others are looked for in
--folder DIR or, without it, in $SPARK_DATA, in Debian's folder (fashion-mnist), and in the user's cache.
A folder may hold the files themselves or a subfolder named like the dataset."""

_EXAMPLES = """\
examples:
  spark-dfl data list                              what there is, and what is already here
  spark-dfl data fetch fashion-mnist               download into the user's cache, resumable
  spark-dfl data fetch mnist --folder /data        download into /data/mnist
  SPARK_DATA=/data spark-dfl data locate mnist     every place that is tried, and what it lacks
  spark-dfl data verify cifar10 --json             compare every file with its official sha256

exit codes: 0 all well; 1 not found, not good, or no mirror delivered; 2 bad usage"""


_EXAMPLE = {
    "list": "spark-dfl data list --json",
    "locate": "SPARK_DATA=/data spark-dfl data locate mnist",
    "fetch": "spark-dfl data fetch mnist --folder /data        (into /data/mnist)",
    "verify": "spark-dfl data verify fashion-mnist",
}

_FOLDER_HELP = (
    "look in this folder alone, not in the usual places",
    "put it into DIR/NAME, not into the user's cache",
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `data` command."""
    parser = subparsers.add_parser(
        "data",
        help="list, locate, fetch, verify datasets",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, func in (
        ("list", "every dataset, and where it is on this machine", _list),
        ("locate", "every place that is tried for a dataset, in order", _locate),
        ("fetch", "download a dataset; an interrupted download goes on where it stopped", _fetch),
        ("verify", "compare a dataset's files with their official sha256", _verify),
    ):
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example:\n  {_EXAMPLE[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name != "list":
            known = list(catalogue.ENTRIES)
            action.add_argument("name", metavar="NAME", choices=known, help=f"one of {', '.join(known)}")
        action.add_argument("--folder", metavar="DIR", type=Path, help=_FOLDER_HELP[name == "fetch"])
        action.add_argument("--json", action="store_true", help="print the result as JSON")
        action.set_defaults(func=func)
    actions.choices["fetch"].add_argument(
        "--mirror",
        metavar="URL",
        help="take the files from below this address instead of the official mirrors",
    )


def _list(args: argparse.Namespace) -> int:
    rows = [_listed(entry, args.folder) for entry in catalogue.ENTRIES.values()]
    if args.json:
        return _print_json({"datasets": rows}, ok=True)
    columns = ("dataset", "samples", "classes", "shape", "writers", "where")
    _print(_table(columns, map(_list_row, rows)))
    return 0


def _list_row(row: dict[str, Any]) -> tuple[str, ...]:
    counted = f"{row['train']:,} + {row['test']:,}" if row["train"] else "as made"
    where = "embedded" if row["embedded"] else row["path"] or f"not here; run: {row['get']}"
    shape, writers = "x".join(map(str, row["shape"])), "yes" if row["writers"] else ""
    return row["name"], counted, str(row["classes"]), shape, writers, where


def _listed(entry: Entry, folder: Path | None) -> dict[str, Any]:
    place = next((place for place in lookup.locate(entry.name, folder) if place.found), None)
    return {
        "name": entry.name,
        "title": entry.title,
        "train": entry.train,
        "test": entry.test,
        "classes": entry.classes,
        "shape": list(entry.shape),
        "writers": entry.writers,
        "embedded": entry.embedded,
        "path": None if place is None else str(place.folder),
        "get": None if place else lookup.fetch_command(entry, folder),
    }


def _locate(args: argparse.Namespace) -> int:
    places = lookup.locate(args.name, args.folder)
    found = next((place for place in places if place.found), None)
    if args.json:
        rows = [{"origin": p.origin, "path": str(p.path), "found": p.found, "missing": list(p.missing)} for p in places]
        path = None if found is None else str(found.folder)
        return _print_json({"name": args.name, "found": path, "places": rows}, ok=found is not None)
    _print(_table(("place", "folder", "found"), ((p.origin, str(p.path), _verdict(p)) for p in places)))
    if found is None:
        _complain(f"{args.name} not found; {lookup.remedy(catalogue.entry(args.name), args.folder)}")
    return 0 if found else 1


def _verdict(place: Place) -> str:
    if place.found:
        return "yes"
    return f"lacks {', '.join(place.missing)}" if place.files else "no"


def _fetch(args: argparse.Namespace) -> int:
    from spark_node.data.fetch import FetchFailed, fetch

    entry = catalogue.entry(args.name)
    try:
        with _progress(shown=not args.json) as report:
            fetched = fetch(args.name, args.folder, mirror=args.mirror, report=report)
    except FetchFailed as error:
        return _failed(args, error)
    if args.json:
        rows = [{"file": f.file, "status": f.status, "path": str(f.path)} for f in fetched]
        return _print_json({"name": args.name, "ok": True, "files": rows}, ok=True)
    if entry.embedded:
        _print(str(entry.advice))
    else:
        _print(_table(("file", "status", "path"), ((f.file, f.status, str(f.path)) for f in fetched)))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from spark_node.data.datasets import verify

    try:
        checks = verify(args.name, args.folder)
    except DataError as error:
        return _failed(args, error)
    ok = all(check.ok for check in checks)
    if args.json:
        rows = [{"file": c.file, "path": str(c.path), "ok": c.ok, "detail": c.detail} for c in checks]
        return _print_json({"name": args.name, "ok": ok, "files": rows}, ok=ok)
    rows_of_text = ((c.file, "good" if c.ok else "BAD", c.detail) for c in checks)
    _print(_table(("file", "verdict", "detail"), rows_of_text))
    if not ok:
        folder = next(place.path for place in lookup.locate(args.name, args.folder) if place.found)
        _complain(f"{args.name} is not good; {lookup.remedy(catalogue.entry(args.name), folder)}")
    return 0 if ok else 1


@contextmanager
def _progress(*, shown: bool) -> Iterator["Report"]:
    """A bar a download, on stderr, from the first byte on."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
    tasks: dict[str, TaskID] = {}

    def report(name: str, done: int, total: int | None) -> None:
        if name not in tasks:
            progress.start()
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _print(what: Table | str) -> None:
    Console(soft_wrap=isinstance(what, str)).print(what)


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _failed(args: argparse.Namespace, error: Exception) -> int:
    if args.json:
        return _print_json({"name": args.name, "ok": False, "error": str(error), "files": []}, ok=False)
    _complain(str(error))
    return 1


def _print_json(result: dict[str, Any], *, ok: bool) -> int:
    print(json.dumps(result, indent=2))
    return 0 if ok else 1
