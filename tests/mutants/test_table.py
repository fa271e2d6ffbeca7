"""The table of `make mutants` knows every module of the packages that it is to cover."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((ROOT / "tests/mutants/table.toml").read_text())
COVERED = ("adapters", "base/quant", "jobs", "plan/cost", "plan/layout", "run", "trainer")


def modules_in(entries):
    return [
        str(path.relative_to(ROOT))
        for entry in entries
        for pattern in entry["modules"]
        for path in ROOT.glob(pattern)
    ]


@pytest.mark.parametrize("package", COVERED)
def test_every_module_of_a_covered_package_is_in_the_table_or_left_out_with_a_reason(package):
    known = {*modules_in(TABLE["target"]), *modules_in(TABLE["left_out"])}
    there = [path for path in (ROOT / "weftune" / package).rglob("*.py") if path.stat().st_size]
    assert there
    assert (
        sorted(str(path.relative_to(ROOT)) for path in there if str(path.relative_to(ROOT)) not in known)
        == []
    )


def test_no_module_is_named_twice():
    counts = Counter(modules_in([*TABLE["target"], *TABLE["left_out"]]))
    assert [module for module, count in counts.items() if count > 1] == []


def test_every_path_of_the_table_exists_and_every_reason_says_something():
    for entry in [*TABLE["target"], *TABLE["left_out"]]:
        assert all(list(ROOT.glob(pattern)) for pattern in entry["modules"]), entry
    for entry in TABLE["target"]:
        assert entry["tests"]
        assert [test for test in entry["tests"] if not (ROOT / test).exists()] == []
    assert all(entry["why"] for entry in TABLE["left_out"])
