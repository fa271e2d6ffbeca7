"""The kernel that chooses the next token from a row of scores.

Shapes: C tokens at a time, H thresholds that are tried at once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from weftune.ops.triton.slots import STRIDE, hash_bits

LOWEST = tl.constexpr(-40.0)
"""Difference from the largest score below which a token's probability is negligible in float32."""
ROUNDS = tl.constexpr(9)
"""Number of rounds of the search for a threshold. Each round divides the interval by 8, so that its width is
3e-7 in the end."""
H = tl.constexpr(8)


@triton.jit(do_not_specialize=["B"])
def sample_row(
    scores,
    logits,
    settings,
    tokens,
    logprobs,
    score_stride,
    logit_stride,
    V,
    B,
    C: tl.constexpr,
):
    """Choose the token of a row by its scores, and compute its log-probability by the logits. `settings` has
    for each row a temperature (0 is greedy), top-p and a key of random numbers. Top-p keeps the tokens above
    a threshold, which is found by a search without sorting. Equally probable tokens are all kept or all
    dropped."""
    row = tl.program_id(0)
    temperature = tl.load(settings + row).to(tl.float32, bitcast=True)
    top_p = tl.load(settings + B + row).to(tl.float32, bitcast=True)
    key = tl.load(settings + 2 * B + row).to(tl.uint32, bitcast=True)
    is_random = temperature > 0
    divisor = tl.where(is_random, temperature, 1.0)
    own, raw = scores + row.to(tl.int64) * score_stride, logits + row.to(tl.int64) * logit_stride
    v_C = tl.arange(0, C)
    most_C = tl.full((C,), float("-inf"), tl.float32)
    most_raw_C = tl.full((C,), float("-inf"), tl.float32)
    for first in range(0, V, C):
        inside_C = first + v_C < V
        s_C = tl.load(own + first + v_C, mask=inside_C, other=float("-inf")) / divisor
        most_C = tl.maximum(most_C, s_C)
        raw_C = tl.load(raw + first + v_C, mask=inside_C, other=float("-inf"))
        most_raw_C = tl.maximum(most_raw_C, raw_C)
    most, most_raw = tl.max(most_C, axis=0), tl.max(most_raw_C, axis=0)
    sum_C = tl.zeros((C,), tl.float32)
    sum_raw_C = tl.zeros((C,), tl.float32)
    for first in range(0, V, C):
        inside_C = first + v_C < V
        s_C = tl.load(own + first + v_C, mask=inside_C, other=float("-inf")) / divisor
        sum_C += tl.exp(s_C - most)
        raw_C = tl.load(raw + first + v_C, mask=inside_C, other=float("-inf"))
        sum_raw_C += tl.exp(raw_C - most_raw)
    total, total_raw = tl.sum(sum_C, axis=0), tl.sum(sum_raw_C, axis=0)
    low = float("-inf")
    if is_random & (top_p < 1.0):
        low = top_p_threshold(own, divisor, most, top_p * total, V, C)
    best_C = tl.full((C,), float("-inf"), tl.float32)
    token_C = tl.zeros((C,), tl.int32)
    for first in range(0, V, C):
        inside_C = first + v_C < V
        s_C = tl.load(own + first + v_C, mask=inside_C, other=float("-inf")) / divisor
        kept_C = inside_C & (s_C - most > low)
        if is_random:
            bits_C = hash_bits((first + v_C + 1).to(tl.uint32) * STRIDE ^ key).to(tl.int32, bitcast=True)
            # As in `generate.sampling`: the top 23 bits, as a number between 0 and 1.
            uniform_C = ((bits_C >> 9).to(tl.float32) + 4194304.5) * 1.1920928955078125e-07
            s_C -= tl.log(-tl.log(uniform_C))
        better_C = kept_C & (s_C > best_C)
        best_C = tl.where(better_C, s_C, best_C)
        token_C = tl.where(better_C, first + v_C, token_C)
    best = tl.max(best_C, axis=0)
    token = tl.min(tl.where(best_C == best, token_C, V - 1), axis=0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(raw + token) - most_raw - tl.log(total_raw))


@triton.jit
def top_p_threshold(score_row, divisor, max_score, target_sum, V, C: tl.constexpr):
    """Return the threshold of top-p sampling, as a difference from the largest score. The tokens above it are
    the smallest set of most probable tokens whose sum of exponentials reaches `target_sum`; tokens as
    probable as the last of them are included."""
    v_C, h_H = tl.arange(0, C), tl.arange(0, H)
    low, width = LOWEST, -LOWEST
    for _ in range(ROUNDS):
        width /= H
        # The sum of the tokens above a threshold falls with it. It is 0 above the interval.
        threshold_H = low + width * (h_H + 1)
        sum_HC = tl.zeros((H, C), tl.float32)
        for first in range(0, V, C):
            inside_C = first + v_C < V
            s_C = tl.load(score_row + first + v_C, mask=inside_C, other=float("-inf")) / divisor - max_score
            sum_HC += tl.where(s_C[None, :] > threshold_H[:, None], tl.exp(s_C)[None, :], 0.0)
        reached_H = (tl.sum(sum_HC, axis=1) >= target_sum) & (h_H < H - 1)
        low += width * tl.sum(reached_H.to(tl.int32), axis=0)
    return low
