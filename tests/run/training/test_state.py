"""One job's step against torch's AdamW on separate tensors."""

import math

import pytest
import torch
from transformers import get_scheduler

from tests import bench
from tests.interpreter import interpret
from tests.run import executors
from weftune.run.training.state import OpenBatch
from weftune.run.training.steps import StepRequest, begin_steps


@pytest.fixture(scope="module")
def base():
    return bench.base()


def open_batch(training, gradient, loss=1.5):
    training.gradient.copy_(gradient)
    training.open_batch = OpenBatch(torch.tensor(loss, dtype=torch.float64), torch.tensor(3), 20)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("clip", "size"), [(1.0, 5.0), (1.0, 1e-3), (None, 5.0)])
def test_a_step_equals_adamw_and_clipping_on_separate_tensors(base, weight_decay, clip, size):
    adam = {"betas": (0.7, 0.98), "eps": 1e-4}
    keys = {"weight_decay": weight_decay, "clip": clip, "schedule": "cosine", "warmup": 2, **adam}
    training = executors.job_training(base, executors.prepare(base, "a", **keys))
    separate = {
        key: v.clone().requires_grad_() for key, v in training.layout.parameter_views(training.master).items()
    }
    optimizer = torch.optim.AdamW(separate.values(), lr=1e-2, weight_decay=weight_decay, **adam)
    scheduler = get_scheduler("cosine", optimizer, 2, 8)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 9):
        gradient = torch.randn(training.master.shape, generator=generator, dtype=torch.float64)
        gradient *= size / gradient.norm()
        for key, view in training.layout.parameter_views(gradient).items():
            separate[key].grad = view.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(separate.values(), clip)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        open_batch(training, gradient)
        (outcome,) = begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()
        assert outcome.learning_rate == pytest.approx(rate, rel=1e-12)
        assert outcome.grad_norm == pytest.approx(size, rel=1e-12)
        assert (outcome.loss, outcome.token_accuracy, outcome.tokens) == (1.5, 0.5, 20)
        assert training.progress.step == step
        for key, view in training.layout.parameter_views(training.master).items():
            torch.testing.assert_close(view, separate[key].detach(), rtol=1e-12, atol=1e-15)
    assert training.progress.trained_tokens == 160
    assert training.open_batch is None
    assert not training.gradient.any()


@pytest.mark.parametrize(
    ("loss", "gradient", "weights", "sentence"),
    [
        (math.nan, 1.0, 0.0, "its loss at step 1 is nan"),
        (1.0, math.inf, 0.0, "its gradient norm at step 1 is"),
        (1.0, 1.0, math.nan, "its weights after step 1 are not finite"),
    ],
)
def test_what_is_not_finite_is_named_and_makes_no_step(base, loss, gradient, weights, sentence):
    training = executors.job_training(base, executors.prepare(base, "a"))
    training.master[3] += weights
    open_batch(training, torch.full_like(training.master, gradient), loss)
    (outcome,) = begin_steps([StepRequest(training, supervised_tokens=6)]).outcomes()
    assert isinstance(outcome, str)
    assert outcome.startswith(sentence)
    assert training.progress.step == 0


def test_steps_that_the_device_decides_are_those_that_the_host_decides(monkeypatch):
    """Clipped, whole, and three that cannot be made, by one launch of the kernel."""
    base = bench.base(dtype=torch.float32)
    cases = [
        (1.5, 5.0, 0.0),
        (1.5, 1e-3, 0.0),
        (math.nan, 1.0, 0.0),
        (1.5, math.inf, 0.0),
        (1.5, 1.0, math.nan),
    ]

    def opened():
        trainings = []
        for index, (loss, size, weight) in enumerate(cases):
            training = executors.job_training(base, executors.prepare(base, f"job{index}", clip=1.0))
            training.master[3] += weight
            gradient = torch.randn(training.master.shape, generator=torch.Generator().manual_seed(index))
            open_batch(training, gradient * size / gradient.norm(), loss)
            trainings.append(training)
        return trainings

    by_host, by_device = opened(), opened()
    want = begin_steps([StepRequest(training, supervised_tokens=6) for training in by_host]).outcomes()
    interpret(monkeypatch)
    begun = begin_steps([StepRequest(training, supervised_tokens=6) for training in by_device])
    assert all(training.open_batch is None and training.progress.step == 0 for training in by_device)
    got = begun.outcomes()
    for one, other in zip(got[:2], want[:2], strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert (one.loss, one.token_accuracy, one.tokens) == (other.loss, other.token_accuracy, other.tokens)
    assert got[2:] == want[2:]
    for device, host in zip(by_device[:2], by_host[:2], strict=True):
        torch.testing.assert_close(device.master, host.master, rtol=1e-6, atol=1e-7)
        assert device.progress == host.progress
    for device, host in zip(by_device[2:4], opened()[2:4], strict=True):
        assert torch.equal(device.master, host.master)
        assert not device.state.exp_avg.any()
        assert not device.gradient.any()


def test_patience_counts_looks_that_are_not_better_by_min_delta_and_the_best_is_the_lowest(base):
    training = executors.job_training(base, executors.prepare(base, "a"))
    stale = []
    for step, loss in enumerate([3.0, 2.95, 2.5, 2.6, 2.5, 2.0]):
        training.progress.step = step
        training.master.fill_(step)
        training.record_evaluation(loss, keep_best=True, min_delta=0.1)
        stale.append(training.progress.stale)
        if step == 1:
            assert (training.progress.best_step, training.progress.best_loss) == (1, 2.95)
            assert training.best_weights[0] == 1
    assert stale == [0, 1, 0, 1, 2, 0]
    assert (training.progress.best_step, training.progress.best_loss) == (5, 2.0)
    assert training.progress.evaluated == 5


def test_of_equal_evaluations_the_earlier_one_is_the_best_and_the_later_one_counts_against_patience(base):
    training = executors.job_training(base, executors.prepare(base, "a"))
    best = []
    for step, loss in enumerate([3.0, 2.5, 2.5, 2.5]):
        training.progress.step = step
        training.master.fill_(step)
        best.append(training.record_evaluation(loss, keep_best=True, min_delta=0.0))
    assert best == [True, True, False, False]
    assert (training.progress.best_step, training.progress.best_loss) == (1, 2.5)
    assert (training.best_weights == 1).all()
    assert training.progress.stale == 2


def test_an_evaluation_better_by_exactly_min_delta_counts_against_patience_and_is_the_best_nevertheless(base):
    training = executors.job_training(base, executors.prepare(base, "a"))
    training.record_evaluation(3.0, keep_best=False, min_delta=0.5)
    training.progress.step = 1
    assert training.record_evaluation(2.5, keep_best=False, min_delta=0.5)
    assert (training.progress.stale, training.progress.best_step) == (1, 1)
    assert training.best_weights is None
