"""Steps by a thread of the host: the bits of whole Steps, and what the first stages need is made first."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import bench
from tests.run import aboard
from tests.run.test_training import open_batch
from weft.ops.adamw import State, Update, update
from weft.run import steps
from weft.run.host_steps import ALIGNMENT, HostBegun, HostSteps, aligned
from weft.run.steps import Due, NoStep, make_updates, take_steps
from weft.run.travel import OUTSIDE, Part

ENOUGH = 20.0
"""Seconds in which whatever should come to pass does."""


@pytest.fixture(scope="module")
def base():
    return bench.base(dtype=torch.float32)


class Signal:
    """Gradients that are on their way until it is set."""

    def __init__(self):
        self._set = threading.Event()
        self.query, self.set = self._set.is_set, self._set.set

    def synchronize(self):
        assert self._set.wait(ENOUGH)


def here():
    signal = Signal()
    signal.set()
    return signal


def thirds(training):
    """Stages 0 to 2, at odd borders."""
    size = training.layout.size
    ends = [0, size // 3 + 1, 2 * size // 3 + 5, size]
    return {stage: Part(ends[stage], ends[stage + 1]) for stage in range(3)}


def due(base, name, seed=1, loss=1.5):
    training = aboard.training(base, aboard.ready(base, name, seed=seed, weight_decay=0.1))
    generator = torch.Generator().manual_seed(seed)
    open_batch(training, torch.randn(training.master.shape, generator=generator), loss)
    return Due(training, supervised=6)


def begin(host, begun, company, gone=here):
    host.begin(begun, company, [thirds(one.training) for one in company], gone)


SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=6)


@st.composite
def layouts(draw):
    """Stages one after another, and what is outside all layers before them, behind them or nowhere."""
    sizes = draw(SIZES)
    stages = list(range(len(sizes)))
    outside = draw(st.sampled_from(["nowhere", "before", "behind"]))
    if outside != "nowhere":
        sizes.append(draw(st.integers(1, 200)))
        stages = [OUTSIDE, *stages] if outside == "before" else [*stages, OUTSIDE]
    parts, at = {}, 0
    for stage, size in zip(stages, sizes, strict=True):
        parts[stage] = Part(at, at + size)
        at += size
    return parts, at


@given(layouts())
def test_a_stage_is_all_updated_when_its_turn_is_over_and_every_cut_is_at_a_multiple(layout):
    parts, size = layout
    found = aligned(parts, size)
    spans = sorted((part.start, part.stop) for part in found.values())
    assert [stop for _, stop in spans] == [*(start for start, _ in spans[1:]), size]
    assert all(start % ALIGNMENT == 0 or start == size for start, _ in spans)
    for stage, part in parts.items():
        updated = {
            at for other, span in found.items() if other <= stage for at in range(span.start, span.stop)
        }
        assert updated.issuperset(range(part.start, part.stop))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_parts_have_the_bits_of_the_whole(layout, dtype, seed):
    parts, size = layout
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(size, generator=generator, dtype=dtype)

    def fresh():
        zeros = (torch.zeros_like(master) for _ in range(3))
        return State(master.clone(), *zeros, master.to(torch.bfloat16))

    one, other = fresh(), fresh()
    for step in range(1, 4):
        gradient = torch.randn(size, generator=generator, dtype=dtype) * 10.0 ** -(seed % 7)
        for state, spans in ((one, {0: Part(0, size)}), (other, aligned(parts, size))):
            state.gradient.copy_(gradient)
            for stage in sorted(spans):
                span = slice(spans[stage].start, spans[stage].stop)
                vectors = (state.master, state.exp_avg, state.exp_avg_sq, state.gradient, state.weights)
                cut = State(*(vector[span] for vector in vectors))
                make_updates([Update(cut, step, 1e-2, 0.1, factor=0.3)])
    assert torch.equal(one.master, other.master)
    assert torch.equal(one.exp_avg_sq, other.exp_avg_sq)
    assert torch.equal(one.weights, other.weights)


def test_outcomes_and_weights_are_those_of_steps_that_are_waited_for(base):
    host, begun = HostSteps(), None
    company, others = ([due(base, name, seed) for seed, name in enumerate("abc")] for _ in range(2))
    for _ in range(3):
        begun = HostBegun(host)
        begin(host, begun, company)
        assert all(one.training.open is None for one in company)
        assert begun.outcomes() == take_steps(others)
        for one, other in zip(company, others, strict=True):
            assert torch.equal(one.training.master, other.training.master)
            assert torch.equal(one.training.state.weights, other.training.state.weights)
            assert not one.training.gradient.any()
            for each in (one, other):
                open_batch(each.training, torch.linspace(-1, 1, each.training.layout.size))
    assert [one.training.progress.step for one in company] == [3, 3, 3]


def test_what_the_first_stage_needs_is_made_first_for_everybody(base):
    order, company = [], [due(base, name, seed) for seed, name in enumerate("ab")]
    starts = {
        one.training.master.data_ptr() + 4 * part.start: (stage, one.training.job)
        for one in company
        for stage, part in aligned(thirds(one.training), one.training.layout.size).items()
    }

    def noting(updates):
        order.extend(starts[update.state.master.data_ptr()] for update in updates)
        return make_updates(updates)

    host = HostSteps(noting)
    begun = HostBegun(host)
    begin(host, begun, company)
    begun.outcomes()
    assert order == [(stage, job) for stage in range(3) for job in "ab"]


def test_gradients_that_are_on_their_way_keep_nobody_waiting(base):
    host, late = HostSteps(), Signal()
    begun = HostBegun(host)
    begin(host, begun, [due(base, "early")])
    begin(host, begun, [due(base, "late")], lambda: late)
    host.wait([("early", stage) for stage in range(3)])
    assert host.unfinished("late", 0)
    late.set()
    assert len(begun.outcomes()) == 2


def test_who_waits_for_one_stage_does_not_wait_for_the_next(base):
    held, made = threading.Event(), []

    def holding(updates):
        if len(made) == 2:
            assert held.wait(ENOUGH)
        made.append(len(updates))
        return make_updates(updates)

    host = HostSteps(holding)
    begun = HostBegun(host)
    begin(host, begun, [due(base, "a")])
    host.wait([("a", 0), ("a", 1)])
    assert [host.unfinished("a", stage) for stage in range(3)] == [False, False, True]
    held.set()
    assert len(begun.outcomes()) == 1


@pytest.mark.parametrize(
    ("loss", "weights", "sentence"),
    [
        (math.nan, 0.0, "its loss at step 1 is nan"),
        (1.0, math.inf, "its weights after step 1 are not finite"),
    ],
)
def test_a_job_that_can_make_no_step_fails_alone(base, loss, weights, sentence):
    host = HostSteps()
    begun = HostBegun(host)
    good, bad, alone = due(base, "good"), due(base, "bad", loss=loss), due(base, "good")
    bad.training.master[-1] += weights
    begin(host, begun, [bad, good])
    failed, made = begun.outcomes()
    assert failed == NoStep(sentence)
    assert [made] == take_steps([alone])
    assert torch.equal(good.training.master, alone.training.master)
    assert bad.training.progress.step == 0


def test_out_of_memory_within_a_part_fails_the_job_whose_part_it_is(base, monkeypatch):
    bad, good = due(base, "bad"), due(base, "good")
    end = bad.training.master.data_ptr() + bad.training.master.nbytes

    def short(updates):
        (master,) = (one.state.master for one in updates)
        if master.data_ptr() + master.nbytes == end:
            raise torch.OutOfMemoryError("no more")
        return update(updates)

    monkeypatch.setattr(steps, "update", short)
    host = HostSteps()
    begun = HostBegun(host)
    begin(host, begun, [bad, good])
    failed, made = begun.outcomes()
    assert failed == NoStep("out of memory inside its optimizer step 1")
    assert made.loss == 1.5


def test_a_mistake_in_the_thread_is_raised_where_its_work_is_waited_for(base):
    def broken(updates):
        raise ArithmeticError("a mistake")

    host = HostSteps(broken)
    begun = HostBegun(host)
    begin(host, begun, [due(base, "a")])
    for wait in (lambda: host.wait([("a", 2)]), host.finish, begun.outcomes):
        with pytest.raises(ArithmeticError, match="a mistake"):
            wait()
