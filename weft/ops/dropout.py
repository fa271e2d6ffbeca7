"""Dropout as a pure function of (job seed, step, site, token index, feature).

The bits come from `mix`, the 32-bit finaliser of MurmurHash3 (fmix32), so neither company, packing, splitting
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
BITS = 24
"""Resolution of the drop probability."""


def key(seed: int, step: int, site: str) -> int:
    """The part of the counter that a job, a step and a site fix."""
    mixed = mix(seed & 0xFFFFFFFF)
    mixed = mix(mixed ^ (seed >> 32 & 0xFFFFFFFF))
    mixed = mix(mixed ^ (step & 0xFFFFFFFF))
    return mix(mixed ^ zlib.crc32(site.encode()))


def mix(value: int) -> int:
    """fmix32 on a Python integer."""
    value ^= value >> 16
    value = value * FIRST & 0xFFFFFFFF
    value ^= value >> 13
    value = value * SECOND & 0xFFFFFFFF
    return value ^ value >> 16


def mix_(value: Tensor) -> Tensor:
    """fmix32 on an int32 tensor, in place."""
    value ^= value >> 16 & 0xFFFF
    value *= _signed(FIRST)
    value ^= value >> 13 & 0x7FFFF
    value *= _signed(SECOND)
    value ^= value >> 16 & 0xFFFF
    return value


def kept_TK(key_of_site: int, token_index_T: Tensor, features: int, probability: float) -> Tensor:
    """Which values survive a drop with `probability`: bool [T, K]."""
    row_T = mix_(token_index_T.to(torch.int32) ^ _signed(key_of_site))
    feature_K = torch.arange(features, dtype=torch.int32, device=row_T.device) * _signed(STRIDE)
    bits_TK = mix_(row_T[:, None] + feature_K)
    return (bits_TK >> 32 - BITS & (1 << BITS) - 1) >= round(probability * (1 << BITS))


def drop(x_TK: Tensor, key_of_site: int, token_index_T: Tensor, probability: float) -> Tensor:
    """x with dropped values at exactly zero (even a NaN) and the others scaled up."""
    if probability == 0.0:
        return x_TK
    kept = kept_TK(key_of_site, token_index_T, x_TK.shape[1], probability)
    return torch.where(kept, x_TK / (1.0 - probability), 0.0)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
