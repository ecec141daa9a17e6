"""`spark-dfl package`: what a package costs, loses and reveals, layer by layer."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spark_node import config as configuration
from spark_node.cli.run import add_flags, add_sources, load_config, reason
from spark_node.config import Config
from spark_node.errors import ConfigError, UserError
from spark_node.observe import wording

if TYPE_CHECKING:
    from spark_node.package.explain import Explanation, Factor, Layer

REFUSED = 1
_WIDTH = 100
"""Columns where stdout is no terminal."""
_RULED = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""Nothing but a rule below the head: the same on every terminal."""

_DESCRIPTION = """\
A package is what a peer tells a neighbour about its samples: Jacobian, logits and labels. What it costs, what it
loses on the way and what it reveals follow from [model], [package] and [learning]."""

_EXPLAIN = """\
Build the configured model, make the package of some real samples at its initial weights, code it as a peer
would, and show it layer by layer: form, coding, bytes; then the messages of a round, the error after decoding,
and what a neighbour learns of the samples. docs/package-format.md describes the format."""

_EPILOG = """\
examples:
  spark-dfl package explain                                           embedded data, lossless
  spark-dfl package explain --preset paper --set package.bits=6       6-bit factors of the paper's network
  PYTHONPATH=. spark-dfl package explain --set model.kind=my_models:small --json

  the paper's whole stack: sketch, a fifth of the samples, half of the entries, 6 bits (makes a 3 GB sketch once)
  spark-dfl package explain --preset paper --set package.encoding=dense --set package.projection=flat \\
    --set package.sketch_size=10000 --set learning.subsample=5 --set package.keep=0.5 --set package.bits=6

exit codes: 0 all well; 1 a neighbour with the same settings would refuse a message; 2 bad usage or bad input"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `package` command."""
    parser = subparsers.add_parser(
        "package",
        help="what a package costs, loses and reveals",
        description=_DESCRIPTION,
        epilog="example:\n  spark-dfl package explain --preset paper --set package.bits=6",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=lambda _: _show_help(parser))
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    action = actions.add_parser(
        "explain",
        usage="%(prog)s [--preset NAME] [--config FILE] [--set SECTION.KEY=VALUE ...] [FLAG ...]",
        help="take a real package apart",
        description=_EXPLAIN,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sources(action)
    add_flags(action, "the data", ("--dataset", "--data-dir"))
    action.add_argument(
        "--samples", metavar="N", type=int, help="samples that the peer holds (default: 200, or as many as there are)"
    )
    action.add_argument("--json", action="store_true", help="print everything as one JSON object")
    action.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """Make a package and show what it is."""
    config = load_config(args)

    from spark_node.data.datasets import load
    from spark_node.launch.devices import check_device

    check_device(config.run.device)
    dataset = load(config.data.dataset, Path(config.data.folder) if config.data.folder else None)
    with _patience(), _blaming_the_model(config):
        from spark_node.package.explain import explain

        found = explain(config, dataset, args.samples)
    if args.json:
        settings = configuration.to_dict(config)
        print(json.dumps({"model": settings["model"], "settings": settings["package"], **found.to_dict()}, indent=2))
    else:
        _show(found, config)
    for refusal in found.refusals:
        print(f"spark-dfl: a neighbour with these settings would refuse the {refusal}", file=sys.stderr)
    return REFUSED if found.refusals else 0


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


@contextmanager
def _patience() -> Iterator[None]:
    """A sign of life where somebody watches."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with console.status("Making a package"):
        yield


@contextmanager
def _blaming_the_model(config: Config) -> Iterator[None]:
    """Whatever goes wrong inside a user's own model is one line, like other bad input."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if config.model.kind in ("mlp", "cnn"):
            raise
        raise ConfigError(f"model.kind = {config.model.kind!r}: {reason(error)}") from error


def _show(found: "Explanation", config: Config) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_title(found), style="bold")
    console.print(escape(f"{wording.model(config, found.parameters)}, {found.classes} classes\n"))
    console.print(_package_table(found, config))
    console.print('"instead" is predicted, before entropy coding.', style="dim")
    console.print("\nBytes to one neighbour in one round", style="bold")
    console.print(_traffic_table(found))
    console.print(f"Inputs only named: {found.naming}", style="dim")
    console.print("\nAfter decoding, against the Jacobian neither coded nor projected", style="bold")
    console.print(_facts(_losses(found)))
    console.print("\nWhat a neighbour learns of the samples", style="bold")
    console.print(_facts(found.reveals.items()))


