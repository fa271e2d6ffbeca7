from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.jobs.sweeps.search import combinations, draws, generations, grid, identity, propose, tidy
from weftune.jobs.sweeps.spec import SweepSpec, Trial, ValueRange

LISTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.integers(), min_size=1, max_size=4, unique=True).map(tuple),
    min_size=1,
)
SEEDS = st.integers(0, 2**63 - 1)


@given(LISTS)
def test_a_grid_is_the_whole_product_in_the_order_written(over: dict[str, Any]) -> None:
    found = grid(over)
    assert [tuple(values.values()) for values in found] == list(product(*over.values()))
    assert len(found) == combinations(over)
    assert all(list(values) == list(over) for values in found)


@given(LISTS, SEEDS, st.data())
def test_draws_are_distinct_members_of_the_grid(over: dict[str, Any], seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, int(combinations(over))))
    found = draws(over, count, seed)
    assert len({identity(values) for values in found}) == count
    assert all(values in grid(over) for values in found)


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
    count = int(min(20, combinations({"x": over})))
    found = [values["x"] for values in draws({"x": over}, count, seed)]
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
    assert [tuple(values.values()) for values in draws(over, 3, seed=7)] == [
        (4.44e-05, 6, 0.065, "linear"), (0.000118, 11, 0.006, "cosine"), (1.19e-05, 13, 0.007, "linear"),
    ]  # fmt: skip
    assert draws(over, 3, seed=7) != draws(over, 3, seed=8)


def test_a_logarithmic_range_is_even_in_the_logarithm_and_another_in_its_values() -> None:
    log = [values["x"] for values in draws({"x": ValueRange(1e-5, 1e-3, True)}, 400, 0)]
    even = [values["x"] for values in draws({"x": ValueRange(1e-5, 1e-3)}, 400, 0)]
    assert 160 < sum(value < 1e-4 for value in log) < 240
    assert sum(value < 1e-4 for value in even) < 60
    ranks = [values["x"] for values in draws({"x": ValueRange(1, 4), "y": ValueRange(0, 1.0)}, 400, 0)]
    assert all(60 < ranks.count(rank) < 140 for rank in (1, 2, 3, 4))


def test_numbers_from_a_range_have_few_digits() -> None:
    assert tidy(ValueRange(1e-5, 1e-3, True), 3.17456e-4) == 3.17e-4
    assert tidy(ValueRange(1e-5, 1e-3, True), 1.23456e-5) == 1.23e-5
    assert tidy(ValueRange(0.0, 0.2), 0.123456) == 0.123
    assert tidy(ValueRange(0.99, 0.9999), 0.998764) == 0.99876
    assert tidy(ValueRange(0.123416, 0.2), 0.123416) == 0.123416


def test_a_narrow_range_is_drawn_with_more_digits_when_it_runs_out() -> None:
    found = [values["x"] for values in draws({"x": ValueRange(1.0, 2.0)}, 1000, 0)]
    assert len(set(found)) == 1000


def test_a_grid_and_random_draws_are_one_generation() -> None:
    for spec in (
        SweepSpec(over={"steps": (1, 2)}),
        SweepSpec(over={"steps": (1, 2)}, search="random", trials=2),
    ):
        found = propose("a", spec, 0)
        assert {trial.name for trial in found.first()} == {"a-s1", "a-s2"}
        assert found.next([(trial, 1.0) for trial in found.first()]) == ()


def test_a_trial_holds_the_values_under_the_keys_of_over() -> None:
    spec = SweepSpec(over={"adapter": ({"rank": 8},), "learning_rate": (1e-4, 3e-4)})
    assert propose("sql", spec, 0).first()[1] == Trial(
        "sql-lr3e-4", {"adapter": {"rank": 8}, "learning_rate": 3e-4}
    )


@pytest.mark.parametrize(
    ("trials", "sizes"), [(24, [6] * 4), (10, [3, 3, 3, 1]), (3, [1, 1, 1]), (1, [1]), (5, [2, 2, 1])]
)
def test_generations_are_a_quarter_each(trials: int, sizes: list[int]) -> None:
    assert list(generations(trials)) == sizes
    assert sizes[0] == math.ceil(trials / 4)
