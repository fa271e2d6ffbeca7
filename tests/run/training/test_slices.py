"""A checkpoint in slices: there when all are there, and read on any number of stages."""

from dataclasses import replace

import pytest
import torch

from tests.base.packs import cut_base
from tests.run import executors
from tests.run.models import deep
from tests.run.workers.test_agreed import whole_base
from weftune.adapters.kind import JobAdapter
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange
from weftune.run.training import checkpoint
from weftune.run.training.checkpoint import drop_partial, finish, partial_folder, write_slice
from weftune.run.training.snapshot import make_snapshot
from weftune.run.training.state import Progress, new_training

CPU = torch.device("cpu")


def job():
    return executors.prepare(whole_base("llama", torch.float64), "a", adapter={"rank": 3})


def slice_training(ready, start, stop):
    """A job's part on the layers from `start` to `stop`, with values that tell where they belong."""
    base = cut_base(deep("llama", torch.float64), BaseSpec(model="tiny"), CPU, LayerRange(start, stop, 4))
    adapter = JobAdapter(ready.name, ready.spec.adapter, ready.spec.seed)
    return new_training(adapter, ready.recipe, base.shape.sites, base.dtype, CPU, base.whole_sites)


def stepped(training, step=5):
    training.progress = Progress(step=step, trained_tokens=77)
    training.state.exp_avg.copy_(training.master * 2)
    training.state.exp_avg_sq.copy_(training.master**2)
    return training


def save(folder, trainings, keeps_best=False):
    slices = {worker: write_slice(folder, make_snapshot(one), worker) for worker, one in enumerate(trainings)}
    return finish(folder, trainings[0].progress, 1, slices, keeps_best)


@pytest.fixture(scope="module")
def ready():
    return job()


def test_slices_of_four_stages_are_read_on_two_and_on_one(ready, tmp_path):
    save(tmp_path, [stepped(slice_training(ready, k, k + 1)) for k in range(4)])
    for start, stop in ((0, 4), (0, 3), (3, 4)):
        want = stepped(slice_training(ready, start, stop)) if stop - start < 4 else None
        got = slice_training(ready, start, stop)
        want = want or stepped(slice_training(ready, 0, 4))
        got.master.zero_()
        assert checkpoint.restore(tmp_path, got)
        assert got.progress == Progress(step=5, trained_tokens=77)
        for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
            assert torch.equal(getattr(got.state, name), getattr(want.state, name)), (start, stop, name)


def test_a_whole_checkpoint_is_read_on_a_stage(ready, tmp_path):
    checkpoint.save(tmp_path, stepped(slice_training(ready, 0, 4)))
    got = slice_training(ready, 1, 3)
    got.master.zero_()
    assert checkpoint.restore(tmp_path, got)
    assert torch.equal(got.master, slice_training(ready, 1, 3).master)


def test_without_its_last_word_it_is_not_there(ready, tmp_path):
    older = [stepped(slice_training(ready, 0, 2), 3), stepped(slice_training(ready, 2, 4), 3)]
    save(tmp_path, older)
    write_slice(tmp_path, make_snapshot(stepped(slice_training(ready, 0, 2), 6)), 0)
    assert partial_folder(tmp_path, 6).is_dir()
    assert checkpoint.newest_progress(tmp_path) == Progress(step=3, trained_tokens=77)
    drop_partial(tmp_path)
    assert not partial_folder(tmp_path, 6).exists()


@pytest.mark.parametrize(
    "file", ["tensors-0.safetensors", "tensors-1.safetensors", "state.json", "SHA256SUMS"]
)
def test_a_flipped_byte_in_any_file_is_found_and_the_one_before_serves(ready, tmp_path, file):
    for step in (3, 6):
        path = save(tmp_path, [stepped(slice_training(ready, k, k + 2), step) for k in (0, 2)])
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)
    got = slice_training(ready, 2, 4)
    assert checkpoint.restore(tmp_path, got)
    assert got.progress.step == 3


def test_the_best_weights_are_the_master_where_this_very_step_was_the_best(ready, tmp_path):
    trainings = [stepped(slice_training(ready, k, k + 2)) for k in (0, 2)]
    for one in trainings:
        one.best_weights = torch.zeros_like(one.master)
    trainings[0].progress.best_step = 5
    save(tmp_path / "now", trainings, keeps_best=True)
    trainings[0].progress.best_step = 2
    save(tmp_path / "before", trainings, keeps_best=True)
    got = slice_training(ready, 0, 4)
    assert checkpoint.restore(tmp_path / "now", got)
    assert torch.equal(got.best_weights, got.master)
    assert checkpoint.restore(tmp_path / "before", got)
    assert not got.best_weights.any()


def test_a_stage_draws_its_own_part_of_the_adapter_that_the_whole_base_would_have(ready):
    whole = slice_training(ready, 0, 4)
    parts = [slice_training(ready, start, stop) for start, stop in ((0, 1), (1, 3), (3, 4))]
    assert all(
        torch.equal(part.master, part.layout.slice_vector(whole.layout, whole.master)) for part in parts
    )
    assert sum(part.layout.size for part in parts) == whole.layout.size
    views = whole.layout.parameter_views(whole.master)
    assert all(
        view.abs().max() <= view.shape[1] ** -0.5 for (_, name), view in views.items() if name == "a_rK"
    )
    assert not any(view.any() for (_, name), view in views.items() if name == "b_rN")
    bounds = [
        float(view.abs().max()) * view.shape[1] ** 0.5 for (_, name), view in views.items() if name == "a_rK"
    ]
    assert min(bounds) > 0.8


def test_a_mean_is_read_from_the_slices_of_all_stages(ready, tmp_path):
    averaged = replace(ready, recipe=replace(ready.recipe, averaged_spans=((4, 8),)))
    parts = [stepped(slice_training(averaged, start, start + 2)) for start in (0, 2)]
    for part in parts:
        part.progress.averaged = 2
        part.mean_weights.copy_(part.master * 3)
    save(tmp_path, parts)
    for start, stop in ((0, 4), (1, 3)):
        got = slice_training(averaged, start, stop)
        assert checkpoint.restore(tmp_path, got)
        assert got.progress.averaged == 2
        assert torch.equal(got.mean_weights, got.master * 3)
    plain = slice_training(ready, 0, 4)
    assert checkpoint.restore(tmp_path, plain)
    assert (plain.mean_weights, plain.progress.averaged) == (None, 0)
