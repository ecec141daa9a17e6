"""The page of a comparison and the index of several: self-contained, the answer first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import spark_node
from spark_node.compare.figures import DESCRIPTIONS
from spark_node.compare.results import Column, Results, seconds_a_round, total_bytes
from spark_node.compare.study import Study
from spark_node.compare.tables import Table, goal, points, seeds_note, spread
from spark_node.observe import page, wording
from spark_node.observe.page import Bold

QUICK = (
    "Quick size: embedded digits and few peers, so that it runs anywhere within minutes. It shows that everything "
    "works; for the figures run the study at its full size."
)


@dataclass(frozen=True)
class Entry:
    """One study on the index page."""

    link: str
    study: Study
    answer: str
    failed: int
    missing: int


def answer(results: Results) -> str:
    """One sentence: which row does best by what the study asks first."""
    found = _winners(results)
    if not found:
        return "No run has finished"
    if len(found) == 1:
        return ": ".join(found[0][1])
    names = list(dict.fromkeys(name for _, (name, _) in found))
    if len(names) == 1:
        return f"{names[0]}: ahead in all {len(found)} settings"
    parts = [f"{name} in {sum(winner == name for _, (winner, _) in found)}" for name in names]
    return f"Ahead by setting: {', '.join(parts)} of {len(found)}"


def details(results: Results) -> list[str]:
    """A sentence a column, where there are several."""
    found = _winners(results)
    return (
        [f"{results.study.column_name(column)}: {': '.join(said)}." for column, said in found] if len(found) > 1 else []
    )


def study_page(results: Results, found: Sequence[Table], drawn: Mapping[str, str], command: str) -> str:
    """The whole page."""
    study = results.study
    where = f" · {study.paper}" if study.paper else ""
    counts = f"{wording.plural(len(results.all_runs), 'run')} of {len(results.outcomes)}"
    parts = [
        f'<p class="eyebrow">{page.text(study.title + where)}</p>',
        f"<h1>{page.text(answer(results))}</h1>",
        f'<p class="lead">{page.text(study.question)}</p>' if study.question else "",
        *(f"<p>{page.text(line)}</p>" for line in details(results)),
        f'<p class="eyebrow">{page.text(f"{counts} finished. {seeds_note(results)}")}</p>',
        f'<p class="warn">{page.text(QUICK)}</p>' if study.is_quick else "",
        *(f'<p class="bad">{page.text(f"{o.cell.title} failed: {o.reason}")}</p>' for o in results.failed),
        f'<p class="warn">{page.text(_missing(len(results.missing)))}</p>' if results.missing else "",
        *(_table(table) for table in found),
        *([page.heading("Plots")] if drawn else []),
        *(f'<div class="plots">{page.plot(name, svg, DESCRIPTIONS[name])}</div>' for name, svg in drawn.items()),
        page.heading("What the runs have in common"),
        _common(results),
        page.heading("Repeat it"),
        page.command(command),
        "<p>Every run has a folder of its own under <code>cells/</code>, with its whole configuration; "
        "finished runs are not run again.</p>",
        f"<footer>Written by spark-dfl {page.text(spark_node.__version__)}. Accuracies are on the test set.</footer>",
    ]
    return _widened(page.document(f"{study.title}: {answer(results)}", "\n".join(part for part in parts if part)))


def index_page(entries: Sequence[Entry]) -> str:
    """A page that leads to each study's own."""
    rows = []
    for entry in entries:
        state = "done"
        if entry.failed or entry.missing:
            state = ", ".join(
                f"{count} {word}" for count, word in ((entry.failed, "failed"), (entry.missing, "not run")) if count
            )
        link = f'<a href="{escape(entry.link)}">{page.text(entry.study.title)}</a>'
        cells = (link, *(page.text(value) for value in (entry.study.paper or "beyond the paper", entry.answer, state)))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{name}</th>" for name in ("Study", "In the paper", "Answer", "Runs"))
    quick = any(entry.study.is_quick for entry in entries)
    body = [
        f"<h1>{page.text(wording.plural(len(entries), 'study').replace('studys', 'studies'))}</h1>",
        f'<p class="warn">{page.text(QUICK)}</p>' if quick else "",
        f'<div class="table"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>',
    ]
    return page.document("Studies", "\n".join(body)).replace("max-height: 34rem", "max-height: none")


