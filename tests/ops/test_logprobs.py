"""Chunked log-probabilities against plain torch."""

import pytest
import torch

from weftune.head import Head
from weftune.ops import logprobs
from weftune.ops.logprobs import target_logprobs


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", {"cpu": 4 * 53 * 5, "cuda": 4 * 53 * 5})


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
    coefficients = torch.randn(rows, dtype=dtype, device=device)

    got, hits = target_logprobs(h, targets, head)
    (gradient,) = torch.autograd.grad((got * coefficients).sum(), h)

    logits = head.logits(h)
    want = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad((want * coefficients).sum(), h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(hits, logits.argmax(-1) == targets)


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