def _title(found: "Explanation") -> str:
    of = f" (of {found.peer_samples:,})" if found.samples < found.peer_samples else ""
    samples = f"{wording.plural(found.samples, 'sample')}{of} of {found.dataset}"
    return f"A package of {samples}, taken at the {found.linearize_at}'s weights"


def _empty_table() -> Table:
    return Table(box=_RULED, show_edge=False, padding=(0, 0, 0, 1), header_style="bold")


def _package_table(found: "Explanation", config: Config) -> Table:
    table = _empty_table()
    for name in ("layer", "numbers", "form and coding"):
        table.add_column(name, overflow="fold")
    for name in ("dense float32", "on the wire", "smaller"):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in found.layers:
        _add_layer(table, layer, config)
    table.add_section()
    for factor in (found.labels, found.logits):
        _add_factor(table, factor)
    table.add_row("header", "", "", "", wording.size(found.header_bytes), "")
    table.add_section()
    total = found.first.messages["package"]
    table.add_row(
        "package", "", "", wording.size(found.dense_bytes), wording.size(total), _times(found.ratio), style="bold"
    )
    return table


def _add_layer(table: Table, layer: "Layer", config: Config) -> None:
    table.add_row(
        escape(layer.name or "(model)"),
        f"d = {layer.parameters:,}",
        layer.form,
        wording.size(layer.dense_bytes),
        wording.size(layer.wire_bytes),
        _times(layer.ratio),
        style="bold",
    )
    for factor in layer.factors:
        _add_factor(table, factor, indent="  ")
    if layer.signals.startswith("none"):
        table.add_row("  signals", "", layer.signals, "", wording.size(0), "")
    table.add_row("  instead", "", _instead(layer, config), "", "", "", style="dim")


def _instead(layer: "Layer", config: Config) -> str:
    """What the layer's other form would cost."""
    if layer.other_form is not None:
        return f"{layer.other_form} would take {wording.size(layer.predicted[layer.other_form])}"
    if config.package.projection == "flat":
        return "no factors: the sketch mixes them"
    return "no factors for such a layer"


def _add_factor(table: Table, factor: "Factor", indent: str = "") -> None:
    shape = " x ".join(f"{n:,}" for n in factor.shape)
    table.add_row(f"{indent}{factor.role}", shape, factor.coding, "", wording.size(factor.bytes), "")


_MESSAGES = {"weights": "weights", "request": "request (the consensus weights)", "package": "package"}


def _traffic_table(found: "Explanation") -> Table:
    table = _empty_table()
    table.add_column("message")
    columns = [found.first] + ([found.named] if found.named else [])
    for name in ("first time", "inputs only named")[: len(columns)]:
        table.add_column(name, justify="right")
    for kind in found.first.messages:
        table.add_row(_MESSAGES[kind], *(wording.size(column.messages[kind]) for column in columns))
    table.add_section()
    table.add_row("sent", *(wording.size(column.sent) for column in columns))
    table.add_row("sent and received", *(wording.size(column.both) for column in columns), style="bold")
    return table


def _losses(found: "Explanation") -> list[tuple[str, str]]:
    loss = found.loss
    return [
        ("kernel", _error(loss.kernel)),
        ("weight update", f"{_error(loss.update)}, cosine {loss.cosine:.4f}"),
    ]


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, text in rows:
        table.add_row(f"  {name}", escape(text))
    return table


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def _error(relative: float) -> str:
    if relative == 0:
        return "no error at all"
    return f"relative error {relative:.2%}" if relative >= 1e-4 else f"relative error {relative:.0e}"
