"""The mean of a job's last weights, which a sweep's rung judges: in every layout it is the plain mean of the
masters after each step, an evaluation of it is that of an adapter with those weights, and training goes on
from the master as if nothing had been shown."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests import bench
from tests.cases import slow_but
from tests.interpreter import interpret
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.processes import run_workers
from tests.run.test_streamed import CUTS as STREAMED
from tests.run.test_streamed import attach_jobs, evaluated_jobs, run, streamed, told, travelling
from tests.run.workers.test_agreed import (
    CAPACITY,
    CUTS,
    PACE,
    cut,
    make_jobs,
    on_worker,
    pipeline_program,
    whole_base,
)
from weftune.adapters.kind import JobAdapter
from weftune.base.load import inspect
from weftune.base.spec import BaseSpec
from weftune.plan.layout.stages import cut_layers
from weftune.plan.program.layout import one_device_layout, pipeline_layout
from weftune.plan.program.program import Forward
from weftune.plan.window.pipeline import PipelineOrder, PipelineRules, plan_pipeline
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Evaluated, Stepped
from weftune.run.parts import fetch_from
from weftune.run.training import checkpoint
from weftune.run.training.state import new_training
from weftune.run.workers.driver import open_pipeline
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.worker import serve
from weftune.trainer.job import collate_plan

SPANS = ((2, 3), (4, 4))
"""Of two rungs, at the steps 3 and 4."""
LAYOUTS = ("resident", "optimizer offloaded", "streamed", "streamed, adapters travel")
TIGHT = {torch.float32: 1e-6, torch.float64: 1e-14}


def averaged(jobs):
    return [replace(job, recipe=replace(job.recipe, averaged_spans=SPANS)) for job in jobs]


def executor_of(layout, dtype=torch.float64):
    if layout.startswith("streamed"):
        held = STREAMED["uneven, two stay"]
        return streamed("llama", dtype, travelling(held) if "travel" in layout else held)
    offloaded = layout == "optimizer offloaded"
    base = whole_base("llama", dtype)
    return resident_executor(base, part=one_device_layout(LAYERS, offloads_optimizer=offloaded).for_worker(0))


def plan(executor, jobs, rounds, begins=()):
    courses = [
        job.job_window(executor.attached[job.name].progress.step, rounds, job.name in begins) for job in jobs
    ]
    return plan_window(courses, executor.part.layout, CAPACITY)


def train(executor, jobs, rounds, masters):
    """A window; every job's master after each step is added to `masters`, by job and step."""
    by_name = {job.name: job for job in jobs}
    fetch = lambda plan, kind: collate_plan(plan, kind, by_name)  # noqa: E731
    for event in executor.run(plan(executor, jobs, rounds), fetch):
        if isinstance(event, Stepped):
            masters[event.job, event.step] = executor.attached[event.job].master.clone()


def plain_mean(masters, job, first, last):
    return torch.stack([masters[job, step] for step in range(first, last + 1)]).mean(0)


def assert_means(executor, jobs, masters, first, last, dtype=torch.float64):
    for job in jobs:
        training = executor.attached[job.name]
        assert training.progress.averaged == last - first + 1
        assert training.mean_weights.dtype == training.master.dtype
        want = plain_mean(masters, job.name, first, last)
        torch.testing.assert_close(training.mean_weights, want, rtol=TIGHT[dtype], atol=TIGHT[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", slow_but([torch.float64, torch.float32], [torch.float64]))
def test_the_mean_is_that_of_the_masters_of_its_steps_and_is_dropped_behind_the_last_span(layout, dtype):
    executor, masters = executor_of(layout, dtype), {}
    jobs = averaged(evaluated_jobs(executor.base)[:1])
    attach_jobs(executor, jobs)
    (job,) = jobs
    train(executor, jobs, 1, masters)
    assert executor.attached[job.name].progress.averaged == 0
    assert torch.equal(executor.attached[job.name].evaluated_weights, masters[job.name, 1]), (
        "there is nothing else yet"
    )
    train(executor, jobs, 2, masters)
    assert_means(executor, jobs, masters, 2, 3, dtype)
    assert not torch.equal(executor.attached[job.name].mean_weights, executor.attached[job.name].master)
    train(executor, jobs, 1, masters)
    assert_means(executor, jobs, masters, 4, 4, dtype)
    assert torch.equal(executor.attached[job.name].mean_weights, masters[job.name, 4])
    train(executor, jobs, 1, masters)
    training = executor.attached[job.name]
    assert (training.progress.step, training.progress.averaged, training.mean_weights) == (5, 0, None)


@pytest.mark.slow
def test_with_the_kernels_of_a_gpu_too(monkeypatch):
    """Which make the steps while the host goes on, and say later what came of them."""
    interpret(monkeypatch)
    executor, masters = executor_of("resident", torch.float32), {}
    jobs = averaged(evaluated_jobs(executor.base)[:2])
    attach_jobs(executor, jobs)
    train(executor, jobs, 3, masters)
    assert_means(executor, jobs, masters, 2, 3, torch.float32)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, ["resident", "streamed, adapters travel"]))
