"""The attention of chunks, against the attention of the whole sample."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from weftune.base.attention import Rule, attend_packed, pack
from weftune.base.chunks import ChunkKeys, SampleKeys

HEADS, GROUPS, PREFIX = 6, 2, 3
CUTS = [0, 7, 13, 20, 25]
"""First rows of chunks of unequal size, of which the last is the shortest."""


def random_heads(rows: int, heads: int, width: int, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, width, dtype=torch.float64, generator=generator).to(like).requires_grad_()


def in_chunks(
    given: tuple[Tensor, Tensor, Tensor], d_THD: Tensor, cuts: list[int], rule: Rule
) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values. Each chunk has its own graph."""
    rows = len(given[0])
    sample = SampleKeys(rows)
    passes = []
    for start, stop in pairwise(cuts):
        own = [x.detach()[start:stop].requires_grad_() for x in given]
        passes.append((own, ChunkKeys(sample, start).attend(*own, rule, layer=0)))
    for (start, stop), (_, out_THD) in zip(reversed(list(pairwise(cuts))), reversed(passes), strict=True):
        out_THD.backward(d_THD[start:stop])
    outputs = torch.cat([out_THD.detach() for _, out_THD in passes])
    return [outputs, *(torch.cat([own[n].grad for own, _ in passes]) for n in range(3))]


def whole(given: tuple[Tensor, Tensor, Tensor], d_THD: Tensor, rule: Rule) -> list[Tensor]:
    out_THD = attend_packed(*given, pack([len(given[0])], given[0].device), rule)
    return [out_THD.detach(), *torch.autograd.grad(out_THD, given, d_THD)]


def heads_like(like: Tensor, rows: int, width: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    q, k, v, d = (
        random_heads(rows, heads, width, like, seed)
        for seed, heads in enumerate((HEADS, GROUPS, GROUPS, HEADS))
    )
    return (q, k, v), d.detach()


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 11, 25, 60])
def test_chunks_have_the_outputs_and_gradients_of_the_whole_sample(
    window: int | None, softcap: float | None
) -> None:
    given, d_THD = heads_like(torch.zeros((), dtype=torch.float64), CUTS[-1], 8)
    rule = Rule(0.3, window, softcap)
    for mine, theirs in zip(in_chunks(given, d_THD, CUTS, rule), whole(given, d_THD, rule), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-12)


def test_without_the_gradients_of_later_chunks_keys_would_differ() -> None:
    """The comparison above can fail."""
    given, d_THD = heads_like(torch.zeros((), dtype=torch.float64), CUTS[-1], 8)
    rule = Rule(0.3, None, None)
    own = [x.detach()[:7].requires_grad_() for x in given]
    ChunkKeys(SampleKeys(7), 0).attend(*own, rule, layer=0).backward(d_THD[:7])
    _, _, dk_TGD, _ = whole(given, d_THD, rule)
    assert own[1].grad is not None
    assert (own[1].grad - dk_TGD[:7]).norm() > 0.01 * dk_TGD[:7].norm()


def test_gradients_reach_prefix_keys_through_every_chunk() -> None:
    (q, k, v), d_THD = heads_like(torch.zeros((), dtype=torch.float64), CUTS[-1] + PREFIX, 8)
    rule = Rule(0.3, 9, None)
    keys, values = (x.detach()[:PREFIX].flatten(1).requires_grad_() for x in (k, v))
    sample, passes = SampleKeys(CUTS[-1]), []
    for start, stop in pairwise(CUTS):
        rows = slice(PREFIX + start, PREFIX + stop)
        chunk = ChunkKeys(sample, start, PREFIX, lambda _: [(keys, values)])
        # Only the prefix is trained: no row of a later chunk requires a gradient by itself.
        out_THD = chunk.attend(*(x.detach()[rows] for x in (q, k, v)), rule, layer=0)
        passes.append((out_THD, d_THD[rows]))
    for out_THD, d in reversed(passes):
        out_THD.backward(d)
    out_ZHD = attend_packed(q, k, v, pack([len(q)], q.device), rule)
    _, dk, dv = torch.autograd.grad(out_ZHD[PREFIX:], (q, k, v), d_THD[PREFIX:])
    torch.testing.assert_close(torch.cat([out for out, _ in passes]).detach(), out_ZHD.detach()[PREFIX:])
    for mine, theirs in ((keys, dk), (values, dv)):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs[:PREFIX].flatten(1), rtol=0.0, atol=1e-12)


def test_layers_whose_rows_do_not_attend_have_no_chunks() -> None:
    with pytest.raises(AssertionError, match="recurrent state"):
        _ = ChunkKeys(SampleKeys(5), 0).states


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_on_a_gpu_are_as_near_to_float64_as_the_whole_sample(
    dtype: torch.dtype, window: int | None
) -> None:
    """At most twice the error of one kernel over the whole sample."""
    cuts, rule = [0, 1000, 2000, 2600, 3333], Rule(None, window, None)
    exact, d_THD = heads_like(torch.zeros((), dtype=torch.float64, device="cuda"), cuts[-1], 64)
    given = tuple(x.detach().to(dtype).requires_grad_() for x in exact)
    want = whole(tuple(x.detach().double().requires_grad_() for x in given), d_THD.to(dtype).double(), rule)
    mine, theirs = in_chunks(given, d_THD.to(dtype), cuts, rule), whole(given, d_THD.to(dtype), rule)
    for own, other, right in zip(mine, theirs, want, strict=True):
        gap, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        assert gap <= 2 * allowed + 1e-6
