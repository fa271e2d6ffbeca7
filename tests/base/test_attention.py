"""The attention function itself, against the formula written out.

Shapes: T rows of the pack, L rows of one sample, H query heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.base.packs import CPU
from weftune.base import attention
from weftune.errors import BaseModelError

HEADS, GROUPS, WIDTH = 6, 2, 8
LENGTHS = (4, 11, 1, 7)


def random_heads(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, sum(LENGTHS), WIDTH, dtype=torch.float64, generator=generator)


def written_out(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, window: int | None, softcap: float | None
) -> Tensor:
    """Row by row and head by head, with nothing shared with the code under test."""
    rows, out_THD = sum(LENGTHS), torch.zeros(sum(LENGTHS), HEADS, WIDTH, dtype=torch.float64)
    starts = [start for start, length in zip([0, 4, 15, 16], LENGTHS, strict=True) for _ in range(length)]
    for row in range(rows):
        first = starts[row] if window is None else max(starts[row], row - window + 1)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = k_GTD[group, first : row + 1] @ q_HTD[head, row] * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out_THD[row, head] = torch.softmax(scores, dim=0) @ v_GTD[group, first : row + 1]
    return out_THD


@pytest.mark.parametrize("window", [None, 1, 3, 11, 50])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_attention_is_the_formula_within_each_sample(window: int | None, softcap: float | None) -> None:
    q_1HTD, k_1GTD, v_1GTD = random_heads(HEADS, 1), random_heads(GROUPS, 2), random_heads(GROUPS, 3)
    out_1THD, weights = attention.attend(
        nn.Identity(),
        q_1HTD,
        k_1GTD,
        v_1GTD,
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        weftune_pack=attention.pack(LENGTHS, CPU),
    )
    assert weights is None
    expected = written_out(q_1HTD[0], k_1GTD[0], v_1GTD[0], window, softcap)
    torch.testing.assert_close(out_1THD[0], expected, rtol=0.0, atol=1e-12)


def test_boundaries_are_cumulative_lengths() -> None:
    pack = attention.pack((4, 11, 1), CPU)
    assert pack.boundaries.tolist() == [0, 4, 15, 16]
    assert pack.boundaries.dtype == torch.int32
    assert pack.max_length == 11


def attended(
    module: nn.Module,
    mask: Tensor | None = None,
    pack: attention.Pack | None = None,
    s_aux: Tensor | None = None,
) -> None:
    x = random_heads(HEADS, 1)
    attention.attend(module, x, x, x, mask, weftune_pack=pack, s_aux=s_aux, position_ids=torch.arange(3))


def test_what_the_attention_does_not_know_is_refused() -> None:
    pack = attention.pack(LENGTHS, CPU)
    attended(nn.Identity(), pack=pack)
    with pytest.raises(BaseModelError, match="asks its attention for s_aux, which Weftune does not know"):
        attended(nn.Identity(), pack=pack, s_aux=torch.ones(HEADS))
    with pytest.raises(BaseModelError, match="mask of its own"):
        attended(nn.Identity(), mask=torch.ones(1, 1, 3, 3), pack=pack)
    with pytest.raises(BaseModelError, match="does not hand the samples' boundaries"):
        attended(nn.Identity())


def test_an_attention_that_is_not_causal_is_refused() -> None:
    module = nn.Identity()
    module.is_causal = False
    with pytest.raises(BaseModelError, match="not causal"):
        attended(module, pack=attention.pack(LENGTHS, CPU))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [LENGTHS, (sum(LENGTHS),), (1,) * sum(LENGTHS)])
def test_the_kernels_equal_the_attention_by_sample(lengths: tuple[int, ...], window: int | None) -> None:
    device = torch.device("cuda", 0)
    pack = attention.pack(lengths, device)
    rule = attention.Rule(0.3, window, None)
    heads = [
        random_heads(count, seed).to(device, torch.bfloat16)
        for count, seed in ((HEADS, 1), (GROUPS, 2), (GROUPS, 3))
    ]
    fast = [x[0].transpose(0, 1).clone().requires_grad_() for x in heads]
    slow = [x.double().requires_grad_() for x in heads]
    assert attention.kernel_fits(fast[0], fast[2], rule)
    fast_THD = attention.attend_packed(*fast, pack, rule)
    slow_THD = attention.attend_by_sample(*slow, pack, rule)[0]
    torch.testing.assert_close(fast_THD.double(), slow_THD, rtol=0.02, atol=0.02)
    weight = torch.randn_like(slow_THD)
    (fast_THD.double() * weight).sum().backward()
    (slow_THD * weight).sum().backward()
    for a, b in zip(fast, slow, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad[0].transpose(0, 1), rtol=0.05, atol=0.05)
