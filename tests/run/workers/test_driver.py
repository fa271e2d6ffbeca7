"""The first worker of a pipeline: what it makes of the others' reports, and a run that it drives."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import weftune.core.interrupt
import weftune.run.workers.driver
import weftune.run.workers.worker
from tests import bench
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import CAPACITY, PACE, whole_base
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import get_kind
from weftune.base.load import inspect
from weftune.base.spec import BaseSpec
from weftune.errors import UserError
from weftune.plan.layout.stages import cut_layers
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import Backward, Evaluate, Forward, Step
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.run.events import Evaluated, SaveDue, Stepped
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import finish, write_slice
from weftune.run.training.state import new_training
from weftune.run.training.writer import Unsaved
from weftune.run.workers.agreed import TimedAction, WorkerReport
from weftune.run.workers.driver import microbatch_seconds, open_pipeline
from weftune.run.workers.messages import WorkerControl
from weftune.run.workers.worker import serve
from weftune.trainer.job import collate_plan

STUCK = 60
"""Seconds after which a worker that waits in vain is killed, so that the test fails."""


def test_a_microbatch_takes_the_mean_of_what_its_passes_take_on_the_workers():
    """So that the times of all microbatches add up to that of the window and not to a multiple of it."""
    first = [
        TimedAction(Forward(0), 0.0, 2.0),
        TimedAction(Backward(0), 2.0, 5.0),
        TimedAction(Evaluate(1), 5.0, 6.0),
        TimedAction(Step("a", 1), 6.0, 9.0),
    ]
    second = [TimedAction(Forward(0, stage=1), 2.0, 6.0), TimedAction(Forward(2, stage=1), 6.0, 7.0)]
    reports = [WorkerReport(times=first), WorkerReport(times=second)]
    assert microbatch_seconds(reports, Forward | Evaluate) == {0: 3.0, 1: 0.5, 2: 0.5}
    assert microbatch_seconds(reports, Backward) == {0: 1.5}


# -- a pipeline of two workers --------------------------------------------------------------------------


@dataclass
class Life:
    """What the first worker saw of two jobs, `a` which keeps its best weights and `b` which does not."""

    device: str = ""
    fused: Any = None
    captures: Any = 0
    evaluated: dict[str, int] = field(default_factory=dict)
    best_is_master: dict[str, bool] = field(default_factory=dict)
    unsaved: list[Unsaved] = field(default_factory=list)
    after_failure: tuple[int, int] = (0, 0)
    second_life: tuple[int, int] = (0, 0)
    saved_once: bool = False
    left_early: list[int] = field(default_factory=list)
    went_on: list[int] = field(default_factory=list)
    written_at_the_end: int = 0
    partial: list[str] = field(default_factory=list)
    whole: dict[str, bool] = field(default_factory=dict)
    best: dict[str, bool] = field(default_factory=dict)
    threads: tuple[int, int] = (0, 0)


class Pipeline:
    """The first worker's side, with jobs to train."""

    def __init__(self, connections, control, folder):
        self.folder = folder
        spec = BaseSpec(model=str(folder / "model"), dtype="float64")
        layout = pipeline_layout(cut_layers(inspect(spec, bench.CPU), connections.position.workers))
        self.driver = open_pipeline(control, spec, bench.CPU, layout, lambda job: folder / job)
        self.rules = PipelineRules(CAPACITY, (PACE,) * connections.position.workers)
        keys = {"steps": 9, "save_every": 1, "eval": {"fraction": 0.3, "every": 1}}
        whole = whole_base("llama", torch.float64)
        jobs = [executors.prepare(whole, name, seed=seed, **keys) for seed, name in enumerate("ab", start=1)]
        self.jobs = {job.name: job for job in jobs}

    def attach(self, name):
        base, job = self.driver.base, self.jobs[name]
        adapter = JobAdapter(name, job.spec.adapter, job.spec.seed)
        made = new_training(adapter, job.recipe, base.shape.sites, base.dtype, base.device, base.whole_sites)
        checkpoint.restore(self.folder / name, made)
        self.driver.attach(made)

    def window(self, names="ab", stop=lambda: False):
        """One step of each job, evaluated and saved; the steps that were made."""
        steps = self.steps(names)
        program = plan_pipeline(
            [self.jobs[name].job_window(step, 1, False) for name, step in zip(names, steps, strict=True)],
            self.rules,
        )
        fetch = lambda plan, kind: collate_plan(plan, kind, self.jobs)  # noqa: E731
        made = []
        for event in self.driver.run(program, fetch, stop):
            if isinstance(event, SaveDue):
                self.driver.save(event.job, self.folder / event.job)
            elif isinstance(event, Evaluated):
                self.driver.record_evaluation(event.job, event.loss, event.job == "a", 0.0)
            elif isinstance(event, Stepped):
                made.append(event.step)
        return made

    def steps(self, names="ab"):
        return [self.driver.attached[name].progress.step for name in names]

    def saved(self, name):
        """The step of the newest checkpoint, which must be intact, and how many are not."""
        found = checkpoint.survey(self.folder / name)
        return found.progress.step, len(found.damaged_paths)

    def finish(self, names="ab"):
        for name in names:
            self.driver.finish_saves(name)


def lived(connections, folder):
    signal.alarm(STUCK)
    with pytest.MonkeyPatch.context() as patch:
        if connections.position.worker > 0:
            patch.setattr(weftune.run.workers.worker, "write_slice", slow_slice)
            serve(connections, bench.CPU)
            return None
        return first_worker(connections, folder, patch)


