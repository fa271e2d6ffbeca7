"""Steps that the host makes while the next round is under way: no pass overtakes them or waits for more than
it needs."""

import math
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from tests import bench
from tests.run import aboard
from tests.run.models import LAYERS, deep
from tests.run.test_stage_executor import make_jobs
from tests.run.test_stream_executor import (
    CAPACITY,
    CUTS,
    evaluated_jobs,
    resident,
    run,
    take_aboard,
    told,
    travelling,
    windows,
)
from weft.base.spec import BaseSpec
from weft.base.streamed import stream_model
from weft.plan.program import Backward, Step
from weft.plan.stream_cut import StreamCut
from weft.plan.stream_step import StreamStage
from weft.plan.stream_window import plan_streamed
from weft.run.events import Evaluated, Failed, OutOfMemory, Stepped, StepsMade
from weft.run.host_steps import HostSteps
from weft.run.steps import make_updates
from weft.run.stream_executor import StreamExecutor

ENOUGH = 20.0
"""Seconds in which whatever should come to pass does."""
BEAT = 0.04
"""Seconds that a slowed pass over a stage and a slowed part of a Step take."""


def one_job(base, steps=4):
    """A microbatch a round, with parameters in every stage."""
    return aboard.ready(base, "a", steps=steps, batch_size=1, adapter={"rank": 4, "targets": "all-linear"})


def executor_of(cut, make):
    model = deep("llama", torch.float32)
    base = stream_model(model, BaseSpec(model="tiny"), bench.CPU, travelling(cut))
    return StreamExecutor(base, host=HostSteps(make))


@contextmanager
def before_passes(executor, do):
    """`do(stage)` before every pass over a stage."""
    layers = executor.base.model.base_model.layers
    hooks = [
        layers[held.start].register_forward_pre_hook(lambda *_, stage=stage: do(stage))
        for stage, held in enumerate(executor.streamed.cut.stages)
    ]
    yield
    for hook in hooks:
        hook.remove()


def plan(executor, jobs, rounds, begins=False):
    courses = [job.course(executor.aboard[job.name].progress.step, rounds, begins) for job in jobs]
    return plan_streamed(courses, executor.streamed.cut, CAPACITY)


@pytest.fixture(scope="module")
def wanted():
    return resident("llama", torch.float32)


ALL_CUTS = CUTS | {"in one piece": StreamCut((StreamStage(0, LAYERS, True),), slots=0)}


@pytest.mark.parametrize("cut", ALL_CUTS.values(), ids=ALL_CUTS.keys())
def test_no_pass_reads_and_no_copy_takes_weights_whose_step_is_not_finished(cut, wanted):
    def lingering(updates):
        for update in updates:
            update.state.weights.fill_(math.nan)
        time.sleep(0.003)
        return make_updates(updates)

    executor = executor_of(cut, lingering)
    jobs = evaluated_jobs(executor.base)
    take_aboard(executor, jobs)
    cut = executor.streamed.cut
    events, masters = windows(executor, jobs, lambda courses: plan_streamed(courses, cut, CAPACITY))
    assert sorted(events, key=str) == sorted(wanted[0], key=str)
    for name, master in wanted[1].items():
        assert torch.equal(masters[name], master), name


