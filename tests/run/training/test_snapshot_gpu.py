"""Snapshots of states on a GPU: run with `pytest -m gpu`."""

import time

import pytest
import torch

from tests import bench
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.core.shapes import SiteShape
from weftune.run.training.schedule import Recipe
from weftune.run.training.snapshot import Snapshots, snapshot_bytes
from weftune.run.training.state import OpenBatch, new_training
from weftune.run.training.steps import StepRequest, begin_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")


@pytest.fixture
def training():
    """A job with some 42 million parameters, as rank 16 has on an 8B base."""
    sites = tuple(
        SiteShape(f"model.layers.{layer}.mlp.up_proj", in_features=4096, out_features=14336)
        for layer in range(140)
    )
    adapter = JobAdapter("a", LoraSpec(rank=16), seed=1)
    return new_training(adapter, Recipe(steps=100, learning_rate=1e-3), sites, torch.bfloat16, GPU)


def step(training):
    training.gradient.normal_()
    training.open_batch = OpenBatch(
        torch.ones((), device=GPU), torch.ones((), device=GPU, dtype=torch.long), 7
    )
    return begin_steps([StepRequest(training, supervised_tokens=6)])


def test_a_snapshot_is_the_state_when_it_was_taken_though_the_next_steps_follow_at_once(training):
    snapshots = Snapshots(GPU)
    step(training).outcomes()
    training.best_weights = training.master.clone()
    want = {name: getattr(training.state, name).clone() for name in ("master", "exp_avg", "exp_avg_sq")}
    for _ in range(3):
        taken = snapshots.take_snapshot(training)
        begun = step(training)
        # Its memory may be given away before the copy is made.
        training.best_weights = None
        torch.full((training.layout.size,), torch.nan, device=GPU)
        found = {name: value.clone() for name, value in taken.tensors().items()}
        assert all(torch.equal(found[name], want[name].cpu()) for name in want)
        if "best" in found:
            assert found["best"].isfinite().all()
        begun.outcomes()
        want = {name: getattr(training.state, name).clone() for name in want}
        snapshots.release(taken)


def test_memory_is_page_locked_and_used_again(training):
    snapshots = Snapshots(GPU)
    snapshots.reserve(snapshot_bytes(training))
    addresses = set()
    for _ in range(3):
        taken = snapshots.take_snapshot(training)
        assert taken.vectors["master"].is_pinned()
        addresses.add(taken.vectors["master"].data_ptr())
        taken.tensors()
        snapshots.release(taken)
    assert len(addresses) == 1


@pytest.mark.timed
def test_taking_a_snapshot_of_half_a_gigabyte_does_not_hold_the_host_up(training):
    snapshots = Snapshots(GPU)
    snapshots.reserve(snapshot_bytes(training))
    snapshots.release(snapshots.take_snapshot(training))
    torch.cuda.synchronize()
    began = time.perf_counter()
    taken = snapshots.take_snapshot(training)
    seconds = time.perf_counter() - began
    taken.tensors()
    print(
        f"{seconds * 1e3:.2f} ms of the host, {(time.perf_counter() - began) * 1e3:.1f} ms until it is copied"
    )
    assert seconds < 0.003
    assert taken.vectors["master"].device == bench.CPU
