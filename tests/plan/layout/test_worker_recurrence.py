"""The recurrence for a round over several workers says what the simulator says of the very Program."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from tests.plan.window.test_streamed_workers import cut, cuts
from weftune.plan.cost.time import Line
from weftune.plan.layout.recurrence import StageRound, round_ends, round_seconds
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import Step
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import LoadPace, StagePace, predict_timeline
from weftune.plan.window.window import plan_window

SECONDS = st.integers(1, 30).map(lambda tenths: tenths / 10)


def ends_simulated(stages, chosen, microbatches, bandwidth, rounds):
    """When the first worker makes each round's Step, by the simulator."""
    program = plan_window([course("a", [[10] * microbatches] * rounds)], chosen, 10)
    passes = tuple(
        PassPrice(one.forward_seconds / microbatches, one.backward_seconds / microbatches) for one in stages
    )
    prices = Prices(
        (passes,) * len(program.microbatches), weight_bytes=tuple(one.load_bytes for one in stages)
    )
    timeline = simulate(program, prices, PricedCluster(chosen.workers, host_link=Link(bandwidth)))
    return [one.start for one in timeline.events if isinstance(one.action, Step) and one.device == 0]


@settings(max_examples=150, deadline=None)
@given(cuts(), st.data(), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.5, 2.0, 20.0]))
def test_rounds_end_when_the_simulator_says(chosen, data, microbatches, rounds, bandwidth):
    stages = [
        StageRound(
            microbatches * data.draw(SECONDS), microbatches * data.draw(SECONDS), data.draw(st.integers(1, 9))
        )
        for _ in chosen.stages
    ]
    found = round_ends(stages, chosen, microbatches, rounds, bandwidth=bandwidth)
    assert found == pytest.approx(ends_simulated(stages, chosen, microbatches, bandwidth, rounds))


def test_a_microbatch_more_than_ranks_hides_a_hop_and_a_second_slot_hides_loads():
    stages = [StageRound(4 * 1.0, 4 * 2.0, 10)] * 8
    one, two = (cut(*[1] * 8, workers=2, slots=slots) for slots in (1, 2))
    bare = round_seconds(stages, one, 4, bandwidth=10 / 3)
    hidden = round_seconds(stages, two, 4, bandwidth=10 / 3)
    free = round_seconds(stages, one, 4)
    assert free <= hidden < bare
    assert hidden - free < 0.2 * (bare - free)
    assert round_seconds(stages, one, 4, hop_seconds=0.5) < free + 4.0


def test_what_is_foreseen_of_a_window_counts_its_loads():
    chosen = cut(*[1] * 6, workers=2, slots=1)
    program = plan_window([course("a", [[10] * 2] * 2)], chosen, 10)
    paces = (StagePace(Line(1.0, 0.0), Line(2.0, 0.0)),) * 6
    seconds = [
        predict_timeline(program, paces, loads).makespan
        for loads in (None, LoadPace((10,) * 6, 1e9), LoadPace((10,) * 6, 1.0))
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[2] > seconds[0] + 2 * 10
