"""Orders for pipelines: legal, complete, and as full as the papers' formulas say."""

from itertools import product
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cases import slow_but
from tests.plan.works import batch, even_prices, stage_prices, work
from weftune.plan.program.check import check
from weftune.plan.program.prices import PassPrice, PricedCluster
from weftune.plan.program.program import (
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    SegmentPlan,
)
from weftune.plan.program.simulate import Span, simulate
from weftune.plan.window.orders import (
    Queue,
    Work,
    gpipe,
    multi_job,
    one_forward_one_backward,
    queue_prices,
    rounds,
    template_order,
)

STEPS = 10
STEADY = (4, 9)
"""Steps between which the pattern has long settled."""


def mlora_ratio(devices, jobs, microbatches):
    """mLoRA 3.2.2: equal stages, any ratio of forward to backward, communication and Steps for nothing."""
    slots = devices + microbatches - 1
    return max((slots - jobs * microbatches) / slots, 0)


def steady_bubbles(program, prices, steady=STEADY):
    devices = len(program.devices)
    timeline = simulate(program, prices, PricedCluster(devices))
    spans = [timeline.span_between_steps(device, "job0", *steady) for device in range(devices)]
    return [1 - timeline.busy_fraction(device, span) for device, span in enumerate(spans)]


@pytest.mark.parametrize(
    ("devices", "microbatches"),
    slow_but(product([2, 3, 4, 6, 8], [1, 2, 3, 5]), [(2, 1), (3, 5), (4, 2), (6, 3), (8, 1)]),
)
def test_many_jobs_leave_the_bubbles_of_mloras_formula(devices, microbatches):
    for jobs in range(1, 7):
        plan = work(jobs, STEPS, microbatches)
        prices = even_prices(len(plan.microbatches), devices)
        found = steady_bubbles(multi_job(plan, devices, prices), prices)
        assert found == pytest.approx([mlora_ratio(devices, jobs, microbatches)] * devices, abs=1e-9)


@pytest.mark.parametrize(
    ("order", "backward"),
    slow_but(
        product([gpipe, one_forward_one_backward], [1.0, 2.0, 2.5]),
        [(gpipe, 1.0), (one_forward_one_backward, 2.5)],
    ),
)
def test_one_job_alone_leaves_the_bubbles_of_gpipes_formula(order, backward):
    for devices in range(1, 9):
        for microbatches in range(1, 9):
            plan = work(1, 4, microbatches)
            prices = even_prices(len(plan.microbatches), devices, 1.0, backward)
            found = steady_bubbles(order(plan, devices), prices, (1, 4))
            assert found == pytest.approx([(devices - 1) / (microbatches + devices - 1)] * devices)


def test_1f1b_keeps_as_many_in_flight_as_stages_are_left_and_gpipe_all():
    plan = work(1, 1, 12)
    prices = even_prices(12, 4)
    assert simulate(one_forward_one_backward(plan, 4), prices, PricedCluster(4)).peaks == (4, 3, 2, 1)
    assert simulate(gpipe(plan, 4), prices, PricedCluster(4)).peaks == (12, 12, 12, 12)


def test_1f1b_never_drains_where_the_bubble_lemma_holds():
    plan = work(jobs=4, steps=6, microbatches=1)
    passes = [a for a in one_forward_one_backward(plan, 4).devices[0] if isinstance(a, Forward | Backward)]
    assert passes[:5] == [Forward(0), Forward(1), Forward(2), Forward(3), Backward(0)]
    assert passes[5:-3] == [x for n in range(1, 21) for x in (Forward(n + 3), Backward(n))]


def test_a_job_that_waits_for_its_step_lets_others_pass():
    """job0 alone would block: its second batch stands in the list right behind its first."""
    mine, other = work(1, 3, 1), work(2, 3, 1)
    ordered = Work(8, tuple(sorted(other.microbatches, key=lambda m: m.segments[0].job)), other.batches)
    prices = even_prices(6, 2)
    assert len(mine.microbatches) == 3
    firsts = [a.microbatch for a in multi_job(ordered, 2, prices).devices[0] if isinstance(a, Forward)]
    assert firsts == [0, 3, 1, 4, 2, 5]


