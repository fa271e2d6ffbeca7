"""Samples that run in chunks train the same adapters as whole samples, and leave no keys behind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from tests import bench
from tests.adapters.kinds.cases import job
from tests.adapters.kinds.test_battery import KINDS
from tests.base.packs import base_of
from tests.base.quant.bases import quantised_base
from tests.cases import slow_but
from tests.families import EVERY, MORE, tiny
from tests.run import executors
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import CUTS, PACE, assert_equal, losses_of, on_worker, views, whole_base
from tests.run.workers.test_agreed import cut as cut_stage
from weftune.adapters.kind import JobAdapter
from weftune.base.chunks import ChunkKeys
from weftune.core.files import cache_folder
from weftune.errors import PlanError
from weftune.ops.lora.routes import Route
from weftune.plan.program.check import check
from weftune.plan.program.layout import Layout, StageLayers
from weftune.plan.program.program import (
    NOTHING,
    Backward,
    Forward,
    MicrobatchPlan,
    Recompute,
    SegmentPlan,
    Step,
    cut_sample,
)
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline
from weftune.run.assemble import resident_executor
from weftune.run.events import OutOfMemory
from weftune.run.parts import fetch_from
from weftune.run.training.state import new_training
from weftune.trainer.job import collate_plan, prepare_job

ROUNDS = 3
ROWS = 5
"""Rows of a chunk. They divide no sample's length, and two chunks are longer than a sliding window."""
FUSED = [family for family in EVERY if family not in ("opt", "gpt2")]


def in_chunks(program, rows=ROWS):
    """Return the program with all samples cut. Those of a batch are in flight together."""
    microbatches, actions = [], []
    for batch in sorted(program.batches, key=lambda one: (one.step, one.job)):
        first = len(microbatches)
        for sample in batch.samples:
            pieces = cut_sample(sample, rows) if sample.length > rows else (sample,)
            microbatches += [MicrobatchPlan((SegmentPlan(batch.job, batch.step, (one,)),)) for one in pieces]
        numbers = range(first, len(microbatches))
        actions += [*map(Forward, numbers), *map(Backward, reversed(numbers)), Step(batch.job, batch.step)]
    made = replace(program, microbatches=tuple(microbatches), devices=(tuple(actions),))
    check(made)
    return made


def train(base, jobs, cut, recompute, fuses):
    """Return losses and weights, and the weights at the start."""
    made = resident_executor(
        base, None if base.device.type == "cuda" else Route.segmented, fuses_layers=fuses
    )
    for one in jobs:
        made.attach(new_state(base, one))
    program = replace(executors.plan_program(jobs, ROUNDS, 64), recompute=recompute)
    events = list(executors.run_program(made, in_chunks(program) if cut else program, jobs))
    assert not made._sample_keys
    starts = views({one.name: new_state(base, one) for one in jobs})
    return losses_of(events), views(made.attached), starts


def new_state(base, prepared):
    spec, start = prepared.spec, prepared.start_tokens
    adapter = JobAdapter(spec.name, spec.adapter, spec.seed, prepared.recipe.steps, start)
    sites, reader = base.shape.sites, base.weight_reader()
    return new_training(adapter, prepared.recipe, sites, base.dtype, base.device, frozen=reader)


def assert_chunks_change_nothing(make_base, make_jobs, recompute=NOTHING, fuses=None):
    found = []
    for cut in (False, True):
        base = make_base()
        found.append(train(base, make_jobs(base), cut, recompute, fuses))
    whole, chunked = found
    assert whole[0]
    assert_equal(chunked[:2], whole, 1e-9, 1e-8)


def two_jobs(base):
    """With dropout at every linear, and with a first sample whose supervised tokens are in its last chunk."""
    samples = bench.samples(12, seed=1, shortest=11, longest=24)
    data = bench.rows([(tokens, [i > len(tokens) - 3 for i in range(len(tokens))]) for tokens, _ in samples])
    dropout = {} if any(site.experts for site in base.shape.sites) else {"dropout": 0.2}
    first = executors.prepare(base, "a", data=data, adapter={"rank": 4, "targets": "all-linear", **dropout})
    return [
        first,
        executors.prepare(base, "b", seed=2, adapter={"rank": 3, "targets": ["o_proj", "fc1", "c_proj"]}),
    ]


@pytest.mark.parametrize("family", slow_but([*EVERY, *MORE], ["gemma3", "gpt2", "mixtral"]))
def test_every_family_trains_the_same_in_chunks(family):
    assert_chunks_change_nothing(partial(bench.base, family), two_jobs)


@pytest.mark.parametrize("family", slow_but(FUSED, ["mistral"]))
@pytest.mark.parametrize("recompute", [NOTHING, Recompute(recomputes_outputs=True, tile_rows=7)])
def test_fused_layers_train_the_same_in_chunks(family, recompute):
    """Where whole samples would run in tiles of rows, chunks do not."""
    assert_chunks_change_nothing(partial(bench.base, family), two_jobs, recompute, fuses=True)


@pytest.mark.parametrize("quantize", slow_but(["nf4", "int8"], ["nf4"]))
def test_a_quantised_base_trains_the_same_in_chunks(quantize):
    assert_chunks_change_nothing(lambda: quantised_base(tiny("llama", torch.float64), quantize), two_jobs)


