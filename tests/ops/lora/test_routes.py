"""Every route of the LoRA op against the readable one, against finite differences, and against a NaN."""

from dataclasses import replace

import pytest
import torch

from weftune.ops.dropout import keep_mask_TK
from weftune.ops.lora.routes import Block, Blocks, Route, _zero_other_rows, add_lora
from weftune.ops.lora.table import LowRank

FAST = [Route.segmented]
WHOLE = [Route.reference, *FAST]


def case(ranks, lengths, dropouts=None, dtype=torch.float64, k=24, n=20, gap=3, seed=0):
    """x, y and segments with `gap` rows without an adapter before each; totals start at zero."""
    torch.manual_seed(seed)
    dropouts = dropouts or [0.0] * len(ranks)
    blocks, row = [], 0
    for index, (rank, length, dropout) in enumerate(zip(ranks, lengths, dropouts, strict=True)):
        row += gap
        weights = torch.randn(rank, k, dtype=dtype), torch.randn(rank, n, dtype=dtype)
        blocks.append(Block(row, row + length, adapter(*weights, (1 + index) / 3, dropout), 1000 + index))
        row += length
    row += gap
    x, y = torch.randn(row, k, dtype=dtype), torch.randn(row, n, dtype=dtype)
    return x, y, Blocks(tuple(blocks), torch.arange(row) * 3 + 1, torch.zeros((), requires_grad=True))


def adapter(a, b, scale, dropout):
    return LowRank(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, dropout)


def fresh(blocks, dtype=None, change=lambda index, adapter: adapter):
    """The same blocks with totals of their own, in another dtype or with other weights."""
    made = []
    for index, one in enumerate(blocks.blocks):
        own = change(index, one.adapter)
        own = adapter(own.a_RK.to(dtype), own.b_RN.to(dtype), own.scale, own.dropout)
        made.append(replace(one, adapter=own))
    return Blocks(tuple(made), blocks.token_index_T, blocks.anchor)


def run(route, x, y, blocks):
    """Output, dx, dy, and the gradients of all A and all B; y is cloned: the fast routes write into it."""
    blocks = fresh(blocks)
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    out = add_lora(leaves[0], leaves[1] * 1.0, blocks, route)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    da = torch.cat([one.adapter.da_RK for one in blocks.blocks])
    db = torch.cat([one.adapter.db_RN for one in blocks.blocks])
    return [out.detach(), *(leaf.grad for leaf in leaves), da, db]


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


