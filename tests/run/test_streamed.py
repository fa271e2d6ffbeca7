"""A base streamed from host memory trains every job to the bits that the resident base gives it."""

from functools import cache
from itertools import product

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.families import MIXTURES
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.workers.test_agreed import PACE, make_jobs, whole_base
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.errors import PlanError
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.program import Load
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.events import Evaluated, Failed, OutOfMemory, Stepped
from weftune.run.training.state import new_training
from weftune.trainer.job import collate_plan

CAPACITY = 40
CUTS = {
    "a layer at a time": Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), slot_counts=(2,)),
    "one slot": Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), slot_counts=(1,)),
    "uneven, two stay": Layout(
        (StageLayers(0, 1, True), StageLayers(1, 2), StageLayers(2, 3, True), StageLayers(3, 4)),
        slot_counts=(1,),
    ),
    "two and two": Layout((StageLayers(0, 2), StageLayers(2, 4)), slot_counts=(2,)),
    "three slots": Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), slot_counts=(3,)),
    "all stay": Layout((StageLayers(0, 2, True), StageLayers(2, 4, True))),
}


def travelling(cut):
    return Layout(cut.stages, cut.slot_counts, adapters_travel=True)


def streamed(family, dtype, cut):
    return streamed_executor(stream_model(deep(family, dtype), BaseSpec(model="tiny"), bench.CPU, cut))


def evaluated_jobs(base):
    jobs = make_jobs(base)
    looking = executors.prepare(base, "d", seed=3, steps=4, eval={"fraction": 0.3, "every": 2}, save_every=4)
    return [*jobs, looking]


def attach_jobs(executor, jobs):
    base = executor.base
    for job in jobs:
        adapter = executors.JobAdapter(job.name, job.spec.adapter, job.spec.seed)
        home = getattr(executor, "home", base.device)
        executor.attach(
            new_training(adapter, job.recipe, base.trained_sites, base.dtype, home, base.whole_sites)
        )


def run(executor, program, jobs):
    by_name = {job.name: job for job in jobs}
    fetch = lambda plan, kind: collate_plan(plan, kind, by_name)  # noqa: E731
    return list(executor.run(program, fetch, lambda: False))


def told(events):
    """What jobs hear, which must not depend on where the base is."""
    return [event for event in events if isinstance(event, Stepped | Evaluated | Failed)]


def windows(executor, jobs, plan):
    """Two windows; what was told, and the masters at the end."""
    found = []
    for begins in (True, False):
        courses = [job.job_window(executor.attached[job.name].progress.step, 2, begins) for job in jobs]
        found += told(run(executor, plan(courses), jobs))
    return found, {name: one.master.clone() for name, one in executor.attached.items()}


@cache
def resident(family, dtype):
    """Trained once for all that are compared with it."""
    base = whole_base(family, dtype)
    jobs = evaluated_jobs(base)
    executor = resident_executor(base)
    attach_jobs(executor, jobs)
    return windows(executor, jobs, lambda courses: plan_window(courses, one_device_layout(), CAPACITY))


def compare(family, dtype, cut):
    executor = streamed(family, dtype, cut)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    events, masters = windows(executor, jobs, lambda courses: plan_window(courses, cut, CAPACITY))
    wanted, wanted_masters = resident(family, dtype)
    assert len(wanted) > 8
    assert sorted(events, key=str) == sorted(wanted, key=str)
    for name, master in wanted_masters.items():
        assert torch.equal(masters[name], master), name
    assert {event.job for event in wanted if isinstance(event, Stepped)} == {job.name for job in jobs}


@pytest.mark.parametrize(
    ("name", "travels"),
    slow_but(
        product(CUTS, (False, True)),
        [("one slot", True), ("two and two", True), ("uneven, two stay", False)],
    ),
)
def test_losses_evaluations_and_adapters_have_the_bits_of_the_resident_run(name, travels):
    compare("llama", torch.float32, travelling(CUTS[name]) if travels else CUTS[name])


