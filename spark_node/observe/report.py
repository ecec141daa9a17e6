"""Reports of finished runs: one page, the answer first, everything it needs inside it."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import spark_node
from spark_node import config as configuration
from spark_node.config import Config
from spark_node.observe import page, plots, wording
from spark_node.observe.history import Round, Run
from spark_node.observe.page import Bold
from spark_node.observe.run_folder import CONFIG, PLOTS, REPORT, write_atomically

_DESCRIPTIONS = {
    "accuracy": "Test accuracy over communication rounds",
    "accuracy_vs_bytes": "Test accuracy of the aggregated model over the bytes sent by all peers",
    "stage_seconds": "Seconds per stage, summed over peers",
    "client_distribution": "Accuracies of the peers' own models after the last round",
    "topology": "The graph of the last round: which peers were neighbours",
    "partition": "Samples of each label that each peer holds",
}
_SELDOM_MEANT = {"data.folder", "run.workers", "run.device"}
"""Settings that differ between machines rather than between experiments."""


def write_report(run: Run, plots_folder: Path | None = None) -> Path:
    """Draw a run's plots and write its report.html, inside its run folder unless told where the plots go."""
    drawn = plots.svgs(plots.figures([(run.name, run)]), plots_folder or run.path / PLOTS)
    return write_page(run_page(run, _inline(drawn)), run.path / REPORT)


