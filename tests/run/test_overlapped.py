"""Microbatches that overlap half a layer at a time on shards train every job as the whole base does."""

import pytest
import torch

from tests.cases import slow_but
from tests.run import executors
from tests.run.models import LAYERS
from tests.run.test_fused_shards import train_on_shards
from tests.run.test_sharded import trained
from tests.run.workers.test_agreed import CAPACITY, assert_equal, make_jobs, whole_base
from weftune.plan.window.overlap import overlap_microbatches
from weftune.run.assemble import resident_executor


def overlapped(program):
    found = overlap_microbatches(program, LAYERS)
    assert found.overlapped_microbatches
    return found


@pytest.mark.parametrize(
    ("family", "shards"),
    slow_but(
        [(family, 2) for family in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")] + [("qwen2", 4)],
        [("llama", 2), ("gemma3", 2)],
    ),
)
def test_losses_and_adapters_equal_those_of_the_whole_base(family, shards):
    whole = whole_base(family, torch.float64)
    jobs = make_jobs(whole)
    program = executors.plan_program(jobs, 5, CAPACITY)
    want = trained(resident_executor(whole), whole, jobs, program)
    found, _ = train_on_shards(family, shards, torch.float64, jobs, overlapped(program), fuses_layers=True)
    for one in found:
        assert_equal(one, want, 1e-9, 1e-8)
