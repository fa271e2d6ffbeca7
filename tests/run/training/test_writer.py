"""What is written beside the training: in order, bounded in memory, and never lost without a word."""

import errno
import os
import signal
import threading
from concurrent.futures import Future

import pytest
import torch

from tests import bench
from tests.faults import Disk
from tests.run import executors
from tests.run.training.test_checkpoint import advance, same
from weftune.run.training import checkpoint
from weftune.run.training import snapshot as snapshot_module
from weftune.run.training.snapshot import Snapshots, snapshot_bytes
from weftune.run.training.writer import Unsaved, Writer

SOON = 30.0


@pytest.fixture(scope="module")
def fresh():
    base = bench.base()
    job = executors.prepare(base, "a")
    return lambda: executors.job_training(base, job)


@pytest.fixture
def writer():
    made = Writer(bench.CPU, threads=1)
    yield made
    made.close()


def save(writer, folder, training):
    writer.save(folder, writer.snapshots.take_snapshot(training))


def test_a_checkpoint_holds_the_state_of_its_snapshot_whatever_is_trained_meanwhile(tmp_path, writer, fresh):
    training, want, restored = fresh(), fresh(), fresh()
    for one in (training, want):
        advance(one, 2)
        one.record_evaluation(2.0, keep_best=True, min_delta=0.0)
    goes_on = threading.Event()
    writer.run("a", lambda: goes_on.wait(SOON))
    save(writer, tmp_path, training)
    advance(training, 3)
    training.record_evaluation(1.0, keep_best=True, min_delta=0.0)
    assert checkpoint.newest_progress(tmp_path) is None
    goes_on.set()
    writer.wait("a")
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, want)
    assert writer.take_unsaved() == []


def test_a_jobs_checkpoints_are_written_in_the_order_of_its_steps(tmp_path, writer, fresh):
    training = fresh()
    with Disk(tmp_path).watched() as disk:
        for _ in range(4):
            advance(training)
            save(writer, tmp_path, training)
        writer.wait("a")
    assert [path for what, path in disk.calls if what == "rename"] == [
        f".step-{step:08d}.partial" for step in range(1, 5)
    ]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000004"]


def test_small_files_of_different_jobs_are_written_side_by_side():
    """Most of that is waiting for the disk, however few cores there are."""
    several = Writer(bench.CPU)
    meets = threading.Barrier(2)
    for job in ("a", "b"):
        several.run(job, lambda: meets.wait(SOON))
    several.wait("a")
    several.wait("b")
    several.close()
    assert not meets.broken


def test_a_disk_that_fails_is_told_with_job_step_and_reason_and_once(tmp_path, writer, fresh):
    training = fresh()
    advance(training, 2)
    with Disk(tmp_path, lambda number: number == 4, errno.ENOSPC).watched():
        save(writer, tmp_path, training)
        writer.wait("a")
    assert writer.take_unsaved() == [Unsaved("a", 2, os.strerror(errno.ENOSPC))]
    assert writer.take_unsaved() == []
    save(writer, tmp_path, training)
    writer.wait("a")
    assert writer.take_unsaved() == []
    assert checkpoint.newest_progress(tmp_path) == training.progress


def test_however_many_saves_are_under_way_asking_for_failed_ones_goes_through_none_of_them(
    tmp_path, writer, fresh, monkeypatch
):
    training, goes_on, asked = fresh(), threading.Event(), []
    advance(training)
    writer.run("other", lambda: goes_on.wait(SOON))
    for at in range(20):
        save(writer, tmp_path / str(at), training)
    monkeypatch.setattr(Future, "done", lambda future: asked.append(future))
    assert writer.take_unsaved() == []
    assert asked == []
    monkeypatch.undo()
    goes_on.set()
    writer.wait("a")


def test_a_bug_in_the_thread_is_raised_where_it_is_asked(tmp_path, writer, fresh, monkeypatch):
    def broken(path, tensors):
        raise ValueError("a bug")

    monkeypatch.setattr(checkpoint, "write_hashed_tensors", broken)
    save(writer, tmp_path, fresh())
    writer.wait("a")
    with pytest.raises(ValueError, match="a bug"):
        writer.take_unsaved()


