"""Chunked log-probabilities against plain torch."""

import pytest
import torch

from weftune.core import shapes
from weftune.core.weights import Head, HeadRows
from weftune.ops.logprobs import run_counts, run_sums, target_logprobs

LENGTHS = [3, 0, 1, 5, 2]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(shapes, "LOGIT_BYTES", {"cpu": 4 * 53 * 5, "cuda": 4 * 53 * 5})


@pytest.mark.parametrize("rows", [1, 5, 13, 0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_equal_plain_log_softmax(rows, softcap, bias, multiplier, dtype, device):
    """In float32 by the kernel."""
    torch.manual_seed(rows)
    weight = torch.randn(53, 16, dtype=dtype, device=device)
    bias_V = torch.randn(53, dtype=dtype, device=device) if bias else None
    head = Head(weight, bias_V, softcap, multiplier)
    h = torch.randn(rows, 16, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(0, 53, (rows,), device=device)
    # Of random targets hardly one is the most probable: every other row's is.
    with torch.no_grad():
        targets[::2] = head.logits(h).argmax(-1)[::2]
    coefficients = torch.randn(rows, dtype=dtype, device=device)

    got, correct = target_logprobs(h, targets, head)
    (gradient,) = torch.autograd.grad((got * coefficients).sum(), h)

    logits = head.logits(h)
    want = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad((want * coefficients).sum(), h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    assert correct[::2].all()
    assert not correct.all() or rows < 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_hit_is_the_argmax_and_the_lowest_index_among_equals(softcap, dtype, device):
    """Logits are the rows themselves: the highest, one below it, the lowest, and both of two equals."""
    head = Head(torch.eye(4, dtype=dtype, device=device), softcap=softcap)
    rows = [[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 0.0], [-1.0, -2.0, -3.0, -4.0], *[[2.0, 0.0, 2.0, 1.0]] * 2]
    h = torch.tensor(rows, dtype=dtype, device=device)
    _, correct = target_logprobs(h, torch.tensor([2, 1, 3, 2, 0], device=device), head)
    assert correct.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_of_equal_logits_predicts_token_0_only(dtype, device):
    """A dead adapter makes such rows: it must not score an accuracy of 1."""
    head = Head(torch.randn(53, 16, dtype=dtype, device=device))
    h = torch.zeros(3, 16, dtype=dtype, device=device)
    _, correct = target_logprobs(h, torch.tensor([0, 1, 52], device=device), head)
    assert correct.tolist() == [True, False, False]


def test_a_row_of_equal_logits_predicts_token_0_only_with_rows_of_the_jobs_own(device):
    head = Head(torch.randn(53, 16, device=device))
    own = HeadRows(torch.tensor([3, 7], device=device), torch.randn(2, 16, device=device))
    _, correct = target_logprobs(
        torch.zeros(3, 16, device=device), torch.tensor([0, 1, 52], device=device), head, own
    )
    assert correct.tolist() == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_nan_row_leaves_the_other_rows_alone(dtype, device):
    head = Head(torch.randn(53, 16, dtype=dtype, device=device))
    h, targets = torch.randn(7, 16, dtype=dtype, device=device), torch.arange(7, device=device)
    clean, _ = target_logprobs(h, targets, head)
    h[3] = float("nan")
    sick = h.requires_grad_()
    got, _ = target_logprobs(sick, targets, head)
    got.sum().backward()
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(got[others], clean[others])
    assert sick.grad[others].isfinite().all()
    assert not got[3].isfinite()


@pytest.mark.parametrize("multiplier", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_multiplier_scales_values_and_gradients_whatever_it_is(multiplier, dtype, device):
    head = Head(torch.randn(5, 3, dtype=dtype, device=device), multiplier=multiplier)
    h = torch.randn(2, 3, dtype=dtype, device=device, requires_grad=True)
    targets = torch.tensor([4, 0], device=device)
    got, _ = target_logprobs(h, targets, head)
    want = torch.log_softmax(multiplier * (h @ head.weight_VD.T), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), h)[0], torch.autograd.grad(want.sum(), h)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hits_have_no_gradient_and_without_one_wanted_none_is_made(dtype, device):
    head = Head(torch.randn(5, 3, dtype=dtype, device=device))
    h, targets = torch.randn(2, 3, dtype=dtype, device=device), torch.tensor([4, 0], device=device)
    logprobs, correct = target_logprobs(h, targets, head)
    assert logprobs.grad_fn is None
    got, again = target_logprobs(h.requires_grad_(), targets, head)
    assert not again.requires_grad
    assert got.requires_grad
    assert torch.equal(got, logprobs)
    assert torch.equal(again, correct)
    assert [saved.shape for saved in got.grad_fn.saved_tensors] == [h.shape]


def test_each_run_is_summed_as_if_alone_and_so_is_its_gradient() -> None:
    values_S = torch.randn(11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together, alone = values_S.clone().requires_grad_(), values_S.clone().requires_grad_()
    weight_J = torch.arange(1.0, 6.0, dtype=torch.float64)
    sums_J = run_sums(together, LENGTHS)
    wanted_J = torch.stack([part.sum() for part in alone.split(LENGTHS)])
    torch.testing.assert_close(sums_J, wanted_J)
    (sums_J / weight_J).sum().backward()
    (wanted_J / weight_J).sum().backward()
    assert torch.equal(together.grad, alone.grad)


def test_a_nan_stays_in_its_run() -> None:
    values_S = torch.ones(11)
    values_S[3] = torch.nan
    assert run_sums(values_S, LENGTHS).isnan().tolist() == [False, False, True, False, False]


def test_what_is_true_is_counted_run_by_run() -> None:
    found_S = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert run_counts(found_S, LENGTHS).tolist() == [2, 0, 1, 2, 2]
