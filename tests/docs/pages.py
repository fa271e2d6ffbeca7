"""README and guide as the tests read them: their blocks of code, their tables and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide.md"
SWEEPS = ROOT / "docs" / "sweeps.md"
MECHANISMS = ROOT / "docs" / "mechanisms.md"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the word behind its fence, and its text."""

    language: str
    text: str


def blocks(page: Path, language: str) -> list[str]:
    return [block.text for block in _blocks(page.read_text(encoding="utf-8")) if block.language == language]


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks, continued lines joined."""
    lines = [line for text in blocks(page, "") for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip()]


def table_rows(page: Path, first: str) -> list[list[str]]:
    """The cells below the heading `first` of a table's first column."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    return [row for line in lines if line.startswith(f"| {first} |") for row in _rows_below(lines)]


def anchors(page: Path) -> set[str]:
    """How headings are linked to, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _blocks(text: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2])


def _rows_below(lines: Iterator[str]) -> Iterator[list[str]]:
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]
