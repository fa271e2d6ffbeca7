"""Inputs of stages that wait in host memory: the bits of the resident run, and little on the device."""

import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import bench
from tests.cases import slow_but
from tests.run.executors import rows_on_device
from tests.run.models import LAYERS, deep
from tests.run.test_streamed import (
    CAPACITY,
    CUTS,
    attach_jobs,
    compare,
    evaluated_jobs,
    resident,
    run,
    streamed,
    travelling,
    windows,
)
from tests.run.workers.test_agreed import make_jobs, whole_base
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.plan.program.layout import one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import OutOfMemory
from weftune.run.executor import max_rows_in_flight
from weftune.run.measure.timers import WaitTime
from weftune.run.passes.rows import StageVisit
from weftune.run.stream.activations import KeptActivations, OffloadedActivations

ROUND = 200
"""Rows; no round of the jobs here has more."""


def offloading(cut, rows=ROUND):
    return replace(cut, offloaded_rows=rows)


LAYER_EACH = offloading(CUTS["a layer at a time"])


@pytest.mark.parametrize(
    ("name", "travels"),
    slow_but(
        product(CUTS, (False, True)),
        [("one slot", False), ("uneven, two stay", True)],
    ),
)
def test_offloaded_inputs_come_back_with_the_bits_of_the_resident_run(name, travels):
    compare("llama", torch.float32, offloading(travelling(CUTS[name]) if travels else CUTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "opt", "gpt2"])
def test_what_another_family_hands_on_waits_in_host_memory_too(family):
    compare(family, torch.float64, LAYER_EACH)


def executor_and_jobs(cut, make=make_jobs):
    executor = streamed("llama", torch.float32, cut)
    jobs = make(executor.base)
    attach_jobs(executor, jobs)
    return executor, jobs


def on_the_device(executor):
    """Notes how many rows of inputs are there whenever one is read."""
    seen, read = [], executor.activations.read

    def noted(by):
        seen.append(rows_on_device(executor.activations))
        return read(by)

    executor.activations.read = noted
    return seen


@pytest.mark.parametrize("cut", [CUTS["one slot"], CUTS["uneven, two stay"]])
def test_only_a_round_and_a_microbatch_of_inputs_are_on_the_device_at_once(cut):
    seen = {}
    for chosen in (cut, offloading(cut)):
        executor, jobs = executor_and_jobs(chosen)
        rows = on_the_device(executor)
        program = plan_window([job.job_window(0, 2, False) for job in jobs], chosen, CAPACITY)
        run(executor, program, jobs)
        seen[chosen.offloads_inputs] = max(rows)
        assert rows_on_device(executor.activations) == 0
    whole = max_rows_in_flight(program)
    largest = max(one.rows for one in program.microbatches)
    assert len(program.microbatches) >= 4
    assert seen[True] <= whole + largest < seen[False] <= len(cut.stages) * whole


@pytest.mark.slow
def test_a_job_killed_in_the_middle_of_a_round_leaves_the_others_the_same_bits():
    masters = []
    for chosen in (CUTS["a layer at a time"], LAYER_EACH):
        cut = replace(chosen, adapters_travel=True)
        executor, jobs = executor_and_jobs(cut, evaluated_jobs)
        passes = 0

        def kill(*_, executor=executor):
            nonlocal passes
            passes += 1
            if passes == 3:
                executor.kill("b")

        hook = executor.passes.stages[2].model.base_model.register_forward_pre_hook(kill)
        others = [job for job in jobs if job.name != "b"]
        courses = [job.job_window(0, 2, True) for job in jobs]
        run(executor, plan_window(courses, cut, CAPACITY), jobs)
        hook.remove()
        courses = [job.job_window(executor.attached[job.name].progress.step, 2, False) for job in others]
        run(executor, plan_window(courses, cut, CAPACITY), jobs)
        assert passes > 3
        assert rows_on_device(executor.activations) == 0
        assert executor.attached["b"].progress.step == 0
        masters.append({job.name: executor.attached[job.name].master.clone() for job in others})
    for name, master in masters[0].items():
        assert torch.equal(masters[1][name], master), name


def test_microbatches_whose_jobs_are_all_dead_take_no_room():
    base = whole_base("llama", torch.float32)
    whole = resident_executor(base)
    capacity = 22
    attach_jobs(whole, make_jobs(base))
    executor, jobs = executor_and_jobs(LAYER_EACH)
    courses = [job.job_window(0, 3, False) for job in jobs]
    program = plan_window(courses, LAYER_EACH, capacity)
    assert any(one.jobs == ("b",) for one in program.microbatches)
    for one, planned in ((whole, plan_window(courses, one_device_layout(), capacity)), (executor, program)):
        one.kill("b")
        run(one, planned, jobs)
    for name in ("a", "c"):
        assert executor.attached[name].progress.step == 3
        assert torch.equal(executor.attached[name].master, whole.attached[name].master), name


