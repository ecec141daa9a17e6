"""The plots of one run, or of several on the same axes. Figures are objects: no global state is touched.

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from spark_node.observe import wording
from spark_node.observe.history import Round, Run
from spark_node.topology import graph

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
INK, FAINT, GRID, SURFACE = "#24292f", "#6e7781", "#d8dee4", "#ffffff"
"""The colours that a page may exchange for those of its own theme."""

_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_BARS_UP_TO = 60
"""Rounds up to which each gets a marker or a bar of its own."""
_PEERS_IN_ORDER = 40
"""Peers up to which the heat map keeps their order; more are sorted, so that the eye finds a pattern."""
_HEAT = LinearSegmentedColormap.from_list("samples", ("#f1f4f8", "#56b4e9", "#0072b2", "#00263d"))

Named = Sequence[tuple[str, Run]]


def figures(runs: Named) -> dict[str, Figure]:
    """Every plot that these runs have the data for, by name; one run gets more detail, several share axes."""
    drawn = [(name, run) for name, run in runs if run.rounds]
    found: dict[str, Figure] = {}
    if drawn:
        found["accuracy"] = accuracy(drawn)
        if any(run.bytes_after[-1] for _, run in drawn):
            found["accuracy_vs_bytes"] = accuracy_vs_bytes(drawn)
        if any(run.stages for _, run in drawn):
            found["stage_seconds"] = stage_seconds(drawn[0][1]) if len(runs) == 1 else stage_seconds_compared(drawn)
        known = {name: run.client_accuracy for name, run in drawn if run.client_accuracy}
        if known:
            found["client_distribution"] = client_distribution(known, drawn[0][1] if len(runs) == 1 else None)
    if len(runs) == 1 and drawn and drawn[0][1].config.run.nodes > 1:
        found["topology"] = topology(drawn[0][1])
    if len(runs) == 1 and runs[0][1].label_counts:
        found["partition"] = partition(np.array(runs[0][1].label_counts))
    return found


def accuracy(runs: Named) -> Figure:
    """Accuracy over rounds: aggregated, and for a single run the clients' mean and quartiles."""
    figure, axes = new_figure()
    for index, (name, run) in enumerate(runs):
        rounds = [r.round for r in run.rounds]
        label = "aggregated model" if len(runs) == 1 else name
        style = {**line_style(index, len(rounds)), "zorder": 3}
        axes.plot(rounds, [r.aggregated_accuracy for r in run.rounds], label=label, **style)
        if len(runs) == 1:
            _draw_clients(axes, [r for r in run.rounds if not math.isnan(r.client_accuracy_mean)])
    _mark_targets(axes, [(run, run.reached.round if run.reached else None) for _, run in runs])
    axes.xaxis.set_major_locator(whole_numbers())
    last = max(run.rounds[-1].round for _, run in runs)
    axes.set_xlim(0.5, last + 0.5)
    axes.set_xlabel("communication round")
    return _finish_accuracy(figure, axes, "Accuracy over rounds")


def _draw_clients(axes: Axes, rounds: Sequence[Round]) -> None:
    """Mean and quartiles of the clients, over the rounds in which they were evaluated."""
    if not rounds:
        return
    numbers = [r.round for r in rounds]
    low, high = [r.client_accuracy.q1 for r in rounds], [r.client_accuracy.q3 for r in rounds]
    axes.fill_between(numbers, low, high, color=PALETTE[1], alpha=0.18, linewidth=0, label="clients, quartiles")
    axes.plot(numbers, [r.client_accuracy_mean for r in rounds], label="clients, mean", **line_style(1, len(rounds)))


