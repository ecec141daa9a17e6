"""What every benchmark shares: its flags, its table, its JSON."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spark_node.config import RunSettings
from spark_node.observe.environment import environment


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small size that ends within a minute or two")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows as JSON")
    return parser


def set_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings {"section.key": value} as the words of a command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def processor_seconds(session: int) -> float:
    """Time on processors of all processes of a session that live, and of those of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(errors="replace").rpartition(")")[2].split()  # from the state on
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def product_ms() -> float:
    """How fast a processor is now: a product of the paper's size in one thread, the median of 50 tries."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(100, 1200), torch.randn(1200, 1200)
    times = []
    for _ in range(50):
        start = time.process_time()
        for _ in range(10):
            a @ b
        times.append((time.process_time() - start) * 100)
    return statistics.median(times)


def report(name: str, rows: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """Print the rows as a table and, where asked, write them as JSON with what they were measured beside."""
    console = Console()
    if not console.is_terminal:
        console.width = 180
    table = Table(title=name)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        surroundings = environment(RunSettings(workers=1), " ".join(sys.argv))
        path.write_text(json.dumps({"benchmark": name, "environment": surroundings, "rows": rows}, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if value and abs(value) < 1e-3 else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    return str(value)
