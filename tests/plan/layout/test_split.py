"""Jobs to shares: everybody once, evenly, and the heaviest share never far from the best there is."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.core.shapes import JobShape, ModelShape, SiteShape
from weftune.plan.cost.estimate import Speed
from weftune.plan.cost.memory import SLACK_BYTES, MemoryModel
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.layout.seats import find_misfits
from weftune.plan.layout.split import JobWork, data_sheet_cost, job_seconds, share_jobs
from weftune.plan.program.program import GlobalBatch, PlacedSample

HIDDEN, LAYERS, VOCABULARY = 256, 4, 1000
SITES = tuple(
    SiteShape(f"model.layers.{layer}.{name}", HIDDEN, HIDDEN) for layer in range(LAYERS) for name in "qkvo"
)
PARAMETERS = LAYERS * 4 * HIDDEN**2 + HIDDEN * VOCABULARY
SHAPE = ModelShape(LAYERS, HIDDEN, VOCABULARY, PARAMETERS, 2, SITES, context=2048)

times = st.lists(st.one_of(st.floats(0.0, 1e5), st.sampled_from([1.0, 2.0, 3.0])), max_size=7)


def named(seconds):
    return {f"job{number}": one for number, one in enumerate(seconds)}


def heaviest(seconds, devices, homes):
    return max(
        math.fsum(one for one, home in zip(seconds, homes, strict=True) if home == device)
        for device in range(devices)
    )


@given(times, st.integers(1, 4))
def test_the_heaviest_share_is_at_most_four_thirds_of_the_best_there_is(seconds, devices):
    best = min(heaviest(seconds, devices, homes) for homes in product(range(devices), repeat=len(seconds)))
    found = max(share.seconds for share in share_jobs(named(seconds), devices))
    assert found <= best * (4 / 3 - 1 / (3 * devices)) * (1 + 1e-9)


@given(st.lists(st.floats(0.0, 1e5), max_size=80), st.integers(1, 9))
def test_every_job_is_in_one_share_and_only_a_lack_of_jobs_leaves_one_empty(seconds, devices):
    shares = share_jobs(named(seconds), devices)
    assert len(shares) == devices
    assert sorted(name for share in shares for name in share.jobs) == sorted(named(seconds))
    assert sum(not share.jobs for share in shares) == max(0, devices - len(seconds))
    for share in shares:
        assert share.seconds == pytest.approx(sum(named(seconds)[name] for name in share.jobs))


@given(st.lists(st.floats(0.0, 1e5), max_size=30), st.integers(1, 5))
def test_the_same_jobs_are_always_divided_alike_and_stay_in_their_order(seconds, devices):
    first, again = (share_jobs(named(seconds), devices) for _ in range(2))
    assert first == again
    order = list(named(seconds))
    assert all(list(share.jobs) == sorted(share.jobs, key=order.index) for share in first)


def test_moves_and_swaps_better_what_longest_first_leaves():
    # Longest first gives 3 + 2 + 2 against 3 + 2; the best is 3 + 3 against 2 + 2 + 2.
    shares = share_jobs(named([3.0, 3.0, 2.0, 2.0, 2.0]), 2)
    assert sorted(share.seconds for share in shares) == [6.0, 6.0]


def work(steps=10, lengths=(50, 60), evaluations=0, held_out=(), trainable=1000):
    samples = tuple(PlacedSample(n, length, 0, length) for n, length in enumerate(lengths))
    held = tuple(PlacedSample(n, length, 0, length) for n, length in enumerate(held_out))
    shape = JobShape("a", 0, 0, trainable_parameters=trainable, max_sample_tokens=max((*lengths, *held_out)))
    batch = GlobalBatch("a", 1, samples, sum(lengths))
    return JobWork(shape=shape, steps=steps, batches=(batch,), evaluations=evaluations, held_out_samples=held)


def test_a_job_s_time_grows_with_steps_tokens_parameters_and_evaluations():
    cost = uncalibrated_cost_model(SHAPE)
    plain = job_seconds(work(), cost, 1024)
    assert job_seconds(work(steps=20), cost, 1024) == pytest.approx(2 * plain)
    assert job_seconds(work(lengths=(100, 120)), cost, 1024) > 1.5 * plain
    assert job_seconds(work(trainable=100_000), cost, 1024) > plain
    assert job_seconds(work(evaluations=3, held_out=(40,)), cost, 1024) > plain
    assert job_seconds(work(evaluations=3), cost, 1024) == plain
    # A capacity that parts a batch makes two passes of it.
    assert job_seconds(work(), cost, 64) > plain


def test_a_data_sheet_gives_the_counted_terms_their_level():
    slow, fast = (Speed(flops, flops, 1.0, 0.0, "a data sheet") for flops in (1e9, 4e9))
    seconds = [job_seconds(work(), data_sheet_cost(SHAPE, speed), 1024) for speed in (slow, fast)]
    assert seconds[0] == pytest.approx(4 * seconds[1])
    assert data_sheet_cost(SHAPE, slow).is_measured
    # Two passes over the weights, two operations a weight, 110 tokens a step; all the rest is less.
    least = 10 * 110 * 2 * 2 * LAYERS * 4 * HIDDEN**2 / 1e9
    assert least < seconds[0] < 3 * least


def test_a_job_that_does_not_fit_even_alone_is_named_with_its_numbers():
    jobs = [JobShape("small", 0, 0, 1000, 64), JobShape("large", 0, 1, 1 << 30, 512)]
    memory = MemoryModel(SHAPE, SLACK_BYTES + (64 << 20))
    found = find_misfits(jobs, memory.misfit_reason)
    assert list(found) == ["large"]
    assert "longest sample of 512 tokens, but 0.31 GiB are available" in found["large"]


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.integers(-1, 20)), max_size=20), st.integers(1, 4))
def test_a_job_is_in_the_share_of_the_one_that_it_starts_from(jobs, devices):
    seconds = named([one for one, _ in jobs])
    sources = {f"job{n}": f"job{source}" for n, (_, source) in enumerate(jobs) if 0 <= source < n}
    shares = share_jobs(seconds, devices, sources)
    homes = {name: number for number, share in enumerate(shares) for name in share.jobs}
    assert sorted(homes) == sorted(seconds)
    assert all(homes[name] == homes[source] for name, source in sources.items())
    assert all(list(share.jobs) == sorted(share.jobs, key=list(seconds).index) for share in shares)


def test_one_that_is_trained_already_binds_nobody():
    shares = share_jobs({"b": 1.0, "c": 1.0}, 2, {"b": "a", "c": "a"})
    assert sorted(share.jobs for share in shares) == [("b",), ("c",)]