def test_a_round_ends_where_a_job_begins_its_next_batch():
    assert rounds(work(jobs=2, steps=2, microbatches=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_microbatch_without_rows_only_keeps_its_place():
    plan = work(1, 1, 2)
    padded = Work(8, (plan.microbatches[0], MicrobatchPlan(()), plan.microbatches[1]), plan.batches)
    for program in (gpipe(padded, 2), one_forward_one_backward(padded, 2)):
        assert [a.microbatch for a in program.devices[1] if isinstance(a, Forward)] == [0, 2]


@st.composite
def mixed_work(draw):
    """Rounds of jobs whose samples share microbatches at random; not every job is in every round."""
    microbatches, batches = [], []
    steps = [0, 0, 0]
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 4))
        segments = [[] for _ in range(count)]
        for job in draw(st.sets(st.integers(0, 2), min_size=1)):
            steps[job] += 1
            homes = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
            samples = tuple(PlacedSample(i, 1, i) for i in range(len(homes)))
            batches.append(GlobalBatch(f"job{job}", steps[job], samples, 1))
            for home in sorted(set(homes)):
                held = tuple(one for one, where in zip(samples, homes, strict=True) if where == home)
                segments[home].append(SegmentPlan(f"job{job}", steps[job], held))
        microbatches += [MicrobatchPlan(tuple(held)) for held in segments]
    return Work(12, tuple(microbatches), tuple(batches))


@settings(max_examples=80, deadline=None)
@given(plan=mixed_work(), stages=st.integers(1, 5), seed=st.integers(0, 1000))
def test_every_order_is_legal_and_the_simulator_runs_it_to_its_end(plan, stages, seed):
    random = Random(seed)
    rows = [[(random.random(), random.random()) for _ in range(stages)] for _ in plan.microbatches]
    prices = stage_prices(rows)
    orders = gpipe(plan, stages), one_forward_one_backward(plan, stages), multi_job(plan, stages, prices)
    for program in orders:
        check(program)
        timeline = simulate(program, prices, PricedCluster(stages))
        assert len(timeline.events) == sum(len(actions) for actions in program.devices)
        busy = [
            sum(sum(rows[number][stage]) for number in plan.filled_microbatches) for stage in range(stages)
        ]
        assert timeline.busy_fractions() == pytest.approx([seconds / timeline.makespan for seconds in busy])
        assert max(timeline.peaks) <= len(plan.filled_microbatches)


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
    passes = [one for one in timeline.events_of(device) if isinstance(one.action, Forward | Backward)]
    span = Span(passes[0].start, passes[-1].stop)
    return span.seconds * (1.0 - timeline.busy_fraction(device, span))


def last_stage_idle(made, plan, queues):
    timeline = simulate(made.program, queue_prices(plan, queues), PricedCluster(len(queues[0].passes)))
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
    made = template_order(plan, queues)
    assert made.violations == ()
    assert last_stage_idle(made, plan, queues) <= 1e-9 * sum(count * seconds for count, seconds in buckets)


def test_the_slowest_bucket_runs_first_and_a_bucket_stays_together():
    plan, numbers = bucket_work([2, 3, 2])
    made = template_order(plan, even_queues(numbers, [1.0, 3.0, 2.0], 2))
    assert made.order == (1, 2, 0)
    for actions in made.program.devices:
        assert [a.microbatch for a in actions if isinstance(a, Forward)] == [2, 3, 4, 5, 6, 0, 1]


def test_launches_keep_to_the_memory_and_the_template_says_what_that_costs():
    plan, numbers = bucket_work([8])
    queues = even_queues(numbers, [1.0], 4)
    tight = template_order(plan, queues, max_bytes=(2, 2, 2, 2))
    timeline = simulate(tight.program, queue_prices(plan, queues), PricedCluster(4))
    assert timeline.peaks == (2, 2, 2, 1)
    assert idle_within(timeline, 3) > 0
    assert tight.violations == ("stage 0 has no memory for an earlier launch",)
    assert template_order(plan, queues, max_bytes=(8, 8, 8, 8)).violations == ()


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
    made = template_order(plan, queues)
    assert last_stage_idle(made, plan, queues) > 0
    assert any(sentence in one for one in made.violations)


def test_the_template_says_that_a_second_batch_waits_for_its_step():
    plan = work(jobs=1, steps=2, microbatches=2)
    queues = [Queue((0, 1, 2, 3), (PassPrice(1.0, 1.0),) * 3)]
    made = template_order(plan, queues)
    assert last_stage_idle(made, plan, queues) > 0
    assert made.violations == ("job0 has several global batches, and each waits for the Step before it",)
