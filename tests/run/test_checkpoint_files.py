"""What a checkpoint's files say, and when they are written anew."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from tests import bench
from tests.run import executors
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import finish, write_slice
from weftune.run.training.snapshot import make_snapshot


@pytest.fixture(scope="module")
def base():
    return bench.base()


@pytest.fixture
def fresh(base):
    job = executors.prepare(base, "a", seed=5)
    return lambda: executors.job_training(base, job)


def at_step(training, step):
    training.progress.step = step
    training.master.fill_(step)
    return training


def test_the_files_say_where_the_job_stands_and_what_they_hold(tmp_path, fresh):
    training = at_step(fresh(), 20)
    folder = checkpoint.save(tmp_path, training)
    assert folder == tmp_path / "step-00000020"
    state = json.loads((folder / "state.json").read_text())
    assert state["seed"] == 5
    assert state["progress"]["step"] == 20
    shapes = [[one.site, one.name, list(one.shape)] for one in training.layout.parameters]
    assert state["layout"] == shapes
    tensors = load_file(folder / "tensors.safetensors")
    assert set(tensors) == {"master", "exp_avg", "exp_avg_sq"}
    assert torch.equal(tensors["master"], training.master)
    sums = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("tensors.safetensors", "state.json")
    }


def test_folders_above_are_made_where_there_are_none(tmp_path, fresh):
    folder = tmp_path / "output" / "a" / "checkpoints"
    assert checkpoint.save(folder, at_step(fresh(), 1)) == folder / "step-00000001"


def test_a_checkpoint_that_says_the_same_is_left_as_it_is(tmp_path, fresh):
    training = at_step(fresh(), 2)
    folder = checkpoint.save(tmp_path, training)
    before = os.stat(folder / "state.json").st_ino
    assert checkpoint.has_progress(tmp_path, training.progress)
    assert checkpoint.save(tmp_path, training) == folder
    assert os.stat(folder / "state.json").st_ino == before
    training.record_evaluation(1.0, keep_best=False, min_delta=0.0)
    assert not checkpoint.has_progress(tmp_path, training.progress)
    checkpoint.save(tmp_path, training)
    assert os.stat(folder / "state.json").st_ino != before


def test_the_newest_checkpoint_is_that_of_the_highest_step_whenever_it_was_written(tmp_path, fresh):
    for step in (30, 4, 200):
        checkpoint.save(tmp_path, at_step(fresh(), step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000200"]
    assert checkpoint.newest_progress(tmp_path).step == 200
    restored = fresh()
    assert checkpoint.restore(tmp_path, restored)
    assert restored.progress.step == 200
    assert (restored.master == 200).all()
    assert (restored.state.weights == 200).all()


def test_what_was_in_the_making_is_forgotten_when_a_job_goes_back(tmp_path, fresh):
    checkpoint.save(tmp_path, at_step(fresh(), 3))
    other = fresh()
    other.gradient.fill_(1.0)
    other.best_weights = other.master.clone()
    assert checkpoint.restore(tmp_path, other)
    assert other.best_weights is None
    assert not other.gradient.any()


def test_slices_whose_evaluation_was_the_best_bring_their_master_weights_as_the_best(tmp_path, fresh):
    for keeps_best, best_step in ((True, 7), (True, 6), (False, 7)):
        training = at_step(fresh(), 7)
        training.progress.best_step, training.progress.best_loss = best_step, 1.0
        written = write_slice(tmp_path, make_snapshot(training), 0)
        finish(tmp_path, training.progress, 5, {0: written}, keeps_best)
        restored = fresh()
        assert checkpoint.restore(tmp_path, restored)
        assert restored.progress == training.progress
        if keeps_best and best_step == 7:
            assert (restored.best_weights == 7).all()
        else:
            assert restored.best_weights is None


def rewritten(folder, change):
    """The checkpoint with another state, and checksums that fit it."""
    path = folder / "state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    names = ("tensors.safetensors", "state.json")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "SHA256SUMS").write_bytes(checkpoint.checksum_file_content(digests))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("progress"),
        lambda state: state.update(progress=7),
        lambda state: state.update(layout="torn"),
        lambda state: state.update(slices=3),
        lambda state: state["progress"].update(unknown=1),
    ],
)
def test_a_state_that_makes_no_sense_is_not_used_even_if_its_checksums_hold(tmp_path, fresh, change):
    checkpoint.save(tmp_path, at_step(fresh(), 2))
    newer = checkpoint.save(tmp_path, at_step(fresh(), 3))
    rewritten(newer, lambda state: None)
    assert checkpoint.newest_progress(tmp_path).step == 3
    rewritten(newer, change)
    assert checkpoint.newest_progress(tmp_path).step == 2


def test_a_file_outside_of_the_checkpoint_is_never_read(tmp_path, fresh):
    folder = checkpoint.save(tmp_path / "own", at_step(fresh(), 2))
    elsewhere = tmp_path / "tensors.safetensors"
    (folder / "tensors.safetensors").rename(elsewhere)
    layout = json.loads((folder / "state.json").read_text())["layout"]
    (folder / "tensors.safetensors").write_bytes(b"torn")
    rewritten(folder, lambda state: state.update(slices=[{"file": str(elsewhere), "layout": layout}]))
    assert checkpoint.newest_progress(tmp_path / "own") is None
