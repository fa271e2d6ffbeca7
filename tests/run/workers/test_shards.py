"""A base whose layers are divided among processes gives every job the losses and weights of one process."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests import bench
from tests.adapters.kinds.cases import case
from tests.cases import slow_but
from tests.run import executors
from tests.run.models import deep
from tests.run.processes import run_workers
from tests.run.workers.test_agreed import (
    CAPACITY,
    CUTS,
    STEPS,
    alone,
    assert_equal,
    losses_of,
    make_jobs,
    pipeline_program,
    ranges,
    views,
    whole_base,
)
from tests.run.workers.test_shortage import kto_job
from weftune.adapters.kind import JobAdapter
from weftune.base.quant.linear import QuantLinear
from weftune.base.shards import cut_shard
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange
from weftune.core.shards import ShardTeam
from weftune.errors import BaseModelError
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.window.overlap import overlap_microbatches
from weftune.run.assemble import resident_executor
from weftune.run.events import Failed, Stepped
from weftune.run.parts import fetch_from
from weftune.run.training.state import new_training
from weftune.run.workers.transport import Transport
from weftune.run.workers.worker import shard_team, worker_executor
from weftune.trainer.job import collate_plan

WHOLE = [0, 4]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")


KINDS = ("dora", "dora-dropped", "pissa", "vera", "ia3", "prompt", "prefix")


def kind_jobs(base, kind, family="llama"):
    """One job of the kind, on linears that are cut by their outputs and by their inputs."""
    data = bench.rows(bench.samples(12, seed=2))
    return [executors.prepare(base, "own", steps=4, adapter=case(kind, family).adapter, data=data)]


def token_jobs(base):
    """A job that trains rows of the embedding, which are on both of two shards."""
    adapter = {"rank": 2, "trainable_token_indices": [5, 9, 11, 60]}
    return [executors.prepare(base, "own", steps=4, adapter=adapter, data=bench.rows(bench.samples(12)))]


def reward_jobs(base):
    """A reward model, whose scalar head every shard has."""
    rows = [{"prompt": f"w{n}", "chosen": f"w{n + 7} w9", "rejected": f"w{n + 20}"} for n in range(6, 18)]
    return [executors.prepare(base, "own", steps=4, adapter={"rank": 2}, objective="reward", data=rows)]


def preference_jobs(base):
    """Jobs with reference scores, one of them with scores of mismatched samples before every batch."""
    rows = [{"prompt": f"w{n}", "chosen": f"w{n + 7} w9", "rejected": f"w{n + 20}"} for n in range(6, 18)]
    dpo = executors.prepare(base, "own", steps=4, adapter={"rank": 2}, objective="dpo", data=rows)
    return [dpo.with_references(np.linspace(-30.0, -10.0, 24)), kto_job(base)]


def whole_reader(model):
    """A function that returns the weight of a linear or of the embedding as one matrix."""

    def read(name):
        if "_proj" not in name and "embed_tokens" not in name:
            return None
        module = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, QuantLinear):
            return module.frozen_weight().matrix()
        return module.weight.detach()

    return read


def training_of(base, job):
    """With weights of the base, from which some kinds start."""
    adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    sites, frozen = base.trained_sites, base.weight_reader()
    return new_training(adapter, job.recipe, sites, base.dtype, base.device, base.whole_sites, frozen=frozen)


def as_shard(connections, family, dtype, jobs_of, cuts, poison, cancelled, overlaps):
    """Train the jobs on this worker; what happened here, and its adapters, which are whole in each layer."""
    position = connections.position
    whole = whole_base(family, dtype)
    jobs = jobs_of(whole)
    spec, team, held = BaseSpec(model=f"tiny/{family}"), shard_team(connections), ranges(cuts)
    read_whole = whole_reader(deep(family, dtype))
    base = cut_shard(deep(family, dtype), spec, bench.CPU, team, held[position.stage], read_whole)
    transport = Transport(connections, base.shape.hidden, base.dtype, base.device)
    layout = pipeline_layout(held, position.replicas, position.shards, overlaps)
    part = layout.for_worker(position.stage)
    executor, _ = worker_executor(base, part, transport, position.list_index, team)
    for job in jobs:
        executor.attach(training_of(base, job))
    if poison is not None and position.worker == 0:
        executor.banks.attached[poison].weights.fill_(math.nan)
    program = pipeline_program(jobs, position, None)
    if overlaps:
        program = overlap_microbatches(program, layout.layers)
        assert program.overlapped_microbatches
    by_name, kinds = {job.name: job for job in jobs}, program.pass_kinds()
    microbatches = {
        n: collate_plan(plan, kinds[n], by_name)
        for n, plan in enumerate(program.microbatches)
        if plan.segments
    }
    events = []
    for event in executor.run(program, fetch_from(program, microbatches)):
        events.append(event)
        if isinstance(event, Stepped) and event.job == cancelled and position.worker == 0:
            executor.kill(cancelled)
    transport.flush()
    steps = {name: training.progress.step for name, training in executor.attached.items()}
    return events, views(executor.attached), steps


def train(
    family,
    shards,
    dtype=torch.float64,
    jobs_of=make_jobs,
    cuts=WHOLE,
    replicas=1,
    poison=None,
    cancelled=None,
    overlaps=False,
):
    workers, arguments = (
        shards * (len(cuts) - 1) * replicas,
        (family, dtype, jobs_of, cuts, poison, cancelled, overlaps),
    )
    return run_workers(workers, as_shard, *arguments, replicas=replicas, shards=shards)


def whole_weights(answers, stages=1, shards=2, without=""):
    """Every adapter, put together from the first replica's stages."""
    first = answers[: stages * shards : shards]
    return {key: value for _, part, _ in first for key, value in part.items() if key[0] != without}


