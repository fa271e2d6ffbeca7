"""Dropout as a pure function of (job seed, step, site, token index, feature).

Row and feature are each hashed by the 32-bit finaliser of MurmurHash3 (fmix32) to an odd number, and the bits
of a value are the product of the two: one multiplication, where a hash of its own would take a dozen passes.
The bits do not depend on other jobs, packing, splitting or recomputation, and a GPU kernel can compute them.
int32 arithmetic wraps, as the hash needs it; shifts are made logical with a mask.

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
"""Values drawn at a time on a CPU, so that their products stay in its cache."""


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

    The features' factors hang on the key too, so that no two features are alike at every step.
    """
    row_T = odd(token_index_T.to(torch.int32) ^ signed(key_of_site))
    count_K = torch.arange(1, features + 1, dtype=torch.int32, device=row_T.device)
    feature_K = odd(count_K * signed(STRIDE) ^ signed(key_of_site))
    least = threshold(probability)
    kept = torch.empty(len(row_T), features, dtype=torch.bool, device=row_T.device)
    rows = max(1, CHUNK // features) if row_T.device.type == "cpu" else max(1, len(row_T))
    bits_TK = torch.empty(min(rows, len(row_T)), features, dtype=torch.int32, device=row_T.device)
    for start in range(0, len(row_T), rows):
        chunk_T = row_T[start : start + rows]
        bits = torch.mul(chunk_T[:, None], feature_K, out=bits_TK[: len(chunk_T)])
        torch.ge(bits, least, out=kept[start : start + rows])
    return kept


def odd(value: Tensor) -> Tensor:
    """fmix32 of an int32 tensor with its lowest bit set: a factor that loses nothing of the other one."""
    return mixed(value) | 1


def mixed(value: Tensor) -> Tensor:
    """fmix32 of an int32 tensor."""
    value = _folded(value, 16) * signed(FIRST)
    value = _folded(value, 13) * signed(SECOND)
    return _folded(value, 16)


def _folded(value: Tensor, places: int) -> Tensor:
    """value ^ value >>> places. torch shifts int32 arithmetically: the copied sign bits are masked off."""
    return value ^ ((value >> places) & (1 << 32 - places) - 1)


def signed(value: int) -> int:
    """The int32 that has these 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value
