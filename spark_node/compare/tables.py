"""The tables of a comparison: figures put into words, with the number of seeds behind them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from spark_node.compare import results as figures
from spark_node.compare.results import Column, Reached, Results
from spark_node.compare.statistics import FEW_SEEDS, Mean
from spark_node.observe import wording
from spark_node.observe.history import Run

Say = Callable[[float], str]


@dataclass(frozen=True)
class Table:
    """A table as text; the cells in `best` (row, column) are to be stressed."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    best: frozenset[tuple[int, int]] = field(default=frozenset())


def tables(results: Results) -> list[Table]:
    """Every table that the study asks for and has figures for, each followed by the published one."""
    makers: dict[str, Callable[[Results], Table | None]] = {
        "rounds_to_target": _rounds,
        "bytes_to_target": _bytes,
        "accuracy": _accuracy,
        "clients": _clients,
        "ablation": _ablation,
        "significance": _significance,
        "cost": _cost,
    }
    found: list[Table] = []
    if not results.all_runs:
        return found
    for name in results.study.tables:
        table = makers[name](results)
        found += [table] if table else []
        published = _published(results, name)
        found += [published] if published else []
    return found


def goal(results: Results) -> str:
    """The target in words; runs with targets of their own have no common one."""
    return wording.target(results.targets[0]) if len(results.targets) == 1 else "its target"


def spread(mean: Mean | None, say: Say, unit: str = "") -> str:
    """86.78 ± 0.02 %, or without a deviation where there is one seed."""
    if mean is None:
        return "n/a"
    if math.isnan(mean.deviation) or say(mean.deviation) == say(0.0) == say(mean.mean):
        return f"{say(mean.mean)}{unit}"
    return f"{say(mean.mean)} ± {say(mean.deviation)}{unit}"


def needed(reached: Reached, say: Say, beyond: str = "") -> str:
    """What it took to reach the target; `> R` (and what R counts) where it was not reached in R rounds."""
    if not reached.seeds:
        return "n/a"
    missed = reached.seeds - len(reached.known)
    if reached.mean is None:
        return f"> {reached.within}{beyond}"
    same = len(set(reached.known)) == 1
    text = say(reached.known[0]) if same else f"{say(reached.mean.mean)} ± {say(reached.mean.deviation)}"
    return f"{text} ({missed} of {reached.seeds} seeds > {reached.within}{beyond})" if missed else text


def points(fraction: float) -> str:
    """A fraction in per cent, without the sign."""
    return f"{100 * fraction:.2f}"


def seeds_note(results: Results) -> str:
    """How many seeds stand behind the figures, and where some are missing."""
    counts = {len(results.runs(row, column)) for row in results.rows for column in results.columns}
    planned = len(results.study.seeds)
    text = f"Mean over {wording.plural(planned, 'seed')}" if planned > 1 else "One seed: no deviation can be given"
    text += " ± sample deviation." if planned > 1 else "."
    return text if counts == {planned} else f"{text} Some have {min(counts)} of {planned} seeds so far."


def _rounds(results: Results) -> Table:
    cells = {(row, column): results.rounds_to_target(row, column) for row, column in _points(results)}
    return _to_target(results, cells, "rounds_to_target", f"Rounds to {goal(results)}", _count, "")


def _bytes(results: Results) -> Table:
    cells = {(row, column): results.bytes_to_target(row, column) for row, column in _points(results)}
    title = f"Bytes to {goal(results)}, sent by all peers"
    table = _to_target(results, cells, "bytes_to_target", title, wording.size, " rounds")
    counted = sorted({str(run.summary.get("bytes_counted", "")) for run in results.all_runs})
    return replace(table, note=f"{table.note} {' '.join(counted)}")


def _to_target(
    results: Results, cells: dict[tuple[str, Column], Reached], name: str, title: str, say: Say, beyond: str
) -> Table:
    def rank(row: str, column: Column) -> float:
        reached = cells[row, column]
        return reached.mean.mean if reached.all_did and reached.mean else math.nan

    note = f"{seeds_note(results)} “> R”: not reached in R rounds."

    def text(row: str, column: Column) -> str:
        return needed(cells[row, column], say, beyond)

    return _grid(results, name, title, text, rank, note, lowest=True)


def _accuracy(results: Results) -> Table:
    title = f"Aggregated test accuracy (%) at round {results.at_round}"
    return _accuracies(results, "accuracy", title, results.accuracy)


def _clients(results: Results) -> Table | None:
    if all(math.isnan(results.client_accuracy(run)) for run in results.all_runs):
        return None
    title = f"Mean test accuracy of the clients' own models (%) at round {results.at_round}"
    return _accuracies(results, "clients", title, results.client_accuracy)


def _accuracies(results: Results, name: str, title: str, figure: Callable[[Run], float]) -> Table:
    def text(row: str, column: Column) -> str:
        return spread(results.mean(row, column, figure), points)

    def rank(row: str, column: Column) -> float:
        mean = results.mean(row, column, figure)
        return mean.mean if mean else math.nan

    return _grid(results, name, title, text, rank, seeds_note(results), lowest=False)


