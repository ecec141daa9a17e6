"""The plots of a comparison, in the look of a run's plots: means over seeds, with their deviation."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from spark_node.compare import results as measured
from spark_node.compare.results import Column, Results
from spark_node.observe import plots, wording
from spark_node.observe.history import Run
from spark_node.observe.plots import FAINT, INK, SURFACE

_PANELS_A_ROW = 3
_HEIGHT_SHOWN = 0.45
"""Most of the accuracy scale that a convergence plot shows, from the best down: the first rounds may fall out."""
_FAR_APART = 20
"""Ratio of bytes from which their axis is logarithmic."""

DESCRIPTIONS = {
    "convergence": "Aggregated test accuracy over communication rounds, mean over seeds with deviation",
    "clients": "Mean test accuracy of the clients' own models over communication rounds",
    "accuracy_vs_bytes": "Aggregated test accuracy over bytes sent by all peers",
    "accuracy_vs_value": "Test accuracy over the varied value, aggregated and clients",
    "time_and_memory": "Time of a round by stage, and peak memory",
    "compression": "Size of a package and the accuracy reached with it",
}


def figures(results: Results) -> dict[str, Figure]:
    """Every plot that the study asks for and has figures for, by name."""
    makers: dict[str, Callable[[Results], Figure | None]] = {
        "convergence": convergence,
        "clients": lambda found: convergence(found, clients=True),
        "accuracy_vs_bytes": accuracy_vs_bytes,
        "accuracy_vs_value": accuracy_vs_value,
        "time_and_memory": time_and_memory,
        "compression": compression,
    }
    if not results.all_runs:
        return {}
    drawn = {name: makers[name](results) for name in results.study.plots}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def convergence(results: Results, clients: bool = False) -> Figure | None:
    """Accuracy over rounds: a panel a column, a line a row, a band of one deviation."""
    title = "Accuracy of the clients" if clients else "Accuracy over rounds"
    said = "mean accuracy of clients" if clients else "aggregated test accuracy"
    figure = _curves(results, title, said, clients=clients)
    if figure is not None:
        for axes in figure.axes:
            axes.xaxis.set_major_locator(plots.whole_numbers())
            axes.set_xlabel("communication round", color=FAINT, fontsize=12)
    return figure


def accuracy_vs_bytes(results: Results) -> Figure | None:
    """Accuracy over what all peers have sent by then."""
    figure = _curves(results, "Accuracy over bytes", "aggregated test accuracy", by_bytes=True)
    if figure is None:
        return None
    sent = [run.bytes_after[-1] for run in results.all_runs]
    far_apart = min(sent) > 0 and max(sent) > _FAR_APART * min(sent)
    for axes in figure.axes:
        axes.set_xlabel("bytes sent by all peers", color=FAINT, fontsize=12)
        if far_apart:
            axes.set_xscale("log")
            axes.minorticks_off()
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plots.tick_size(value)))
    return figure


def accuracy_vs_value(results: Results) -> Figure | None:
    """Accuracy at the compared round over the values of the last axis: aggregated solid, clients dashed."""
    if len(results.study.axes) > 2:
        return None
    point: dict[tuple[str, str], tuple[str, Column]]
    if len(results.study.axes) == 2:
        axis, lines = results.study.axes[1], results.rows
        point = {(line, label): (line, (label,)) for line in lines for label in axis.labels}
    else:
        axis, lines = results.study.axes[0], ("",)
        point = {(lines[0], label): (label, ()) for label in axis.labels}
    figure, axes = plots.new_figure(height=4.4)
    places = np.arange(len(axis.labels), dtype=float)
    for index, line in enumerate(lines):
        shift = (index - (len(lines) - 1) / 2) * 0.05
        for clients in (False, True):
            runs = [results.runs(*point[line, label]) for label in axis.labels]
            _value_line(axes, results, places + shift, runs, index, line if len(lines) > 1 else None, clients)
    axes.set_xticks(places, axis.labels)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(axis.name.replace("_", " "))
    axes.set_ylabel(f"test accuracy at round {results.at_round}")
    _in_percent(axes)
    _legend_below(figure, axes)
    return plots.titled(figure, axes, f"Accuracy by {axis.name.replace('_', ' ')}")


def time_and_memory(results: Results) -> Figure | None:
    """Seconds of one peer's round by stage, and the most memory that a run held: a bar a point of the grid."""
    rows = [(name, runs) for name, runs in _groups(results) if any(_computing(run) for run in runs)]
    if not rows:
        return None
    height = 2.0 + 0.42 * max(len(rows), 3)
    figure = Figure(figsize=(11, height), layout="constrained", facecolor=SURFACE)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1.2))
    stages = list(dict.fromkeys(stage for _, runs in rows for run in runs for stage in _computing(run)))
    base = np.zeros(len(rows))
    for index, stage in enumerate(stages):
        seconds = np.array([np.mean([_stage_seconds(run, stage) for run in runs]) for _, runs in rows])
        left.barh(
            range(len(rows)), seconds, left=base, height=0.66, label=stage, color=plots.colour(index), linewidth=0
        )
        base += seconds
    left.set_xlabel("seconds that one peer computes in a round")
    held = [np.mean([measured.memory(run) for run in runs]) for _, runs in rows]
    right.barh(range(len(rows)), [0 if math.isnan(h) else h for h in held], height=0.66, color=plots.colour(7))
    right.xaxis.set_major_locator(MaxNLocator(nbins=4))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plots.tick_size(value)))
    right.set_xlabel("peak memory of the run")
    for axes, title in ((left, "Time per stage"), (right, "Memory")):
        plots.plain(axes)
        plots.titled(figure, axes, title, grid="x")
    plots.name_rows(left, [name for name, _ in rows])
    _legend_below(figure, left)
    return figure


