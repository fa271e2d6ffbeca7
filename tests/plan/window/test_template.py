"""The template's order, and its theorem: under the premises the last stage never waits."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plan.works import batch, work
from weftune.plan.program.prices import PassPrice, free_cluster
from weftune.plan.program.program import Backward, Forward
from weftune.plan.program.simulate import simulate
from weftune.plan.program.timeline import Span
from weftune.plan.window.orders import Work
from weftune.plan.window.template import Queue, queue_prices, template


def bucket_work(counts):
    """One job for each bucket, with so many microbatches; and the microbatches of each."""
    made = [batch(f"job{bucket}", 1, count) for bucket, count in enumerate(counts)]
    starts = [sum(counts[:bucket]) for bucket in range(len(counts))]
    numbers = [tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return Work(8, tuple(one for _, held in made for one in held), tuple(one for one, _ in made)), numbers


def even_queues(numbers, seconds, stages):
    return [
        Queue(held, (PassPrice(time, time, kept_bytes=1),) * stages)
        for held, time in zip(numbers, seconds, strict=True)
    ]


def idle_within(timeline, device):
    """Seconds that a device does not compute between its first pass and its last."""
    passes = [one for one in timeline.of(device) if isinstance(one.action, Forward | Backward)]
    span = Span(passes[0].start, passes[-1].stop)
    return span.seconds * (1.0 - timeline.busy_share(device, span))


def last_stage_idle(made, plan, queues):
    timeline = simulate(made.program, queue_prices(plan, queues), free_cluster(len(queues[0].passes)))
    return idle_within(timeline, len(queues[0].passes) - 1)


buckets = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.integers(1, 1000).map(float), st.floats(0.01, 100.0))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(buckets=buckets, stages=st.integers(1, 8))
@example(buckets=[(1, 100.0), (9, 1.0)], stages=8)
def test_the_last_stage_is_busy_from_its_first_forward_to_its_last_backward(buckets, stages):
    plan, numbers = bucket_work([count for count, _ in buckets])
    queues = even_queues(numbers, [seconds for _, seconds in buckets], stages)
    made = template(plan, queues)
    assert made.broken == ()
    assert last_stage_idle(made, plan, queues) <= 1e-9 * sum(count * seconds for count, seconds in buckets)


def test_the_slowest_bucket_runs_first_and_a_bucket_stays_together():
    plan, numbers = bucket_work([2, 3, 2])
    made = template(plan, even_queues(numbers, [1.0, 3.0, 2.0], 2))
    assert made.order == (1, 2, 0)
    for actions in made.program.devices:
        assert [a.microbatch for a in actions if isinstance(a, Forward)] == [2, 3, 4, 5, 6, 0, 1]


def test_launches_keep_to_the_memory_and_the_template_says_what_that_costs():
    plan, numbers = bucket_work([8])
    queues = even_queues(numbers, [1.0], 4)
    tight = template(plan, queues, room=(2, 2, 2, 2))
    timeline = simulate(tight.program, queue_prices(plan, queues), free_cluster(4))
    assert timeline.peaks == (2, 2, 2, 1)
    assert idle_within(timeline, 3) > 0
    assert tight.broken == ("stage 0 has no memory for an earlier launch",)
    assert "may have to wait" in tight.why()
    assert "is busy" in template(plan, queues, room=(8, 8, 8, 8)).why()


@pytest.mark.parametrize(
    ("passes", "sentence"),
    [
        ([(2, 2), (1, 1)], "different times on different stages"),
        ([(1, 1), (1, 3), (1, 1)], "the forward and the backward of bucket 1 take different times"),
    ],
)
def test_the_template_says_which_premise_fails_where_the_last_stage_waits(passes, sentence):
    plan, numbers = bucket_work([6])
    queues = [Queue(numbers[0], tuple(PassPrice(float(f), float(b)) for f, b in passes))]
    made = template(plan, queues)
    assert last_stage_idle(made, plan, queues) > 0
    assert any(sentence in one for one in made.broken)


def test_the_template_says_that_a_second_batch_waits_for_its_step():
    plan = work(jobs=1, steps=2, microbatches=2)
    queues = [Queue((0, 1, 2, 3), (PassPrice(1.0, 1.0),) * 3)]
    made = template(plan, queues)
    assert last_stage_idle(made, plan, queues) > 0
    assert made.broken == ("job0 has several global batches, and each waits for the Step before it",)
