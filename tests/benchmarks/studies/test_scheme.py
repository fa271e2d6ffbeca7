"""The quick time of an order against the simulator's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.scheme import least_seconds
from tests.plan.works import work
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.simulate import simulate
from weftune.plan.window.orders import alternating_passes, assemble, gpipe_passes, multi_job_passes

TIMES = st.floats(0.1, 5.0)


@st.composite
def cases(draw):
    todo = work(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    stages = draw(st.integers(1, 4))
    rows = [
        tuple(PassPrice(draw(TIMES), draw(TIMES), 3, 2, 1) for _ in range(stages)) for _ in todo.microbatches
    ]
    prices = Prices(tuple(rows))
    passes = draw(
        st.sampled_from(
            [
                gpipe_passes(todo, stages),
                alternating_passes(todo, stages),
                multi_job_passes(todo, stages, prices),
            ]
        )
    )
    return todo, passes, prices, stages


@settings(max_examples=60, deadline=None)
@given(cases(), st.floats(0.5, 50.0), st.floats(0.0, 1.0))
def test_no_simulation_is_shorter_than_the_least_seconds(case, bandwidth, latency):
    todo, passes, prices, stages = case
    link = Link(bandwidth, latency)
    cluster = PricedCluster(stages, link)
    simulated = simulate(assemble(todo, passes), prices, cluster).makespan
    assert least_seconds(passes, prices, link) <= simulated * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_where_links_take_no_time_both_are_equal(case):
    todo, passes, prices, stages = case
    simulated = simulate(assemble(todo, passes), prices, PricedCluster(stages)).makespan
    assert least_seconds(passes, prices, Link()) == pytest.approx(simulated)
