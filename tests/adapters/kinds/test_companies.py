"""Random companies of kinds in the same microbatches: every job learns what it learns alone.

Equal as docs/design.md has it, in float64: step losses to 1e-9, what training moved to 1e-8, parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import bench, oracle
from tests.run import executors
from weftune.adapters.ia3.apply import Ia3
from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import KINDS
from weftune.adapters.plain import JobAt, JobPart
from weftune.adapters.vector import VectorLayout
from weftune.base.model import Base
from weftune.plan.program.program import Program
from weftune.run.assemble import resident_executor
from weftune.run.events import Stepped
from weftune.run.training.state import Training, new_training
from weftune.trainer.job import PreparedJob

STEPS = 2
LONGEST = 14
"""Tokens of a sample."""
FEWEST_ROWS = LONGEST + 4
"""The least capacity: a sample and the virtual tokens before it."""
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["attn.c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
"""Endings of the linears of each base."""
LAST = {"llama": ["o_proj", "down_proj"], "gpt2": ["attn.c_proj", "mlp.c_proj"], "phi3": ["down_proj"]}
"""Those that a bottleneck comes behind."""

ranks, dropouts = st.integers(1, 9), st.sampled_from([0.0, 0.3])
layers = st.sampled_from([None, 0, "1-1", (0, 1)])


def some(names: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=1, unique=True)


def keys_of(kind: str, family: str) -> st.SearchStrategy[dict[str, Any]]:
    """What a job of the kind may say on that base."""
    where = {"targets": some(TARGETS[family]), "layers": layers}
    low_rank = {**where, "rank": ranks, "alpha": st.sampled_from([1.0, 6.0]), "dropout": dropouts}
    low_rank |= {"trainable_token_indices": st.lists(st.integers(0, 96), max_size=3, unique=True)}
    low_rank |= {"rslora": st.booleans(), "loraplus_lr_ratio": st.sampled_from([1.0, 4.0])}
    gates = {"sparsity": st.sampled_from([0.02, 0.5]), "structured": st.booleans()}
    keys = {
        "lora": low_rank,
        "dora": low_rank,
        "pissa": low_rank,
        "vera": {**where, "rank": ranks, "dropout": dropouts, "projection_prng_key": st.integers(0, 1)},
        "ia3": {**where, "feedforward": some(TARGETS[family])},
        "bottleneck": {
            "targets": some(LAST[family]),
            "layers": layers,
            "size": ranks,
            "activation": st.sampled_from(["relu", "gelu", "silu"]),
        },
        "diff": {**where, **gates, "relaxed": st.sampled_from([0.5, 1, 2])},
        "prompt": {
            "num_virtual_tokens": st.integers(1, 4),
            "init": st.sampled_from(["random", "vocabulary"]),
        },
        "prefix": {"num_virtual_tokens": st.integers(1, 4)},
    }[kind]
    return st.fixed_dictionaries({"kind": st.just(kind), **keys})


OURS = [name for name, spec in KINDS.items() if spec.__module__.startswith("weftune.")]


@st.composite
def companies(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A family, and what each of two to four jobs says."""
    family = draw(st.sampled_from(list(TARGETS)))
    kinds = draw(st.lists(st.sampled_from(OURS), min_size=2, max_size=4))
    jobs = [
        {
            "name": f"{kind}-{number}",
            "adapter": draw(keys_of(kind, family)),
            "samples": draw(st.integers(2, 6)),
            "batch_size": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 9)),
        }
        for number, kind in enumerate(kinds)
    ]
    return family, jobs


@cache
def base_of(family: str) -> Base:
    return bench.base(family)


def ready(base: Base, samples: int, seed: int, **keys: Any) -> PreparedJob:
    data = bench.rows(bench.samples(samples, seed, shortest=3, longest=LONGEST))
    return executors.prepare(base, data=data, seed=seed, steps=STEPS, **keys)


def at_start(base: Base, job: PreparedJob) -> Training:
    adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed, job.recipe.steps)
    sites, frozen = base.shape.sites, base.weight_reader()
    return new_training(adapter, job.recipe, sites, base.dtype, base.device, frozen=frozen)


def train(base: Base, jobs: Sequence[PreparedJob], capacity: int) -> dict[str, oracle.Trained]:
    """What became of every job."""
    executor, trainings = resident_executor(base), [at_start(base, job) for job in jobs]
    for one in trainings:
        executor.attach(one)
    starts = {one.job: one.master.clone() for one in trainings}
    events = list(executors.run_program(executor, program(jobs, capacity), jobs))
    executor.restore_base()
    losses = {
        one.job: [
            event.outcome.loss for event in events if isinstance(event, Stepped) and event.job == one.job
        ]
        for one in trainings
    }
    return {
        one.job: oracle.Trained(
            losses[one.job], named(one.layout, starts[one.job]), named(one.layout, one.master)
        )
        for one in trainings
    }


def program(jobs: Sequence[PreparedJob], capacity: int) -> Program:
    return executors.plan_program(jobs, STEPS, capacity, begins=True)


def named(layout: VectorLayout, flat: Tensor) -> dict[str, Tensor]:
    return {f"{site}.{name}": value for (site, name), value in layout.parameter_views(flat).items()}


def compare(family: str, company: Sequence[dict[str, Any]], capacity: int, capacity_alone: int) -> None:
    """Train the jobs together, then each of them alone."""
    base = base_of(family)
    jobs = [ready(base, **one) for one in company]
    together = train(base, jobs, capacity)
    for job in jobs:
        alone = train(base, [job], capacity_alone)[job.name]
        assert len(alone.losses) == STEPS
        oracle.assert_equal_float64(together[job.name], alone)


capacities = st.integers(FEWEST_ROWS, 128)


@settings(max_examples=100)
@given(companies(), capacities, capacities)
def test_in_any_company_a_job_of_any_kind_learns_what_it_learns_alone(company, capacity, capacity_alone):
    compare(*company, capacity, capacity_alone)


def test_one_of_every_kind_shares_a_microbatch_with_all_others_and_learns():
    """So what is drawn above can share one, too."""
    base = base_of("llama")
    jobs = [ready(base, 3, 0, name=kind, adapter={"kind": kind}) for kind in OURS]
    assert max(len(one.jobs) for one in program(jobs, 1024).microbatches) == len(OURS) >= 9
    for name, trained in train(base, jobs, 1024).items():
        assert max(moved.norm() for moved in trained.moved().values()) > 1e-6, name


def test_a_kind_that_looks_at_its_neighbours_is_noticed(monkeypatch):
    """The comparison can fail."""
    part = Ia3.part

    def leaking(self: Ia3, at: JobAt) -> JobPart:
        own = part(self, at)
        scale_N = own.g_out_N * (1.0 + 1e-7 * at.segment.start) if own.g_out_N is not None else None
        return replace(own, g_out_N=scale_N)

    company = [
        {"name": name, "adapter": {"kind": "ia3"}, "samples": 3, "batch_size": 1, "seed": 0} for name in "ab"
    ]
    compare("llama", company, 64, 64)
    monkeypatch.setattr(Ia3, "part", leaking)
    with pytest.raises(AssertionError):
        compare("llama", company, 64, 64)
