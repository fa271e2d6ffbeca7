"""The loop at the edges: which job goes back when memory is short, which is paused, which is saved first."""

import errno
import os
import signal
import time

import pytest
import torch

from tests import bench
from tests.outputs import assert_whole, lines, states, status
from tests.trainer.sweeps.test_running import JobLimit, decided, sweep_of, sweeping, trial
from tests.trainer.test_saves import job, steps_written
from weftune import Options
from weftune.run.events import Stepped
from weftune.run.training import checkpoint
from weftune.run.training.writer import MAX_THREADS, Unsaved


def short_of_memory(base, is_short):
    """A device on which passes run out of memory while `is_short` returns True."""

    def hook(_module, _args):
        if is_short():
            raise torch.OutOfMemoryError("no room")

    base.model.base_model.register_forward_pre_hook(hook)


def test_when_memory_is_short_the_job_of_the_lowest_priority_goes_back(tmp_path, monkeypatch):
    sent_back = []

    def write(folder, snapshot, real=checkpoint.write):
        sent_back.append(folder.parent.name)
        return real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", write)
    base = bench.base()
    jobs = [job("low", 3), job("urgent", 3, priority=5), job("middle", 3, priority=1)]
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(capacity=20))
    short_of_memory(base, lambda: len(trainer.loop.executor.attached) > 1)
    results = trainer.run()
    assert sent_back == ["low", "middle", "low"], "from three jobs to one, and from the other two to one"
    assert {result.state for result in results.values()} == {"succeeded"}


def test_when_a_job_has_ended_as_many_come_aboard_again_as_memory_holds(tmp_path):
    """As long as `a` is aboard, two jobs fit."""
    base = bench.base()
    jobs = [job("a", 2), *(job(name, 6) for name in ("b", "c", "d"))]
    trainer = bench.trainer(base, tmp_path / "out", jobs, options=Options(capacity=20))
    running = []

    def is_short():
        present = trainer.loop.executor.attached
        return "a" in present and len(present) > 2

    short_of_memory(base, is_short)
    trainer.run(lambda _: running.append(frozenset(trainer.loop.executor.attached)))
    assert running[0] == {"a", "b"}
    assert frozenset("bcd") in running


@pytest.mark.parametrize(("step", "state"), [(2, "paused"), (3, "succeeded")])
def test_a_job_whose_checkpoint_is_lost_is_paused_unless_it_has_made_its_last_step(tmp_path, step, state):
    trainer = bench.trainer(bench.base(), tmp_path / "out", [job("a", 3)])

    def callback(event):
        if isinstance(event, Stepped) and event.step == step:
            trainer.loop._pause_unsaved(Unsaved("a", step - 1, "No space left on device"))

    assert trainer.run(callback)["a"].state == state
    if state == "paused":
        assert "step 1 cannot be written: No space left" in status(tmp_path / "out")["jobs"]["a"]["reason"]


def test_a_job_that_starts_from_a_folder_is_saved_before_its_first_step(tmp_path, monkeypatch):
    """The folder may be gone when the job is to resume; jobs that start anew need no checkpoint for that."""
    base = bench.base()
    bench.train(base, tmp_path / "before", [job("source", 1)])
    written = steps_written(monkeypatch)
    start = {"rank": 2, "init_from": str(tmp_path / "before" / "source")}
    bench.trainer(base, tmp_path / "out", [job("from", 10, adapter=start), job("anew", 10)]).run()
    assert written == [0]


def test_a_job_that_gives_way_has_left_when_the_other_comes_even_if_it_cannot_be_saved(tmp_path, monkeypatch):
    JobLimit(monkeypatch, 1)
    trainer, seen = bench.trainer(bench.base(), tmp_path / "out", [job("low", 9)]), []

    def unwritable(folder, snapshot):
        raise OSError(errno.ENOSPC, "No space left on device")

    def callback(event):
        if (event.job, event.step) == ("low", 2):
            monkeypatch.setattr(checkpoint, "write", unwritable)
            trainer.add(job("urgent", 1, priority=9))
        if event.job == "urgent":
            seen.append((list(trainer.loop.executor.attached), states(tmp_path / "out")["low"]))

    results = trainer.run(callback)
    assert seen == [(["urgent"], "paused")]
    assert "cannot be written: No space left on device" in results["low"].reason


