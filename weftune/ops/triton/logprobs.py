"""The kernel of target log-probabilities. A program processes one row of logits and reads it twice. The
second read, from which the gradient is written, mostly hits the cache.

Shapes: V vocabulary, B values at a time.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-3.0e38)


@triton.jit
def _capped_logits(z_B, multiplier, softcap, HAS_SOFTCAP: tl.constexpr):
    value_B = z_B.to(tl.float32) * multiplier
    if HAS_SOFTCAP:
        # cap · tanh(v / cap), computed by Triton's exponential.
        small_B = tl.exp(-2.0 * tl.abs(value_B) / softcap)
        tanh_B = (1.0 - small_B) / (1.0 + small_B)
        value_B = softcap * tl.where(value_B < 0, -tanh_B, tanh_B)
    return value_B


@triton.jit
def target_logprobs(
    z,
    gradient,
    targets,
    logprobs,
    correct,
    vocabulary,
    multiplier,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write log p(target), whether the target is the row's argmax, and d log p(target) / dz to `gradient`. z
    are the logits, which `gradient` may overwrite.

    Among equal logits the argmax is the lowest index, as in torch.
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * vocabulary
    gradient += row * vocabulary
    target = tl.load(targets + row)
    wanted = _capped_logits(tl.load(z + target), multiplier, softcap, HAS_SOFTCAP)
    # Finite, so that a lane without values does not subtract an infinity from itself.
    most_B = tl.full((BLOCK,), LEAST, tl.float32)
    sum_B = tl.zeros((BLOCK,), tl.float32)
    # The number of tokens that argmax prefers to the target, by lane.
    preferred_B = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        inside_B = at_B < vocabulary
        z_B = tl.load(z + at_B, mask=inside_B, other=0.0)
        value_B = tl.where(inside_B, _capped_logits(z_B, multiplier, softcap, HAS_SOFTCAP), float("-inf"))
        new_B = tl.maximum(most_B, value_B)
        sum_B = sum_B * tl.exp(most_B - new_B) + tl.exp(value_B - new_B)
        most_B = new_B
        is_preferred_B = ((value_B > wanted) & (at_B != target)) | ((value_B == wanted) & (at_B < target))
        preferred_B += is_preferred_B.to(tl.int32)
    most = tl.max(most_B, axis=0)
    total = tl.sum(sum_B * tl.exp(most_B - most), axis=0)
    # A maximum ignores a NaN, a sum does not: it reaches the log-probability through `total`.
    norm = most + tl.log(total)
    tl.store(logprobs + row, wanted - norm)
    # A NaN is neither greater than nor equal to any value.
    tl.store(correct + row, (tl.sum(preferred_B, axis=0) == 0) & (wanted == wanted))
    if GRADIENT:
        # All loads of the target's own logit must be done before it is overwritten.
        tl.debug_barrier()
        for start in range(0, vocabulary, BLOCK):
            at_B = start + tl.arange(0, BLOCK)
            inside_B = at_B < vocabulary
            z_B = tl.load(z + at_B, mask=inside_B, other=0.0)
            value_B = _capped_logits(z_B, multiplier, softcap, HAS_SOFTCAP)
            d_B = tl.where(at_B == target, 1.0, 0.0) - tl.exp(value_B - norm)
            if HAS_SOFTCAP:
                d_B *= 1.0 - (value_B / softcap) * (value_B / softcap)
            tl.store(gradient + at_B, (d_B * multiplier).to(gradient.dtype.element_ty), mask=inside_B)