def accuracy_vs_bytes(runs: Named) -> Figure:
    """Aggregated accuracy over the bytes that all peers have sent."""
    figure, axes = new_figure()
    for index, (name, run) in enumerate(runs):
        label = "aggregated model" if len(runs) == 1 else name
        axes.plot(
            run.bytes_after,
            [r.aggregated_accuracy for r in run.rounds],
            label=label,
            **line_style(index, len(run.rounds)),
        )
    _mark_targets(axes, [(run, run.bytes_to_target) for _, run in runs])
    spent = [run.bytes_after for _, run in runs if run.bytes_after[0] > 0]
    if spent and max(run[-1] for run in spent) > 20 * min(run[-1] for run in spent):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_size(value)))
    axes.set_xlabel("bytes sent by all peers")
    return _finish_accuracy(figure, axes, "Accuracy over bytes")


def stage_seconds(run: Run) -> Figure:
    """Where the time of each round went, stacked by stage."""
    figure, axes = new_figure()
    rounds = [r.round for r in run.rounds]
    parts = {stage: np.array([r.stages.get(stage, 0.0) for r in run.rounds]) for stage in run.stages}
    if len(rounds) <= _BARS_UP_TO:
        base = np.zeros(len(rounds))
        for index, (stage, seconds) in enumerate(parts.items()):
            axes.bar(rounds, seconds, bottom=base, width=0.8, label=stage, color=colour(index), linewidth=0)
            base += seconds
    else:
        colours = [colour(index) for index in range(len(parts))]
        axes.stackplot(rounds, *parts.values(), labels=list(parts), colors=colours, linewidth=0)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlim(rounds[0] - 0.5, rounds[-1] + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("communication round")
    axes.set_ylabel("seconds, summed over peers")
    _legend_beside(axes)
    return titled(figure, axes, "Time per stage")


def stage_seconds_compared(runs: Named) -> Figure:
    """Mean time of a round by stage, a bar a run."""
    figure, axes = new_figure(height=1.4 + 0.5 * max(len(runs), 3))
    stages = list(dict.fromkeys(stage for _, run in runs for stage in run.stages))
    base = np.zeros(len(runs))
    for index, stage in enumerate(stages):
        seconds = np.array([run.stages.get(stage, 0.0) / len(run.rounds) for _, run in runs])
        axes.barh(range(len(runs)), seconds, left=base, height=0.66, label=stage, color=colour(index), linewidth=0)
        base += seconds
    name_rows(axes, [name for name, _ in runs])
    axes.set_xlabel("seconds a round, summed over peers")
    _legend_beside(axes)
    return titled(figure, axes, "Time per stage", grid="x")


def client_distribution(accuracies: Mapping[str, Sequence[float]], run: Run | None = None) -> Figure:
    """How well each peer's own model does in the end: a histogram of one run, violins of several."""
    known = {name: np.array([v for v in values if not math.isnan(v)]) for name, values in accuracies.items()}
    known = {name: values for name, values in known.items() if values.size}
    if len(known) == 1 and len(accuracies) == 1:
        return _histogram(next(iter(known.values())), run)
    figure, axes = new_figure(height=1.4 + 0.6 * max(len(known), 3))
    if known:
        drawn: Any = axes.violinplot(
            list(known.values()), range(len(known)), orientation="horizontal", showextrema=False
        )
        for index, body in enumerate(drawn["bodies"]):
            body.set(facecolor=colour(index), alpha=0.35, linewidth=0)
    for index, values in enumerate(known.values()):
        q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75))
        axes.hlines(index, q1, q3, color=colour(index), linewidth=5, zorder=3)
        axes.plot([median], [index], "o", color=SURFACE, markeredgecolor=colour(index), markersize=6, zorder=4)
    name_rows(axes, list(known))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("accuracy of each peer's own model; dot: median, bar: quartiles")
    return titled(figure, axes, "Clients after the last round", grid="x")


