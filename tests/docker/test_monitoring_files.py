"""What Prometheus and Grafana are given, checked without an engine: by promtool, and by what Grafana insists on."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docker import dashboard

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian package prometheus)")


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
    ids=" ".join,
)
def test_prometheus_own_tool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rule_tests_can_fail(tmp_path: Path) -> None:
    for name in ("rules.yml", "rules_test.yml"):
        text = (PROMETHEUS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("peer:spark_rounds_behind >= 3", "peer:spark_rounds_behind >= 99"))
    done = subprocess.run(["promtool", "test", "rules", "rules_test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "PeerStalled" in done.stdout + done.stderr


def test_every_alert_has_a_test() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", (PROMETHEUS / "rules.yml").read_text(encoding="utf-8")))
    tested = set(re.findall(r"alertname: (\w+)", (PROMETHEUS / "rules_test.yml").read_text(encoding="utf-8")))
    assert alerts == tested


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return dashboard.load()


def test_the_dashboard_has_what_grafana_needs(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] >= 36, "older ones have panel formats that Grafana migrates"
    assert board["uid"]
    assert board["title"]
    assert "id" not in board, "an id is of one Grafana's database: a provisioned dashboard has none"
    kinds = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert kinds == {"datasource": "datasource", "run": "query"}


def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_chosen_data_source(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["targets"], panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters), panel["title"]


def test_the_dashboard_shows_what_operators_ask_for(board: dict[str, Any]) -> None:
    shown = {panel["title"] for panel in board["panels"]}
    assert shown >= {
        "Network bandwidth by kind",
        "Bytes per edge and round",
        "Compression ratio",
        "Accuracy by round",
        "Stage times",
        "Stragglers",
        "Refusals",
        "Memory of a peer",
    }


def test_grafana_is_told_where_dashboards_and_prometheus_are() -> None:
    compose = (DEPLOY.parent / "docker-compose.yml").read_text(encoding="utf-8")
    provider = (DEPLOY / "grafana/provisioning/dashboards/spark.yml").read_text(encoding="utf-8")
    path = re.search(r"path: ([\w/.-]+)", provider)
    assert path is not None
    assert f"./deploy/grafana/dashboards:{path[1]}:ro" in compose
    source = (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    assert "url: http://prometheus:9090" in source
    assert "\n  prometheus:\n" in compose
