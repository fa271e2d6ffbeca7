"""Fused layers on shards, as threads of one process, train every job as the whole base does."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests import bench
from tests.base.quant.bases import quantised_base, quantised_model
from tests.cases import slow_but
from tests.interpreter import interpret
from tests.run import executors
from tests.run.models import deep
from tests.run.test_sharded import WHOLE, AloneOnShard, trained
from tests.run.workers.test_agreed import CAPACITY, assert_equal, make_jobs, whole_base
from tests.shards import on_shards
from weftune.adapters import banks
from weftune.base.shards import cut_shard
from weftune.base.spec import BaseSpec
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import NOTHING, Recompute
from weftune.run.assemble import resident_executor

IN_TILES = Recompute(True, 2, tile_rows=16, keeps_attention=True)


def train_on_shards(
    family, shards, dtype, jobs, program, one_at_a_time=False, change=lambda model: model, **options
):
    """What every shard found, and how many sums over shards each of them took part in."""
    models = [change(deep(family, dtype)) for _ in range(shards)]
    counts = [0] * shards

    def on_shard(team):
        def count_sum(tensor):
            counts[team.shard] += 1
            team.sum_over_shards(tensor)

        counting = replace(team, sum_over_shards=count_sum)
        base = cut_shard(models[team.shard], BaseSpec(model=f"tiny/{family}"), bench.CPU, counting, WHOLE)
        executor = resident_executor(base, make_agreement=AloneOnShard, team=counting, **options)
        assert executor.is_fused
        return trained(executor, base, jobs, program)[:2]

    found = on_shards(shards, on_shard, one_at_a_time)
    assert len(set(counts)) == 1
    return found, counts[0]


@pytest.mark.parametrize(
    ("family", "shards", "recompute"),
    slow_but(
        [
            *((family, 2, NOTHING) for family in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")),
            ("llama", 2, Recompute(recomputes_outputs=True)),
            ("llama", 2, Recompute(True, 3)),
            ("gemma3", 2, Recompute(True, 4)),
            ("qwen2", 4, Recompute(True, 2)),
            *((family, 2, IN_TILES) for family in ("llama", "gemma3", "phi3")),
        ],
        [("gemma3", 2, NOTHING), ("qwen2", 4, Recompute(True, 2))],
    ),
)
def test_losses_and_adapters_equal_those_of_the_whole_base(family, shards, recompute):
    whole = whole_base(family, torch.float64)
    jobs = make_jobs(whole)
    program = executors.plan_program(jobs, 5, CAPACITY)
    want = trained(resident_executor(whole), whole, jobs, program)
    program = replace(program, recompute=recompute)
    found, _ = train_on_shards(family, shards, torch.float64, jobs, program, fuses_layers=True)
    for one in found:
        assert_equal(one, want, 1e-9, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [NOTHING, Recompute(True, 3), IN_TILES], ids=["", "layers", "tiles"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_fused_layers_of_a_base_in_fp8_equal_those_of_the_whole_base(family, recompute):
    """Gradients of linears that share their input are rounded together, over all shards."""
    whole = quantised_base(deep(family, torch.float64), "fp8")
    jobs = make_jobs(whole)
    program = executors.plan_program(jobs, 5, CAPACITY)
    want = trained(resident_executor(whole, fuses_layers=True), whole, jobs, program)
    program, change = replace(program, recompute=recompute), partial(quantised_model, quantize="fp8")
    found, _ = train_on_shards(family, 2, torch.float64, jobs, program, change=change, fuses_layers=True)
    for one in found:
        assert_equal(one, want, 1e-9, 1e-8)


def test_a_recomputed_layer_repeats_one_of_its_two_sums():
    """The sum at the end of the layer is not needed again."""
    jobs = make_jobs(whole_base("llama", torch.float64))[:1]
    program = executors.plan_program(jobs, 1, 1000)
    assert len(program.microbatches) == 1
    counts = [
        train_on_shards(
            "llama", 2, torch.float64, jobs, replace(program, recompute=recompute), fuses_layers=True
        )[1]
        for recompute in (NOTHING, Recompute(True, 3))
    ]
    assert counts[1] - counts[0] == 3


@pytest.mark.slow
def test_kernels_on_shards_train_as_the_whole_base_does(monkeypatch):
    """Llama with dropout at linears that are cut by their inputs, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(banks, "SLOTS", 2)
    whole = whole_base("llama", torch.float32)
    jobs = [
        executors.prepare(
            whole,
            "dropping",
            steps=2,
            batch_size=2,
            adapter={"rank": 7, "dropout": 0.3, "targets": ["q_proj", "o_proj", "down_proj"]},
            data=bench.rows(bench.samples(4, 1, shortest=5, longest=5)),
        ),
        executors.prepare(
            whole,
            "vera",
            steps=2,
            batch_size=1,
            adapter={"kind": "vera", "rank": 4, "targets": ["v_proj", "o_proj"]},
            data=bench.rows(bench.samples(4, 2, shortest=5, longest=5)),
        ),
    ]
    program = executors.plan_program(jobs, 2, 1000)
    want = trained(resident_executor(whole), whole, jobs, program)
    interpret(monkeypatch)
    found, _ = train_on_shards("llama", 2, torch.float32, jobs, program, True, route=Route.tiled)
    for one in found:
        assert_equal(one, want, 1e-5, 5e-3)
