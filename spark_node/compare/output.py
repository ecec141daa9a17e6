"""The files of a comparison: compare.md, compare.csv, compare.json, compare.html and plots/."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spark_node.compare.figures import figures
from spark_node.compare.page import QUICK, Entry, answer, details, index_page, study_page
from spark_node.compare.results import Results
from spark_node.compare.runner import Outcome
from spark_node.compare.tables import Table, tables
from spark_node.observe import plots
from spark_node.observe.history import finite
from spark_node.observe.run_folder import PLOTS, write_atomically

MARKDOWN, CSV, JSON, PAGE, INDEX = "compare.md", "compare.csv", "compare.json", "compare.html", "index.html"


def write_results(results: Results, folder: Path, command: str) -> dict[str, Any]:
    """Write every file; what compare.json says, for the caller."""
    found = tables(results)
    drawn = plots.svgs(figures(results), folder / PLOTS)
    data = as_data(results, found)
    write_atomically(folder / JSON, json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    write_atomically(folder / CSV, as_csv(results))
    write_atomically(folder / MARKDOWN, as_markdown(results, found, list(drawn), command))
    write_atomically(folder / PAGE, study_page(results, found, drawn, command))
    return data


def write_index(folder: Path, named: Sequence[tuple[str, Results]]) -> Path:
    """index.html beside the folders of several studies."""
    entries = [
        Entry(f"{name}/{PAGE}", results.study, answer(results), len(results.failed), len(results.missing))
        for name, results in named
    ]
    write_atomically(folder / INDEX, index_page(entries))
    return folder / INDEX


def as_markdown(results: Results, found: Sequence[Table], drawn: Sequence[str], command: str) -> str:
    """The tables for people who read text."""
    lines = [f"# {results.study.title}", ""]
    lines += [results.study.question, ""] if results.study.question else []
    lines += [QUICK, ""] if results.study.is_quick else []
    lines += [f"**{answer(results)}.**", "", *(f"- {line}" for line in details(results)), ""]
    lines += [f"- failed: {o.cell.title}: {o.reason}" for o in results.failed]
    lines += [f"- not run: {o.cell.title}" for o in results.missing]
    for table in found:
        lines += ["", f"## {table.title}", "", *_markdown_rows(table), ""]
        lines += [table.note] if table.note else []
    lines += ["", *(f"![{name}]({PLOTS}/{name}.png)" for name in drawn), "", "```sh", command, "```", ""]
    return "\n".join(lines)


def as_csv(results: Results) -> str:
    """A row a run: what it was, and its figures."""
    rows = [_cell(outcome, results) for outcome in results.outcomes]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_data(results: Results, found: Sequence[Table]) -> dict[str, Any]:
    """Everything as JSON: accuracies are fractions, bytes whole numbers, null is not reached or not known."""
    study = results.study
    first = next((run for run in results.all_runs), None)
    return {
        "title": study.title,
        "question": study.question,
        "paper": study.paper,
        "quick": study.is_quick,
        "answer": answer(results),
        "at_round": results.at_round,
        "seeds": list(study.seeds),
        "axes": [{"name": axis.name, "labels": list(axis.labels)} for axis in study.axes],
        "cells": [_cell(outcome, results) for outcome in results.outcomes],
        "points": _points(results),
        "tests": _tests(results),
        "tables": [{**asdict(table), "best": sorted(table.best)} for table in found],
        "environment": {} if first is None else dict(first.summary["environment"]),
    }


def _cell(outcome: Outcome, results: Results) -> dict[str, Any]:
    run, cell = outcome.run, outcome.cell
    known = run is not None and bool(run.rounds)
    return {
        "cell": cell.name,
        **dict(cell.labels),
        "seed": cell.seed,
        "state": outcome.state,
        "reason": outcome.reason,
        "rounds": len(run.rounds) if run else 0,
        "target_accuracy": cell.config.run.target_accuracy,
        "rounds_to_target": run.reached.round if run and run.reached else None,
        "bytes_to_target": run.bytes_to_target if run else None,
        "aggregated_accuracy": finite(results.accuracy(run)) if run and known else None,
        "client_accuracy": finite(results.client_accuracy(run)) if run and known else None,
        "bytes_sent": run.bytes_after[-1] if run and known else None,
        "seconds": run.seconds if run else None,
    }


def _points(results: Results) -> list[dict[str, Any]]:
    found = []
    for row in results.rows:
        for column in results.columns:
            accuracy = results.mean(row, column, results.accuracy)
            clients = results.mean(row, column, results.client_accuracy)
            found.append(
                {
                    "row": row,
                    "column": results.study.column_name(column),
                    "seeds": len(results.runs(row, column)),
                    "aggregated_accuracy": _numbers(asdict(accuracy)) if accuracy else None,
                    "client_accuracy": _numbers(asdict(clients)) if clients else None,
                    "rounds_to_target": list(results.rounds_to_target(row, column).known),
                    "bytes_to_target": list(results.bytes_to_target(row, column).known),
                }
            )
    return found


def _tests(results: Results) -> list[dict[str, Any]]:
    subject, *others = results.rows
    found = []
    for column in results.columns:
        for other in others:
            test = results.paired(subject, other, column)
            shown = None if test is None else _numbers(asdict(test))
            found.append({"row": subject, "over": other, "column": results.study.column_name(column), "test": shown})
    return found


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _markdown_rows(table: Table) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rows = [
        line([f"**{cell}**" if (number, index) in table.best else cell for index, cell in enumerate(row)])
        for number, row in enumerate(table.rows)
    ]
    return [line(table.header), "|" + "---|" * len(table.header), *rows]