def test_a_mean_that_is_shown_is_evaluated_as_its_own_adapter_and_training_goes_on_from_the_master(layout):
    executor, undisturbed = executor_of(layout), executor_of(layout)
    jobs = averaged(evaluated_jobs(executor.base))
    looking = jobs[-1]
    for one in (executor, undisturbed):
        attach_jobs(one, jobs)
        run(one, plan(one, jobs, 3), jobs)
    addresses = executor.attached[looking.name].state.weights.data_ptr()
    mean = executor.attached[looking.name].mean_weights.clone()
    executor.use_mean_weights(looking.name)
    held = [replace(job, step_limit=3) if job is looking else job for job in jobs]
    events = told(run(executor, plan(executor, held, 1, begins=[looking.name]), held))
    executor.use_latest_weights(looking.name)
    (judged,) = [event for event in events if isinstance(event, Evaluated)]
    assert executor.attached[looking.name].state.weights.data_ptr() == addresses
    assert (judged.job, judged.step) == (looking.name, 3)
    assert judged.loss == evaluated(looking, mean).loss != evaluated(looking, undisturbed, 3).loss

    others = [job for job in jobs if job is not looking]
    mine = told(run(executor, plan(executor, [looking], 1), jobs))
    theirs = told(run(undisturbed, plan(undisturbed, [looking], 1), jobs))
    assert mine == theirs
    run(undisturbed, plan(undisturbed, others, 1), jobs)
    for job in jobs:
        assert torch.equal(executor.attached[job.name].master, undisturbed.attached[job.name].master), (
            job.name
        )


def evaluated(job, weights, step=3):
    """What comes of an evaluation of an adapter with these weights, or with the master of an executor."""
    base = whole_base("llama", torch.float64)
    executor = executors.executor_with(base, [job])
    master = weights if isinstance(weights, torch.Tensor) else weights.attached[job.name].master
    training = executor.attached[job.name]
    training.master.copy_(master)
    training.state.weights.copy_(master)
    training.progress.step = step
    held = replace(job, step_limit=step)
    (event,) = told(run(executor, plan(executor, [held], 1, begins=[job.name]), [held]))
    return event


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_inside_a_span_it_goes_on_to_the_same_mean(layout, tmp_path):
    executor, restored = executor_of(layout), executor_of(layout)
    (job,) = averaged(evaluated_jobs(executor.base)[:1])
    attach_jobs(executor, [job])
    run(executor, plan(executor, [job], 2), [job])
    executor.save(job.name, tmp_path)
    executor.finish_saves(job.name)
    run(executor, plan(executor, [job], 1), [job])

    training = executors.job_training(restored.base, job)
    assert checkpoint.restore(tmp_path, training)
    assert training.progress.averaged == 1
    restored.attach(training)
    run(restored, plan(restored, [job], 1), [job])
    assert torch.equal(restored.attached[job.name].mean_weights, executor.attached[job.name].mean_weights)
    assert restored.attached[job.name].progress == executor.attached[job.name].progress


