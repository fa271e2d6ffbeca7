"""Steps of adapters that travel: made in pieces, in a ring of buffers, they have the bits of whole
Steps."""

import math
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench import CPU
from tests.cases import slow_but
from tests.interpreter import interpret
from tests.run.host_steps import (
    WEIGHTS,
    Short,
    attach_all,
    begin,
    buffer_bytes,
    drawn,
    expected,
    hand_in,
    new,
    outcomes,
    promised_bytes,
    steps_for,
)
from weftune.ops.adamw import update
from weftune.ops.triton import kernels_available_on
from weftune.plan.cost import ring
from weftune.plan.cost.ring import PIECES
from weftune.run.stream import adapter_steps
from weftune.run.stream.adapter_steps import ALIGNMENT, PieceLanes, StagePart, split_part
from weftune.run.stream.adapters import OUTSIDE_STAGE


def assert_told(found, wanted):
    """Kernels sum the squares of parts apart, in float64: the last digit of a norm may be another."""
    exact = not kernels_available_on(CPU, torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert one.grad_norm == (other.grad_norm if exact else pytest.approx(other.grad_norm, rel=1e-14))
        assert replace(one, grad_norm=other.grad_norm) == other


def assert_same(one, other):
    """Everything but the gradient."""
    for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
        mine, theirs = getattr(one.state, name), getattr(other.state, name)
        assert torch.equal(mine, theirs), name
    assert one.progress == other.progress


def assert_the_device_has_them(steps, training):
    """In every place that a stage is in, or comes to, are the weights that the host has."""
    transfers = steps.transfers
    for stage, part in transfers.adapters[training.job].parts.items():
        stays = transfers.is_loaded(stage)
        if not stays:
            assert transfers.device_weights(training.job, stage) is None
            transfers.load_weights(stage, steps.is_unfinished)
        assert torch.equal(
            transfers.device_weights(training.job, stage), training.state.weights[part.start : part.stop]
        ), stage
        if not stays:
            transfers.evict(stage)


@pytest.fixture(params=["float32", "float64", "kernels"])
def dtypes(request, monkeypatch):
    """Of masters and weights; torch makes the updates, or the kernel does."""
    if request.param == "kernels":
        interpret(monkeypatch)
        return torch.float32, torch.float32
    master = getattr(torch, request.param)
    return master, WEIGHTS[master]


# -- pieces ----------------------------------------------------------------------------------------------


@st.composite
def cuts(draw):
    """Parts of a vector one after another, its size, and how much is updated at a time."""
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    ends = [0, *accumulate(sizes)]
    parts = [StagePart(start, stop) for start, stop in pairwise(ends)]
    return parts, ends[-1], ALIGNMENT * draw(st.integers(1, 5))


@given(cuts())
def test_pieces_cover_a_part_once_and_are_cut_at_multiples(cut):
    parts, size, piece = cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_steps, "PIECE", piece)
        for part in parts:
            found = list(split_part(part, size))
            covered = [at for one in found for at in range(one.kept_range.start, one.kept_range.stop)]
            assert covered == list(range(part.start, part.stop))
            for one in found:
                assert 0 < one.kept_range.size <= one.computed_range.size <= piece
                assert one.computed_range.start % ALIGNMENT == 0
                assert one.computed_range.stop % ALIGNMENT == 0 or one.computed_range.stop == size
                assert 0 <= one.kept_range.start - one.computed_range.start < ALIGNMENT
                assert 0 <= one.computed_range.stop - one.kept_range.stop < ALIGNMENT
            borders = [one.kept_range.start for one in found[1:]]
            assert all(border % ALIGNMENT == 0 for border in borders)


