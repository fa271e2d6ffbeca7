"""Chunked log-probabilities against plain torch."""

from dataclasses import replace

import pytest
import torch

from tests.shards import on_shards
from weftune.core import shapes
from weftune.core.shards import VocabularyShard
from weftune.core.weights import Head, HeadRows
from weftune.ops.logprobs import range_counts, range_sums, target_logprobs

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


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_half_precision_products_are_not_rounded(bias):
    """Logits of about 20, which bfloat16 would round by up to 0.06; gradients are in bfloat16."""
    torch.manual_seed(0)
    h, weight = (torch.randn(size, 64, device="cuda", dtype=torch.bfloat16) for size in (13, 53))
    head = Head(2.5 * weight, torch.randn(53, device="cuda", dtype=torch.bfloat16) if bias else None)
    targets = torch.randint(0, 53, (13,), device="cuda")
    leaf = h.requires_grad_()
    got, _ = target_logprobs(leaf, targets, head)
    (gradient,) = torch.autograd.grad(got.sum(), leaf)
    exact = h.detach().double().requires_grad_()
    logits = exact @ head.weight_VD.double().T + (0.0 if head.bias_V is None else head.bias_V.double())
    want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=0.0)
    torch.testing.assert_close(head.logits(h.detach()).double(), logits.detach(), atol=1e-3, rtol=0.0)
    assert (gradient.double() - expected).norm() <= 0.01 * expected.norm()


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
    sums_J = range_sums(together, LENGTHS)
    wanted_J = torch.stack([part.sum() for part in alone.split(LENGTHS)])
    torch.testing.assert_close(sums_J, wanted_J)
    (sums_J / weight_J).sum().backward()
    (wanted_J / weight_J).sum().backward()
    assert torch.equal(together.grad, alone.grad)


def test_a_nan_stays_in_its_run() -> None:
    values_S = torch.ones(11)
    values_S[3] = torch.nan
    assert range_sums(values_S, LENGTHS).isnan().tolist() == [False, False, True, False, False]


def test_what_is_true_is_counted_run_by_run() -> None:
    found_S = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert range_counts(found_S, LENGTHS).tolist() == [2, 0, 1, 2, 2]


def by_shards(shards, h, targets, head, coefficients, own=None):
    """What every shard of a head returns: log-probabilities, whether the targets are the argmax, and the
    gradients of the hidden states and of a job's own rows."""

    def on_shard(team):
        shard = VocabularyShard(team, len(head.weight_VD))
        rows = slice(shard.start, shard.stop)
        bias_V = None if head.bias_V is None else head.bias_V[rows]
        part = replace(head, weight_VD=head.weight_VD[rows], bias_V=bias_V, shard=shard)
        leaf = h.detach().requires_grad_()
        rows_nD = own.rows_nD.detach().requires_grad_() if own else None
        logprobs, correct = target_logprobs(leaf, targets, part, own and HeadRows(own.ids_n, rows_nD))
        leaves = [leaf] if rows_nD is None else [leaf, rows_nD]
        return logprobs.detach(), correct, *torch.autograd.grad((logprobs * coefficients).sum(), leaves)

    first, *others = on_shards(shards, on_shard)
    for one in others:
        torch.testing.assert_close(one, first, rtol=0, atol=0, equal_nan=True)
    return first


@pytest.mark.parametrize("shards", [2, 4, 53])
@pytest.mark.parametrize("rows", [13, 0])
@pytest.mark.parametrize(("softcap", "multiplier", "bias"), [(None, 1.0, False), (3.0, 0.25, True)])
def test_a_head_divided_by_tokens_gives_what_the_whole_one_gives(shards, rows, softcap, multiplier, bias):
    torch.manual_seed(rows)
    bias_V = torch.randn(53, dtype=torch.float64) if bias else None
    head = Head(torch.randn(53, 16, dtype=torch.float64), bias_V, softcap, multiplier)
    h = torch.randn(rows, 16, dtype=torch.float64)
    targets = torch.randint(0, 53, (rows,))
    targets[::2] = head.logits(h).argmax(-1)[::2]
    coefficients = torch.randn(rows, dtype=torch.float64)
    leaf = h.clone().requires_grad_()
    want, hits = target_logprobs(leaf, targets, head)
    (gradient,) = torch.autograd.grad((want * coefficients).sum(), leaf)

    got = by_shards(shards, h, targets, head, coefficients)

    torch.testing.assert_close(got[0], want.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(got[1], hits)
    torch.testing.assert_close(got[2], gradient, rtol=1e-12, atol=1e-12)


def test_logits_of_any_size_are_normalised_across_shards():
    """The largest logit of one shard may be far above all those of another."""
    head = Head(torch.eye(4, dtype=torch.float64))
    h = torch.tensor([[900.0, 0, -900, 1], [-900, -901, 900, 899], [0, 0, 0, 0]], dtype=torch.float64)
    targets = torch.tensor([3, 2, 1])
    got = by_shards(2, h, targets, head, torch.ones(3))
    want, hits = target_logprobs(h, targets, head)
    torch.testing.assert_close(got[0], want, rtol=1e-12, atol=0)
    assert torch.equal(got[1], hits)


@pytest.mark.parametrize("shards", [2, 4])
def test_the_argmax_across_shards_is_the_lowest_index_among_equals(shards):
    head = Head(torch.eye(4))
    h = torch.tensor([[1.0, 2.0, 2.0, 0.0], [1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0], [0.0, 1.0, 0.0, 1.0]])
    correct = by_shards(shards, h, torch.tensor([1, 2, 0, 1]), head, torch.ones(4))[1]
    assert correct.tolist() == [True, False, True, True]


@pytest.mark.parametrize("shards", [2, 4])
def test_rows_of_a_jobs_own_in_a_divided_head_get_the_gradient_of_the_whole_one(shards):
    """The rows are on several shards, and some shards have none of them."""
    torch.manual_seed(0)
    head = Head(torch.randn(53, 16, dtype=torch.float64), softcap=3.0, multiplier=0.5)
    own = HeadRows(torch.tensor([5, 3, 30]), torch.randn(3, 16, dtype=torch.float64, requires_grad=True))
    h = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    targets, coefficients = torch.randint(0, 53, (13,)), torch.randn(13, dtype=torch.float64)
    targets[:3] = own.ids_n
    want, hits = target_logprobs(h, targets, head, own)
    expected = torch.autograd.grad((want * coefficients).sum(), (h, own.rows_nD))

    got = by_shards(shards, h.detach(), targets, head, coefficients, own)

    torch.testing.assert_close(got[0], want.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(got[1], hits)
    torch.testing.assert_close(got[2:], expected, rtol=1e-12, atol=1e-12)


def test_a_nan_row_leaves_the_other_rows_of_a_divided_head_alone():
    torch.manual_seed(1)
    head = Head(torch.randn(53, 16))
    h, targets = torch.randn(6, 16), torch.randint(0, 53, (6,))
    clean = by_shards(2, h, targets, head, torch.ones(6))
    h[2] = torch.nan
    poisoned = by_shards(2, h, targets, head, torch.ones(6))
    keep = torch.arange(6) != 2
    assert all(torch.equal(a[keep], b[keep]) for a, b in zip(clean, poisoned, strict=True))
    assert poisoned[0][2].isnan()
