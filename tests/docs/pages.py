"""The pages of the project as data: fenced blocks, commands, inline code, headings and links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"(?:\]\(|src=\")([^)\s\"]+)[)\"]")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and its text."""

    language: str
    text: str


def names() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in PAGES]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands(block: Block) -> Iterator[str]:
    """The commands of a block, one a line; comments go, continued lines are joined."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield shlex.join(words).replace("'&&'", "&&").replace("'*'", "*").replace("'&'", "&")


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def inline(page: str) -> list[str]:
    """Everything in single backticks; line breaks are spaces."""
    return [" ".join(found.split()) for found in _INLINE.findall(prose(page))]


def links(page: str) -> list[str]:
    """Targets of links and images."""
    return _LINK.findall(prose(page))


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    found = _HEADING.findall(_FENCE.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