@pytest.mark.parametrize("kind", slow_but(KINDS, ["prompt", "prefix", "diff"]))
def test_every_kind_trains_the_same_in_chunks(kind):
    def prepared(base):
        return [prepare_job(job(kind, "llama"), 0, bench.tokenizer(), base.shape, cache_folder())]

    assert_chunks_change_nothing(partial(bench.base, "llama"), prepared)


def long_job(base):
    samples = bench.samples(9, seed=4, shortest=24, longest=50)
    return executors.prepare(
        base,
        "a",
        data=bench.rows(samples),
        batch_size=3,
        adapter={"rank": 4, "dropout": 0.2, "targets": "all-linear"},
    )


def chunked_window(job, stages):
    rules = PipelineRules(50, (PACE,) * stages, spare_microbatches=1, min_chunk_rows=4)
    program = plan_pipeline([job.job_window(0, ROUNDS, False)], rules)
    assert sum(one.chunk is not None for one in program.microbatches) >= 6 * ROUNDS
    return program


def as_worker(connections, family, cuts):
    """Train one job of long samples on this worker; what happened here, and this worker's slices."""
    job = long_job(whole_base(family, torch.float64))
    executor, _, transport = on_worker(
        cut_stage(family, torch.float64, connections.position, cuts), connections, cuts
    )
    executor.attach(executors.job_training(executor.base, job))
    program = chunked_window(job, connections.position.stages)
    laid = {
        number: collate_plan(plan, Forward, {"a": job})
        for number, plan in enumerate(program.microbatches)
        if plan.segments
    }
    events = list(executor.run(program, fetch_from(program, laid)))
    transport.flush()
    assert not executor._sample_keys
    return events, views(executor.attached)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "workers"), [("mistral", 2), ("llama", 4)])
def test_a_pipeline_of_processes_trains_one_job_of_long_samples_in_chunks(family, workers):
    answers = run_workers(workers, as_worker, family, CUTS[workers])
    base = whole_base(family, torch.float64)
    job = long_job(base)
    made = executors.executor_with(base, [job])
    events = list(executors.run_program(made, executors.plan_program([job], ROUNDS), [job]))
    whole = losses_of(events), views(made.attached), views({"a": executors.job_training(base, job)})
    weights = {key: value for _, slices in answers for key, value in slices.items()}
    assert_equal((losses_of(answers[0][0]), weights), whole, 1e-9, 1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_losses_on_a_gpu_are_near_those_of_whole_samples(dtype, gap):
    """By the tiled route, with fused layers; passes of whole samples may be captured, those of chunks not."""
    found = []
    for cut in (False, True):
        base = base_of(tiny("llama", dtype), device=torch.device("cuda", 0))
        found.append(train(base, two_jobs(base), cut, NOTHING, None)[0])
    whole, chunked = found
    assert whole.keys() == chunked.keys()
    for name, lines in whole.items():
        assert [loss for _, loss, _ in chunked[name]] == pytest.approx(
            [loss for _, loss, _ in lines], rel=gap
        )


def test_a_job_that_dies_between_two_chunks_leaves_no_keys_and_changes_no_other_job():
    base = bench.base()
    jobs = two_jobs(base)
    program = in_chunks(executors.plan_program(jobs, 1, 64))
    made = executors.executor_with(base, jobs)
    calls = count(1)

    def kill_after_two_forwards():
        if next(calls) == 2:
            assert made._sample_keys
            made.kill("a")

    made.offer_turn = kill_after_two_forwards
    events = list(executors.run_program(made, program, jobs))
    assert not made._sample_keys
    other = executors.executor_with(bench.base(), jobs[1:])
    alone = list(executors.run_program(other, program.without("a"), jobs[1:]))
    starts = views({"b": executors.job_training(base, jobs[1])})
    weights = {key: value for key, value in views(made.attached).items() if key[0] == "b"}
    assert_equal((losses_of(events), weights), (losses_of(alone), views(other.attached), starts), 1e-9, 1e-8)


def test_a_chunk_without_memory_drops_the_keys_of_its_sample(monkeypatch):
    base = bench.base()
    jobs = two_jobs(base)
    made, attend, calls = executors.executor_with(base, jobs), ChunkKeys.attend, count(1)

    def attend_twice(*given, **named):
        if next(calls) > 3:
            raise torch.OutOfMemoryError("no room")
        return attend(*given, **named)

    monkeypatch.setattr(ChunkKeys, "attend", attend_twice)
    with pytest.raises(OutOfMemory, match="no room"):
        list(executors.run_program(made, in_chunks(executors.plan_program(jobs, 1)), jobs))
    assert not made._sample_keys
    assert not made._in_flight


def test_chunks_are_refused_where_stages_take_turns():
    base = bench.base()
    jobs = two_jobs(base)
    made = executors.executor_with(base, jobs)
    made.part = Layout((StageLayers(0, 1, True), StageLayers(1, 2, True))).for_worker(0)
    with pytest.raises(PlanError, match="cuts samples into chunks"):
        list(executors.run_program(made, in_chunks(executors.plan_program(jobs, 1)), jobs))
