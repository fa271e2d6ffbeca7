"""Dropout as a pure function of (job seed, step, site, token index, feature).

The bits come from the 32-bit finaliser of MurmurHash3 (fmix32), so neither company, packing, splitting
nor recomputation can change them, and a GPU kernel can draw the same ones. int32 arithmetic wraps, which is
what the hash wants; shifts are made logical with a mask.

Shapes: T rows, K features.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

FIRST = 0x85EBCA6B
SECOND = 0xC2B2AE35
STRIDE = 0x9E3779B9
"""2³² over the golden ratio: consecutive features land far apart before they are mixed."""
CHUNK = 1 << 17
"""Values hashed at a time on a CPU, so that the dozen passes of the hash stay in its cache."""


def key(seed: int, step: int, site: str) -> int:
    """The part of the counter that a job, a step and a site fix."""
    return mix(step_key(seed, step) ^ zlib.crc32(site.encode()))


def step_key(seed: int, step: int) -> int:
    """The part of it that all sites share."""
    mixed = mix(seed & 0xFFFFFFFF)
    mixed = mix(mixed ^ (seed >> 32 & 0xFFFFFFFF))
    return mix(mixed ^ (step & 0xFFFFFFFF))


def threshold(probability: float) -> int:
    """A value is kept if its bits, read as a signed integer, reach this."""
    return min(round(probability * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def mix(value: int) -> int:
    """fmix32 on a Python integer."""
    value ^= value >> 16
    value = value * FIRST & 0xFFFFFFFF
    value ^= value >> 13
    value = value * SECOND & 0xFFFFFFFF
    return value ^ value >> 16


def kept_TK(key_of_site: int, token_index_T: Tensor, features: int, probability: float) -> Tensor:
    """Which values survive a drop with `probability`: bool [T, K].

    The last fold of fmix32 only stirs high bits into low ones, which a threshold does not see, so it is left
    out for the single values.
    """
    row_T = _fold_(mix_without_last_fold_(token_index_T.to(torch.int32) ^ _signed(key_of_site)), 16)
    feature_K = torch.arange(features, dtype=torch.int32, device=row_T.device) * _signed(STRIDE)
    least = threshold(probability)
    kept = torch.empty(len(row_T), features, dtype=torch.bool, device=row_T.device)
    rows = max(1, CHUNK // features) if row_T.device.type == "cpu" else max(1, len(row_T))
    bits_TK = torch.empty(min(rows, len(row_T)), features, dtype=torch.int32, device=row_T.device)
    spare_TK = torch.empty_like(bits_TK)
    for start in range(0, len(row_T), rows):
        chunk_T = row_T[start : start + rows]
        bits, spare = bits_TK[: len(chunk_T)], spare_TK[: len(chunk_T)]
        torch.add(chunk_T[:, None], feature_K, out=bits)
        mix_without_last_fold_(bits, spare)
        torch.ge(bits, least, out=kept[start : start + rows])
    return kept


def mix_without_last_fold_(value: Tensor, spare: Tensor | None = None) -> Tensor:
    """fmix32 but for its last line on an int32 tensor, in place; `spare` is room for one more of its size."""
    _fold_(value, 16, spare)
    value *= _signed(FIRST)
    _fold_(value, 13, spare)
    value *= _signed(SECOND)
    return value


def _fold_(value: Tensor, places: int, spare: Tensor | None = None) -> Tensor:
    """value ^= value >>> places. torch shifts int32 arithmetically: the copied sign bits are masked off."""
    spare = torch.bitwise_right_shift(value, places, out=spare)
    spare &= (1 << 32 - places) - 1
    value ^= spare
    return value


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
