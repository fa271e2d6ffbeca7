"""The recurrence of slots: what the simulator says of the Programs, and of nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_check import course
from tests.plan.test_stream_window import cut
from weft.plan.price import Link, PassPrice, PricedCluster, PricedDevice, Prices
from weft.plan.simulate import simulate
from weft.plan.stream_slots import StageRound, compute_seconds, slotted_seconds
from weft.plan.stream_window import plan_streamed

SECONDS = st.integers(0, 30).map(lambda tenths: tenths / 10)
STAGES = st.lists(st.builds(StageRound, SECONDS, SECONDS, st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(STAGES, st.sets(st.integers(0, 7)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_rounds_take_what_the_simulator_says_of_their_program(stages, resident, slots, rounds, microbatches):
    chosen = cut(*[1] * len(stages), resident=resident, slots=slots)
    program = plan_streamed([course("a", [[9] * microbatches] * rounds)], chosen, 10)
    price = tuple(PassPrice(one.forward / microbatches, one.backward / microbatches) for one in stages)
    prices = Prices(
        (price,) * len(program.microbatches), weight_bytes=tuple(one.load_bytes for one in stages)
    )
    cluster = PricedCluster((PricedDevice(1 << 40, Link(10.0)),), roots=(10.0,))
    bits = [stage.resident for stage in chosen.stages]
    foreseen = rounds * slotted_seconds(stages, bits, slots, 10.0)
    assert simulate(program, prices, cluster).makespan == pytest.approx(foreseen)


@given(STAGES, st.integers(1, 4))
def test_with_everything_resident_or_a_slot_for_each_there_is_nothing_to_wait_for(stages, slots):
    everything = [True] * len(stages)
    nothing = [False] * len(stages)
    assert slotted_seconds(stages, everything, slots, 1.0) == pytest.approx(compute_seconds(stages))
    assert slotted_seconds(stages, nothing, len(stages), 1.0) == pytest.approx(compute_seconds(stages))


def test_one_slot_loads_and_computes_in_turn_and_two_hide_what_they_can():
    stages = [StageRound(1.0, 2.0, load_bytes=3)] * 4
    streamed = [False] * 4
    # Three loads there, three back, none of them beside a pass.
    assert slotted_seconds(stages, streamed, 1, 1.0) == 4 * 3.0 + 6 * 3.0
    # The third stage comes from 1 to 4, the last from 4 to 7 and stays until 10; the second then comes until
    # 13, the first until 16, which is when the first's turn would begin; it ends at 18.
    assert slotted_seconds(stages, streamed, 2, 1.0) == 18.0


def test_a_slot_is_taken_until_gradients_have_left_it():
    stages = [StageRound(1.0, 1.0, load_bytes=2, gone_bytes=4)] * 2
    # Forth 1, load 2, both ways 2, gradients 4, load 2, back 1, gradients 4.
    assert slotted_seconds(stages, [False, False], 1, 1.0) == 16.0
    # What stays need not wait for them, but the round does.
    assert slotted_seconds(stages, [True, True], 1, 1.0) == 1 + 2 + 4 + 4