def slow_slice(folder, snapshot, worker):
    """The second worker's disk takes its time with one slice."""
    if (snapshot.job, snapshot.progress.step) == ("b", 2):
        time.sleep(0.3)
    return write_slice(folder, snapshot, worker)


def full_disk(folder, snapshot, worker):
    """The first worker's disk has no room for a slice of `b`."""
    if snapshot.job == "b":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write_slice(folder, snapshot, worker)


def first_worker(connections, folder, patch):
    seen, control = Life(), WorkerControl(connections)
    pipeline = Pipeline(connections, control, folder)
    driver = pipeline.driver
    seen.device, seen.fused, seen.captures = driver.home.type, driver.is_fused, driver.captures
    for name in "ab":
        pipeline.attach(name)
    pipeline.window()
    pipeline.finish()
    for name in "ab":
        (path,) = (folder / name).glob("step-*")
        seen.evaluated[name] = checkpoint.newest_progress(folder / name).evaluated
        seen.best_is_master[name] = json.loads((path / "state.json").read_text())["best_is_master"]

    with patch.context() as full:
        full.setattr(weftune.run.workers.driver, "write_slice", full_disk)
        pipeline.window()
        pipeline.finish()
    seen.unsaved = driver.take_unsaved()
    seen.after_failure = tuple(pipeline.saved(name)[0] for name in "ab")

    driver.detach("b")
    pipeline.attach("b")
    pipeline.window("b")
    pipeline.finish("b")
    seen.second_life = pipeline.saved("b")

    (folder / "a" / "step-00000002").rename(folder / "aside")
    numbers = []
    for _ in range(2):
        driver.save_now("a", folder / "a")
        pipeline.finish("a")
        numbers.append((folder / "a" / "step-00000002").stat().st_ino)
    seen.saved_once = numbers[0] == numbers[1]

    with patch.context() as hurried:
        hurried.setattr(weftune.core.interrupt, "FINISH_SECONDS", -1.0)
        seen.left_early = [*pipeline.window(stop=lambda: True), *pipeline.steps()]

    began = threading.Event()

    def slow_finish(*arguments):
        began.set()
        time.sleep(0.3)
        return finish(*arguments)

    patch.setattr(weftune.run.workers.driver, "finish", slow_finish)
    seen.went_on = pipeline.window()
    while not began.is_set():
        driver.take_unsaved()
        time.sleep(0.01)
    (folder / "a" / ".step-00000009.partial").mkdir()
    for name in "ab":
        detached = driver.detach(name)
        layout = get_kind("lora").layout(detached.adapter.spec, driver.base.whole_sites)
        seen.whole[name] = detached.layout == layout and len(detached.master) == layout.size
        seen.best[name] = detached.best_weights is not None
    seen.written_at_the_end = pipeline.saved("a")[0]
    seen.partial = [path.name for path in folder.glob("*/.*.partial")]

    before = senders()
    driver.restore_base()
    seen.threads = before, senders()
    control.end_workers()
    return seen


def senders():
    return sum(thread.name.startswith("to worker") for thread in threading.enumerate())


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("driven")
    deep("llama", torch.float64).save_pretrained(folder / "model")
    found, _ = run_workers(2, lived, folder)
    return found


def test_it_says_of_itself_what_an_executor_says(life):
    assert (life.device, life.fused, life.captures) == ("cpu", False, None)


def test_a_checkpoint_holds_the_evaluation_of_its_step_and_whether_its_weights_are_the_best(life):
    assert life.evaluated == {"a": 1, "b": 1}
    assert life.best_is_master == {"a": True, "b": False}


def test_a_slice_that_the_first_worker_cannot_write_is_told_and_the_one_before_stays(life):
    assert life.unsaved == [Unsaved("b", 2, os.strerror(errno.ENOSPC))]
    assert life.after_failure == (2, 1)


def test_a_slice_from_before_a_job_left_is_not_taken_for_one_of_its_next_life(life):
    assert life.second_life == (2, 0)


def test_what_is_saved_between_windows_is_not_saved_again(life):
    assert life.saved_once


def test_a_window_that_is_to_end_at_once_drops_its_open_batches_and_the_next_makes_them_again(life):
    assert life.left_early == [2, 2], "no step was made"
    assert life.went_on == [3, 3]


def test_a_job_is_handed_over_whole_when_its_last_checkpoint_is_in_place(life):
    assert life.whole == {"a": True, "b": True}
    assert life.best == {"a": True, "b": False}
    assert life.written_at_the_end == 3
    assert life.partial == []


def test_its_threads_end_with_it(life):
    before, after = life.threads
    assert before > after == 0


def failed_captures(connections, folder):
    """The second worker finds no model where it looks."""
    signal.alarm(STUCK)
    if connections.position.worker > 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weftune.run.workers.worker, "load_part", no_model)
            serve(connections, bench.CPU)
        return None
    control = WorkerControl(connections)
    with pytest.raises(UserError) as error:
        Pipeline(connections, control, folder)
    control.end_workers()
    return str(error.value)


def no_model(*_: Any) -> None:
    raise UserError("there is no model here")


def test_a_mistake_that_only_another_worker_sees_is_told_by_the_first(tmp_path: Path) -> None:
    deep("llama", torch.float64).save_pretrained(tmp_path / "model")
    told, _ = run_workers(2, failed_captures, tmp_path)
    assert told == "worker 1: there is no model here"