def compression(results: Results) -> Figure | None:
    """How small a package gets, and what that does to the accuracy: a row a point of the grid."""
    rows = [(name, runs) for name, runs in _groups(results) if any(measured.package_bytes(run) for run in runs)]
    if not rows:
        return None
    figure = Figure(figsize=(11, 1.9 + 0.46 * max(len(rows), 3)), layout="constrained", facecolor=SURFACE)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    sizes = [float(np.mean([measured.package_bytes(run) for run in runs])) for _, runs in rows]
    left.barh(range(len(rows)), sizes, height=0.62, color=plots.colour(0), linewidth=0)
    for index, size in enumerate(sizes):
        times = f", {sizes[0] / size:.3g}× less" if size < 0.995 * sizes[0] else ""
        left.annotate(
            f"{wording.size(size)}{times}",
            (size, index),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=INK,
            fontsize=11,
        )
    if max(sizes) > _FAR_APART * min(sizes):
        left.set_xscale("log")
        left.set_xlim(min(sizes) / 3, max(sizes) * (max(sizes) / min(sizes)) ** 0.45)
    else:
        left.set_xlim(0, max(sizes) * 1.5)
        left.xaxis.set_major_locator(MaxNLocator(nbins=4))
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plots.tick_size(value)))
    left.minorticks_off()
    left.set_xlabel("bytes of packages a peer sends in a round")
    _dots(right, results, [runs for _, runs in rows])
    for axes, title in ((left, "Packages"), (right, f"Accuracy at round {results.at_round}")):
        plots.plain(axes)
        plots.titled(figure, axes, title, grid="x")
    plots.name_rows(left, [name for name, _ in rows])
    return figure


def _curves(results: Results, title: str, said: str, by_bytes: bool = False, clients: bool = False) -> Figure | None:
    """Mean curves, a panel a column; None where there is nothing to draw."""
    found = {
        column: {
            index: curve
            for index, row in enumerate(results.rows)
            if (curve := results.curve(row, column, by_bytes, clients)) is not None
        }
        for column in results.columns
    }
    columns = [column for column, curves in found.items() if curves]
    if not columns:
        return None
    figure, panels = _panels(len(columns))
    across = _across(len(columns))
    for place, (axes, column) in enumerate(zip(panels, columns, strict=True), start=1):
        for index, curve in found[column].items():
            style = plots.line_style(index, len(curve.x))
            axes.plot(curve.x, curve.mean, label=results.rows[index], **style)
            low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
            if not by_bytes:
                axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        if not clients:
            for target in results.targets:
                plots.target_line(axes, target, named=place % across == 0 or place == len(columns))
        plots.titled(figure, axes, results.study.column_name(column) if len(columns) > 1 else title)
        if len(columns) > 1:
            axes.set_title(results.study.column_name(column), loc="left", fontsize=12.5, fontweight="normal", color=INK)
    tops = [float(np.nanmax(curve.mean)) for curves in found.values() for curve in curves.values()]
    lows = [float(np.nanmin(curve.mean)) for curves in found.values() for curve in curves.values()]
    top = max([*tops, *([] if clients else results.targets)])
    bottom = max(min(lows), min(top - _HEIGHT_SHOWN, *tops))  # the worst method is seen too, where it gets to
    margin = 0.04 * (top - bottom) + 0.002
    for axes in panels[: len(columns)]:
        axes.set_ylim(max(bottom - margin, 0.0), min(top + margin, 1.005))
        _in_percent(axes)
    for axes in panels[: len(columns) : across]:
        axes.set_ylabel(said, color=FAINT, fontsize=12)
    if len(columns) > 1:
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=15, fontweight="bold", color=INK)
    if len(results.rows) > 1:
        _legend_below(figure, panels[0], panels[1:])
    return figure


