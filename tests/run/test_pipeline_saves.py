"""Checkpoints of a pipeline are whole, whichever worker comes first to writing its slice."""

import errno
import os
import time
from concurrent.futures import wait

import pytest
import torch

import weftune.run.workers.worker
from tests import bench
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import CAPACITY, PACE, whole_base
from weftune.adapters.kind import JobAdapter
from weftune.base.load import inspect
from weftune.base.spec import BaseSpec
from weftune.plan.layout.stages import cut_layers
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.run.events import Failed, SaveDue
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import write_slice
from weftune.run.training.state import new_training
from weftune.run.training.writer import Unsaved
from weftune.run.workers.driver import Driver, open_pipeline
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.worker import serve
from weftune.trainer.job import collate_plan

STEPS = 3


def windows(connections, folder, on_event):
    """Trains two jobs in windows of one step each, all saved. On the first worker, after each window: the
    newest checkpoints, and what could not be saved."""
    if connections.position.worker > 0:
        serve(connections, bench.CPU)
        return None
    control = WorkerControl(connections)
    spec = BaseSpec(model=str(folder / "model"), dtype="float64")
    layout = pipeline_layout(cut_layers(inspect(spec, bench.CPU), connections.position.workers))
    pipeline = open_pipeline(control, spec, bench.CPU, layout, lambda job: folder / job)
    jobs = [
        executors.prepare(whole_base("llama", torch.float64), name, seed=seed, steps=STEPS + 1, save_every=1)
        for seed, name in enumerate("ab", start=1)
    ]
    base = pipeline.base
    for job in jobs:
        adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed)
        made = new_training(adapter, job.recipe, base.shape.sites, base.dtype, base.device, base.whole_sites)
        pipeline.attach(made)
    by_name, seen = {job.name: job for job in jobs}, []
    for step in range(STEPS):
        courses = [job.job_window(step, 1, step == 0) for job in jobs]
        program = plan_pipeline(courses, PipelineRules(CAPACITY, (PACE,) * connections.position.workers))
        fetch = lambda plan, kind: collate_plan(plan, kind, by_name)  # noqa: E731
        for event in pipeline.run(program, fetch, lambda: False):
            assert not isinstance(event, Failed), event
            on_event(event)
            if isinstance(event, SaveDue):
                pipeline.save(event.job, folder / event.job)
        for job in jobs:
            pipeline.finish_saves(job.name)
        newest = [checkpoint.newest_progress(folder / job.name).step for job in jobs]
        seen.append((newest, pipeline.take_unsaved()))
    control.end_workers()
    return seen


def slow_leader(connections, folder):
    """The first worker takes its time after every event, so that the others have long written their slices
    when it comes to its own."""
    return windows(connections, folder, lambda event: time.sleep(0.1))


def test_a_slice_that_another_worker_wrote_first_is_not_lost(tmp_path):
    deep("llama", torch.float64).save_pretrained(tmp_path / "model")
    seen, *_ = run_workers(3, slow_leader, tmp_path)
    assert seen == [([step, step], []) for step in (1, 2, 3)]


def written_meanwhile(connections, folder):
    """The first worker's slices are the last, under way when it first looks, and written right after that."""
    looked, real = set(), Driver._commit_checkpoints

    def advance(driver):
        new = driver._pending_checkpoints.keys() - looked
        looked.update(new)
        if not new:
            real(driver)
        for key in new:
            wait([driver._pending_checkpoints[key].own_slice])
            while not driver._pending_checkpoints[key].slices:
                driver._handle_answer(*driver.control.wait())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "_commit_checkpoints", advance)
        return windows(connections, folder, lambda event: time.sleep(0.1))


def test_a_slice_that_is_written_while_the_first_worker_looks_is_not_waited_for(tmp_path):
    deep("llama", torch.float64).save_pretrained(tmp_path / "model")
    seen, *_ = run_workers(2, written_meanwhile, tmp_path)
    assert seen == [([step, step], []) for step in (1, 2, 3)]


def full_disk(folder, snapshot, worker):
    if (snapshot.job, snapshot.progress.step) == ("b", 2):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write_slice(folder, snapshot, worker)


def failing_follower(connections, folder):
    """The last worker's disk does not take one slice. What the first worker hears of it."""
    with pytest.MonkeyPatch.context() as patch:
        if connections.position.worker == 1:
            patch.setattr(weftune.run.workers.worker, "write_slice", full_disk)
        return windows(connections, folder, lambda event: None)


def test_a_slice_that_cannot_be_written_is_told_with_its_reason_and_the_one_before_stays(tmp_path):
    deep("llama", torch.float64).save_pretrained(tmp_path / "model")
    found, *_ = run_workers(2, failing_follower, tmp_path)
    unsaved = [Unsaved("b", 2, os.strerror(errno.ENOSPC))]
    assert found == [([1, 1], []), ([2, 1], unsaved), ([3, 3], [])]
