"""Dropout as a pure function of (job seed, step, site, token index, feature). A site is a linear layer that
adapters are attached to. The mask does not depend on other jobs, packing, splitting or recomputation, and a
GPU kernel can compute it.

Row and feature are each hashed by the 32-bit finaliser of MurmurHash3 (fmix32) to an odd number, and the
random bits of a value are the product of the two: one multiplication, while a hash per value would take a
dozen steps. int32 arithmetic wraps, as the hash requires; shifts are made logical with a mask. On a CPU,
numpy hashes rows and features: its calls cost less, and its integers can be unsigned.

Shapes: T rows, K features.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

FIRST = 0x85EBCA6B
SECOND = 0xC2B2AE35
STRIDE = 0x9E3779B9
"""Multiplier of feature indices before they are hashed: 2³² divided by the golden ratio, which spreads
consecutive indices."""
CHUNK = 1 << 17
"""Number of mask values drawn at a time on a CPU, so that intermediate tensors stay in its cache."""
FEW = 1 << 14
"""Maximum number of mask values for which numpy is used in place of torch on a CPU. For so few values torch
would not use several threads either."""


def mask_key(seed: int, step: int, site: str) -> int:
    """Return the hash key of a job's dropout mask at one optimizer step and one linear layer (`site` is its
    name)."""
    return hash_int(step_key(seed, step) ^ zlib.crc32(site.encode()))


def step_key(seed: int, step: int) -> int:
    """Return the hash of a job's seed and optimizer step, from which the dropout keys of all linears are
    derived."""
    mixed = hash_int(seed & 0xFFFFFFFF)
    mixed = hash_int(mixed ^ (seed >> 32 & 0xFFFFFFFF))
    return hash_int(mixed ^ (step & 0xFFFFFFFF))


def keep_threshold(probability: float) -> int:
    """Return the integer threshold for a dropout probability: a value is kept if its random bits, read as a
    signed integer, are not below the threshold."""
    return min(round(probability * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def hash_int(value: int) -> int:
    """Return the 32-bit finaliser of MurmurHash3 (fmix32) of a Python integer."""
    value ^= value >> 16
    value = value * FIRST & 0xFFFFFFFF
    value ^= value >> 13
    value = value * SECOND & 0xFFFFFFFF
    return value ^ value >> 16


def keep_mask_TK(
    key_of_site: int, token_index_T: Tensor, features: int, probability: float, first_feature: int = 0
) -> Tensor:
    """Return the mask of the values that dropout with `probability` keeps, bool [T, K]. The hashes of
    features depend on the key too, so that no two features have the same mask at every step. `first_feature`
    is the index of the first of these features in the whole linear, of which a shard may have only a part."""
    draw = _keep_mask_on_cpu if token_index_T.device.type == "cpu" else _keep_mask_by_torch
    numbers = range(first_feature + 1, first_feature + 1 + features)
    return draw(key_of_site, token_index_T, numbers, keep_threshold(probability))


def _keep_mask_by_torch(
    key_of_site: int, token_index_T: Tensor, feature_indices: range, min_hash: int
) -> Tensor:
    row_T = hash_to_odd(token_index_T.to(torch.int32) ^ to_signed(key_of_site))
    count_K = torch.arange(
        feature_indices.start, feature_indices.stop, dtype=torch.int32, device=row_T.device
    )
    feature_K = hash_to_odd(count_K * to_signed(STRIDE) ^ to_signed(key_of_site))
    return row_T[:, None] * feature_K >= min_hash


def _keep_mask_on_cpu(
    key_of_site: int, token_index_T: Tensor, feature_indices: range, min_hash: int
) -> Tensor:
    own = np.uint32(key_of_site)
    row_T = _hash_unsigned_to_odd(token_index_T.numpy().astype(np.uint32) ^ own)
    count_K = np.arange(feature_indices.start, feature_indices.stop, dtype=np.uint32)
    feature_K = _hash_unsigned_to_odd(count_K * np.uint32(STRIDE) ^ own)
    if row_T.size * feature_K.size <= FEW:
        return torch.from_numpy(np.multiply.outer(row_T, feature_K).view(np.int32) >= min_hash)
    row, feature = (torch.from_numpy(one.view(np.int32)) for one in (row_T, feature_K))
    kept, rows = torch.empty(len(row), len(feature), dtype=torch.bool), max(1, CHUNK // len(feature))
    bits_TK = torch.empty(min(rows, len(row)), len(feature), dtype=torch.int32)
    for start in range(0, len(row), rows):
        chunk = row[start : start + rows]
        bits = torch.mul(chunk[:, None], feature, out=bits_TK[: len(chunk)])
        torch.ge(bits, min_hash, out=kept[start : start + rows])
    return kept


def _hash_unsigned_to_odd(value: np.ndarray) -> np.ndarray:
    """Return the 32-bit finaliser of MurmurHash3 of each unsigned integer, with the lowest bit set. The bits
    are those that `hash_to_odd` returns for tensors."""
    value = value ^ (value >> 16)
    value *= np.uint32(FIRST)
    value ^= value >> 13
    value *= np.uint32(SECOND)
    value ^= value >> 16
    value |= 1
    return value


def hash_to_odd(value: Tensor) -> Tensor:
    """Return the 32-bit finaliser of MurmurHash3 of each element, with the lowest bit set: multiplication by
    an odd number modulo 2³² is invertible."""
    return hash_bits(value) | 1


def hash_bits(value: Tensor) -> Tensor:
    """Return the 32-bit finaliser of MurmurHash3 of each element of an int32 tensor."""
    value = _fold_bits(value, 16) * to_signed(FIRST)
    value = _fold_bits(value, 13) * to_signed(SECOND)
    return _fold_bits(value, 16)


def _fold_bits(value: Tensor, bit_count: int) -> Tensor:
    """Return value ^ (value >>> bit_count), where >>> is a logical shift. torch shifts int32 arithmetically,
    so the copied sign bits are masked off."""
    return value ^ ((value >> bit_count) & (1 << 32 - bit_count) - 1)


def to_signed(value: int) -> int:
    """Return the int32 that has the same 32 bits as the unsigned `value`."""
    return value - (1 << 32) if value >= 1 << 31 else value
