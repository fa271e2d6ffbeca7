"""Chunked log-probabilities against plain torch."""

import pytest
import torch

from weft.head import Head
from weft.ops import logprobs
from weft.ops.logprobs import target_logprobs


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 53 * 5)


@pytest.mark.parametrize("rows", [1, 5, 13, 0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.25])
def test_values_and_gradients_equal_plain_log_softmax(rows, softcap, bias, multiplier):
    torch.manual_seed(rows)
    weight = torch.randn(53, 16, dtype=torch.float64)
    head = Head(weight, torch.randn(53, dtype=torch.float64) if bias else None, softcap, multiplier)
    h = torch.randn(rows, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 53, (rows,))
    coefficients = torch.randn(rows, dtype=torch.float64)

    got, hits = target_logprobs(h, targets, head)
    (gradient,) = torch.autograd.grad((got * coefficients).sum(), h)

    logits = head.logits(h)
    want = torch.log_softmax(logits, -1)[torch.arange(rows), targets]
    (expected,) = torch.autograd.grad((want * coefficients).sum(), h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(hits, logits.argmax(-1) == targets)


def test_a_nan_row_leaves_the_other_rows_alone():
    head = Head(torch.randn(53, 16))
    h = torch.randn(7, 16)
    clean, _ = target_logprobs(h, torch.arange(7), head)
    h[3] = float("nan")
    sick = h.requires_grad_()
    got, _ = target_logprobs(sick, torch.arange(7), head)
    got.sum().backward()
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(got[others], clean[others])
    assert sick.grad[others].isfinite().all()
    assert not got[3].isfinite()
