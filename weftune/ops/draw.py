"""Uniform random numbers as a pure function of (seed, site, parameter, index), with the same bits on every
device. A site is a linear layer that adapters are attached to.

Each index is hashed by the 32-bit finaliser of MurmurHash3 (`dropout.hash_bits`), and the top 24 bits are the
number. So any slice of a parameter can be drawn separately, in any order and on any device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from weftune.core.batch import to_device
from weftune.ops.dropout import STRIDE, hash_bits, hash_int, step_key, to_signed

CPU_CHUNK, CHUNK = 1 << 16, 1 << 20
"""Numbers of values drawn at a time: on a CPU few enough that intermediate tensors stay in its cache, and on
a GPU few enough that each takes at most 8 MiB."""


def parameter_key(seed: int, site: str, parameter: str) -> int:
    """Return the key of the random numbers with which a job's parameter is initialised. The key is a hash for
    step 0, in which no dropout masks are drawn, so the numbers are independent of all masks."""
    of_site = hash_int(step_key(seed, 0) ^ zlib.crc32(site.encode()))
    return hash_int(of_site ^ zlib.crc32(parameter.encode()))


def fill_uniform(
    value: Tensor, key: int, bound: float, start: int = 0, draw_device: torch.device | None = None
) -> None:
    """Fill `value` with uniform random numbers between −bound and bound. `value` is a parameter, or the slice
    of a parameter that begins at element `start`. The numbers are drawn in float64, so that parameters of all
    dtypes get the same numbers, on the device `draw_device` if given, else on the device of `value`."""
    flat, device = value.view(-1), draw_device or value.device
    assert start + len(flat) < 1 << 31, "a parameter has fewer than 2³¹ elements"
    chunk = _chunk_size(device)
    for low in range(0, len(flat), chunk):
        part = flat[low : low + chunk]
        part.copy_(_draw_block(start + low, len(part), to_signed(key), bound, device))


def fill_uniform_batch(
    values: Sequence[Tensor], keys: Sequence[int], bound: float, draw_device: torch.device | None = None
) -> None:
    """Fill many tensors of equal size with the numbers that `fill_uniform` would write, between −bound and
    bound, with few kernel launches. For the hundreds of small matrices of an adapter, separate launches would
    take longer than the arithmetic."""
    device, size = draw_device or values[0].device, values[0].numel()
    many = max(1, _chunk_size(device) // size)
    if many == 1:
        for value, key in zip(values, keys, strict=True):
            fill_uniform(value, key, bound, draw_device=draw_device)
        return
    for low in range(0, len(values), many):
        some = values[low : low + many]
        key_P = torch.tensor([to_signed(key) for key in keys[low : low + many]], dtype=torch.int32)
        drawn_PN = _draw_block(0, size, to_device(key_P, device)[:, None], bound, device)
        torch._foreach_copy_([value.view(-1) for value in some], list(drawn_PN.to(some[0])))


def fill_normal(value: Tensor, key: int) -> None:
    """Fill a small parameter on any device with standard normal numbers, drawn by torch on the host."""
    generator = torch.Generator().manual_seed(key)
    value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))


def draw_integers(count: int, upper_bound: int, key: int) -> Tensor:
    """Return `count` uniform integers from 0 to `upper_bound` − 1, drawn by torch on the host."""
    return torch.randint(upper_bound, (count,), generator=torch.Generator().manual_seed(key))


def _chunk_size(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else CHUNK


def _draw_block(start: int, size: int, key: int | Tensor, bound: float, device: torch.device) -> Tensor:
    """Return `size` uniform random numbers between −bound and bound, in float64: those with the indices from
    `start` on. If `key` is a tensor [P, 1] of keys, return one row of numbers for each key, [P, size]."""
    count = torch.arange(start + 1, start + 1 + size, dtype=torch.int32, device=device)
    bits = hash_bits(count * to_signed(STRIDE) ^ key)
    # Shifted arithmetically, the top 24 bits are a whole number from −2²³ up to 2²³.
    return (bits >> 8).double().mul_(bound * 2.0**-23)
