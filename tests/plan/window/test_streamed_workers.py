"""A window streamed over several workers: one device's microbatches, each stage alone in its slot."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from tests.plan.window.test_streamed import done, job_sets
from weftune.plan.program.check import check, check_slots
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.prices import PassPrice, PricedCluster, Prices
from weftune.plan.program.program import (
    Backward,
    Evaluate,
    Evict,
    Forward,
    IllegalProgram,
    Load,
    Program,
    Recv,
    Reduce,
    Save,
    Send,
    Step,
)
from weftune.plan.program.simulate import simulate
from weftune.plan.window.window import plan_window


def cut(*layers: int, workers: int, resident: set[int] = frozenset(), slots: int = 1) -> Layout:
    """Stages of so many layers each."""
    ends = pairwise(accumulate(layers, initial=0))
    stages = tuple(StageLayers(*both, number in resident) for number, both in enumerate(ends))
    return Layout(stages, (slots,) * workers)


@st.composite
def cuts(draw: st.DrawFn) -> Layout:
    layers = draw(st.lists(st.integers(1, 3), min_size=2, max_size=9))
    workers = draw(st.integers(2, min(4, len(layers))))
    resident = draw(st.sets(st.integers(0, len(layers) - 1)))
    made = cut(*layers, workers=workers, resident=resident)
    return replace(made, slot_counts=tuple(draw(st.integers(1, 3)) for _ in range(workers)))


def passes(program: Program, kind: type, stage: int) -> list[int]:
    here = program.devices[program.stages[stage]]
    return [one.microbatch for one in here if isinstance(one, kind) and one.stage == stage]


SHARDS = st.integers(2, 4).map(lambda shards: replace(cut(1, 2, 1, workers=1, resident={1}), shards=shards))
"""Teams that run one list of actions: only the first shard knows the result of an evaluation."""


@settings(max_examples=120, deadline=None)
@given(job_sets(), cuts())
def test_every_stage_sees_the_microbatches_of_one_device_in_its_order(courses, chosen):
    program = plan_window(courses, chosen, 60)
    alone = plan_window(courses, one_device_layout(), 60)
    for stage in range(len(chosen.stages)):
        trained = passes(alone, Forward, 0)
        mine = passes(program, Forward, stage)
        planned = [program.microbatches[number] for number in mine]
        assert planned == [alone.microbatches[number] for number in trained[: len(mine)]]
        assert passes(program, Backward, stage) == mine


@settings(max_examples=120, deadline=None)
@given(job_sets(), cuts(), st.data())
def test_every_window_is_legal_and_so_is_what_a_dead_job_leaves_of_it(courses, chosen, data):
    program = plan_window(courses, chosen, 60)
    left = program.without(data.draw(st.sampled_from(courses)).job)
    for one in (program, left):
        check(one, done(courses))
        for worker in range(chosen.workers):
            check_slots(one, chosen.for_worker(worker))


@settings(max_examples=60, deadline=None)
@given(job_sets(), cuts())
def test_the_simulator_runs_every_window_to_its_end_and_holds_no_more_than_the_slots(courses, chosen):
    program = plan_window(courses, chosen, 60)
    # A stage that nothing moves seems resident to the simulator.
    assume(program.microbatches)
    sizes = tuple(stage.stop - stage.start for stage in chosen.stages)
    rows = ((PassPrice(1.0, 2.0),) * len(sizes),) * len(program.microbatches)
    timeline = simulate(program, Prices(rows, weight_bytes=sizes), PricedCluster(chosen.workers))
    for worker, peak in enumerate(timeline.peaks):
        own = chosen.for_worker(worker)
        streamed = [sizes[stage] for stage in own.streamed_stages]
        stays = sum(sizes[stage] for stage in own.own_stages) - sum(streamed)
        assert peak <= stays + own.slot_count * max(streamed, default=0)
    assert all(Reduce(batch.job, batch.step) in program.devices[0] for batch in program.batches)


@settings(max_examples=100, deadline=None)
@given(job_sets(), cuts() | SHARDS)
def test_a_window_ends_with_the_first_round_in_which_somebody_evaluates(courses, chosen):
    program = plan_window(courses, chosen, 60)
    for actions in program.devices:
        looks = [n for n, one in enumerate(actions) if isinstance(one, Evaluate)]
        if looks:
            assert not any(isinstance(one, Forward | Backward) for one in actions[looks[0] :])
    # Whoever evaluates where it begins does so before anybody trains.
    if any(one.begins_run and one.evaluation and one.step in one.evaluation_steps for one in courses):
        assert not program.batches


def test_a_round_hops_from_rank_to_rank_there_and_back():
    program = plan_window([course("a", [[9]])], cut(1, 1, 1, workers=2, slots=1), 10)
    there = Recv(0, 2, "activation", 1), Forward(0, 2), Backward(0, 2), Send(0, 1, "gradient", 1)
    assert program.stages == (0, 1, 0)
    assert program.devices == (
        (
            *(Forward(0, 0), Send(0, 1, "activation", 1), Evict(0), Load(2), *there, Evict(2), Load(0)),
            *(Recv(0, 0, "gradient", 1), Backward(0, 0), Reduce("a", 1), Step("a", 1)),
        ),
        (
            *(Recv(0, 1, "activation", 0), Forward(0, 1), Send(0, 2, "activation", 0)),
            *(Recv(0, 1, "gradient", 0), Backward(0, 1), Send(0, 0, "gradient", 0)),
            *(Reduce("a", 1), Step("a", 1)),
        ),
    )


def test_other_ranks_than_the_first_make_a_step_right_before_its_job_needs_it():
    first = course("a", [[9], [9]], evaluation=[4], evaluate_at={2}, save_at={1})
    actions = plan_window([first, course("b", [[8], [8]])], cut(1, 1, 1, 1, workers=2), 40).devices[1]
    order = [one for one in actions if isinstance(one, Step | Save | Evaluate | Reduce)]
    assert order == [
        *(Reduce("a", 1), Reduce("b", 1), Step("a", 1), Save("a", 1), Step("b", 1)),
        *(Reduce("a", 2), Reduce("b", 2), Step("a", 2), Evaluate(2, 1), Evaluate(2, 3), Step("b", 2)),
    ]


def test_a_stage_that_has_gone_is_refused_on_any_rank():
    chosen = cut(1, 1, 1, 1, workers=2, slots=1)
    program = plan_window([course("a", [[9]])], chosen, 10)
    broken = tuple(one for one in program.devices[1] if one != Load(3))
    without_load = replace(program, devices=(program.devices[0], broken))
    with pytest.raises(IllegalProgram, match="uses a stage that is not in its slot"):
        check_slots(without_load, chosen.for_worker(1))
    check_slots(without_load, chosen.for_worker(0))
