"""Shards of a quantised base, as threads of one process, train every job as the whole base does."""

from functools import partial

import pytest
import torch

from tests import bench
from tests.base.quant.bases import quantised_base, quantised_model
from tests.cases import slow_but
from tests.run import executors
from tests.run.models import LAYERS, deep
from tests.run.workers.test_agreed import CAPACITY, assert_equal, losses_of, make_jobs, views
from tests.run.workers.test_shards import kind_jobs, reward_jobs, token_jobs, training_of, whole_reader
from tests.shards import on_shards
from weftune.base.shards import cut_shard
from weftune.core.shapes import LayerRange
from weftune.run.alone import Alone
from weftune.run.assemble import resident_executor

WHOLE = LayerRange(0, LAYERS, LAYERS)


class AloneOnShard(Alone):
    """Steps of a shard whose team runs the same Program at the same time, so that it needs no messages."""

    def __init__(self, adapters, timer, shards):
        super().__init__(adapters, timer.is_asynchronous)
        self._shards = shards

    def step(self, steps):
        trainings = [self._roster.trainings[step.job] for step in steps]
        for training in trainings:
            self._shards.sum_gradient(training)
        yield from super().step(steps)
        yield from self.finish_steps()
        for training in trainings:
            self._shards.update_weights(training.job, training.state.weights)


def trained(executor, base, jobs, program):
    """The losses, and the adapters of whole linears, after and before the program."""
    for job in jobs:
        executor.attach(training_of(base, job))
    starts = views(executor.attached)
    events = list(executors.run_program(executor, program, jobs))
    return losses_of(events), views(executor.attached), starts


def assert_shards_equal(family, shards, quantize, jobs_of):
    whole = quantised_base(deep(family, torch.float64), quantize)
    jobs = jobs_of(whole)
    program = executors.plan_program(jobs, 5, CAPACITY)
    want = trained(resident_executor(whole), whole, jobs, program)
    models = [quantised_model(deep(family, torch.float64), quantize) for _ in range(shards)]
    read_whole = whole_reader(quantised_model(deep(family, torch.float64), quantize))

    def on_shard(team):
        base = cut_shard(models[team.shard], whole.spec, bench.CPU, team, WHOLE, read_whole)
        executor = resident_executor(base, make_agreement=AloneOnShard, team=team)
        return trained(executor, base, jobs, program)[:2]

    for found in on_shards(shards, on_shard):
        assert_equal(found, want, 1e-9, 1e-8)


@pytest.mark.parametrize(
    ("quantize", "family", "shards"),
    slow_but(
        [
            *(("nf4", "llama", 2), ("nf4", "phi3", 2), ("nf4", "qwen2", 4), ("int8", "phi3", 2)),
            *(("fp8", family, 2) for family in ("llama", "phi3", "gemma3", "qwen2", "qwen3", "mistral")),
        ],
        [("nf4", "llama", 2), ("fp8", "phi3", 2)],
    ),
)
def test_losses_and_adapters_equal_those_of_the_whole_quantised_base(quantize, family, shards):
    """Of nf4, some parts are whole blocks and others are not."""
    assert_shards_equal(family, shards, quantize, make_jobs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "pissa", "ia3"])
@pytest.mark.parametrize("quantize", ["nf4", "fp8"])
def test_kinds_on_shards_of_a_quantised_base(kind, quantize):
    assert_shards_equal("llama", 2, quantize, partial(kind_jobs, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("jobs_of", [reward_jobs, token_jobs])
def test_embedding_rows_and_scalar_heads_on_shards_of_a_quantised_base(jobs_of):
    assert_shards_equal("gemma3", 2, "int8", jobs_of)
