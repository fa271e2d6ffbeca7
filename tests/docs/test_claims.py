"""What README and the other pages refer to exists: tests, files, sections."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, MECHANISMS, README, ROOT, anchors, table_rows

PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def spelled_out(path: str) -> list[str]:
    """`test_{a,b}.py` is two files, as in a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(words) for words in product(*parts)] if "{" in path else [path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_and_benchmark_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for named in re.findall(r"`((?:tests|benchmarks|examples)/[\w/{},.-]+\.\w+)", text):
        for path in spelled_out(named):
            assert (ROOT / path).is_file(), path
    for module in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{module}.py").is_file(), module


def test_every_module_and_test_of_a_mechanism_exists() -> None:
    rows = table_rows(MECHANISMS, "mechanism")
    assert len(rows) > 30
    for mechanism, places, shown in rows:
        assert re.search(r"`(tests|benchmarks)/", shown), mechanism
        for named in re.findall(r"`([\w/{},*]+\.py|[\w/]+/)`", places):
            for path in spelled_out(named):
                found = [one for root in (ROOT, ROOT / "weftune") for one in root.glob(path)]
                assert found, f"{mechanism}: {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_lines_wrap_at_a_sane_width(page: Path) -> None:
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > 120] == []
