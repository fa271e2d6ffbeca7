"""A worker without room computes nothing more in a window; all come to its end, and Steps that were made are
made everywhere."""

import random

import numpy as np
import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import (
    CAPACITY,
    CUTS,
    PACE,
    STEPS,
    alone,
    assert_equal,
    cut,
    losses_of,
    make_jobs,
    on_worker,
    ranges,
    views,
    whole_base,
)
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout
from weftune.plan.program.program import Forward
from weftune.plan.window.window import Pacing, plan_window
from weftune.run.parts import fetch_from
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import worker_executor
from weftune.trainer.job import collate_plan

PIPELINE = pipeline_layout(ranges(CUTS[2]))
STREAMED = Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), (1, 1))
REPLICAS = pipeline_layout(ranges([0, LAYERS]), replicas=2)


def opened(connections, layout):
    """This worker's executor, its side of the agreement, and what it is connected by."""
    if layout.is_pipeline:
        cuts = [0, *(stage.stop for stage in layout.stages)]
        return on_worker(cut("llama", torch.float64, connections.position, cuts), connections, cuts)
    part = layout.for_worker(connections.position.worker)
    streamed = stream_model(
        deep("llama", torch.float64), BaseSpec(model="tiny"), bench.CPU, layout, part.worker
    )
    transport = Transport(connections, streamed.whole.shape.hidden, torch.float64, bench.CPU)
    return *worker_executor(streamed, part, transport, connections.position.worker), transport


def as_worker(connections, layout, short, at):
    """Train all jobs to their ends; the worker `short` has no memory for its pass number `at`."""
    executor, agreed, transport = opened(connections, layout)
    jobs = make_jobs(whole_base("llama", torch.float64))
    for job in jobs:
        executor.attach(executors.job_training(executor.base, job))
    passes = 0

    def strike(*_):
        nonlocal passes
        passes += 1
        if connections.position.worker == short and passes == at:
            raise torch.OutOfMemoryError("no more")

    executor.base.model.base_model.register_forward_pre_hook(strike)
    pacing = Pacing((PACE,) * len(layout.stages)) if layout.is_pipeline else None
    by_name = {job.name: job for job in jobs}
    events, shortages, steps = [], [], []
    for _ in range(6):
        courses = [job.job_window(executor.attached[job.name].progress.step, 2, False) for job in jobs]
        program = plan_window(courses, layout, CAPACITY, pacing=pacing)
        laid = {
            action.microbatch: collate_plan(plan, Forward, by_name)
            for action, plan in program.replica_passes(connections.position.replica)
        }
        events += executor.run(program, fetch_from(program, laid))
        transport.flush()
        shortages.append(agreed.report.shortage)
        steps.append({name: one.progress.step for name, one in executor.attached.items()})
        assert executors.is_empty(executor.activations)
        assert all(one.open_batch is None and not one.gradient.any() for one in executor.attached.values())
    return events, views(executor.attached), shortages, steps


@pytest.mark.parametrize(
    ("layout", "short", "at"),
    slow_but(
        [
            (PIPELINE, 0, 1),
            (PIPELINE, 1, 4),
            (PIPELINE, 0, 9),
            (STREAMED, 1, 1),
            (STREAMED, 0, 11),
            (REPLICAS, 1, 2),
        ],
        [(PIPELINE, 1, 4), (STREAMED, 0, 11), (REPLICAS, 1, 2)],
    ),
)
def test_the_window_ends_short_everywhere_and_jobs_end_as_if_nothing_had_been(layout, short, at):
    answers = run_workers(
        2, as_worker, layout, short, at, replicas=layout.replicas, ring=not layout.is_pipeline
    )
    for worker, (_, _, shortages, _) in enumerate(answers):
        told = [sentence for sentence in shortages if sentence]
        assert told == ([f"worker {short}: no more"] if worker == short else [])
    assert answers[0][3] == answers[1][3], "workers disagree on which Steps were made"
    assert answers[0][3][-1] == STEPS
    weights = {key: value for _, slices, *_ in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), alone("llama", torch.float64), 1e-9, 1e-8)


def kto_job(base):
    """A job whose losses need the scores of mismatched samples, with made-up reference scores."""
    draw = random.Random(5)

    def text(count):
        return " ".join(f"w{draw.randrange(6, 40)}" for _ in range(count))

    rows = [{"prompt": text(4), "completion": f" {text(1 + n % 4)}", "label": n % 3 > 0} for n in range(12)]
    keys = {"objective": {"kind": "kto", "beta": 0.5}, "data": rows, "batch_size": 4, "steps": 4}
    job = executors.prepare(base, "kto", **keys)
    count = sum(map(len, job.reference_data.parts))
    return job.with_references(np.linspace(-30.0, -10.0, count))


def run_windows(executor, job, layout, replica, windows):
    """Run windows of at most two batches from the job's current step; yield the events of each."""
    pacing = Pacing((PACE,) * len(layout.stages)) if layout.is_pipeline else None
    for _ in range(windows):
        course = job.job_window(executor.attached["kto"].progress.step, 2, False)
        program = plan_window([course], layout, CAPACITY, pacing=pacing)
        kinds = program.pass_kinds()
        laid = {
            action.microbatch: collate_plan(plan, kinds[action.microbatch], {"kto": job})
            for action, plan in program.replica_passes(replica)
        }
        yield list(executor.run(program, fetch_from(program, laid)))


def as_replica(connections, short):
    """Train on this replica; the worker `short` has no memory for its first pass, which scores samples."""
    executor, agreed, transport = opened(connections, REPLICAS)
    job = kto_job(whole_base("llama", torch.float64))
    executor.attach(executors.job_training(executor.base, job))
    passes = 0

    def strike(*_):
        nonlocal passes
        passes += 1
        if connections.position.worker == short and passes == 1:
            raise torch.OutOfMemoryError("no more")

    executor.base.model.base_model.register_forward_pre_hook(strike)
    events, shortages, steps = [], [], []
    for found in run_windows(executor, job, REPLICAS, connections.position.replica, 3):
        transport.flush()
        events += found
        shortages.append(agreed.report.shortage)
        steps.append(executor.attached["kto"].progress.step)
    return events, views(executor.attached), shortages, steps


@pytest.mark.parametrize("short", slow_but([0, 1], [1]))
def test_no_step_is_made_without_the_scores_of_a_replica_that_fell_short(short):
    answers = run_workers(2, as_replica, short, replicas=2)
    for worker, (_, _, shortages, steps) in enumerate(answers):
        reason = "no more" if worker == short else "another replica could not score the samples of kto"
        assert shortages == [f"worker {worker}: {reason}", "", ""]
        assert steps == [0, 2, 4]
    base = whole_base("llama", torch.float64)
    made, job = executors.executor_with(base, []), kto_job(base)
    made.attach(executors.job_training(base, job))
    events = [event for found in run_windows(made, job, one_device_layout(), 0, 2) for event in found]
    starts = views({"kto": executors.job_training(base, job)})
    wanted = losses_of(events), views(made.attached), starts
    assert_equal((losses_of(answers[0][0]), answers[0][1]), wanted, 1e-9, 1e-8)
