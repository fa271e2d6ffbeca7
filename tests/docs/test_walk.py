"""The two walks of docs/design.md: every stop is a function that exists and is called by a stop before it."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_STOPS = 25
STOP = re.compile(
    r"^\d+\. `(?P<file>weftune/[\w/]+\.py)` `(?P<function>[\w.]+)`.*?(?P<library> Called by \w+\.)?$"
)
Stop = tuple[str, str, bool]


def walks() -> dict[str, list[Stop]]:
    """Return title → stops (file, function, whether a library calls it) of the walks in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.split("## Two walks through the code\n")[1].split("\n## ")[0]
    found: dict[str, list[Stop]] = {}
    for part in section.split("\n### ")[1:]:
        title, *lines = part.splitlines()
        found[title] = [
            (stop["file"], stop["function"], bool(stop["library"]))
            for line in lines
            if (stop := STOP.match(line))
        ]
    return found


def function_of(stop: Stop) -> ast.AST:
    """Return the node of a function, or of a method written as `Class.method`."""
    file, name, _ = stop
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        children = [child for child in ast.walk(node) if isinstance(child, ast.FunctionDef | ast.ClassDef)]
        found = [child for child in children if child.name == part]
        assert found, f"{file} has no {name}"
        node = found[0]
    return node


def names_in(node: ast.AST) -> set[str]:
    named = (child.id if isinstance(child, ast.Name) else child.attr for child in ast.walk(node)
             if isinstance(child, ast.Name | ast.Attribute))  # fmt: skip
    return set(named)


def spoken_name(stop: Stop) -> str:
    """Return how a caller refers to a stop: by its class where it is a constructor or `__call__`."""
    parts = stop[1].split(".")
    return parts[-2] if parts[-1] in ("__init__", "__call__") else parts[-1]


@pytest.mark.parametrize("title", ["From the command to the adapter", "From one step to its kernel"])
def test_each_stop_of_a_walk_exists_and_is_called_by_one_before_it(title: str) -> None:
    stops = walks()[title]
    assert 5 <= len(stops) <= MAX_STOPS
    called = names_in(function_of(stops[0]))
    for before, stop in pairwise(stops):
        assert stop[2] or spoken_name(stop) in called, (
            f"neither {before} nor an earlier stop refers to {stop}"
        )
        called |= names_in(function_of(stop))