@pytest.mark.parametrize("name", ["a layer at a time", "one slot", "uneven, two stay", "three slots"])
def test_the_forward_goes_on_while_a_later_stages_part_is_still_being_made(name):
    """The last stage's part waits for a pass over the stage before, which a run that waited for whole Steps
    would never come to."""
    arrived, made = threading.Event(), []

    def holding(updates):
        if len(made) % LAYERS == LAYERS - 1:
            assert arrived.wait(ENOUGH), "nobody got as far as the stage before the last"
        made.append(len(updates))
        return make_updates(updates)

    def note(stage):
        passes.append((stage, len(made)))
        if stage == LAYERS - 2 and len(made) % LAYERS == LAYERS - 1:
            arrived.set()

    executor, passes = executor_of(CUTS[name], holding), []
    job = one_job(executor.base)
    take_aboard(executor, [job])
    with before_passes(executor, note):
        events = run(executor, plan(executor, [job], 2), [job])
    assert len(told(events)) == 2
    second = passes[len(passes) // 2 :][:LAYERS]
    assert [stage for stage, _ in second] == list(range(LAYERS))
    assert all(parts >= stage + 1 for stage, parts in second)
    assert second[-2][1] == LAYERS - 1


@pytest.mark.timed
def test_a_round_takes_its_passes_and_the_first_part_not_its_passes_and_its_steps():
    """Four rounds of seven passes and, behind each, four parts, which all take as long."""
    made = []

    def slowed(updates):
        time.sleep(BEAT)
        made.append(len(updates))
        return make_updates(updates)

    executor = executor_of(CUTS["a layer at a time"], slowed)
    job = one_job(executor.base)
    take_aboard(executor, [job])
    began = time.perf_counter()
    with before_passes(executor, lambda stage: time.sleep(BEAT)):
        events = run(executor, plan(executor, [job], 4), [job])
    seconds = time.perf_counter() - began
    rounds, passes, parts = 4, 2 * LAYERS - 1, LAYERS
    assert len(made) == rounds * parts
    # The last round has no forward behind it: its Steps are waited for.
    behind = (rounds - 1) + parts
    assert rounds * passes * BEAT <= seconds
    assert behind / 2 * BEAT < executor.streamer.waited.seconds < (behind + rounds * parts) / 2 * BEAT
    # What is reported of Steps is what they kept the device waiting: the first part, and at the end all four.
    *inner, final = (event.time.seconds for event in events if isinstance(event, StepsMade))
    assert len(inner) == rounds - 2
    assert max(inner) < (1 + parts) / 2 * BEAT < final


def test_passes_do_not_wait_for_steps_of_jobs_that_they_do_not_hold():
    """Behind the Steps of the first microbatch the second goes back through the first stage."""
    arrived = threading.Event()

    def holding(updates):
        assert arrived.wait(ENOUGH), "the second microbatch waited for the first one's Steps"
        return make_updates(updates)

    executor = executor_of(CUTS["two and two"], holding)
    jobs = [aboard.ready(executor.base, name, seed=seed, batch_size=2) for seed, name in enumerate("ab")]
    take_aboard(executor, jobs)
    program = plan_streamed([job.course(0, 1, False) for job in jobs], executor.streamed.cut, capacity=24)
    kinds = [type(action) for action in program.actions]
    assert kinds.index(Step) < len(kinds) - 1 - kinds[::-1].index(Backward)
    passes = []

    def note(stage):
        passes.append(stage)
        if len(passes) == 3 * len(program.microbatches):
            arrived.set()

    with before_passes(executor, note):
        assert len(told(run(executor, program, jobs))) == 2


def test_a_job_that_steps_to_weights_that_are_not_finite_fails_alone():
    cut = CUTS["a layer at a time"]

    def spoiling(updates):
        for update in updates:
            if update.step == 2 and update.state.master.untyped_storage().data_ptr() == spoilt:
                update.state.gradient.fill_(math.inf)
        return make_updates(updates)

    executor, alone = executor_of(cut, spoiling), executor_of(cut, make_updates)
    for each in (executor, alone):
        take_aboard(each, make_jobs(each.base))
    jobs = make_jobs(executor.base)
    spoilt = executor.aboard["a"].master.untyped_storage().data_ptr()
    events = told(run(executor, plan(executor, jobs, 4), jobs))
    failed = [event for event in events if isinstance(event, Failed)]
    assert failed == [Failed("a", "its weights after step 2 are not finite")]
    assert [event.step for event in events if isinstance(event, Stepped) and event.job == "a"] == [1]
    others = [job for job in jobs if job.name != "a"]
    run(alone, plan(alone, others, 4), others)
    for job in others:
        mine, theirs = executor.aboard[job.name].master, alone.aboard[job.name].master
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        assert bool(mine.isfinite().all())
        assert executor.aboard[job.name].progress.step == job.recipe.steps


def test_a_job_that_fails_in_its_step_is_not_evaluated_after_it():
    executor = executor_of(
        CUTS["a layer at a time"], lambda updates: ["its weights are spoilt"] * len(updates)
    )
    (*_, looking) = evaluated_jobs(executor.base)
    take_aboard(executor, [looking])
    events = told(run(executor, plan(executor, [looking], 2), [looking]))
    assert events == [Failed("d", "its weights are spoilt")]


def test_a_mistake_of_the_thread_ends_the_run_with_it():
    def broken(updates):
        raise ArithmeticError("a mistake")

    executor = executor_of(CUTS["two and two"], broken)
    job = one_job(executor.base)
    take_aboard(executor, [job])
    with pytest.raises(ArithmeticError, match="a mistake"):
        run(executor, plan(executor, [job], 2), [job])


def test_a_job_can_be_killed_and_leave_while_its_step_is_being_made():
    """The job's weights are zeroed when nobody writes them any longer."""

    def slowed(updates):
        time.sleep(BEAT)
        return make_updates(updates)

    executor = executor_of(CUTS["a layer at a time"], slowed)
    jobs = [aboard.ready(executor.base, name, seed=seed) for seed, name in enumerate("ab")]
    take_aboard(executor, jobs)
    killed = False

    def kill(stage):
        nonlocal killed
        if executor.host.unfinished("a", LAYERS - 1) and not killed:
            killed = True
            executor.kill("a")
            assert not executor.host.unfinished("a", LAYERS - 1)

    with before_passes(executor, kill):
        events = told(run(executor, plan(executor, jobs, 3), jobs))
    assert killed
    assert not executor.aboard["a"].state.weights.any()
    assert {event.job for event in events} == {"b"}
    assert executor.detach("a").job == "a"
    assert executor.aboard["b"].progress.step == 3


def test_after_a_shortage_steps_under_way_are_made_and_reported():
    def slowed(updates):
        time.sleep(BEAT / 4)
        return make_updates(updates)

    executor = executor_of(CUTS["one slot"], slowed)
    jobs = evaluated_jobs(executor.base)
    take_aboard(executor, jobs)
    short = True

    def fail(stage):
        if short and stage == 1 and executor.host.unfinished("a", LAYERS - 1):
            raise torch.OutOfMemoryError("no more")

    events = []
    with before_passes(executor, fail):
        by_name = {job.name: job for job in jobs}
        found = aboard.events(executor, plan(executor, jobs, 2, begins=True), list(by_name.values()))
        with pytest.raises(OutOfMemory):
            events += found
        short = False
        assert {event.step for event in events if isinstance(event, Stepped)} <= {0, 1}
        while any(executor.aboard[job.name].progress.step < job.recipe.steps for job in jobs):
            events += run(executor, plan(executor, jobs, 2), jobs)
    steps = {
        job.name: [e.step for e in events if isinstance(e, Stepped) and e.job == job.name] for job in jobs
    }
    assert steps == {job.name: list(range(1, job.recipe.steps + 1)) for job in jobs}
    assert any(isinstance(event, Evaluated) for event in events)