@settings(max_examples=40, deadline=None)
@given(
    cuts(),
    st.sampled_from(["nowhere", "before", "behind"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
def test_piece_by_piece_a_step_has_the_bits_of_the_whole(cut, outside, dtype, seed, shuffled):
    parts, _, piece = cut
    sizes = [part.size for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_steps, "PIECE", piece)
        steps = steps_for(len(sizes), dtype=WEIGHTS[dtype])
        one, other = (new("a", sizes, outside, seed, dtype) for _ in range(2))
        together = attach_all(steps, one)
        for step in range(3):
            gradient = drawn(one, 100 * seed + step, 10.0 ** -(seed % 7))
            hand_in(steps, one, gradient)
            begun = begin(steps, together)
            pairs = steps.all_pending_pairs()
            shuffled.shuffle(pairs)
            for pair in pairs:
                steps.start([pair])
            assert outcomes(steps, begun) == [expected(other, gradient)]
            assert_same(one, other)
        assert_the_device_has_them(steps, one)


# -- what comes of Steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", slow_but([64, 320, 1 << 21], [320, 1 << 21]))
def test_outcomes_and_weights_are_those_of_steps_that_are_waited_for(dtypes, piece, monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", piece)
    dtype, weights = dtypes
    steps = steps_for(dtype=weights)
    together, others = (
        [new(name, seed=seed, dtype=dtype, weights=weights) for seed, name in enumerate("abc")]
        for _ in range(2)
    )
    due = attach_all(steps, *together)
    for step in range(3):
        gradients = [drawn(one, 7 * step + seed, 10.0 ** (seed - 2)) for seed, one in enumerate(together)]
        for one, gradient in zip(together, gradients, strict=True):
            hand_in(steps, one, gradient)
        begun = begin(steps, due)
        steps.start(steps.all_pending_pairs())
        wanted = [expected(other, gradient) for other, gradient in zip(others, gradients, strict=True)]
        assert_told(outcomes(steps, begun), wanted)
        for one, other in zip(together, others, strict=True):
            assert_same(one, other)
            assert_the_device_has_them(steps, one)
    assert [one.progress.step for one in together] == [3, 3, 3]


@pytest.mark.parametrize("at", slow_but([0, 301, -1], [301]))
@pytest.mark.parametrize(
    ("loss", "gradient", "weights", "sentence"),
    [
        (math.nan, 0.0, 0.0, "its loss at step 1 is nan"),
        (1.0, math.inf, 0.0, "its gradient norm at step 1 is inf"),
        (1.0, math.nan, 0.0, "its gradient norm at step 1 is nan"),
        (1.0, 0.0, math.inf, "its weights after step 1 are not finite"),
    ],
)
def test_a_job_that_can_make_no_step_fails_alone(dtypes, loss, gradient, weights, sentence, at, monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", 256)
    dtype, narrow = dtypes
    bad, good, alone = (
        new(name, seed=seed, dtype=dtype, weights=narrow)
        for name, seed in (("bad", 1), ("good", 2), ("good", 2))
    )
    steps = steps_for(dtype=narrow)
    bad.master[at] += weights
    due = attach_all(steps, good, bad)
    before = [vector.clone() for vector in vectors(bad)]
    spoilt = drawn(bad, 5)
    spoilt[at] += gradient
    hand_in(steps, bad, spoilt, loss)
    hand_in(steps, good, drawn(good, 6))
    begun = begin(steps, due)
    steps.start(steps.all_pending_pairs())
    made, failed = outcomes(steps, begun)
    assert failed == sentence
    assert bad.progress.step == 0
    assert_told([made], [expected(alone, drawn(alone, 6))])
    assert_same(good, alone)
    if not weights:
        assert all(torch.equal(mine, old) for mine, old in zip(vectors(bad), before, strict=True))
        assert_the_device_has_them(steps, bad)


def vectors(training):
    state = training.state
    return state.master, state.exp_avg, state.exp_avg_sq, state.weights


def pending(steps, stage, jobs):
    return steps.pending_pairs(steps.transfers.pairs(stage, jobs))


def started(steps, stage, jobs):
    return steps.started_pairs(steps.transfers.pairs(stage, jobs))


# -- what has to wait ------------------------------------------------------------------------------------


def test_what_the_first_stages_need_is_made_first_and_each_pass_wants_its_own_jobs_parts():
    steps = steps_for()
    together = [new("a", outside="before"), new("b", outside="behind", seed=1), new("c", seed=2)]
    due = attach_all(steps, *together)
    for one in together:
        hand_in(steps, one, drawn(one, 3))
    begun = begin(steps, due)
    assert steps.all_pending_pairs() == [
        ("a", OUTSIDE_STAGE),
        ("b", OUTSIDE_STAGE),
        *((job, stage) for stage in range(4) for job in "abc"),
    ]
    assert pending(steps, 1, ["c", "a"]) == [("c", 1), ("a", 1)]
    assert pending(steps, 0, ["a", "c"]) == [("a", 0), ("a", OUTSIDE_STAGE), ("c", 0)]
    assert pending(steps, 3, "b") == [("b", 3), ("b", OUTSIDE_STAGE)]
    steps.start(pending(steps, 0, ["a"]))
    assert not pending(steps, 0, ["a"])
    assert [stage for stage in (OUTSIDE_STAGE, 0, 1, 2, 3) if steps.is_unfinished("a", stage)] == [1, 2, 3]
    assert pending(steps, 0, "bc") == [("b", 0), ("b", OUTSIDE_STAGE), ("c", 0)]
    with pytest.raises(AssertionError, match="not all made"):
        outcomes(steps, begun)
    steps.start(steps.all_pending_pairs())
    assert not any(pending(steps, stage, "abc") for stage in range(4))
    assert len(outcomes(steps, begun)) == 3


def test_a_stage_that_comes_before_its_part_is_made_brings_no_weights_of_that_job():
    steps = steps_for()
    one, other = new("a"), new("b", seed=1)
    due, _ = attach_all(steps, one, other)
    hand_in(steps, one, drawn(one, 3))
    begin(steps, [due])
    one.state.weights.fill_(math.nan)
    steps.transfers.adapters["a"].weights[1].fill_(7.0)
    steps.transfers.load_weights(1, steps.is_unfinished)
    assert torch.equal(steps.transfers.device_weights("a", 1), torch.full((77,), 7.0, dtype=torch.bfloat16))
    assert torch.equal(steps.transfers.device_weights("b", 1), other.state.weights[301:378])
    steps.start([("a", 1)])
    assert torch.equal(steps.transfers.device_weights("a", 1), one.state.weights[301:378])
    assert bool(one.state.weights[301:378].isfinite().all())
    assert bool(one.state.weights[:301].isnan().all())
    assert bool(one.state.weights[378:].isnan().all())


class NotedStream:
    """Notes what is asked of it; everything happens at once."""

    def __init__(self):
        self.waited, self.made = [], 0

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, other):
        """Between the streams of Steps only."""
        assert self is not passes_stream(), "passes would wait for all that was asked for"

    def record_event(self):
        return (self, self.made)


HERE = []


def passes_stream():
    return HERE[0]


@contextmanager
def on(stream):
    HERE.append(stream)
    yield
    HERE.pop()


def test_on_a_gpu_a_pass_waits_for_what_was_asked_for_of_its_jobs_and_stage_and_only_once(monkeypatch):
    """No GPU is here; tests/test_stream_gpu.py has real streams."""
    up, making, down, passes = (NotedStream() for _ in range(4))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: HERE[-1])
    monkeypatch.setattr(adapter_steps, "PIECE", 2048)

    def noting(updates, factor_J=None):
        making.made += len(updates)
        return update(updates, factor_J)

    steps = steps_for(make=noting)
    together = [new(name, seed=seed) for seed, name in enumerate("ab")]
    due = attach_all(steps, *together)
    for one in together:
        hand_in(steps, one, drawn(one, 3))
    begin(steps, due)
    steps.ring.lanes = PieceLanes(up, making, down)
    with on(passes):
        steps.start(pending(steps, 0, "a"), ("writable",))
        steps.start(pending(steps, 0, "b"))
        steps.start(pending(steps, 1, "ab"))
        # What comes waits for no pass: only where the weights go must be writable.
        assert (making.made, making.waited, up.waited, passes.waited) == (4, ["writable"], [], [])
        assert started(steps, 0, "ab") == [("a", 0), ("b", 0)]
        steps.wait_for_updates(started(steps, 0, "a"))
        # All that is behind it on that stream may still be on its way.
        assert passes.waited == [(making, 1)]
        assert started(steps, 0, "ab") == [("b", 0)]
        steps.wait_for_updates(started(steps, 1, "ab"))
        assert passes.waited == [(making, 1), (making, 4)]
        assert not started(steps, 1, "ab")
        steps.wait_for_updates(started(steps, 1, "ab"))
        assert passes.waited == [(making, 1), (making, 4)]
    with on(NotedStream()):
        steps.wait_for_stage(2)
        assert HERE[-1].waited == []
        steps.wait_for_stage(1)
        assert HERE[-1].waited == [(down, 0)]


# -- the ring --------------------------------------------------------------------------------------------


def test_pieces_take_turns_in_the_buffers(monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", 64)
    seen = []

    def noting(updates, factor_J=None):
        (one,) = updates
        seen.append(one.state.master.data_ptr())
        return update(updates, factor_J)

    steps = steps_for(make=noting)
    one = new("a")
    due = attach_all(steps, one)
    hand_in(steps, one, drawn(one, 3))
    begin(steps, due)
    steps.start(steps.all_pending_pairs())
    assert len(seen) == sum(len(list(split_part(part, 1442))) for part in by_stage(steps, "a")) > 20
    assert len(set(seen[:PIECES])) == PIECES == 3
    assert all(seen[at] == seen[at % PIECES] for at in range(len(seen)))


def by_stage(steps, job):
    return steps.transfers.adapters[job].parts.values()


@pytest.mark.parametrize("piece", [64, 128, 1024, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_job_with_a_larger_part_makes_the_buffers_grow_to_what_is_promised_at_the_most(
    piece, dtype, monkeypatch
):
    for module in (adapter_steps, ring):
        monkeypatch.setattr(module, "PIECE", piece)
    weights, value = WEIGHTS[dtype], WEIGHTS[dtype].itemsize
    steps = steps_for(dtype=weights)
    small, large, middle = (
        new("small", (50, 60, 70, 3), dtype=dtype),
        new("large", (1, 400, 900, 7), seed=1, dtype=dtype),
        new("middle", (80, 9, 0, 200), seed=2, dtype=dtype),
    )
    twins = [
        new("small", (50, 60, 70, 3), dtype=dtype),
        new("large", (1, 400, 900, 7), seed=1, dtype=dtype),
        new("middle", (80, 9, 0, 200), seed=2, dtype=dtype),
    ]
    due, held = [], []
    for count, training in enumerate((small, large, middle), start=1):
        due += attach_all(steps, training)
        held.append(buffer_bytes(steps))
        assert 0 < held[-1] <= promised_bytes(steps.transfers, value)
        assert len(steps.ring.buffers) == PIECES
        for one, twin in zip(due, twins[:count], strict=True):
            gradient = drawn(twin, count)
            hand_in(steps, one.training, gradient)
            twin_outcome = expected(twin, gradient)
            begun = begin(steps, [one])
            steps.start(steps.all_pending_pairs())
            assert outcomes(steps, begun) == [twin_outcome]
            assert_same(one.training, twin)
    assert held[2] == held[1]
    assert (held[1] > held[0]) == (piece > 128)


def test_a_job_for_which_the_buffers_are_large_enough_leaves_them_as_they_are(monkeypatch):
    monkeypatch.setattr(adapter_steps, "PIECE", 128)
    steps = steps_for()
    attach_all(steps, new("a"))
    before = steps.ring.buffers
    attach_all(steps, new("b", seed=1))
    assert steps.ring.buffers is before


def test_pieces_that_share_a_buffer_begin_at_multiples_in_it():
    starts = []

    def noting(updates, factor_J=None):
        whole = {buffer.state.master.untyped_storage().data_ptr() for buffer in steps.ring.buffers}
        for one in updates:
            assert one.state.master.untyped_storage().data_ptr() in whole
            starts.append(one.state.master.storage_offset())
        return update(updates, factor_J)

    steps = steps_for(make=noting)
    together = [new(name, seed=seed) for seed, name in enumerate("abc")]
    due = attach_all(steps, *together)
    for one in together:
        hand_in(steps, one, drawn(one, 3))
    begin(steps, due)
    steps.start(steps.all_pending_pairs())
    assert {start % ALIGNMENT for start in starts} == {0}
    assert max(starts) > 0, "pieces share a buffer"


# -- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halfway", [False, True], ids=["before the update", "behind the update"])
@pytest.mark.parametrize("at", slow_but(range(0, 12, 2), [0, 6]))
def test_an_error_within_a_step_that_is_made_good_later_repeats_no_piece(at, halfway, dtypes, monkeypatch):
    """Whether or not the buffer was updated when the error came."""
    monkeypatch.setattr(adapter_steps, "PIECE", 192)
    dtype, weights = dtypes
    failing = Short(at, halfway)
    steps = steps_for(make=failing, dtype=weights)
    together, others = (
        [new(name, seed=seed, dtype=dtype, weights=weights) for seed, name in enumerate("ab")]
        for _ in range(2)
    )
    due = attach_all(steps, *together)
    for one in together:
        hand_in(steps, one, drawn(one, 3))
    begun = begin(steps, due)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        steps.start(steps.all_pending_pairs())
    assert at <= failing.made < at + 3
    steps.start(steps.all_pending_pairs())
    total = sum(len(list(split_part(part, 1442))) for job in "ab" for part in by_stage(steps, job))
    assert failing.made == total
    assert_told(outcomes(steps, begun), [expected(other, drawn(other, 3)) for other in others])
    for one, other in zip(together, others, strict=True):
        assert_same(one, other)
        assert_the_device_has_them(steps, one)