def _across(count: int) -> int:
    """Panels in a row: rows that are full, or nearly so (four are two and two, not three and one)."""
    return math.ceil(count / math.ceil(count / _PANELS_A_ROW))


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    across = _across(count)
    down = math.ceil(count / across)
    size = (7.4, 4.6) if count == 1 else (0.6 + 4.2 * across, 0.9 + 3.5 * down)
    figure = Figure(figsize=size, layout="constrained", facecolor=SURFACE)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = [axes for line in grid for axes in line]
    for axes in panels:
        plots.plain(axes)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _value_line(
    axes: Axes,
    results: Results,
    places: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    runs: Sequence[Sequence[Run]],
    index: int,
    name: str | None,
    clients: bool,
) -> None:
    """One line with error bars, where any of its points is known."""
    figure = results.client_accuracy if clients else results.accuracy
    values = [[figure(run) for run in some] for some in runs]
    mean = np.array([np.mean(some) if some else math.nan for some in values])
    if np.isnan(mean).all():
        return
    deviation = np.array([np.std(some, ddof=1) if len(some) > 1 else 0.0 for some in values])
    style = plots.line_style(index if name is not None else int(clients), len(places))
    kind = "clients" if clients else "aggregated"
    style |= {"linestyle": "--" if clients else "-", "alpha": 0.75 if clients else 1.0}
    axes.errorbar(
        places, mean, yerr=deviation, capsize=3, elinewidth=1.4, label=f"{name}, {kind}" if name else kind, **style
    )


def _dots(axes: Axes, results: Results, groups: Sequence[Sequence[Run]]) -> None:
    for index, runs in enumerate(groups):
        values = [results.accuracy(run) for run in runs]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        axes.errorbar([float(np.mean(values))], [index], xerr=[deviation], fmt="o", capsize=3, color=plots.colour(1))
    low, high = axes.get_xlim()
    middle, half = (low + high) / 2, max((high - low) / 2, 0.01)
    axes.set_xlim(middle - half, middle + half)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=_decimals(axes.get_xlim())))
    axes.set_xlabel("aggregated test accuracy")


def _groups(results: Results) -> list[tuple[str, list[Run]]]:
    points: list[tuple[str, Column]] = [(row, column) for row in results.rows for column in results.columns]
    return [(", ".join((row, *column)), runs) for row, column in points if (runs := results.runs(row, column))]


def _computing(run: Run) -> list[str]:
    """The stages in which a peer computes; how long it waits for others depends on what runs beside it."""
    return [stage for stage, seconds in run.stages.items() if seconds > 0 and not stage.startswith("waiting")]


def _stage_seconds(run: Run, stage: str) -> float:
    return run.stages.get(stage, 0.0) / len(run.rounds) / int(run.summary["peers"])


def _legend_below(figure: Figure, axes: Axes, others: Sequence[Axes] = ()) -> None:
    """One legend for the whole figure, below it, where it covers nothing."""
    entries: dict[str, Artist] = {}
    for some in (axes, *others):
        handles, labels = some.get_legend_handles_labels()
        entries.update({label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries})
    across = max(2, min(len(entries), int(figure.get_figwidth() // (0.55 + 0.09 * max(map(len, entries), default=0)))))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=across,
        frameon=False,
        fontsize=11,
        labelcolor=INK,
    )


def _in_percent(axes: Axes) -> None:
    """Whole numbers of percent where there is room for them, never 78, 75, 72 for steps of 2.5."""
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=_decimals(axes.get_ylim())))


def _decimals(limits: tuple[float, float]) -> int:
    return 0 if limits[1] - limits[0] > 0.06 else 1