@pytest.mark.parametrize("short_stage", slow_but([1, 2, 3], [2]))
def test_after_a_shortage_in_the_middle_of_a_round_it_is_made_again_to_the_same_bits(short_stage):
    executor, jobs = executor_and_jobs(LAYER_EACH, evaluated_jobs)
    program = plan_window([job.job_window(0, 2, True) for job in jobs], LAYER_EACH, CAPACITY)
    passes = 0

    def short(*_):
        nonlocal passes
        passes += 1
        if passes == 2:
            raise torch.OutOfMemoryError("no more")

    hook = executor.passes.stages[short_stage].model.base_model.register_forward_pre_hook(short)
    with pytest.raises(OutOfMemory):
        run(executor, program, jobs)
    hook.remove()
    assert rows_on_device(executor.activations) == 0
    assert {one.progress.step for one in executor.attached.values()} == {0}
    _, masters = windows(executor, jobs, lambda courses: plan_window(courses, LAYER_EACH, CAPACITY))
    _, wanted = resident("llama", torch.float32)
    for name, master in wanted.items():
        assert torch.equal(masters[name], master), name


def test_room_on_the_host_is_the_plans_and_grows_only_for_a_larger_round():
    small = offloading(CUTS["a layer at a time"], rows=1)
    for cut, grows in ((LAYER_EACH, False), (small, True)):
        executor, jobs = executor_and_jobs(cut)
        program = plan_window([job.job_window(0, 2, False) for job in jobs], cut, CAPACITY)
        assert executor.activations.reserved_rows == cut.offloaded_rows
        run(executor, program, jobs)
        assert 1 < max_rows_in_flight(program) < ROUND
        assert executor.activations.reserved_rows == (max_rows_in_flight(program) if grows else ROUND)


def test_what_comes_back_is_told_among_what_came_from_the_host():
    copied = {}
    for cut in (CUTS["one slot"], offloading(CUTS["one slot"])):
        executor, jobs = executor_and_jobs(cut)
        program = plan_window([job.job_window(0, 1, False) for job in jobs], cut, CAPACITY)
        run(executor, program, jobs)
        copied[cut.offloads_inputs] = executor.weights.wait_time.copied_bytes
    rows = sum(one.rows for one in program.microbatches)
    assert copied[True] - copied[False] == (LAYERS - 2) * rows * executor.base.shape.hidden * 4


# -- the keeper alone ------------------------------------------------------------------------------------


def keeper(stages, rows):
    cut = CUTS["a layer at a time"]
    base = stream_model(deep("llama", torch.float32), BaseSpec(model="tiny"), bench.CPU, cut)
    assert stages <= LAYERS
    chosen = replace(cut, stages=cut.stages[:stages], offloaded_rows=rows)
    return OffloadedActivations(replace(base, part=chosen.for_worker(0)), WaitTime())


def test_an_input_is_off_the_device_between_its_forward_and_the_stage_behinds_backward():
    inputs = keeper(4, rows=8)
    input_TD = torch.randn(8, inputs.width)
    values, gone = input_TD.clone(), weakref.ref(input_TD)
    at = StageVisit(0, 1)
    inputs.store_input(at, input_TD)
    del input_TD
    assert torch.equal(inputs.read(at), values)
    assert gone() is not None
    inputs.end_forward(at)
    assert gone() is None
    assert rows_on_device(inputs) == 0
    inputs.prefetch_input(at)
    assert torch.equal(inputs.read(at), values)
    inputs.drop(at)
    assert rows_on_device(inputs) == 0


def test_a_round_larger_than_what_was_reserved_is_a_bug():
    inputs = keeper(3, rows=8)
    inputs.store_input(StageVisit(0, 1), torch.zeros(5, inputs.width))
    with pytest.raises(AssertionError, match="more rows than were reserved"):
        inputs.store_input(StageVisit(1, 1), torch.zeros(4, inputs.width))


def there_and_back(inputs, given, last):
    """What every visit of a round reads, in the order of the visits."""
    numbers = range(len(given[1]))
    for stage in range(last):
        for number in numbers:
            if stage:
                yield inputs.read(StageVisit(number, stage)).clone()
            inputs.store_input(StageVisit(number, stage + 1), given[stage + 1][number].clone())
            if stage:
                inputs.end_forward(StageVisit(number, stage))
    for stage in range(last, 0, -1):
        for number in numbers:
            if stage > 1:
                inputs.prefetch_input(StageVisit(number, stage - 1))
            yield inputs.read(StageVisit(number, stage)).clone()
            inputs.drop(StageVisit(number, stage))


@settings(max_examples=30, deadline=None)
@given(st.integers(3, LAYERS), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3))
def test_every_visit_reads_what_it_was_given_round_after_round(stages, rows, rounds):
    offloaded, kept = keeper(stages, sum(rows)), KeptActivations(range(stages))
    for _ in range(rounds):
        offloaded.reserve(sum(rows))
        given = {stage: [torch.randn(count, offloaded.width) for count in rows] for stage in range(1, stages)}
        pairs = zip(
            there_and_back(offloaded, given, stages - 1), there_and_back(kept, given, stages - 1), strict=True
        )
        for mine, theirs in pairs:
            assert torch.equal(mine, theirs)
            assert rows_on_device(offloaded) <= sum(rows) + max(rows)
        assert rows_on_device(offloaded) == rows_on_device(kept) == 0
