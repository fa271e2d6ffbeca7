"""Every route of the LoRA op against the readable one, against finite differences, and against a NaN."""

import pytest
import torch

from weft.ops.dropout import kept_TK
from weft.ops.lora import Block, Blocks, Route, add_lora

FAST = [Route.segmented, Route.concatenated]


def case(ranks, lengths, dropouts=None, dtype=torch.float64, k=24, n=20, gap=3, seed=0):
    """Segments with `gap` rows without an adapter before each; ranks in reverse order in the bank."""
    torch.manual_seed(seed)
    dropouts = dropouts or [0.0] * len(ranks)
    blocks, row, top = [], 0, sum(ranks)
    for index, (rank, length, dropout) in enumerate(zip(ranks, lengths, dropouts, strict=True)):
        row += gap
        blocks.append(Block(row, row + length, top - rank, top, (1 + index) / 3, dropout, 1000 + index))
        row, top = row + length, top - rank
    row += gap
    x, y = torch.randn(row, k, dtype=dtype), torch.randn(row, n, dtype=dtype)
    a, b = torch.randn(sum(ranks), k, dtype=dtype), torch.randn(sum(ranks), n, dtype=dtype)
    return x, y, a, b, Blocks(tuple(blocks), torch.arange(row) * 3 + 1, sum(ranks))


def run(route, x, y, a, b, blocks):
    """Output and all gradients; y is cloned because the fast routes write into it."""
    leaves = [t.clone().requires_grad_() for t in (x, y, a, b)]
    out = add_lora(leaves[0], leaves[1] * 1.0, leaves[2], leaves[3], blocks, route)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("route", FAST)
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        ([4], [10]),
        ([1, 7, 8], [5, 1, 9]),
        ([24, 3, 16, 1], [2, 30, 4, 4]),
        ([5, 5], [0, 6]),
        ([2] * 64, [1] * 64),
        ([100], [3]),
    ],
)
@pytest.mark.parametrize("dropping", [False, True])
def test_the_fast_routes_equal_the_reference(route, ranks, lengths, dropping):
    dropouts = [0.5 if i % 2 == 0 else 0.1 for i in range(len(ranks))] if dropping else None
    arguments = case(ranks, lengths, dropouts)
    for got, want in zip(run(route, *arguments), run(Route.reference, *arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", list(Route))
def test_gradients_equal_finite_differences_with_half_of_the_values_dropped(route):
    x, y, a, b, blocks = case([2, 3], [4, 3], [0.5, 0.0], k=5, n=4, gap=1)

    def function(x, y, a, b):
        return add_lora(x, y * 1.0, a, b, blocks, route)

    leaves = [t.requires_grad_() for t in (x, y, a, b)]
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6)


def test_the_reference_is_the_formula_with_scale_and_dropout():
    x, y, a, b, blocks = case([3], [6], [0.5], gap=2)
    (block,) = blocks.blocks
    kept = kept_TK(block.key, blocks.token_index_T[block.rows], x.shape[1], 0.5)
    expected = y.clone()
    expected[2:8] += (1 / 3) * ((x[2:8] * kept / 0.5) @ a.T) @ b
    torch.testing.assert_close(add_lora(x, y, a, b, blocks, Route.reference), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", FAST)
def test_the_error_is_at_most_twice_that_of_plain_torch_in_the_same_dtype(route, dtype):
    exact = case([16, 8, 5], [40, 33, 27], [0.1, 0.0, 0.5], k=96, n=64)
    low = [t.to(dtype) for t in exact[:4]]
    truth = run(Route.reference, *(t.double() for t in low), exact[4])
    plain = run(Route.reference, *low, exact[4])
    fast = run(route, *low, exact[4])
    for name, want, twin, got in zip(["y", "dx", "dy", "da", "db"], truth, plain, fast, strict=True):
        allowed = 2 * (twin.double() - want).norm() + 1e-30
        assert (got.double() - want).norm() <= allowed, name


def test_segmented_keeps_a_nan_with_its_owner():
    x, y, a, b, blocks = case([4, 4], [6, 6], [0.1, 0.1])
    clean = run(Route.segmented, x, y, a, b, blocks)
    sick, healthy = blocks.blocks
    a, b, x = a.clone(), b.clone(), x.clone()
    a[sick.ranks] = b[sick.ranks] = float("nan")
    x[sick.rows] = float("inf")
    out, dx, _, da, db = run(Route.segmented, x, y, a, b, blocks)
    assert torch.equal(out[healthy.rows], clean[0][healthy.rows])
    assert torch.equal(dx[healthy.rows], clean[1][healthy.rows])
    assert torch.equal(da[healthy.ranks], clean[3][healthy.ranks])
    assert torch.equal(db[healthy.ranks], clean[4][healthy.ranks])
    assert not da[sick.ranks].isfinite().any()


def test_concatenated_lets_a_nan_reach_a_neighbours_gradient():
    """Why the executor looks before it keeps a gradient of this route."""
    x, y, a, b, blocks = case([4, 4], [6, 6])
    sick, healthy = blocks.blocks
    x[sick.rows] = float("nan")
    _, _, _, da, _ = run(Route.concatenated, x, y, a, b, blocks)
    assert not da[healthy.ranks].isfinite().all()
