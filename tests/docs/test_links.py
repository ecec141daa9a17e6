"""Links between pages, to files and to headings hold; files and symbols that pages name are there."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, inline, links, names

FOLDERS = ("docs", "tests", "spark_node", "benchmarks", "examples", "proto", "orchestrator", "deploy")


@pytest.mark.parametrize("page", names())
def test_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page}: {target} is not there"
        if anchor:
            assert anchor in anchors(found), f"{page}: {target}: no such heading"


@pytest.mark.parametrize("page", names())
def test_files_that_a_page_names_are_there(page: str) -> None:
    for text in inline(page):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w/.-]+", text):
            assert (ROOT / text).exists(), f"{page}: {text}"


def symbols(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_page_of_equations_names_code_that_exists() -> None:
    named = [match for text in inline("docs/algorithms.md") if (match := re.fullmatch(r"([\w/]+\.py):(\w+)", text))]
    assert len(named) > 15
    for place in named:
        path = ROOT / "spark_node" / place[1]
        assert path.is_file(), place[0]
        assert place[2] in symbols(path), place[0]


def test_every_page_is_in_the_index() -> None:
    index = links("docs/README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or page.name in index, f"docs/README.md does not name {page.name}"


def test_pictures_are_small_enough_to_keep() -> None:
    for picture in [*(ROOT / "docs").rglob("*.png"), *(ROOT / "docs").rglob("*.svg")]:
        assert picture.stat().st_size < 500_000, picture.name
