"""A save that is broken off at any of its writes: what it left is never loaded, the one before always."""

import errno
import hashlib
import os
import signal

import pytest

from tests import bench
from tests.faults import Disk
from tests.run import executors
from tests.run.training.test_checkpoint import advance, same
from weftune.errors import OutputError
from weftune.run.training import checkpoint


@pytest.fixture(scope="module")
def fresh():
    base = bench.base()
    job = executors.prepare(base, "a")
    return lambda: executors.job_training(base, job)


@pytest.fixture
def two(tmp_path, fresh):
    """A job whose checkpoint of step 2 is there, and the same job at step 5."""
    before, newest = fresh(), fresh()
    advance(before, 2)
    checkpoint.save(tmp_path, before)
    advance(newest, 5)
    return before, newest


def calls_of(folder, training):
    with Disk(folder).watched() as disk:
        checkpoint.save(folder, training)
    return disk.calls


def test_data_are_synced_before_the_name_is_given_and_the_name_after(tmp_path, fresh):
    training = fresh()
    advance(training, 5)
    calls = calls_of(tmp_path, training)
    renamed = calls.index(("rename", ".step-00000005.partial"))
    for name in ("tensors.safetensors", "state.json", "SHA256SUMS"):
        path = f".step-00000005.partial/{name}"
        written = max(i for i, call in enumerate(calls) if call == ("write", path))
        assert written < calls.index(("fsync", path)) < renamed, name
    folder = calls.index(("fsync", ".step-00000005.partial"))
    last = max(i for i, (what, path) in enumerate(calls) if what == "fsync" and path.count("/"))
    assert last < folder < renamed, "the folder's own entries, after its files"
    assert ("fsync", ".") in calls[renamed:]


def test_nothing_of_a_file_waits_in_memory_when_it_is_synced(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    checkpoint.write_synced(tmp_path / "a", b"12345")
    assert sizes == [5]


def test_killed_at_every_write_of_a_save_the_one_before_or_the_whole_new_one_is_loaded(tmp_path, two, fresh):
    before, newest = two
    calls = calls_of(tmp_path / "elsewhere", newest)
    loaded = []
    for at in range(1, len(calls) + 1):
        child = os.fork()
        if child == 0:
            with Disk(tmp_path, lambda number, at=at: number == at, error=None).watched():
                checkpoint.save(tmp_path, newest)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        restored = fresh()
        assert checkpoint.restore(tmp_path, restored)
        loaded.append(restored.progress.step)
        assert same(restored, before if loaded[-1] == 2 else newest), f"at {calls[at - 1]}"
        assert checkpoint.save(tmp_path, before if loaded[-1] == 2 else newest).is_dir()
        for path in tmp_path.glob("step-00000005"):
            assert at > calls.index(("rename", ".step-00000005.partial")), path
            path.rename(tmp_path / f"whole-{at}")
    assert loaded == sorted(loaded)
    assert set(loaded) == {2, 5}, "the last write of all comes after the name"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_save_that_fails_at_any_write_leaves_nothing_behind_and_the_one_before(tmp_path, two, fresh, error):
    before, newest = two
    calls = calls_of(tmp_path / "elsewhere", newest)
    assert calls[0] == ("mkdir", "."), "the folder of all checkpoints is there already"
    for at in range(2, len(calls) + 1):
        disk = Disk(tmp_path, lambda number, at=at: number == at, error)
        with disk.watched(), pytest.raises(OSError, match=os.strerror(error)):
            checkpoint.save(tmp_path, newest)
        assert list(tmp_path.glob(".step-*")) == []
        restored = fresh()
        assert checkpoint.restore(tmp_path, restored)
        is_new = (tmp_path / "step-00000005").exists()
        assert same(restored, newest if is_new else before), f"at {calls[at - 1]}"
        assert is_new == (at > calls.index(("rename", ".step-00000005.partial")) + 1)
        checkpoint.save(tmp_path, newest)
        assert checkpoint.restore(tmp_path, restored)
        assert same(restored, newest)
        (tmp_path / "step-00000005").rename(tmp_path / f"whole-{at}")


def test_a_checkpoint_of_a_later_format_is_refused_and_one_from_before_formats_is_read(tmp_path, two, fresh):
    before, _ = two
    folder = tmp_path / "step-00000002"
    state = (folder / "state.json").read_bytes()

    def rewritten(old, new):
        (folder / "state.json").write_bytes(state.replace(old, new))
        content = {name: (folder / name).read_bytes() for name in ("tensors.safetensors", "state.json")}
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        (folder / "SHA256SUMS").write_bytes(checkpoint.checksum_file_content(digests))

    rewritten(b'"format": 1', b'"format": 2')
    for read in (lambda: checkpoint.restore(tmp_path, fresh()), lambda: checkpoint.survey(tmp_path)):
        with pytest.raises(OutputError, match=r"state.json has the format 2, and .* formats up to 1:"):
            read()
    rewritten(b'"format": 1', b'"version": 1')
    restored = fresh()
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, before)


def test_damaged_checkpoints_are_named_and_taken_out_of_the_count(tmp_path, two, fresh):
    before, newest = two
    checkpoint.save(tmp_path, newest)
    (tmp_path / "step-00000005" / "state.json").write_text("{")
    found = checkpoint.survey(tmp_path)
    assert (found.progress, [path.name for path in found.damaged_paths]) == (
        before.progress,
        ["step-00000005"],
    )
    checkpoint.rename_damaged(found.damaged_paths)
    advance(before, 1)
    checkpoint.save(tmp_path, before)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["damaged-step-00000005", "step-00000002", "step-00000003"]
