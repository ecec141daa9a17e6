"""The Grafana dashboard as Prometheus sees it: its panels and their queries."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
VARIABLES = {"$__range": "1h", "$__rate_interval": "1m"}


@dataclass(frozen=True)
class Query:
    """One query of one panel."""

    panel: str
    kind: str
    expression: str

    def of_run(self, run: str) -> str:
        """With the dashboard's variables filled in as Grafana does."""
        text = self.expression.replace("$run", run)
        for name, value in VARIABLES.items():
            text = text.replace(name, value)
        return text


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "spark.json").read_text(encoding="utf-8"))
    return found


def queries() -> Iterator[Query]:
    for panel in load()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], panel["type"], target["expr"])
