"""The recurrence of slots: what the simulator says of the Programs, and of nothing else."""

from dataclasses import replace

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


STEPPED = st.lists(
    st.builds(StageRound, SECONDS, SECONDS, *[st.integers(0, 40)] * 2, SECONDS, st.integers(0, 9)),
    min_size=1,
    max_size=8,
)


def by_what_waits_for_what(stages, resident, slots, bandwidth, norms):
    """A round as tasks, each with its seconds and the tasks before it: when the last of them ends."""
    numbers = range(len(stages))
    tasks = {"norms": (norms, [])}
    for stage, one in enumerate(stages):
        tasks["part", stage] = one.stepped, [("part", stage - 1) if stage else "norms"]
        tasks["new", stage] = one.new_bytes / bandwidth, [("part", stage)]
    visits = [*(("forth", stage) for stage in numbers), *(("back", stage) for stage in reversed(numbers))]
    streamed = [stage for stage in numbers if not resident[stage]]
    left = dict(enumerate((stage, None) for stage in streamed[:slots]))
    before, load, gone = None, None, None
    for way, stage in visits:
        waits = [before] if before else []
        waits += [("new", stage)] if way == "forth" else []
        slot = streamed.index(stage) % slots if stage in streamed else None
        if slot is not None and left[slot][0] != stage:
            tasks["load", way, stage] = (
                stages[stage].load_bytes / bandwidth,
                [one for one in (load, left[slot][1]) if one],
            )
            load = "load", way, stage
            waits.append(load)
        before = way, stage
        tasks[before] = stages[stage].forward if way == "forth" else stages[stage].backward, waits
        if way == "back":
            sent = "gone", stage
            tasks[sent] = stages[stage].gone_bytes / bandwidth, [before, *([gone] if gone else [])]
            gone = sent
        left[slot] = stage, gone if way == "back" and stages[stage].gone_bytes else before
    ends = {}
    for task, (seconds, waits) in tasks.items():
        ends[task] = seconds + max((ends[one] for one in waits), default=0.0)
    return max(ends[before], ends[gone])


@settings(max_examples=300, deadline=None)
@given(STEPPED, st.sets(st.integers(0, 7)), st.integers(1, 4), SECONDS)
def test_a_round_ends_when_all_that_waits_for_one_another_has_come_to_pass(stages, resident, slots, norms):
    bits = [number in resident for number in range(len(stages))]
    expected = by_what_waits_for_what(stages, bits, slots, 10.0, norms)
    assert slotted_seconds(stages, bits, slots, 10.0, norms) == pytest.approx(expected)


def test_of_steps_the_device_waits_for_the_norms_the_first_part_and_what_the_forward_overtakes():
    quick = [StageRound(4.0, 8.0, stepped=3.0, new_bytes=1)] * 3
    stays = [True] * 3
    assert slotted_seconds(quick, stays, 1, 1.0, norms=2.0) == compute_seconds(quick) + 2 + 3 + 1
    slow = [StageRound(4.0, 8.0, stepped=6.0, new_bytes=1)] * 3
    # The parts are there at 9, 15 and 21: each time the forward has waited 2.
    assert slotted_seconds(slow, stays, 1, 1.0, norms=2.0) == 21 + 4 + 3 * 8


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


INPUTS = st.lists(st.integers(0, 40), min_size=8, max_size=8)


@given(STAGES, INPUTS, st.sets(st.integers(0, 7)), st.integers(1, 4))
def test_inputs_that_wait_on_the_host_cost_no_more_than_their_way_there_and_back(
    stages, inputs, resident, slots
):
    bits = [number in resident for number in range(len(stages))]
    waiting = [
        replace(stage, input_bytes=inputs[number] if 0 < number < len(stages) - 1 else 0)
        for number, stage in enumerate(stages)
    ]
    way = sum(stage.input_bytes for stage in waiting) / 10.0
    kept, offloaded = (slotted_seconds(each, bits, slots, 10.0) for each in (stages, waiting))
    assert kept <= offloaded <= kept + 2 * way + 1e-9


def waiting_inside(stage, count, seconds):
    """The first stage has no input, the last one's never leaves."""
    inner = replace(stage, input_bytes=seconds)
    return [stage, *[inner] * (count - 2), stage]


def test_inputs_hide_behind_the_visit_before_and_behind_their_stages_forward():
    stages = waiting_inside(StageRound(1.0, 2.0), 4, seconds=1)
    assert slotted_seconds(stages, [True] * 4, 1, 1.0) == compute_seconds(stages)
    # Out until 6 and 11, the last stage until 14; back 5 after each visit began: at 16 and 21.
    stages = waiting_inside(StageRound(1.0, 2.0), 4, seconds=5)
    assert slotted_seconds(stages, [True] * 4, 1, 1.0) == 21 + 2 + 2


def test_inputs_come_while_the_link_waits_for_a_slot_and_delay_the_loads_where_it_does_not():
    stages = waiting_inside(StageRound(1.0, 2.0, load_bytes=3), 4, seconds=1)
    streamed = [False] * 4
    # With one slot the link is idle during every visit.
    assert slotted_seconds(stages, streamed, 1, 1.0) == 4 * 3.0 + 6 * 3.0
    # With two the second stage's load follows the last one's visit at once, and its input comes behind.
    assert slotted_seconds(stages, streamed, 2, 1.0) == 18.0 + 1.0