def write_page(text: str, file: Path) -> Path:
    """Write a page in one step: a reader never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return file


def report_of(runs: Sequence[Run], plots_folder: Path | None = None) -> str:
    """The page of one run, or the comparison of several; the plots as files too where a folder is given."""
    named = list(zip(names(runs), runs, strict=True))
    inlined = _inline(plots.svgs(plots.figures(named), plots_folder))
    return run_page(runs[0], inlined) if len(runs) == 1 else comparison_page(named, inlined)


def run_page(run: Run, inlined: Mapping[str, str]) -> str:
    """One run: the answer, the plots, the figures behind them, and how to repeat it."""
    peers, parameters = int(run.summary["peers"]), run.summary["parameters"]
    tone = {"complete": "good"}.get(run.status, "bad" if run.status == "failed" else "warn")
    model, seed = wording.model(run.config, parameters), run.config.run.seed
    facts = f"{wording.network(run.config, peers)}; {model}; seed {seed}."
    parts = [
        f'<p class="eyebrow">{page.text(wording.task(run.config))}</p>',
        f"<h1>{page.text(wording.headline(run))}</h1>",
        f'<p class="lead">{page.text(facts)}</p>',
        f'<p class="{tone}">{page.text(wording.state(run))}</p>',
        page.cards(_cards(run)),
        page.plots(inlined),
        page.heading("Rounds"),
        _rounds_table(run),
        page.heading("What was sent, and where the time went"),
        f'<div class="two">{_bytes_table(run)}{_stages_table(run)}</div>',
        f'<p class="eyebrow">{page.text(run.summary.get("bytes_counted", ""))} '
        "Stage times are summed over peers, so they may exceed wall time.</p>",
        page.heading("Settings that differ from the defaults"),
        _settings_table(run.config),
        page.heading("Repeat it"),
        _repeat(run),
        page.heading("Measured on"),
        _environment_table(run.summary),
        _footer(),
    ]
    return page.document(f"{wording.task(run.config)}: {wording.headline(run)}", "\n".join(parts))


def comparison_page(runs: Sequence[tuple[str, Run]], inlined: Mapping[str, str]) -> str:
    """Several runs: who did best, side by side, on the same axes, and what set them apart."""
    answer = comparison_headline(runs)
    parts = [
        f'<p class="eyebrow">Comparison of {len(runs)} runs</p>',
        f"<h1>{page.text(answer)}</h1>",
        *(f'<p class="warn">{page.text(caution)}</p>' for caution in cautions([run for _, run in runs])),
        page.heading("Side by side"),
        _comparison_table(runs),
        page.heading("On the same axes"),
        page.plots(inlined),
        page.heading("Settings that set them apart"),
        _differences_table(runs),
        page.heading("Repeat them"),
        *(f"<p><b>{page.text(name)}</b></p>{_repeat(run)}" for name, run in runs),
        _footer(),
    ]
    return page.document(f"Comparison: {answer}", "\n".join(parts))


def names(runs: Sequence[Run]) -> list[str]:
    """Short names that tell runs apart: by algorithm, by one or two settings that differ, else by folder."""
    keys = [key for key in differing([run.config for run in runs]) if key not in _SELDOM_MEANT]
    candidates = [["run.algorithm"], keys] if len(keys) <= 2 else [["run.algorithm"]]
    for chosen in candidates:
        found = [", ".join(_short(key, _flat(run.config)[key]) for key in chosen) for run in runs]
        if len(set(found)) == len(runs):
            return found
    folders = [run.name for run in runs]
    return folders if len(set(folders)) == len(runs) else [str(run.path) for run in runs]


def differing(configs: Sequence[Config]) -> list[str]:
    """The settings that are not the same everywhere."""
    flat = [_flat(config) for config in configs]
    return [key for key in flat[0] if any(other[key] != flat[0][key] for other in flat)]


def comparison_headline(runs: Sequence[tuple[str, Run]]) -> str:
    """Who reached the target first and with the fewest bytes; or who came closest."""
    reached = [(name, run, run.reached.round, run.bytes_to_target or 0) for name, run in runs if run.reached]
    targets = {run.target for _, run in runs}
    goal = wording.target(targets.pop()) if len(targets) == 1 else "its target"
    if reached:
        name, run, rounds, sent = min(reached, key=lambda entry: (entry[2], entry[3]))
        frugal = min(reached, key=lambda entry: (entry[3], entry[2]))
        first = f"{name} reaches {goal} first: {wording.plural(rounds, 'round')} and {wording.size(sent)}"
        return first if frugal[1] is run else f"{first}; {frugal[0]} with the fewest bytes: {wording.size(frugal[3])}"
    ranked = [(name, run.best.aggregated_accuracy) for name, run in runs if run.best]
    if not ranked:
        return "No run has finished a round"
    name, accuracy = max(ranked, key=lambda entry: entry[1])
    return f"No run reaches {goal}; {name} comes closest with {wording.percent(accuracy)}"


def cautions(runs: Sequence[Run]) -> list[str]:
    """What makes these runs hard to compare."""
    found = []
    for label, key in (
        ("datasets", "data.dataset"),
        ("partitions", "data.partition"),
        ("targets", "run.target_accuracy"),
    ):
        values = list(dict.fromkeys(str(_flat(run.config)[key]) for run in runs))
        if len(values) > 1:
            found.append(f"The runs have different {label}: {', '.join(values)}.")
    unfinished = [run.name for run in runs if run.status != "complete"]
    if unfinished:
        found.append(f"Not complete: {', '.join(unfinished)}.")
    return found


def results(runs: Sequence[Run], report: Path) -> str:
    """What `spark-dfl report --json` prints."""
    entries = [{"run": str(run.path), "name": name, **run.summary} for name, run in zip(names(runs), runs, strict=True)]
    return json.dumps({"report": str(report), "runs": entries}, indent=2)


def _cards(run: Run) -> list[tuple[str, str]]:
    goal = wording.target(run.target)
    reached = str(run.reached.round) if run.reached else "not reached"
    sent = "not reached" if run.bytes_to_target is None else wording.size(run.bytes_to_target)
    figures = [(reached, f"rounds to {goal}"), (sent, f"bytes to {goal}, all peers")]
    if run.final is not None:
        figures.append((wording.percent(run.final.aggregated_accuracy), "final aggregated accuracy"))
        figures.append((wording.percent(run.final.client_accuracy_mean), "final accuracy of the clients, mean"))
    if run.best is not None:
        figures.append((wording.percent(run.best.aggregated_accuracy), f"best aggregated, round {run.best.round}"))
    figures.append((wording.size(run.bytes_after[-1] if run.rounds else 0), "sent in all"))
    figures.append((wording.duration(run.seconds), f"for {wording.plural(len(run.rounds), 'round')}"))
    return figures


def _rounds_table(run: Run) -> str:
    if not run.rounds:
        return "<p>No round was finished.</p>"
    header = ["Round", "Aggregated", "Clients", "min", "median", "max", "Loss", "t*", "Sent", "Seconds", "Neighbours"]
    if all(math.isnan(r.t_star_mean) for r in run.rounds):
        header.remove("t*")
    rows = [[cells[name] for name in header] for cells in (_round_cells(run, r) for r in run.rounds)]
    note = f'<p class="eyebrow">★ first round at or above {wording.target(run.target)}. Bold: the best.</p>'
    return page.table(header, rows, numbers=range(len(header))) + note


def _round_cells(run: Run, r: Round) -> dict[str, object]:
    """One row of the table of rounds, by column."""
    accuracy, clients = wording.percent(r.aggregated_accuracy), r.client_accuracy
    return {
        "Round": f"{r.round} ★" if r is run.reached else r.round,
        "Aggregated": Bold(accuracy) if r is run.best else accuracy,
        "Clients": wording.percent(r.client_accuracy_mean),
        "min": wording.percent(clients.min),
        "median": wording.percent(clients.median),
        "max": wording.percent(clients.max),
        "Loss": wording.decimal(r.loss),
        "t*": wording.decimal(r.t_star_mean, ".0f"),
        "Sent": wording.size(r.bytes_total),
        "Seconds": f"{r.wall:.2f}",
        "Neighbours": f"{r.neighbours_used} of {r.neighbours_expected}",
    }


def _bytes_table(run: Run) -> str:
    total = sum(run.bytes_by_kind.values())
    rows: list[list[object]] = [
        [kind, wording.size(count), f"{count:,}", _share(count, total)] for kind, count in run.bytes_by_kind.items()
    ]
    rows.append([Bold("total"), Bold(wording.size(total)), f"{total:,}", ""])
    return page.table(["Sent by all peers", "", "Bytes", "Share"], rows, numbers=(1, 2, 3))


def _stages_table(run: Run) -> str:
    total = sum(run.stages.values())
    rows: list[list[object]] = [
        [stage, wording.duration(seconds), _share(seconds, total)] for stage, seconds in run.stages.items()
    ]
    rows += [[f"wall time, {part}", wording.duration(seconds), ""] for part, seconds in run.wall.items()]
    rows.append([Bold("wall time, whole run"), Bold(wording.duration(run.seconds)), ""])
    return page.table(["Stage", "Time", "Share"], rows, numbers=(1, 2))


def _settings_table(config: Config) -> str:
    values = _flat(config)
    rows = [
        [setting.key, _value(values[setting.key]), _value(setting.default), setting.help]
        for setting in configuration.settings()
        if values[setting.key] != setting.default
    ]
    if not rows:
        return "<p>None: every setting has its default.</p>"
    return page.table(["Setting", "Value", "Default", "Meaning"], rows)


def _repeat(run: Run) -> str:
    """The command as it was typed, and the one that holds even if defaults and presets change."""
    lasting = page.command(f"spark-dfl run --config {shlex.quote(str(run.path / CONFIG))}")
    typed = run.summary["environment"].get("command")
    return (page.command(typed) + "<p>Or with every setting pinned as it was:</p>" if typed else "") + lasting


def _environment_table(summary: Mapping[str, Any]) -> str:
    rows: list[list[object]] = [
        [key.replace("_", " "), "unknown" if value is None else value]
        for key, value in summary["environment"].items()
        if key != "command"
    ]
    rows += [
        [f"memory, {key.replace('_', ' ')}", wording.size(value) if isinstance(value, int | float) else value]
        for key, value in summary["memory"].items()
    ]
    return page.table(["", ""], rows) if rows else "<p>Not recorded.</p>"


def _comparison_table(runs: Sequence[tuple[str, Run]]) -> str:
    columns: list[tuple[str, Callable[[Run], float | None], Callable[[float], str], int]] = [
        (
            "Rounds to target",
            lambda run: run.reached.round if run.reached else None,
            lambda v: f"{v:.0f}",
            -1,
        ),
        ("Bytes to target", lambda run: run.bytes_to_target, wording.size, -1),
        (
            "Final accuracy",
            lambda run: run.final.aggregated_accuracy if run.final else None,
            wording.percent,
            1,
        ),
        ("Clients", lambda run: run.final.client_accuracy_mean if run.final else None, wording.percent, 1),
        ("Best", lambda run: run.best.aggregated_accuracy if run.best else None, wording.percent, 1),
        ("Rounds", lambda run: len(run.rounds), lambda v: f"{v:.0f}", 0),
        ("Sent", lambda run: run.bytes_after[-1] if run.rounds else 0, wording.size, 0),
        ("Time", lambda run: run.seconds, wording.duration, 0),
    ]
    cells: list[list[object]] = []
    for _, figure, say, better in columns:
        values = [figure(run) for _, run in runs]
        known = [value for value in values if value is not None and not math.isnan(value)]
        best = (max(known) if better > 0 else min(known)) if known and better else None
        said = ["not reached" if value is None else say(value) for value in values]
        cells.append([Bold(s) if v is not None and v == best else s for v, s in zip(values, said, strict=True)])
    rows = [[name, *(column[index] for column in cells)] for index, (name, _) in enumerate(runs)]
    header = ["Run", *(name for name, *_ in columns)]
    return page.table(header, rows, numbers=range(1, len(header)))


def _differences_table(runs: Sequence[tuple[str, Run]]) -> str:
    keys = differing([run.config for _, run in runs])
    if not keys:
        return "<p>None: all runs have the same settings.</p>"
    values = [_flat(run.config) for _, run in runs]
    rows = [[key, *(_value(flat[key]) for flat in values)] for key in keys]
    return page.table(["Setting", *(name for name, _ in runs)], rows)


def _inline(drawn: Mapping[str, str]) -> dict[str, str]:
    return {name: page.plot(name, svg, _DESCRIPTIONS[name]) for name, svg in drawn.items()}


def _footer() -> str:
    version = page.text(spark_node.__version__)
    return f"<footer>Written by spark-dfl {version}. Accuracies are on the test set.</footer>"


def _flat(config: Config) -> dict[str, Any]:
    sections = configuration.to_dict(config)
    return {f"{section}.{key}": value for section, entries in sections.items() for key, value in entries.items()}


def _short(key: str, value: Any) -> str:
    if key == "run.algorithm":
        return wording.NAMES.get(value, str(value))
    section, _, name = key.partition(".")
    return f"{section if name == 'kind' else name} {_value(value)}"


def _value(value: Any) -> str:
    """A setting's value as TOML would show it, text without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    return "(empty)" if value == "" else str(value)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""