@pytest.mark.parametrize("route", WHOLE)
def test_gradients_equal_finite_differences_with_half_of_the_values_dropped(route):
    x, y, blocks = case([2, 3], [4, 3], [0.5, 0.0], k=5, n=4, gap=1)
    leaves = [t.requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(lambda x, y: add_lora(x, y * 1.0, blocks, route), leaves, atol=1e-6)


@pytest.mark.parametrize("route", WHOLE)
@pytest.mark.parametrize("which", ["a_RK", "b_RN"])
def test_what_is_added_to_the_totals_equals_finite_differences(route, which):
    x, y, blocks = case([2, 3], [4, 3], [0.5, 0.0], k=5, n=4, gap=1)

    def loss(change, at):
        changed = fresh(blocks, change=lambda index, w: moved(w, change, at) if index == 1 else w)
        out = add_lora(x, y * 1.0, changed, Route.reference)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().item()

    def moved(weights, change, at):
        values = getattr(weights, which).clone()
        values[at] += change
        return replace(weights, **{which: values})

    x.requires_grad_()
    found = run(route, x.detach(), y, blocks)[3 if which == "a_RK" else 4]
    for at in [(0, 0), (2, 3), (1, 2)]:
        slope = (loss(1e-6, at) - loss(-1e-6, at)) / 2e-6
        assert found[2 + at[0], at[1]].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("route", WHOLE)
def test_totals_add_up_over_passes_in_their_own_dtype(route):
    x, y, blocks = case([2, 3], [4, 3], dtype=torch.bfloat16)
    wide = [
        replace(
            one,
            adapter=replace(one.adapter, da_RK=one.adapter.da_RK.float(), db_RN=one.adapter.db_RN.float()),
        )
        for one in blocks.blocks
    ]
    once = run(route, x, y, blocks)
    twice = Blocks(tuple(wide), blocks.token_index_T, blocks.anchor)
    for _ in range(2):
        out = add_lora(x.clone().requires_grad_(), y * 1.0, twice, route)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    torch.testing.assert_close(wide[0].adapter.db_RN, 2 * once[4][:2].float(), rtol=0.02, atol=1e-3)


def test_the_reference_is_the_formula_with_scale_and_dropout():
    x, y, blocks = case([3], [6], [0.5], gap=2)
    (one,) = blocks.blocks
    kept = keep_mask_TK(one.key, blocks.token_index_T[one.rows], x.shape[1], 0.5)
    expected = y.clone()
    expected[2:8] += (1 / 3) * ((x[2:8] * kept / 0.5) @ one.adapter.a_RK.T) @ one.adapter.b_RN
    torch.testing.assert_close(add_lora(x, y, blocks, Route.reference).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", FAST)
def test_the_error_is_at_most_twice_that_of_plain_torch_in_the_same_dtype(route, dtype):
    x, y, blocks = case([16, 8, 5], [40, 33, 27], [0.1, 0.0, 0.5], k=96, n=64)
    x, y, low = x.to(dtype), y.to(dtype), fresh(blocks, dtype)
    truth = run(Route.reference, x.double(), y.double(), fresh(low, torch.float64))
    plain = run(Route.reference, x, y, low)
    fast = run(route, x, y, low)
    for name, want, twin, got in zip(["y", "dx", "dy", "da", "db"], truth, plain, fast, strict=True):
        allowed = 2 * (twin.double() - want).norm() + 1e-30
        assert (got.double() - want).norm() <= allowed, name


def test_segmented_keeps_a_nan_with_its_owner():
    x, y, blocks = case([4, 4], [6, 6], [0.1, 0.1])
    clean = run(Route.segmented, x, y, blocks)
    sick, healthy = blocks.blocks
    x = x.clone()
    x[sick.rows] = float("inf")
    spoilt = fresh(
        blocks,
        change=lambda index, own: (
            replace(own, a_RK=own.a_RK * float("nan"), b_RN=own.b_RN * float("nan")) if index == 0 else own
        ),
    )
    out, dx, _, da, db = run(Route.segmented, x, y, spoilt)
    assert torch.equal(out[healthy.rows], clean[0][healthy.rows])
    assert torch.equal(dx[healthy.rows], clean[1][healthy.rows])
    assert torch.equal(da[4:], clean[3][4:])
    assert torch.equal(db[4:], clean[4][4:])
    assert not da[:4].isfinite().any()


def test_a_block_knows_its_rows_its_rank_and_what_its_kept_values_are_scaled_by():
    _, _, blocks = case([3, 2], [6, 1], [0.75, 0.0], gap=2)
    one, other = blocks.blocks
    assert (one.rows, one.adapter.rank) == (slice(2, 8), 3)
    assert (one.adapter.factor, other.adapter.factor) == (pytest.approx(4 / 3), pytest.approx(2 / 3))
    assert blocks.keep_mask(other, 24) is None
    assert blocks.keep_mask(one, 24).shape == (6, 24)


def test_rows_of_no_block_are_zeroed_and_the_others_left_to_be_written():
    _, _, blocks = case([3, 2], [6, 1], gap=2)
    values = _zero_other_rows(blocks, torch.full((13, 4), torch.nan))
    written = [row for row in range(13) if values[row].isnan().all()]
    assert written == [2, 3, 4, 5, 6, 7, 10]
    assert not values[[row for row in range(13) if row not in written]].any()


@pytest.mark.parametrize("route", WHOLE)
@pytest.mark.parametrize("wants", [(True, False), (False, True), (False, False)])
def test_only_who_needs_a_gradient_gets_one_and_the_adapters_always_do(route, wants):
    x, y, blocks = case([3, 2], [6, 1], [0.5, 0.0], gap=2)
    x.requires_grad_(wants[0])
    y.requires_grad_(wants[1])
    out = add_lora(x, y * 1.0, blocks, route)
    out.sum().backward()
    assert (x.grad is not None, y.grad is not None) == wants
    assert all(one.adapter.da_RK.any() and one.adapter.db_RN.any() for one in blocks.blocks)


def test_the_fast_route_writes_into_y_and_says_so():
    x, y, blocks = case([3], [6])
    inner = y * 1.0
    version = inner._version
    out = add_lora(x, inner, blocks, Route.segmented)
    assert out is inner
    assert inner._version > version
    assert out.grad_fn.name() == "_SegmentedBackward"
    before = y.clone()
    assert add_lora(x, y, blocks, Route.reference) is not y
    assert torch.equal(y, before)