def slow_disk(monkeypatch, seconds):
    """Syncing the tensors of a checkpoint takes so many seconds."""

    def fsync(handle, real=os.fsync):
        if os.readlink(f"/proc/self/fd/{handle}").endswith("tensors.safetensors"):
            time.sleep(seconds)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_job_that_is_saved_at_every_step_never_loses_two_however_slow_the_disk_is(tmp_path, monkeypatch):
    slow_disk(monkeypatch, 0.1)
    folder, seen = tmp_path / "out" / "a" / "checkpoints", []

    def callback(event):
        found = checkpoint.newest_progress(folder)
        seen.append((event.step, found.step if found else 0))

    bench.trainer(bench.base(), tmp_path / "out", [job("a", 4, save_every=1)]).run(callback)
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_a_broken_off_run_finishes_the_checkpoints_that_are_being_written_and_begins_no_other(
    tmp_path, monkeypatch
):
    slow_disk(monkeypatch, 0.4)
    names = [f"job{number}" for number in range(2 * MAX_THREADS)]
    folders = [tmp_path / "out" / name / "checkpoints" for name in names]

    def callback(event):
        if event.step == 3:
            assert not any(map(checkpoint.newest_progress, folders))
            raise KeyboardInterrupt

    trainer = bench.trainer(bench.base(), tmp_path / "out", [job(name, 9, save_every=4) for name in names])
    with pytest.raises(KeyboardInterrupt):
        trainer.run(callback)
    written = [found.step for found in map(checkpoint.newest_progress, folders) if found]
    assert 0 < len(written) <= MAX_THREADS
    assert set(written) == {2}
    assert not [path for folder in folders for path in folder.glob("*.partial")]


def test_an_interrupted_run_saves_every_job_and_says_how_to_go_on(tmp_path):
    base, output = bench.base(), tmp_path / "out"
    jobs = [job("a", 6), job("b", 6)]

    def callback(event):
        if (event.job, event.step) == ("b", 2):
            signal.raise_signal(signal.SIGINT)

    bench.trainer(base, output, jobs).run(callback)
    for found in status(output)["jobs"].values():
        assert found["state"] == "paused"
        assert found["reason"].startswith(f"interrupted at step {found['step']};")
        assert "Options(resume=True)" in found["reason"]
    for one in jobs:
        saved = checkpoint.newest_progress(output / one.name / "checkpoints")
        assert saved.step == status(output)["jobs"][one.name]["step"] >= 2
    bench.train(base, output, jobs, resume=True)
    assert_whole(output)


def test_a_job_that_starts_from_another_comes_aboard_when_that_has_succeeded(tmp_path):
    jobs = [job("b", 2, adapter={"rank": 2, "init_from": {"job": "a"}}), job("a", 2)]
    bench.trainer(bench.base(), tmp_path / "out", jobs).run()
    assert states(tmp_path / "out") == {"b": "succeeded", "a": "succeeded"}
    assert [line["job"] for line in lines(tmp_path / "out")] == ["a", "a", "b", "b"]


def test_the_loss_of_the_base_is_on_disk_before_a_job_that_starts_elsewhere_makes_a_step(tmp_path):
    base, output = bench.base(), tmp_path / "out"
    bench.train(base, tmp_path / "before", [job("source", 3, learning_rate=0.1)])
    start = {"rank": 2, "init_from": str(tmp_path / "before" / "source")}
    held_out, seen = {"eval": {"fraction": 0.3, "every": 2}}, []
    jobs = [job("from", 2, adapter=start, **held_out), job("too", 2, adapter=start, **held_out)]

    def callback(event):
        seen.append([found["base_loss"] for found in status(output)["jobs"].values()])

    bench.trainer(base, output, jobs).run(callback)
    bench.train(base, tmp_path / "anew", [job("anew", 1, **held_out)])
    wanted = status(tmp_path / "anew")["jobs"]["anew"]["base_loss"]
    assert seen[0] == [pytest.approx(wanted, rel=1e-9)] * 2
    first = {line["job"]: line["eval_loss"] for line in lines(output) if line.get("eval_loss")}
    assert first["from"] != pytest.approx(wanted, rel=1e-3), "it does not start as the base"


def test_trials_stop_at_their_rung_until_their_sweep_has_decided(tmp_path):
    jobs = [trial(rate, steps=4) for rate in (1e-2, 1e-4)]
    trainer = sweeping(bench.base("opt"), tmp_path / "out", jobs, sweep_of(jobs, at=(0.5,), keep=1))
    trainer.run()
    ((step, kept, left),) = decided(tmp_path / "out")
    assert (step, len(kept), len(left)) == (2, 1, 1)
    assert states(tmp_path / "out") == {kept[0]: "succeeded", left[0]: "cancelled"}
    stepped = [line["step"] for line in lines(tmp_path / "out") if line["job"] == left[0] and "loss" in line]
    assert stepped == [1, 2]