def partition(counts: np.ndarray[Any, Any]) -> Figure:
    """Which labels each peer holds: a heat map of samples, labels by peers."""
    peers, labels = counts.shape
    figure, axes = new_figure(height=min(max(1.9 + 0.22 * labels, 2.6), 6.0))
    if peers > _PEERS_IN_ORDER:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
        axes.set_xlabel(f"{peers} peers, ordered by their commonest label")
        axes.set_xticks([])
    else:
        axes.set_xlabel("peer")
        axes.xaxis.set_major_locator(whole_numbers())
    image = axes.imshow(counts.T, aspect="auto", interpolation="nearest", cmap=_HEAT, vmin=0, origin="lower")
    axes.set_ylabel("label")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(labels, 12), integer=True, min_n_ticks=1))
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    bar.ax.tick_params(colors=FAINT, labelsize=9, length=0)
    bar.set_label("samples", color=FAINT, fontsize=11)
    return titled(figure, axes, "Which labels each peer holds", grid=None)


def topology(run: Run) -> Figure:
    """Who talked to whom in the last round, as the run's seed says; peers by their own accuracy where that is known."""
    config, k = run.config, run.rounds[-1].round
    peers, settings = config.run.nodes, config.topology
    made = graph(settings.kind, range(peers), settings.degree, config.run.seed, k, settings.fresh)
    turn = 2 * np.pi * np.arange(peers) / peers
    places = np.column_stack((np.sin(turn), np.cos(turn)))
    figure, axes = new_figure(height=5.2)
    axes.set_aspect("equal")
    axes.axis("off")
    strength = float(np.clip(6 / math.sqrt(max(len(made.edges), 1)), 0.18, 0.75))
    lines = [(places[i], places[j]) for i, j in made.edges]
    axes.add_collection(LineCollection(lines, colors=FAINT, linewidths=0.9, alpha=strength, zorder=1))
    area = float(np.clip(9000 / peers, 14, 170))
    known = run.client_accuracy
    style: dict[str, Any] = {"s": area, "zorder": 2, "edgecolors": SURFACE, "linewidths": 0.7}
    if len(known) == peers and not any(math.isnan(value) for value in known):
        dots = axes.scatter(places[:, 0], places[:, 1], c=known, cmap="viridis", **style)
        bar = figure.colorbar(dots, ax=axes, pad=0.02, shrink=0.8, format=PercentFormatter(1.0))
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=FAINT, labelsize=10, length=0)
        bar.set_label("accuracy of the peer's own model", color=FAINT, fontsize=11)
    else:
        axes.scatter(places[:, 0], places[:, 1], c=PALETTE[0], **style)
    if peers <= _PEERS_IN_ORDER:
        for i, (x, y) in enumerate(1.1 * places):
            axes.text(x, y, str(i), ha="center", va="center", fontsize=9, color=FAINT)
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    when = f"round {k}" if settings.fresh else "every round"
    return titled(figure, axes, f"Who talked to whom in {when}: {wording.plural(len(made.edges), 'edge')}", grid=None)


def svgs(found: Mapping[str, Figure], folder: Path | None = None) -> dict[str, str]:
    """Each figure as SVG, by name; where a folder is given also written there as NAME.svg and NAME.png."""
    texts = {name: svg(name, figure) for name, figure in found.items()}
    if folder is None:
        return texts
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in found.items():
        figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})
        (folder / f"{name}.svg").write_text(texts[name], encoding="utf-8")
    return texts


def svg(name: str, figure: Figure) -> str:
    """The figure as SVG; the same figure gives the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def new_figure(height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure with one plot, in the look that all plots share."""
    figure = Figure(figsize=(7.4, height), layout="constrained", facecolor=SURFACE)
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes


def plain(axes: Axes) -> None:
    """Only what is needed to read a plot: no box, quiet ticks."""
    axes.set_facecolor(SURFACE)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=11, length=0)
    axes.set_axisbelow(True)


def titled(figure: Figure, axes: Axes, title: str, grid: Literal["x", "y"] | None = "y", above: float = 12) -> Figure:
    """Title, labels of the axes and grid, as on every plot."""
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=above)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=FAINT, fontsize=12)
    if grid is not None:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)
    return figure