def as_worker(connections, cuts):
    """Train the jobs on this worker; every job's mean as it is and as it should be, and its steps."""
    jobs = averaged(make_jobs(whole_base("llama", torch.float64)))
    base = cut("llama", torch.float64, connections.position, cuts)
    executor, _, transport = on_worker(base, connections, cuts)
    for job in jobs:
        executor.attach(executors.job_training(base, job))
    program = pipeline_program(jobs, connections.position, PipelineOrder.alternating, rounds=3)
    by_name = {job.name: job for job in jobs}
    microbatches = {
        n: collate_plan(plan, Forward, by_name)
        for n, plan in enumerate(program.microbatches)
        if plan.segments
    }
    # Other workers than the first report no step: the master is noted where a step is made.
    masters, make = {}, executor.adapters.make_step

    def made(due, sums):
        outcome = make(due, sums)
        training = due.training
        masters[training.job, training.progress.step] = training.master.clone()
        return outcome

    executor.adapters.make_step = made
    list(executor.run(program, fetch_from(program, microbatches)))
    transport.flush()
    return {
        name: (training.mean_weights, plain_mean(masters, name, 2, 3), training.progress.averaged)
        for name, training in executor.attached.items()
    }


@pytest.mark.parametrize(
    ("replicas", "cuts"), [(1, CUTS[2]), (2, [0, LAYERS])], ids=["two stages", "two replicas"]
)
def test_every_worker_keeps_the_mean_of_its_own_parameters(replicas, cuts):
    found = run_workers(2, as_worker, cuts, replicas=replicas)
    assert all(one.keys() == {"a", "b", "c"} for one in found)
    for one in found:
        for mean, want, steps in one.values():
            assert steps == 2
            torch.testing.assert_close(mean, want, rtol=1e-14, atol=1e-14)
    if replicas == 2:
        assert all(torch.equal(found[0][name][0], found[1][name][0]) for name in found[0])


def driven(connections, folder, checkpoints, until):
    """The first worker of a pipeline, and those behind it: train a job to that step from its newest
    checkpoint, if there is one, and save it there."""
    if connections.position.worker > 0:
        serve(connections, bench.CPU)
        return
    control = WorkerControl(connections)
    spec = BaseSpec(model=str(folder / "model"), dtype="float64")
    layout = pipeline_layout(cut_layers(inspect(spec, bench.CPU), connections.position.workers))
    pipeline = open_pipeline(control, spec, bench.CPU, layout, lambda job: checkpoints)
    base = pipeline.base
    (job, *_) = averaged(make_jobs(whole_base("llama", torch.float64)))
    adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    training = new_training(adapter, job.recipe, base.shape.sites, base.dtype, base.device, base.whole_sites)
    checkpoint.restore(checkpoints, training)
    pipeline.attach(training)
    while training.progress.step < until:
        rules = PipelineRules(CAPACITY, (PACE,) * connections.position.workers)
        program = plan_pipeline([job.job_window(training.progress.step, 1, False)], rules)
        fetch = lambda plan, kind: collate_plan(plan, kind, {job.name: job})  # noqa: E731
        list(pipeline.run(program, fetch, lambda: False))
    pipeline.save_now(job.name, checkpoints)
    pipeline.finish_saves(job.name)
    control.end_workers()


@pytest.mark.slow
def test_a_pipeline_that_was_stopped_inside_a_span_goes_on_to_the_same_mean(tmp_path):
    deep("llama", torch.float64).save_pretrained(tmp_path / "model")
    run_workers(2, driven, tmp_path, tmp_path / "stopped", 2)
    assert checkpoint.newest_progress(tmp_path / "stopped").averaged == 1
    run_workers(2, driven, tmp_path, tmp_path / "stopped", 3)
    run_workers(2, driven, tmp_path, tmp_path / "undisturbed", 3)
    for worker in range(2):
        found = [
            load_file(tmp_path / name / "step-00000003" / f"tensors-{worker}.safetensors")
            for name in ("stopped", "undisturbed")
        ]
        assert torch.equal(found[0]["mean"], found[1]["mean"])
        assert not torch.equal(found[0]["mean"], found[0]["master"])
