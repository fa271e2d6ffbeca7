"""Checkpoints come back exactly, and one that is damaged or not whole is never used."""

import copy
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests import bench
from tests.run import executors
from weftune.run.training import checkpoint
from weftune.run.training.state import OpenBatch
from weftune.run.training.steps import StepRequest, begin_steps


@pytest.fixture(scope="module")
def base():
    return bench.base()


@pytest.fixture
def fresh(base):
    job = executors.prepare(base, "a")
    return lambda: executors.job_training(base, job)


def advance(training, steps=1):
    generator = torch.Generator().manual_seed(training.progress.step)
    for _ in range(steps):
        gradient = torch.randn(training.master.shape, generator=generator, dtype=torch.float64)
        training.gradient.copy_(gradient)
        training.open_batch = OpenBatch(torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), 7)
        begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()


def same(first, second):
    return (
        first.progress == second.progress
        and torch.equal(first.master, second.master)
        and torch.equal(first.state.weights, second.state.weights)
        and torch.equal(first.state.exp_avg, second.state.exp_avg)
        and torch.equal(first.state.exp_avg_sq, second.state.exp_avg_sq)
        and (first.best_weights is None) == (second.best_weights is None)
        and (first.best_weights is None or torch.equal(first.best_weights, second.best_weights))
        and (not first.progress.averaged or torch.equal(first.mean_weights, second.mean_weights))
    )


def test_what_was_saved_comes_back_to_the_bit_and_goes_on_alike(tmp_path, fresh):
    saved = fresh()
    advance(saved, 3)
    saved.record_evaluation(2.0, keep_best=True, min_delta=0.0)
    advance(saved, 1)
    checkpoint.save(tmp_path, saved)
    restored = fresh()
    assert not same(saved, restored)
    assert checkpoint.restore(tmp_path, restored)
    assert same(saved, restored)
    assert checkpoint.newest_progress(tmp_path) == saved.progress
    advance(saved, 2)
    advance(restored, 2)
    assert same(saved, restored)


def test_a_job_at_step_zero_can_be_saved_too(tmp_path, fresh):
    saved, restored = fresh(), fresh()
    saved.state.weights.copy_(saved.master.add_(1.0))
    checkpoint.save(tmp_path, saved)
    assert checkpoint.restore(tmp_path, restored)
    assert same(saved, restored)


def test_without_a_checkpoint_nothing_is_restored(tmp_path, fresh):
    untouched = fresh()
    assert not checkpoint.restore(tmp_path / "nowhere", untouched)
    assert same(untouched, fresh())
    assert checkpoint.newest_progress(tmp_path / "nowhere") is None


def test_the_last_two_are_kept_and_nothing_in_them_is_a_pickle(tmp_path, fresh):
    training = fresh()
    for _ in range(4):
        advance(training)
        checkpoint.save(tmp_path, training)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000003", "step-00000004"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"state.json", "tensors.safetensors", "SHA256SUMS"}
    for path in files:
        content = path.read_bytes()
        assert content[:1] != b"\x80", "a pickle begins like that"
        assert content[:2] != b"PK", "torch.save begins like that"


def test_a_flipped_byte_is_found_100_times_of_100_and_the_checkpoint_before_serves(tmp_path, fresh):
    before, newest = fresh(), fresh()
    advance(before, 2)
    advance(newest, 2)
    checkpoint.save(tmp_path, before)
    advance(newest, 3)
    folder = checkpoint.save(tmp_path, newest)
    rng = random.Random(7)
    files = sorted(folder.iterdir())
    for number in range(100):
        path = files[number % len(files)]
        whole = path.read_bytes()
        place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        restored = fresh()
        assert checkpoint.restore(tmp_path, restored)
        assert same(restored, before), f"bit {bit} of byte {place} of {path.name} was not noticed"
        assert checkpoint.newest_progress(tmp_path) == before.progress
        path.write_bytes(whole)
    restored = fresh()
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, newest)


def test_a_checkpoint_that_is_not_whole_is_never_loaded(tmp_path, fresh):
    before, newest = fresh(), fresh()
    advance(before, 2)
    checkpoint.save(tmp_path, before)
    advance(newest, 5)
    folder = checkpoint.save(tmp_path / "elsewhere", newest)
    for missing in sorted(path.name for path in folder.iterdir()):
        torn = tmp_path / "step-00000005"
        shutil.copytree(folder, torn)
        (torn / missing).unlink()
        restored = fresh()
        assert checkpoint.restore(tmp_path, restored)
        assert same(restored, before), f"was loaded without {missing}"
        shutil.rmtree(torn)
    shutil.copytree(folder, tmp_path / ".step-00000005.partial")
    restored = fresh()
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, before)


def test_a_damaged_or_half_written_checkpoint_is_replaced_when_its_step_comes_again(tmp_path, fresh):
    training, restored = fresh(), fresh()
    advance(training, 2)
    folder = checkpoint.save(tmp_path, training)
    (folder / "tensors.safetensors").write_bytes(b"torn")
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000002.partial" / "state.json").write_text("{")
    assert checkpoint.save(tmp_path, training) == folder
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, training)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_an_evaluation_after_the_save_of_a_step_is_saved_in_its_place(tmp_path, fresh):
    training, restored = fresh(), fresh()
    advance(training, 2)
    checkpoint.save(tmp_path, training)
    training.record_evaluation(1.0, keep_best=True, min_delta=0.0)
    checkpoint.save(tmp_path, training)
    assert checkpoint.restore(tmp_path, restored)
    assert same(restored, training)
    assert restored.progress.evaluated == 2


def test_a_checkpoint_of_another_adapter_is_not_taken(tmp_path, base, fresh):
    wider = executors.job_training(base, executors.prepare(base, "a", adapter={"rank": 5}))
    checkpoint.save(tmp_path, wider)
    untouched = fresh()
    assert not checkpoint.restore(tmp_path, untouched)
    assert same(untouched, fresh())


def averaging(base, spans):
    job = executors.prepare(base, "a")
    return lambda: executors.job_training(
        base, replace(job, recipe=replace(job.recipe, averaged_spans=spans))
    )


def test_a_mean_comes_back_to_the_bit_and_is_there_only_inside_its_span(tmp_path, base):
    new = averaging(base, ((3, 4),))
    saved = new()
    for step in range(1, 5):
        advance(saved)
        path = checkpoint.save(tmp_path, saved)
        assert ("mean" in load_file(path / "tensors.safetensors")) == (step >= 3)
        restored = new()
        assert checkpoint.restore(tmp_path, restored)
        assert same(saved, restored)
        assert restored.progress.averaged == max(0, step - 2)
        advance(restored)
        going_on = copy.deepcopy(saved)
        advance(going_on)
        assert same(going_on, restored)


def test_where_the_checkpoint_has_no_mean_it_begins_with_the_next_step(tmp_path, base, fresh):
    """One of an earlier release, or of the job before its sweep judged means."""
    saved = fresh()
    advance(saved, 3)
    checkpoint.save(tmp_path, saved)
    restored = averaging(base, ((3, 4),))()
    assert checkpoint.restore(tmp_path, restored)
    assert torch.equal(restored.evaluated_weights, restored.master)
    advance(restored)
    assert restored.progress.averaged == 1
    assert torch.equal(restored.evaluated_weights, restored.master)
