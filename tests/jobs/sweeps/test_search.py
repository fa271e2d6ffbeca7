"""Combinations of values, and the names of trials."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.jobs.spec.keys import MAX_NAME_LETTERS, name_fault
from weftune.jobs.sweeps.search import (
    TrialSearch,
    combination_key,
    count_combinations,
    draw_combinations,
    generation_sizes,
    grid_combinations,
    number_text,
    round_value,
    trial_names,
    value_text,
)
from weftune.jobs.sweeps.spec import SweepSpec, Trial, ValueRange

LISTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.integers(), min_size=1, max_size=4, unique=True).map(tuple),
    min_size=1,
)
SEEDS = st.integers(0, 2**63 - 1)


@given(LISTS)
def test_a_grid_is_the_whole_product_in_the_order_written(over: dict[str, Any]) -> None:
    found = grid_combinations(over)
    assert [tuple(values.values()) for values in found] == list(product(*over.values()))
    assert len(found) == count_combinations(over)
    assert all(list(values) == list(over) for values in found)


@given(LISTS, SEEDS, st.data())
def test_draws_are_distinct_members_of_the_grid(over: dict[str, Any], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, int(count_combinations(over))))
    found = draw_combinations(over, count, seed)
    assert len({combination_key(values) for values in found}) == count
    assert all(values in grid_combinations(over) for values in found)


@st.composite
def ranges(draw: st.DrawFn) -> ValueRange:
    log = draw(st.booleans())
    if draw(st.booleans()):
        low = draw(st.integers(1 if log else -1000, 1000))
        return ValueRange(low, draw(st.integers(low + 1, low + 10**9)), log)
    low = draw(st.floats(1e-9 if log else -1e3, 1e3))
    high = low + draw(st.floats(1e-3, 1e6)) * max(abs(low), 1e-9)
    return ValueRange(low, high, log)


@given(ranges(), SEEDS)
def test_draws_lie_inside_their_range(over: ValueRange, seed: int) -> None:
    is_whole = isinstance(over.min, int)
    count = int(min(20, count_combinations({"x": over})))
    found = [values["x"] for values in draw_combinations({"x": over}, count, seed)]
    assert all(over.min <= value <= over.max for value in found)
    assert all(isinstance(value, int) == is_whole for value in found)
    assert len(set(found)) == count


def test_the_same_seed_draws_the_same_on_every_machine() -> None:
    over = {
        "learning_rate": ValueRange(1e-5, 1e-3, True),
        "adapter.rank": ValueRange(4, 64, True),
        "weight_decay": ValueRange(0, 0.1),
        "schedule": ("linear", "cosine"),
    }
    # Written down once: whoever resumes a run on another machine must get these.
    assert [tuple(values.values()) for values in draw_combinations(over, 3, seed=7)] == [
        (4.44e-05, 6, 0.065, "linear"), (0.000118, 11, 0.006, "cosine"), (1.19e-05, 13, 0.007, "linear"),
    ]  # fmt: skip
    assert draw_combinations(over, 3, seed=7) != draw_combinations(over, 3, seed=8)


def test_a_logarithmic_range_is_even_in_the_logarithm_and_another_in_its_values() -> None:
    log = [values["x"] for values in draw_combinations({"x": ValueRange(1e-5, 1e-3, True)}, 400, 0)]
    even = [values["x"] for values in draw_combinations({"x": ValueRange(1e-5, 1e-3)}, 400, 0)]
    assert 160 < sum(value < 1e-4 for value in log) < 240
    assert sum(value < 1e-4 for value in even) < 60
    ranks = [
        values["x"] for values in draw_combinations({"x": ValueRange(1, 4), "y": ValueRange(0, 1.0)}, 400, 0)
    ]
    assert all(60 < ranks.count(rank) < 140 for rank in (1, 2, 3, 4))


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    ("low", "high"), [(1e-300, 1e308), (1, 10**300), (5e-324, 1e-320), (0.1, 0.1 + 1e-10)]
)
def test_a_range_of_any_size_is_drawn_from(low: float, high: float, log: bool) -> None:
    found = [values["x"] for values in draw_combinations({"x": ValueRange(low, high, log)}, 20, 0)]
    assert all(low <= value <= high for value in found)


def test_numbers_from_a_range_have_few_digits() -> None:
    assert round_value(ValueRange(1e-5, 1e-3, True), 3.17456e-4) == 3.17e-4
    assert round_value(ValueRange(1e-5, 1e-3, True), 1.23456e-5) == 1.23e-5
    assert round_value(ValueRange(0.0, 0.2), 0.123456) == 0.123
    assert round_value(ValueRange(0.99, 0.9999), 0.998764) == 0.99876
    assert round_value(ValueRange(0.123416, 0.2), 0.123416) == 0.123416


def test_a_narrow_range_is_drawn_with_more_digits_when_it_runs_out() -> None:
    found = [values["x"] for values in draw_combinations({"x": ValueRange(1.0, 2.0)}, 1000, 0)]
    assert len(set(found)) == 1000


@pytest.mark.parametrize(
    ("trials", "sizes"), [(24, [6] * 4), (10, [3, 3, 3, 1]), (3, [1, 1, 1]), (1, [1]), (5, [2, 2, 1])]
)
def test_generations_are_a_quarter_each(trials: int, sizes: list[int]) -> None:
    assert list(generation_sizes(trials)) == sizes
    assert sizes[0] == math.ceil(trials / 4)


def names(over: dict[str, Any], sweep: str = "sql") -> list[str]:
    over = {key: tuple(values) for key, values in over.items()}
    return trial_names(sweep, over, grid_combinations(over))


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
    assert trial_names("a", {"steps": (1, 2)}, [{"steps": 1}, {"steps": 2}], used_names=["A-S1"]) == [
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
    assert max(map(len, found)) <= MAX_NAME_LETTERS


@given(st.floats(-1e300, 1e300))
def test_a_number_in_a_name_is_that_number_to_four_digits(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=1e-3)


def test_a_ranges_value_is_always_told() -> None:
    over = {"learning_rate": ValueRange(1e-5, 1e-3, True)}
    assert trial_names("a", over, [{"learning_rate": 3.17e-4}]) == ["a-lr3.17e-4"]


def test_a_mapping_inside_a_list_is_its_values() -> None:
    assert value_text({"q_proj": 4, "v_proj": 8}) == "4_8"


def test_a_grid_and_random_draws_are_one_generation() -> None:
    for spec in (
        SweepSpec(over={"steps": (1, 2)}),
        SweepSpec(over={"steps": (1, 2)}, search="random", trials=2),
    ):
        found = TrialSearch("a", spec, 0)
        assert {trial.name for trial in found.first_generation()} == {"a-s1", "a-s2"}
        assert found.next_generation([(trial, 1.0) for trial in found.first_generation()]) == ()


def test_a_trial_holds_the_values_under_the_keys_of_over() -> None:
    spec = SweepSpec(over={"adapter": ({"rank": 8},), "learning_rate": (1e-4, 3e-4)})
    assert TrialSearch("sql", spec, 0).first_generation()[1] == Trial(
        "sql-lr3e-4", {"adapter": {"rank": 8}, "learning_rate": 3e-4}
    )
