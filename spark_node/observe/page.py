"""Pieces of a self-contained HTML page: escaped text, tables, inlined plots, a style for light and dark."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from spark_node.observe.plots import FAINT, GRID, INK, PALETTE, SURFACE

_THEME = {INK: "--ink", FAINT: "--faint", GRID: "--grid", SURFACE: "--surface"}
_THEME |= {colour: f"--series-{index}" for index, colour in enumerate(PALETTE)}
_DARK_SERIES = ("#4aa8e0", "#f0843c", "#2fc49a", "#e39ac4", "#f2b83a", "#8fd0f5", "#c2a25f", "#a8a8a8")

_STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --faint: #6e7781; --grid: #d8dee4; --surface: #ffffff;
  --page: #f6f8fa; --good: #1a7f4b; --warn: #9a6700; --bad: #b42318; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #8d96a0; --grid: #30363d;
  --surface: #161b22; --page: #0d1117; --good: #4cc38a; --warn: #e3b341; --bad: #ff7b72; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.2; margin: .2rem 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; }
p { margin: .3rem 0; }
.eyebrow { color: var(--faint); font-size: .9rem; }
.lead { color: var(--faint); font-size: 1.05rem; max-width: 60rem; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: .7rem;
  margin: 1.6rem 0; }
.card, figure, .table, pre { background: var(--surface); border: 1px solid var(--grid); border-radius: 10px; }
.card { padding: .8rem .9rem; }
.card b { display: block; font-size: 1.35rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { display: block; color: var(--faint); font-size: .82rem; line-height: 1.35; margin-top: .2rem; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .9rem; }
.plots figure:first-child, .plots figure:last-child:nth-child(even) { grid-column: 1 / -1; }
.plots figure:first-child svg, .plots figure:last-child:nth-child(even) svg { max-width: 800px;
  margin: 0 auto; }
figure { margin: 0; padding: .8rem; } figure svg { display: block; width: 100%; height: auto; }
.table { overflow: auto; max-height: 34rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .42rem .8rem; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--faint); font-weight: 600; position: sticky; top: 0; background: var(--surface);
  white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: .9rem;
  align-items: start; }
pre { padding: .8rem 1rem; overflow-x: auto; margin: .4rem 0 1rem; font-size: .88rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { color: var(--faint); font-size: .85rem; margin-top: 3rem; }
@media (max-width: 720px) { .plots { grid-template-columns: 1fr; } }
@media print { body { background: none; } .table { max-height: none; } }
"""


def document(title: str, body: str) -> str:
    """A whole page. Its content policy forbids every outside resource and every script."""
    light = " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(PALETTE))
    dark = " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(_DARK_SERIES))
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark).strip()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Any value as text that cannot become markup."""
    return html.escape(str(value))


def heading(title: str) -> str:
    return f"<h2>{text(title)}</h2>"


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """Key figures: (value, what it is)."""
    items = (f'<div class="card"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in figures)
    return f'<div class="cards">{"".join(items)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """A table; the columns of `numbers` are set flush right. A cell that is `Bold` stands out."""
    return f'<div class="table"><table><thead>{_row("th", header, numbers)}</thead><tbody>' + (
        "".join(_row("td", row, numbers) for row in rows) + "</tbody></table></div>"
    )


class Bold(str):
    """A cell to stress."""


def command(line: str) -> str:
    return f"<pre>{text(line)}</pre>"


def plot(name: str, svg: str, description: str) -> str:
    """A plot inlined so that it follows the page's theme."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    for colour, variable in _THEME.items():
        body = body.replace(colour, f"var({variable})")
    opening = f'<svg role="img" aria-label="{text(description)}"'
    return f"<figure>{body.replace('<svg', opening, 1)}</figure>"


def plots(inlined: Mapping[str, str]) -> str:
    return f'<div class="plots">{"".join(inlined.values())}</div>'


def _row(tag: str, cells: Sequence[object], numbers: Sequence[int]) -> str:
    parts = []
    for index, cell in enumerate(cells):
        kind = ' class="number"' if index in numbers else ""
        body = f"<b>{text(cell)}</b>" if isinstance(cell, Bold) else text(cell)
        parts.append(f"<{tag}{kind}>{body}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"
