"""Steps of jobs one by one: what they come to, and what ends in a reason instead."""

import math

import pytest
import torch

from tests import bench
from tests.interpreter import interpret
from tests.run import executors
from weftune.objectives.spec import MAX_METRICS
from weftune.run.training import steps
from weftune.run.training.state import OpenBatch
from weftune.run.training.steps import (
    BatchSums,
    StepRequest,
    apply_update,
    batch_sums,
    batch_totals,
    begin_steps,
    clip_factors,
    find_step_problem,
    open_batch_sums,
    open_batch_tokens,
)


@pytest.fixture(scope="module")
def base():
    return bench.base(dtype=torch.float32)


@pytest.fixture
def training(base):
    return executors.job_training(base, executors.prepare(base, "a", clip=1.0))


def open_batch(training, gradient=1.0, loss=1.5, correct=3, tokens=20):
    training.gradient.fill_(gradient)
    training.open_batch = OpenBatch(torch.tensor(loss), torch.tensor(correct), tokens)


def test_a_step_out_of_memory_names_the_step_and_other_errors_are_not_hidden(training, monkeypatch):
    def short(*_):
        raise torch.OutOfMemoryError("no room")

    training.progress.step = 4
    open_batch(training)
    monkeypatch.setattr(steps, "update", short)
    (outcome,) = begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()
    assert outcome == "out of memory inside its optimizer step 5"
    assert training.progress.step == 4

    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(steps, "update", broken)
    open_batch(training)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()


def test_what_open_batches_came_to_is_told_in_the_order_of_the_jobs(base):
    trainings = [executors.job_training(base, executors.prepare(base, name)) for name in "ab"]
    open_batch(trainings[0], gradient=0.5, loss=1.25, correct=3)
    open_batch(trainings[1], gradient=2.0, loss=2.5, correct=7, tokens=11)
    root = math.sqrt(trainings[0].master.numel())
    first, second = map(batch_sums, trainings)
    assert (first.loss, first.correct) == (1.25, 3.0)
    assert (second.loss, second.correct) == (2.5, 7.0)
    assert [first.norm, second.norm] == pytest.approx([0.5 * root, 2.0 * root], rel=1e-5)
    assert open_batch_sums(trainings).dtype == torch.float64
    none = [0.0] * MAX_METRICS
    assert open_batch_sums(trainings).tolist() == [[1.25, 3.0, *none], [2.5, 7.0, *none]]
    assert [open_batch_tokens(one) for one in trainings] == [20, 11]


def test_replicas_exchange_totals_in_the_dtype_of_the_master_weights(training):
    open_batch(training)
    assert batch_totals(training).dtype == torch.float32
    assert batch_totals(training).tolist() == [1.5, 3.0, *[0.0] * MAX_METRICS]


@pytest.mark.parametrize("ask", [open_batch_tokens, lambda training: open_batch_sums([training])])
def test_a_step_without_an_open_batch_is_a_bug(training, ask):
    with pytest.raises(AssertionError, match="a step needs an open batch"):
        ask(training)


def test_what_clipping_leaves_of_a_gradient_is_below_zero_where_no_step_can_be_made(base):
    clipped, unclipped = (
        executors.job_training(base, executors.prepare(base, "a", clip=clip)) for clip in (2.0, None)
    )
    trainings = [clipped, clipped, unclipped, clipped, clipped]
    sums_J2 = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [math.nan, 0.0], [1.0, 0.0]]).double()
    norm_J = torch.tensor([8.0, 1.0, 8.0, 1.0, math.inf], dtype=torch.float64)
    left = clip_factors(trainings, sums_J2, norm_J)
    assert left.dtype == torch.float64
    assert left.tolist() == pytest.approx([0.25, 1.0, 1.0, -1.0, -1.0], rel=1e-6)


def test_a_norm_next_to_nothing_is_clipped_by_what_is_added_to_it(base):
    """As torch does: a clip of a millionth leaves half of a gradient of that norm."""
    training = executors.job_training(base, executors.prepare(base, "a", clip=1e-6))
    norm_J = torch.tensor([1e-6], dtype=torch.float64)
    assert clip_factors([training], torch.ones(1, 2).double(), norm_J).tolist() == pytest.approx([0.5])


def test_the_reason_names_the_step_that_was_to_come(training):
    training.progress.step = 6
    assert find_step_problem(training, BatchSums(loss=1.0, norm=1.0, correct=0.0)) is None
    assert find_step_problem(training, BatchSums(math.inf, 1.0, 0.0)) == "its loss at step 7 is inf"
    assert find_step_problem(training, BatchSums(1.0, math.nan, 0.0)) == "its gradient norm at step 7 is nan"


@pytest.mark.parametrize("by_kernel", [False, True])
def test_updates_that_spoil_the_weights_are_named_in_their_place(base, by_kernel, monkeypatch):
    if by_kernel:
        interpret(monkeypatch)
    good, bad = (executors.job_training(base, executors.prepare(base, name)) for name in "ab")
    bad.master[0] = math.nan
    reasons = [apply_update(one.update()) for one in (good, bad)]
    assert reasons == [None, "its weights after step 1 are not finite"]