def assert_same_bits(answers, stages=1, shards=2):
    """All shards of a stage and all replicas hold the same adapters."""
    for worker, (_, weights, _) in enumerate(answers):
        first = answers[worker // shards % stages * shards][1]
        assert weights.keys() == first.keys()
        assert all(torch.equal(value, weights[key]) for key, value in first.items())


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["phi3", "gemma3"]))
def test_losses_and_adapters_equal_one_process_in_float64(family):
    answers = train(family, 2)
    assert_equal((losses_of(answers[0][0]), answers[0][1]), alone(family, torch.float64), 1e-9, 1e-8)
    assert all(steps == STEPS for _, _, steps in answers)
    assert_same_bits(answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "replicas", "shards"),
    [(2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 4)],
)
def test_shards_of_stages_and_of_replicas_equal_one_process(stages, replicas, shards):
    cuts = WHOLE if stages == 1 else CUTS[stages]
    answers = train("llama", shards, cuts=cuts, replicas=replicas)
    found = losses_of(answers[0][0]), whole_weights(answers, stages, shards)
    assert_equal(found, alone("llama", torch.float64), 1e-9, 1e-8)
    assert all(steps == STEPS for _, _, steps in answers)
    assert_same_bits(answers, stages, shards)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_more_shards_than_key_value_heads_repeat_these_heads(family):
    answers = train(family, 4)
    assert_equal((losses_of(answers[0][0]), answers[0][1]), alone(family, torch.float64), 1e-9, 1e-8)
    assert_same_bits(answers, shards=4)


def assert_equal_to_one_process(family, shards, jobs_of, replicas=1, overlaps=False):
    base = whole_base(family, torch.float64)
    jobs = jobs_of(base)
    made = resident_executor(base)
    for job in jobs:
        made.attach(training_of(base, job))
    starts = views(made.attached)
    events = list(executors.run_program(made, executors.plan_program(jobs, 5, CAPACITY), jobs))
    answers = train(family, shards, jobs_of=jobs_of, replicas=replicas, overlaps=overlaps)
    want = losses_of(events), views(made.attached), starts
    assert_equal((losses_of(answers[0][0]), answers[0][1]), want, 1e-9, 1e-8)
    assert_same_bits(answers, shards=shards)


@pytest.mark.parametrize("kind", slow_but(KINDS, ["pissa", "vera", "prompt"]))
def test_kinds_are_cut_as_their_sites_are(kind):
    assert_equal_to_one_process("llama", 2, partial(kind_jobs, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pissa"])
def test_kinds_are_cut_in_other_families_and_with_repeated_key_value_heads(kind, family):
    assert_equal_to_one_process(family, 4, partial(kind_jobs, kind=kind, family=family))


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3"], ["gemma3"]))
def test_trained_rows_of_the_embedding_get_their_gradient_once(family):
    """In a family whose head is tied to the embedding, too."""
    assert whole_base(family, torch.float64).is_tied == (family == "gemma3")
    assert_equal_to_one_process(family, 2, token_jobs)


def test_the_scalar_head_of_a_reward_model_gets_its_gradient_once():
    assert_equal_to_one_process("llama", 2, reward_jobs)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_jobs_that_learn_from_preferences_equal_one_process(replicas):
    assert_equal_to_one_process("llama", 2, preference_jobs, replicas)


@pytest.mark.parametrize("stages", slow_but([1, 2], [1]))
def test_a_nan_on_one_shard_kills_its_job_on_all_and_the_others_equal_a_run_without_it(stages):
    answers = train("llama", 2, cuts=WHOLE if stages == 1 else CUTS[2], poison="a")
    (failed,) = (event for event in answers[0][0] if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("a", "its loss at step 1 is nan")
    assert all(steps == {"a": 0, "b": 3, "c": 4} for _, _, steps in answers)
    found = losses_of(answers[0][0]), whole_weights(answers, stages, without="a")
    assert_equal(found, alone("llama", torch.float64, "bc"), 1e-9, 1e-8)


@pytest.mark.parametrize("stages", slow_but([1, 2], [2]))
def test_a_job_that_the_first_worker_ends_makes_no_more_steps_anywhere(stages):
    answers = train("llama", 2, cuts=WHOLE if stages == 1 else CUTS[2], cancelled="a")
    losses = losses_of(answers[0][0])
    assert len(losses.pop("a")) == 1
    assert all(steps == {"a": 1, "b": 3, "c": 4} for _, _, steps in answers)
    found = losses, whole_weights(answers, stages, without="a")
    assert_equal(found, alone("llama", torch.float64, "bc"), 1e-9, 1e-8)


@pytest.mark.parametrize(
    ("family", "shards", "reason"),
    [
        ("gpt2", 2, "cannot be divided into shards; Weftune knows how to divide gemma3_text, llama"),
        (
            "llama",
            3,
            "has 4 attention heads, 2 key/value heads and a feed-forward of width 48, which 3 shards",
        ),
    ],
)
def test_a_base_that_cannot_be_divided_is_refused_in_a_sentence(family, shards, reason):
    model = deep(family, torch.float32)
    with pytest.raises(BaseModelError, match=reason):
        cut_shard(
            model,
            BaseSpec(model="tiny"),
            bench.CPU,
            ShardTeam(0, shards, lambda _: None),
            LayerRange(0, 4, 4),
        )