def _ablation(results: Results) -> Table:
    header = ("Variant", f"Rounds to {goal(results)}", "Aggregated (%)", "Clients (%)", "Time of a run", "Seeds")
    rows = []
    for row, column in _points(results):
        seconds = results.mean(row, column, lambda run: run.seconds)
        rows.append(
            (
                _point_name(row, column),
                needed(results.rounds_to_target(row, column), _count),
                spread(results.mean(row, column, results.accuracy), points),
                spread(results.mean(row, column, results.client_accuracy), points),
                wording.duration(seconds.mean) if seconds else "n/a",
                str(len(results.runs(row, column))),
            )
        )
    note = f"Accuracies at round {results.at_round}. {seeds_note(results)} {_beside(results)}"
    return Table("ablation", "Variant by variant", header, tuple(rows), note)


def _significance(results: Results) -> Table | None:
    """The first row of the study against each other one, column by column."""
    subject, *others = results.rows
    header = ("Setting", f"{subject} over", "Gain (points)", "95 % interval", "p", "d_z", "Pairs")
    rows = []
    for column in results.columns:
        for other in others:
            test = results.paired(subject, other, column)
            if test is None:
                pairs = min(len(results.runs(subject, column)), len(results.runs(other, column)))
                rows.append((results.study.column_name(column), other, "too few seeds", "", "", "", str(pairs)))
                continue
            p = "< 0.001" if test.p < 0.001 else f"{test.p:.4f}"
            interval = f"[{points(test.low)}, {points(test.high)}]"
            effect = "n/a" if math.isnan(test.effect) else f"{test.effect:.2f}"
            gain = f"{100 * test.gain:+.2f}" + (" *" if test.significant else "")
            rows.append((results.study.column_name(column), other, gain, interval, p, effect, str(test.count)))
    if not rows:
        return None
    few = len(results.study.seeds) < FEW_SEEDS
    caution = f" Fewer than {FEW_SEEDS} seeds: read nothing into it." if few else ""
    note = (
        f"Two-sided paired t-test over shared seeds, accuracy at round {results.at_round}; * p < 0.05. d_z: mean "
        f"difference over its deviation, not comparable to Cohen's d between groups.{caution}"
    )
    return Table("significance", f"Is {subject} better?", header, tuple(rows), note)


def _cost(results: Results) -> Table:
    header = ("Variant", "Sent a round and peer", "of it packages", "Time of a round", "Peak memory", "Seeds")
    columns: tuple[tuple[Callable[[Run], float], Say], ...] = (
        (figures.total_bytes, wording.size),
        (figures.package_bytes, wording.size),
        (figures.seconds_a_round, wording.duration),
        (figures.memory, wording.size),
    )
    rows = []
    for row, column in _points(results):
        means = [(results.mean(row, column, figure), say) for figure, say in columns]
        texts = [say(mean.mean) if mean else "n/a" for mean, say in means]
        rows.append((_point_name(row, column), *texts, str(len(results.runs(row, column)))))
    return Table("cost", "What it costs", header, tuple(rows), f"{seeds_note(results)} {_beside(results)}")


def _published(results: Results, name: str) -> Table | None:
    entries = results.study.published.get(name)
    if not entries:
        return None
    columns = [results.study.column_name(column) for column in results.columns]
    rows = tuple((row, *(entries[row].get(column, "") for column in columns)) for row in entries)
    title = (
        f"For comparison, the paper's ({results.study.paper})" if results.study.paper else "For comparison, the paper's"
    )
    return Table(f"{name}_published", title, (_corner(results), *columns), rows)


def _grid(
    results: Results,
    name: str,
    title: str,
    text: Callable[[str, Column], str],
    rank: Callable[[str, Column], float],
    note: str,
    lowest: bool,
) -> Table:
    """Rows by columns, the best of each column stressed."""
    best = set()
    for index, column in enumerate(results.columns, start=1):
        ranks = [rank(row, column) for row in results.rows]
        known = [value for value in ranks if not math.isnan(value)]
        top = (min(known) if lowest else max(known)) if len(known) > 1 else math.nan
        best |= {(number, index) for number, value in enumerate(ranks) if value == top}
    rows = tuple((row, *(text(row, column) for column in results.columns)) for row in results.rows)
    header = (_corner(results), *(results.study.column_name(column) for column in results.columns))
    return Table(name, title, header, rows, note, frozenset(best))


def _corner(results: Results) -> str:
    return results.study.rows.name.replace("_", " ").capitalize()


def _points(results: Results) -> list[tuple[str, Column]]:
    return [(row, column) for row in results.rows for column in results.columns]


def _point_name(row: str, column: Sequence[str]) -> str:
    return ", ".join((row, *column))


def _beside(results: Results) -> str:
    return f"Times were taken with {results.jobs} runs side by side." if results.jobs > 1 else ""


def _count(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