def test_what_has_not_begun_can_be_forgotten_and_its_memory_comes_back(tmp_path, fresh):
    training = fresh()
    writer = Writer(bench.CPU, max_bytes=snapshot_bytes(training), threads=1)
    goes_on = threading.Event()
    writer.run("other", lambda: goes_on.wait(SOON))
    for _ in range(3):
        # There is room for one only.
        save(writer, tmp_path, training)
        writer.forget("a")
    goes_on.set()
    writer.close()
    assert writer.take_unsaved() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_closing_waits_for_all_or_for_what_has_begun(tmp_path, fresh, at_once):
    writer, training = Writer(bench.CPU, threads=1), fresh()
    begun, goes_on = threading.Event(), threading.Event()
    ended = []

    def slow():
        begun.set()
        goes_on.wait(SOON)
        ended.append("slow")

    writer.run("a", slow)
    save(writer, tmp_path, training)
    assert begun.wait(SOON)
    threading.Timer(0.1, goes_on.set).start()
    writer.close(at_once)
    assert ended == ["slow"]
    assert checkpoint.newest_progress(tmp_path) == (None if at_once else training.progress)


def test_snapshots_take_a_bounded_number_of_bytes_and_who_wants_more_waits(fresh):
    training = fresh()
    snapshots = Snapshots(bench.CPU, max_bytes=2 * snapshot_bytes(training))
    held = [snapshots.take_snapshot(training), snapshots.take_snapshot(training)]
    third = []
    thread = threading.Thread(target=lambda: third.append(snapshots.take_snapshot(training)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert not third
    snapshots.release(held.pop())
    thread.join(SOON)
    assert torch.equal(third[0].tensors()["master"], training.master)


def test_locked_memory_is_used_again_by_whom_it_fits_and_what_fits_nobody_goes_first(fresh, monkeypatch):
    training, locked = fresh(), []
    size = snapshot_bytes(training)

    def lock(size, device):
        locked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(snapshot_module, "_host_memory", lock)
    snapshots = Snapshots(bench.CPU, max_bytes=3 * size)
    # As on a GPU, where memory is locked and therefore kept.
    monkeypatch.setattr(snapshots, "_stream", "a stream")
    monkeypatch.setattr(snapshots, "_copy_vectors", lambda vectors, copies: None)
    for wanted in (size // 2, size + 256, 3 * size):
        snapshots.reserve(wanted)
    assert locked == [size // 2, size + 256]
    first = snapshots.take_snapshot(training)
    assert len(first.memory) == size + 256
    second = snapshots.take_snapshot(training)
    assert locked == [size // 2, size + 256, size]
    assert snapshots._allocated_bytes <= snapshots.max_bytes
    for one in (first, second):
        snapshots.release(one)
    again = [snapshots.take_snapshot(training) for _ in range(2)]
    assert {len(one.memory) for one in again} == {size, size + 256}
    assert len(locked) == 3


def test_a_snapshot_larger_than_the_bound_is_taken_alone(fresh):
    snapshots, training = Snapshots(bench.CPU, max_bytes=1), fresh()
    for _ in range(2):
        snapshots.release(snapshots.take_snapshot(training))


def test_killed_between_a_snapshot_and_its_name_only_that_save_is_lost(tmp_path, fresh):
    before, newest, restored = fresh(), fresh(), fresh()
    advance(before, 2)
    advance(newest, 5)
    child = os.fork()
    if child == 0:
        writer = Writer(bench.CPU)
        save(writer, tmp_path, before)
        writer.wait("a")
        renamed = lambda _: disk.calls[-1] == ("rename", ".step-00000005.partial")  # noqa: E731
        disk = Disk(tmp_path, renamed, error=None)
        with disk.watched():
            save(writer, tmp_path, newest)
            writer.close()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (tmp_path / ".step-00000005.partial" / "SHA256SUMS").exists()
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, before)
