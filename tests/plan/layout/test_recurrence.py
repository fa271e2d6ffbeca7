"""The recurrence of slots: what the simulator says of the Programs, and of nothing else."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from tests.plan.window.test_streamed import cut
from weftune.plan.layout.recurrence import StageRound, compute_seconds, slotted_seconds
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.simulate import simulate
from weftune.plan.window.window import plan_window

SECONDS = st.integers(0, 30).map(lambda tenths: tenths / 10)
STAGES = st.lists(st.builds(StageRound, SECONDS, SECONDS, st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(STAGES, st.sets(st.integers(0, 7)), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_rounds_take_what_the_simulator_says_of_their_program(stages, resident, slots, rounds, microbatches):
    chosen = cut(*[1] * len(stages), resident=resident, slots=slots)
    program = plan_window([course("a", [[9] * microbatches] * rounds)], chosen, 10)
    price = tuple(
        PassPrice(one.forward_seconds / microbatches, one.backward_seconds / microbatches) for one in stages
    )
    prices = Prices(
        (price,) * len(program.microbatches), weight_bytes=tuple(one.load_bytes for one in stages)
    )
    cluster = PricedCluster(1, host_link=Link(10.0), root_bandwidths=(10.0,))
    bits = [stage.is_resident for stage in chosen.stages]
    foreseen = rounds * slotted_seconds(stages, bits, slots, 10.0)
    assert simulate(program, prices, cluster).makespan == pytest.approx(foreseen)


TRAVELLING = st.lists(
    st.builds(StageRound, SECONDS, SECONDS, *[st.integers(0, 40)] * 5), min_size=1, max_size=8
)


def by_what_waits_for_what(stages, resident, slots, bandwidth, rounds=1):
    """Rounds as tasks, each with its seconds and the tasks before it: when the last of them ends."""
    numbers = range(len(stages))
    streamed = [stage for stage in numbers if not resident[stage]]
    visits = [*(("forth", stage) for stage in numbers), *(("back", stage) for stage in reversed(numbers))]
    tasks = {"begin": (0.0, [])}
    inside = dict(enumerate(streamed[:slots]))
    free = dict.fromkeys(inside, "begin")
    before = up = down = "begin"

    def add(name, seconds, *waits):
        tasks[name] = seconds, waits
        return name

    for turn in range(rounds):
        asked = down
        for way, stage in visits:
            one = stages[stage]
            slot = streamed.index(stage) % slots if stage in streamed else None
            there = ["begin"]
            if slot is not None and inside[slot] != stage:
                copies, written = (
                    (0, "begin") if way == "forth" else (one.adapter_bytes, ("new", turn, stage))
                )
                seconds = (one.load_bytes + copies) / bandwidth
                there = [up := add(("load", turn, way, stage), seconds, up, free[slot], written)]
                inside[slot] = stage
            if way == "forth":
                seconds = one.step_bytes / bandwidth
                there = [
                    up := add(("step", turn, stage), seconds, up, *there, *([asked] if stage == 0 else [])),
                    add(("step asked for", turn, stage), seconds, asked),
                ]
                # Where nothing goes back, nothing waits for what goes back of other stages.
                goes = [down] if one.state_bytes else []
                new = add(("new", turn, stage), one.state_bytes / bandwidth, *there, *goes)
                down = new if one.state_bytes else down
            began = add((way, "begins", turn, stage), 0.0, before, *there)
            before = add(
                (way, turn, stage), one.forward_seconds if way == "forth" else one.backward_seconds, began
            )
            left = before
            if way == "forth":
                asked = began
            else:
                down = add(("gone", turn, stage), one.gradient_bytes / bandwidth, before, down)
                left = down if one.gradient_bytes else before
            if slot is not None:
                free[slot] = left
    ends = {}
    for task, (seconds, waits) in tasks.items():
        ends[task] = seconds + max((ends[one] for one in waits), default=0.0)
    return max(ends[before], ends[down])


@settings(max_examples=300, deadline=None)
@given(TRAVELLING, st.sets(st.integers(0, 7)), st.integers(1, 4), st.integers(1, 3))
@example([*(StageRound(0.0, 0.0, number == 1, state_bytes=number == 0) for number in range(4))], set(), 2, 1)
def test_rounds_end_when_all_that_waits_for_one_another_has_come_to_pass(stages, resident, slots, rounds):
    bits = [number in resident for number in range(len(stages))]
    expected = by_what_waits_for_what(stages, bits, slots, 10.0, rounds)
    assert rounds * slotted_seconds(stages, bits, slots, 10.0) == pytest.approx(expected)


def test_of_steps_the_device_waits_for_the_first_and_for_what_the_forward_overtakes():
    stays = [True] * 3
    quick = [StageRound(4.0, 8.0, step_bytes=3)] * 3
    assert slotted_seconds(quick, stays, 1, 1.0) == 3 + compute_seconds(quick)
    slow = [StageRound(4.0, 8.0, step_bytes=6)] * 3
    # They are there at 6, 12 and 18: each time but the first the forward has waited 2.
    assert slotted_seconds(slow, stays, 1, 1.0) == 18 + 4 + 3 * 8


def test_a_step_is_asked_for_when_the_forward_of_the_stage_before_begins_and_not_earlier():
    stays = [True] * 3
    # The first two forwards take 9 and 1, so that the link is idle for long; still the last Step, asked for
    # at 9, is there only at 14.
    stages = [StageRound(9.0, 1.0), StageRound(1.0, 1.0), StageRound(1.0, 1.0, step_bytes=5)]
    assert slotted_seconds(stages, stays, 1, 1.0) == 14 + 1 + 3


def test_a_step_comes_behind_the_load_of_its_stage_and_before_the_next_one():
    stages = [StageRound(1.0, 1.0, load_bytes=2, step_bytes=3)] * 3
    # Steps until 3 and 6, passes until 7; the slot of the first is free at 4, but the link at 6: the last
    # stage's load until 8, its Step until 11, both ways until 13; the second is there, the first comes from
    # 13 to 15, while the second goes back.
    assert slotted_seconds(stages, [False] * 3, 2, 1.0) == 15 + 1


def test_a_load_in_the_backward_brings_a_copy_of_the_weights_once_they_have_gone_back():
    stages = [StageRound(1.0, 1.0, load_bytes=2, adapter_bytes=4)] * 2
    # Forth 1, load 2, both ways 2, load 6, back 1: the forward's load has brought no copy.
    assert slotted_seconds(stages, [False, False], 1, 1.0) == 1 + 2 + 2 + 6 + 1
    # What went back of the first Step is there at 20, and after it a load of 6.
    late = [replace(stages[0], state_bytes=20), stages[1]]
    assert slotted_seconds(late, [False, False], 1, 1.0) == 20 + 6 + 1


def test_what_goes_back_of_a_step_keeps_gradients_and_later_inputs_waiting_and_not_its_own_input():
    stays = [True] * 3
    gradients = [StageRound(1.0, 1.0, gradient_bytes=1, state_bytes=5)] * 3
    # It has gone back at 5, 10 and 15, though the backward ends at 6; then the gradients go.
    assert slotted_seconds(gradients, stays, 1, 1.0) == 15 + 3
    inner = StageRound(1.0, 2.0, input_bytes=1)
    # The first stage's is back at 10, and the second's input leaves until 11, with which its forward ends.
    first = [StageRound(1.0, 2.0, state_bytes=10), inner, StageRound(1.0, 2.0)]
    assert slotted_seconds(first, stays, 1, 1.0) == 11 + 3 + 2 + 2
    # The second's own goes behind its input.
    second = [StageRound(1.0, 2.0), replace(inner, state_bytes=5), StageRound(1.0, 2.0)]
    assert slotted_seconds(second, stays, 1, 1.0) == compute_seconds(second)


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
    stages = [StageRound(1.0, 1.0, load_bytes=2, gradient_bytes=4)] * 2
    # Forth 1, load 2, both ways 2, gradients 4, load 2, back 1, gradients 4.
    assert slotted_seconds(stages, [False, False], 1, 1.0) == 16.0
    # What stays need not wait for them, but the round does.
    assert slotted_seconds(stages, [True, True], 1, 1.0) == 1 + 2 + 4 + 4


INPUTS = st.lists(st.integers(0, 40), min_size=8, max_size=8)


@given(STAGES | TRAVELLING, INPUTS, st.sets(st.integers(0, 7)), st.integers(1, 4))
def test_inputs_that_wait_on_the_host_cost_no_more_than_their_way_there_and_back(
    stages, inputs, resident, slots
):
    bits = [number in resident for number in range(len(stages))]
    waiting = [
        replace(stage, input_bytes=inputs[number] if 0 < number < len(stages) - 1 else 0)
        for number, stage in enumerate(stages)
    ]
    way = sum(stage.input_bytes for stage in waiting) / 10.0
    # A forward waits for its input to leave, which goes behind what goes back of the Steps before.
    ahead = sum(stage.state_bytes for stage in stages) / 10.0 if way else 0.0
    kept, offloaded = (slotted_seconds(each, bits, slots, 10.0) for each in (stages, waiting))
    assert kept <= offloaded <= kept + 2 * way + ahead + 1e-9


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
