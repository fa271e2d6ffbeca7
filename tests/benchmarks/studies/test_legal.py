"""Whatever the jobs, the cluster and the lengths: every Program of the planner trains what was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.ablate import ablate
from benchmarks.studies.placement import cut_stages, recompute_cases
from benchmarks.studies.scheme import SEARCHED, Scheme, SchemeOrder, run_scheme, separate_groups
from benchmarks.studies.search import outlook
from tests.plan.outlooks import ground, outline
from weftune.plan.cost.estimate import JobOutline
from weftune.plan.pack.best import BEST_FIT_ONLY
from weftune.plan.program.check import check
from weftune.plan.program.program import Forward, Program, Step

LENGTHS = st.lists(
    st.lists(st.lists(st.integers(2, 900), min_size=1, max_size=5), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


def made(jobs: list[list[list[int]]]) -> list[JobOutline]:
    outline_model = []
    for number, batches in enumerate(jobs):
        job = outline(f"job{number}", 10)
        lengths = tuple(map(tuple, batches))
        longest = max(map(max, lengths))
        outline_model.append(
            replace(job, batches=lengths, shape=replace(job.shape, max_sample_tokens=longest))
        )
    return outline_model


def trains(program: Program, jobs: list[JobOutline]) -> None:
    """Told without the checker: every sample of every batch once, and on each device all Steps in order."""
    check(program)
    asked = Counter(
        (job.name, step, number, length)
        for job in jobs
        for step, lengths in enumerate(job.batches, start=1)
        for number, length in enumerate(lengths)
    )
    last = len(program.stages) - 1
    passed = [
        one.microbatch
        for actions in program.devices
        for one in actions
        if isinstance(one, Forward) and one.stage == last
    ]
    trained = Counter(
        (segment.job, segment.step, placed.sample, placed.length)
        for number in passed
        for segment in program.microbatches[number].segments
        for placed in segment.samples
    )
    assert trained == asked
    for actions in program.devices:
        steps = [one for one in actions if isinstance(one, Step)]
        for job in jobs:
            assert [one.step for one in steps if one.job == job.name] == [*range(1, len(job.batches) + 1)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["H100", "2xA100-40G", "3xL40S", "4xRTX4090", "8xH200"]),
    LENGTHS,
    st.sampled_from(
        [
            SchemeOrder.gpipe,
            SchemeOrder.alternating,
            SchemeOrder.multi_job,
            SchemeOrder.template,
        ]
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from([BEST_FIT_ONLY, SEARCHED]),
    st.sampled_from([1024, 2048, 8192]),
)
def test_every_order_is_legal_and_trains_each_sample_of_each_batch_once(
    cluster, lengths, order, shift, together, limits, capacity
):
    place, jobs = recompute_cases(ground(cluster))[-1], made(lengths)
    groups = (tuple(job.name for job in jobs),) if together else separate_groups(jobs)
    scheme = Scheme("weftune", groups, order, limits, shift)
    trains(run_scheme(scheme, jobs, cut_stages(place, jobs, capacity)).program, jobs)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["H100", "2xA100-40G", "3xL40S", "8xH200"]), LENGTHS)
def test_what_the_outlook_chooses_trains_each_sample_of_each_batch_once(cluster, lengths):
    jobs = made(lengths)
    found = outlook(ground(cluster), jobs)
    trains(found.run.program, jobs)
    for one in found.simulated_schemes:
        trains(one.run.program, jobs)


@settings(max_examples=4, deadline=None)
@given(LENGTHS)
def test_no_ablation_of_a_pipeline_breaks_down(lengths):
    jobs = made(lengths)
    tokens = sum(sum(batch) for job in jobs for batch in job.batches)
    for row in ablate(outlook(ground("4xA100-80G"), jobs)):
        assert row.forecast.tokens == tokens
        assert row.forecast.seconds > 0
        assert 0 <= row.forecast.bubbles < 1


def test_the_independent_telling_can_fail():
    jobs = made([[[5, 7], [9]]])
    program = outlook(ground("H100"), jobs).run.program
    with pytest.raises(AssertionError, match="Counter"):
        trains(program, made([[[5, 7], [8]]]))
