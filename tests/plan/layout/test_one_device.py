"""For whom a streamed run is planned: as many jobs as fit, found without a search for each number of them."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.stream_cases import DEVICES, base, gpu, job, sized
from weftune.errors import PlanError
from weftune.plan.layout.need import StreamCase, draft_from_layout
from weftune.plan.layout.stream_choice import choose_for_jobs, choose_stream, fits_streamed

JOB_SETS = st.lists(
    st.tuples(st.sampled_from([5000, 80_000, 300_000]), st.integers(1, 60), st.integers(0, 2)),
    min_size=1,
    max_size=5,
).map(
    lambda wants: [
        replace(
            job(str(at), trainable, longest), priority=priority, file_position=at, batch_tokens=3 * longest
        )
        for at, (trainable, longest, priority) in enumerate(wants)
    ]
)
SHARES = st.integers(15, 80).map(lambda percent: percent / 100)


def chooses(shape, together, device, waiting=()):
    tokens = sum(one.batch_tokens for one in together)
    try:
        choose_stream(shape, together, device, 256, tokens, waiting_jobs=waiting)
    except PlanError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), JOB_SETS, DEVICES, SHARES, st.integers(0, 4))
def test_whether_jobs_fit_streamed_is_told_without_the_search(layers, jobs, device, share, attached_jobs):
    shape = base(layers)
    device = sized(device, share, shape, jobs, 200)
    together, waiting = jobs[: attached_jobs + 1], jobs[attached_jobs + 1 :]
    tokens = sum(one.batch_tokens for one in together)
    told = fits_streamed(shape, together, device, 256, tokens)
    assert told == chooses(shape, together, device)
    if fits_streamed(shape, together, device, 256, tokens, waiting):
        assert told
        assert chooses(shape, together, device, waiting)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), JOB_SETS, DEVICES, SHARES)
def test_those_aboard_are_the_first_jobs_in_order_and_one_more_would_not_fit(layers, jobs, device, share):
    shape = base(layers)
    device = sized(device, share, shape, jobs, 200)
    ordered = sorted(jobs, key=lambda one: (-one.priority, one.file_position))
    try:
        found = choose_for_jobs(shape, jobs, device, 256)
    except PlanError:
        assert not chooses(shape, ordered[:1], device)
        return
    count = len(found.attached_jobs)
    assert list(found.attached_jobs) == ordered[:count]
    for waiting in (lambda at: ordered[at:], lambda at: []):
        if chooses(shape, ordered[:count], device, waiting(count)):
            tokens = sum(one.batch_tokens for one in found.attached_jobs)
            choice = choose_stream(shape, ordered[:count], device, 256, tokens, waiting_jobs=waiting(count))
            assert found == choice
            assert count == len(jobs) or not chooses(shape, ordered[: count + 1], device, waiting(count + 1))
            break


def test_a_cut_that_serves_fewer_jobs_now_and_each_of_the_others_later_is_preferred():
    """Two small jobs and a large one that fits by itself only."""
    shape, device = base(8), gpu(2_200_000)
    jobs = [replace(job(name, 1000), file_position=at, batch_tokens=100) for at, name in enumerate("ab")]
    large = replace(job("c", 100_000, longest=60), file_position=2, batch_tokens=400)

    def serves(choice):
        capacity, cut = max(choice.capacity, large.max_sample_tokens), choice.layout
        alone = StreamCase(shape, (large,), device, 400, capacity, cut.adapters_travel, cut.offloads_inputs)
        return alone.fits(draft_from_layout(cut))

    found = choose_for_jobs(shape, [*jobs, large], device, 64)
    assert [one.name for one in found.attached_jobs] == ["a", "b"]
    assert serves(found)
    assert not serves(choose_for_jobs(shape, jobs, device, 64))