FAMILIES = ["qwen2", "qwen3", "mistral", "gemma3", "phi3", "opt", "gpt2", *MIXTURES]


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["gemma3"]))
def test_every_family_streams(family):
    compare(family, torch.float64, travelling(CUTS["a layer at a time"]))


def test_a_stage_that_has_left_cannot_be_used():
    executor = streamed("llama", torch.float32, CUTS["one slot"])
    executor.weights.begin_window()
    assert executor.weights.loaded_stages == {0}
    layer = executor.base.model.base_model.layers[0].self_attn.q_proj.weight
    assert bool(layer.isfinite().all())
    executor.weights.evict(0)
    assert bool(layer.isnan().all())
    with pytest.raises(AssertionError, match="was not brought"):
        executor.weights.make_readable(0)


def test_stages_that_stay_have_no_copy_in_host_memory():
    executor = streamed("llama", torch.float32, CUTS["uneven, two stay"])
    assert set(executor.weights.base.sources) == {1, 3}
    assert executor.weights.base.arena.shape[0] == 1


def test_a_nan_of_one_job_does_not_reach_the_others():
    cut = travelling(CUTS["a layer at a time"])
    executor = streamed("llama", torch.float32, cut)
    jobs = make_jobs(executor.base)
    attach_jobs(executor, jobs)
    executor.attached["b"].state.weights.fill_(float("nan"))
    executor.adapters.transfers.copy_weights_in(["b"])
    courses = [job.job_window(0, 3, False) for job in jobs]
    events = told(run(executor, plan_window(courses, cut, CAPACITY), jobs))
    assert [event.job for event in events if isinstance(event, Failed)] == ["b"]

    alone = streamed("llama", torch.float32, cut)
    others = [job for job in make_jobs(alone.base) if job.name != "b"]
    attach_jobs(alone, make_jobs(alone.base))
    alone.kill("b")
    run(alone, plan_window(courses, cut, CAPACITY), jobs)
    for job in others:
        mine, theirs = executor.attached[job.name].master, alone.attached[job.name].master
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        assert bool(mine.isfinite().all())


def test_after_a_shortage_in_the_middle_of_a_round_the_next_window_finds_everything_in_place():
    cut = travelling(CUTS["a layer at a time"])
    executor = streamed("llama", torch.float32, cut)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    courses = [job.job_window(0, 2, True) for job in jobs]
    program = plan_window(courses, cut, CAPACITY)
    passes = 0

    def short(*_):
        nonlocal passes
        passes += 1
        if passes == 9:
            raise torch.OutOfMemoryError("no more")

    hook = executor.passes.stages[2].model.base_model.register_forward_pre_hook(short)
    with pytest.raises(OutOfMemory):
        run(executor, program, jobs)
    hook.remove()
    done = {name: one.progress.step for name, one in executor.attached.items()}
    assert max(done.values()) <= 1
    for _ in range(3):
        courses = [job.job_window(executor.attached[job.name].progress.step, 2, False) for job in jobs]
        run(executor, plan_window(courses, cut, CAPACITY), jobs)
    assert {name: one.progress.step for name, one in executor.attached.items()} == {
        job.name: job.recipe.steps for job in jobs
    }


def test_one_load_of_a_stage_serves_all_jobs():
    cut = CUTS["a layer at a time"]
    loads = set()
    for count in (1, 3):
        jobs = make_jobs(whole_base("llama", torch.float32))[:count]
        program = plan_window([job.job_window(0, 2, False) for job in jobs], cut, CAPACITY)
        loads.add(sum(isinstance(action, Load) for action in program.actions))
    assert len(loads) == 1


def test_a_plan_for_several_devices_is_refused():
    executor = streamed("llama", torch.float32, CUTS["two and two"])
    jobs = make_jobs(executor.base)
    rules = PipelineRules(CAPACITY, (PACE, PACE))
    program = plan_pipeline([job.job_window(0, 2, False) for job in jobs], rules)
    with pytest.raises(PlanError, match="for 2 devices"):
        run(executor, program, jobs)