def _winners(results: Results) -> list[tuple[Column, tuple[str, str]]]:
    columns = [column for column in results.columns if any(results.runs(row, column) for row in results.rows)]
    return [(column, _winner(results, column)) for column in columns]


def _winner(results: Results, column: Column) -> tuple[str, str]:
    """Who is first in a column, and by what: the study's first table says what counts."""
    first = results.study.tables[0] if results.study.tables else "accuracy"
    if first in ("rounds_to_target", "bytes_to_target"):
        by_bytes = first == "bytes_to_target"
        reached = {
            row: (results.bytes_to_target if by_bytes else results.rounds_to_target)(row, column)
            for row in results.rows
        }
        means = {row: its.mean.mean for row, its in reached.items() if its.all_did and its.mean is not None}
        if means:
            say = wording.size if by_bytes else _rounds
            names, least = _least(means)
            rest = sorted(value for value in means.values() if value > least)
            after = f"; the next: {say(rest[0])}" if rest else ""
            if by_bytes:
                return names, f"fewest bytes to {goal(results)}, {say(least)}{after}"
            return names, f"first to reach {goal(results)}, in {say(least)} rounds{after}"
    if first == "cost":
        smallest = "compression" in results.study.plots
        figure = total_bytes if smallest else seconds_a_round
        costs = {row: mean.mean for row in results.rows if (mean := results.mean(row, column, figure)) is not None}
        names, least = _least(costs)
        said = f"least sent, {wording.size(least)} a peer and" if smallest else f"fastest, {wording.duration(least)} a"
        return names, f"{said} round"
    accuracies = {
        row: mean for row in results.rows if (mean := results.mean(row, column, results.accuracy)) is not None
    }
    names, _ = _least({row: -mean.mean for row, mean in accuracies.items() if not math.isnan(mean.mean)})
    best = max(accuracies.values(), key=lambda mean: mean.mean)
    return names, f"most accurate at round {results.at_round}, {spread(best, points)} %"


def _least(values: Mapping[str, float]) -> tuple[str, float]:
    """The name of the smallest, or the names where several are."""
    least = min(values.values(), default=math.nan)
    return " and ".join(name for name, value in values.items() if value == least), least


def _table(table: Table) -> str:
    rows = [
        [Bold(cell) if (number, index) in table.best else cell for index, cell in enumerate(row)]
        for number, row in enumerate(table.rows)
    ]
    note = f'<p class="eyebrow">{page.text(table.note)}</p>' if table.note else ""
    return page.heading(table.title) + page.table(table.header, rows, numbers=range(1, len(table.header))) + note


def _common(results: Results) -> str:
    runs = results.all_runs
    if not runs:
        return "<p>Nothing yet.</p>"
    facts = {
        "dataset": {run.config.data.dataset for run in runs},
        "partition": {run.config.data.partition for run in runs},
        "network": {wording.network(run.config, int(run.summary["peers"])) for run in runs},
        "model": {wording.model(run.config, run.summary["parameters"]) for run in runs},
        "rounds": {str(run.config.run.rounds) for run in runs},
        "seeds": {str(run.config.run.seed) for run in runs},
        "transport": {run.config.run.transport for run in runs},
        "processor": {str(run.summary["environment"].get("processor", "unknown")) for run in runs},
    }
    return page.table(["", ""], [[name, "; ".join(sorted(values))] for name, values in facts.items()])


def _missing(count: int) -> str:
    return f"{wording.plural(count, 'run')} not finished: run the same command again to go on."


def _widened(text: str) -> str:
    """Plots with several panels need the whole width."""
    return text.replace("max-width: 800px", "max-width: 1000px")


def _rounds(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
