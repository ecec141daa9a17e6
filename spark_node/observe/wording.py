"""How figures and outcomes are put into words, the same on the terminal and in reports."""

import math

from spark_node.config import Config
from spark_node.observe.history import Run

NAMES = {
    "spark": "SPARK",
    "ntk-dfl": "NTK-DFL",
    "dpsgd": "D-PSGD",
    "dfedavg": "DFedAvg",
    "dfedavgm": "DFedAvgM",
    "dfedsam": "DFedSAM",
}


def percent(fraction: float, digits: int = 2) -> str:
    """0.8125 -> 81.25%."""
    return "n/a" if math.isnan(fraction) else f"{100 * fraction:.{digits}f}%"


def decimal(value: float, form: str = ".4f") -> str:
    """A plain number, or n/a where there is none."""
    return "n/a" if math.isnan(value) else f"{value:{form}}"


def target(fraction: float) -> str:
    """A target as it was set, without idle zeros: 0.85 -> 85%."""
    return f"{100 * fraction:.6g}%"


def size(count: float) -> str:
    """Bytes in decimal units, three digits: 12345678 -> 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for a reader: 2.31 s, 34 s, 5 min 12 s, 1 h 03 min."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """1 round, 2 rounds, 1,000 rounds."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def algorithm(config: Config) -> str:
    return NAMES.get(config.run.algorithm, config.run.algorithm.rpartition(":")[2])


def task(config: Config) -> str:
    """What is run, in a phrase."""
    return f"{algorithm(config)} on {config.data.title} ({config.data.partition})"


def network(config: Config, peers: int) -> str:
    """Who talks to whom, in a phrase."""
    kind = config.topology.kind
    shape = kind if kind in ("ring", "line") else f"{kind} graph of degree {config.topology.degree}"
    when = "fresh every round" if config.topology.fresh else "the same every round"
    return f"{plural(peers, 'peer')}, {shape}, {when}"


def model(config: Config, parameters: int | None) -> str:
    settings = config.model
    widths = {"mlp": settings.hidden, "cnn": settings.channels + settings.hidden}.get(settings.kind, ())
    shape = f" {list(widths)}" if widths else ""
    return f"{settings.kind}{shape}" + ("" if parameters is None else f", {plural(parameters, 'parameter')}")


def state(run: Run) -> str:
    """How the run ended, in a phrase."""
    done, planned = len(run.rounds), run.config.run.rounds
    return {
        "complete": f"Complete: {plural(done, 'round')}",
        "interrupted": f"Interrupted after {done} of {plural(planned, 'round')}",
        "failed": f"Failed after {done} of {plural(planned, 'round')}",
    }.get(run.status, f"Unfinished: {done} of {plural(planned, 'round')} so far")


def headline(run: Run) -> str:
    """The answer in a phrase: was the target accuracy reached, and at what cost."""
    goal = target(run.target)
    if run.reached is not None and run.bytes_to_target is not None:
        return f"{goal} reached after {plural(run.reached.round, 'round')} and {size(run.bytes_to_target)} sent"
    if not run.rounds:
        return f"{goal} not reached: no round was finished"
    return f"{goal} not reached in {plural(len(run.rounds), 'round')}"


def outcome(run: Run) -> str:
    """The accuracies in a phrase; empty without a finished round."""
    if run.final is None:
        return ""
    text = f"final {percent(run.final.aggregated_accuracy)} (clients {percent(run.final.client_accuracy_mean)})"
    if run.best is not None and run.best is not run.final:
        text += f", best {percent(run.best.aggregated_accuracy)} in round {run.best.round}"
    return text


def cost(run: Run) -> str:
    """Bytes and time in a phrase."""
    sent = run.bytes_after[-1] if run.rounds else 0
    return f"{size(sent)} sent by all peers in {plural(len(run.rounds), 'round')} and {duration(run.seconds)}"


def one_line(run: Run) -> str:
    """The whole answer on one line."""
    parts = [headline(run), outcome(run), cost(run)]
    if run.status != "complete":
        parts.insert(0, state(run).lower())
    return "; ".join(part for part in parts if part)
