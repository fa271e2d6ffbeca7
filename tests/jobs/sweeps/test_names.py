from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.jobs.spec.names import LONGEST, name_fault
from weftune.jobs.sweeps.draws import grid
from weftune.jobs.sweeps.names import number_text, trial_names, value_text
from weftune.jobs.sweeps.spec import ValueRange


def names(over: dict[str, Any], sweep: str = "sql") -> list[str]:
    over = {key: tuple(values) for key, values in over.items()}
    return trial_names(sweep, over, grid(over))


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"adapter.rank": [8, 16], "learning_rate": [3e-4]}, ["sql-r8", "sql-r16"]),
        ({"learning_rate": [3e-4, 1e-3, 0.05]}, ["sql-lr3e-4", "sql-lr1e-3", "sql-lr0.05"]),
        ({"adapter.dropout": [0, 0.1], "adapter.alpha": [8.0, 16]},
         ["sql-d0-a8", "sql-d0-a16", "sql-d0.1-a8", "sql-d0.1-a16"]),
        ({"batch_size": [4, 8]}, ["sql-b4", "sql-b8"]),
        ({"epochs": [0.5, 2]}, ["sql-e0.5", "sql-e2"]),
        ({"steps": [100, 100000]}, ["sql-s100", "sql-s100000"]),
        ({"weight_decay": [0, 0.01]}, ["sql-wd0", "sql-wd0.01"]),
        ({"warmup": [0, 0.03]}, ["sql-w0", "sql-w0.03"]),
        ({"schedule": ["cosine", "linear"]}, ["sql-cosine", "sql-linear"]),
        ({"adapter.targets": ["all-linear", ["q_proj", "v_proj"]]}, ["sql-all-linear", "sql-q_v"]),
        ({"adapter.rslora": [True, False]}, ["sql-rslora", "sql-no-rslora"]),
        ({"clip": [None, 0.5]}, ["sql-clip-none", "sql-clip0.5"]),
        ({"betas": [[0.9, 0.99], [0.9, 0.999]]}, ["sql-betas-0.9_0.99", "sql-betas-0.9_0.999"]),
        ({"early_stop.patience": [2, 3]}, ["sql-patience2", "sql-patience3"]),
        ({"adapter.init_from": ["runs/one", "runs/two/"]}, ["sql-init_from-one", "sql-init_from-two"]),
    ],
)  # fmt: skip
def test_names_say_what_differs(over: dict[str, Any], told: list[str]) -> None:
    assert names(over) == told


def test_of_keys_that_go_together_the_first_is_told() -> None:
    assert names({"adapter": [{"rank": 8, "alpha": 16}, {"rank": 64, "alpha": 128}]}) == ["sql-r8", "sql-r64"]
    assert names({"adapter": [{"rank": 8, "alpha": 16}, {"rank": 8, "alpha": 32}, {"rank": 64}]}) == [
        "sql-r8-a16", "sql-r8-a32", "sql-r64",
    ]  # fmt: skip


def test_a_single_trial_is_told_by_its_values() -> None:
    assert names({"adapter": [{"rank": 8, "alpha": 16}], "learning_rate": [3e-4]}) == ["sql-r8-lr3e-4"]
    assert names({"adapter": [{}]}) == ["sql-2"]


def test_a_number_is_appended_only_where_two_names_would_be_one() -> None:
    assert names({"adapter.targets": ["a+b", "a|b", "c"]}) == ["sql-a-b", "sql-a-b-2", "sql-c"]
    assert trial_names("a", {"steps": (1, 2)}, [{"steps": 1}, {"steps": 2}], taken=["A-S1"]) == [
        "a-s1-2",
        "a-s2",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "3e-4"), (0.05, "0.05"), (1e-3, "1e-3"), (0.01, "0.01"), (3.17e-4, "3.17e-4"), (2.0, "2"),
     (1e-8, "1e-8"), (0.999, "0.999"), (1500.0, "1500"), (1e6, "1e6"), (0.1234567, "0.1235"), (0.0, "0"),
     (0.0123, "0.0123"), (0.00216, "2.16e-3"), (0.0012, "1.2e-3")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


VALUES = st.one_of(
    st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.booleans(),
    st.none(), st.lists(st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=9), st.integers(), max_size=3),
)  # fmt: skip
KEYS = st.sampled_from(
    ["learning_rate", "adapter", "adapter.rank", "adapter.targets", "adapter.rank_pattern.x.y"]
)
SWEEPS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}[a-z]", fullmatch=True).filter(
    lambda name: not name_fault(name)
)


@given(SWEEPS, st.dictionaries(KEYS, st.lists(VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_names_are_unique_and_may_be_names_whatever_the_values(
    sweep: str, over: dict[str, list[Any]]
) -> None:
    found = names(over, sweep)
    assert len({name.lower() for name in found} | {sweep.lower()}) == len(found) + 1
    assert all(name_fault(name) is None for name in found)
    assert max(map(len, found)) <= LONGEST


@given(st.floats(-1e300, 1e300))
def test_a_number_in_a_name_is_that_number_to_four_digits(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=1e-3)


def test_a_ranges_value_is_always_told() -> None:
    over = {"learning_rate": ValueRange(1e-5, 1e-3, True)}
    assert trial_names("a", over, [{"learning_rate": 3.17e-4}]) == ["a-lr3.17e-4"]


def test_a_mapping_inside_a_list_is_its_values() -> None:
    assert value_text({"q_proj": 4, "v_proj": 8}) == "4_8"