def _finish_accuracy(figure: Figure, axes: Axes, title: str) -> Figure:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 1.005))
    _, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(loc="lower right", frameon=False, fontsize=11, labelcolor=INK)
    axes.set_ylabel("test accuracy" if "clients, mean" in labels else "aggregated test accuracy")
    return titled(figure, axes, title)


def target_line(axes: Axes, target: float, *, named: bool = True) -> None:
    """A dashed line at a target accuracy; its name stands to the right, where no curve is."""
    axes.axhline(target, color=FAINT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    if named:
        axes.annotate(
            f"target\n{wording.target(target)}",
            (1, target),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=FAINT,
            fontsize=11,
        )


def _mark_targets(axes: Axes, runs: Sequence[tuple[Run, float | None]]) -> None:
    """A dashed line at each target, and a ring where a run reached its own."""
    for target in sorted({run.target for run, _ in runs if run.target > 0}):
        target_line(axes, target)
    for index, (run, place) in enumerate(runs):
        if run.reached is None or place is None:
            continue
        height = run.reached.aggregated_accuracy
        axes.plot(
            [place],
            [height],
            "o",
            color=colour(index),
            markersize=12,
            markeredgewidth=2,
            fillstyle="none",
            zorder=5,
        )
    if len(runs) == 1 and runs[0][0].target > 0:
        axes.set_title(wording.headline(runs[0][0]), loc="right", fontsize=11, color=FAINT, pad=12)


def _histogram(values: np.ndarray[Any, Any], run: Run | None) -> Figure:
    figure, axes = new_figure(height=3.4)
    low, high = float(values.min()), float(values.max())
    margin = max((high - low) * 0.05, 0.005)
    bins = np.linspace(
        max(low - margin, 0.0), min(high + margin, 1.0), min(max(int(math.sqrt(values.size)) * 2, 6), 30) + 1
    )
    axes.hist(values, bins=bins.tolist(), color=PALETTE[1], rwidth=0.92)
    axes.axvline(
        values.mean(),
        color=INK,
        linewidth=2,
        label=f"mean of the clients, {wording.percent(values.mean(), 1)}",
    )
    if run is not None and run.final is not None and not math.isnan(run.final.aggregated_accuracy):
        final = run.final.aggregated_accuracy
        axes.axvline(final, color=PALETTE[0], linewidth=2, label=f"aggregated model, {wording.percent(final, 1)}")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.015, 1.0), ncols=2, frameon=False, fontsize=11, labelcolor=INK)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if bins[-1] - bins[0] > 0.1 else 1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.set_xlabel("accuracy of each peer's own model")
    axes.set_ylabel("peers")
    return titled(figure, axes, "Clients after the last round", above=32)


def _legend_beside(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize=11,
        labelcolor=INK,
    )


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names instead of numbers on the vertical axis, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", labelcolor=INK)


def whole_numbers() -> MaxNLocator:
    """Ticks for things that are counted."""
    return MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def tick_size(count: float) -> str:
    """Like wording.size, without idle zeros: 2.00 GB -> 2 GB."""
    number, _, unit = wording.size(count).partition(" ")
    return f"{float(number):g} {unit}" if count else "0"


def colour(index: int) -> str:
    """The colour of a series."""
    return PALETTE[index % len(PALETTE)]


def line_style(index: int, points: int) -> dict[str, Any]:
    """Colour, marker and, once the colours are used up, the dash tell lines apart."""
    return {
        "color": colour(index),
        "linestyle": _LINES[index // len(PALETTE) % len(_LINES)],
        "linewidth": 2.2 if points <= _BARS_UP_TO else 1.6,
        "marker": _MARKERS[index % len(_MARKERS)] if points <= _BARS_UP_TO else None,
        "markersize": 4.5,
    }
