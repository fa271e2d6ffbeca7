"""Uniform numbers as a pure function of (seed, site, parameter, index), the same bits on every device.

Each index is hashed by the 32-bit finaliser of MurmurHash3 (`dropout.mixed`), and the top 24 bits are the
number. So any part can be drawn by itself, in any order, where it is wanted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from weftune.core.batch import to_device
from weftune.ops.dropout import STRIDE, mix, mixed, signed, step_key

CPU_CHUNK, CHUNK = 1 << 16, 1 << 20
"""Values drawn at a time: what is made on the way stays in a CPU's cache, elsewhere within 8 MiB a tensor."""


def parameter_key(seed: int, site: str, parameter: str) -> int:
    """The part of the counter that a job, a site and one of its parameters fix; no dropout has step 0."""
    of_site = mix(step_key(seed, 0) ^ zlib.crc32(site.encode()))
    return mix(of_site ^ zlib.crc32(parameter.encode()))


def fill_uniform(
    value: Tensor, key: int, bound: float, start: int = 0, drawn_on: torch.device | None = None
) -> None:
    """Numbers between −bound and bound for every element of `value`, whose first is number `start`.

    Made in float64, so that a parameter of any dtype starts from the same numbers; on the device `drawn_on`,
    if it is not the parameter's own.
    """
    flat, device = value.view(-1), drawn_on or value.device
    assert start + len(flat) < 1 << 31, "a parameter has fewer than 2³¹ elements"
    chunk = _chunk(device)
    for low in range(0, len(flat), chunk):
        part = flat[low : low + chunk]
        part.copy_(_drawn(start + low, len(part), signed(key), bound, device))


def fill_uniform_alike(
    values: Sequence[Tensor], keys: Sequence[int], bound: float, drawn_on: torch.device | None = None
) -> None:
    """`fill_uniform` for values of one size: a few launches for many of them instead of many for each, which
    take longer than the numbers where an adapter has hundreds of small matrices."""
    device, size = drawn_on or values[0].device, values[0].numel()
    many = max(1, _chunk(device) // size)
    if many == 1:
        for value, key in zip(values, keys, strict=True):
            fill_uniform(value, key, bound, drawn_on=drawn_on)
        return
    for low in range(0, len(values), many):
        some = values[low : low + many]
        key_P = torch.tensor([signed(key) for key in keys[low : low + many]], dtype=torch.int32)
        drawn_PN = _drawn(0, size, to_device(key_P, device)[:, None], bound, device)
        torch._foreach_copy_([value.view(-1) for value in some], list(drawn_PN.to(some[0])))


def fill_normal(value: Tensor, key: int) -> None:
    """Standard normal numbers, for small parameters: drawn by torch on the host, whatever device keeps
    them."""
    generator = torch.Generator().manual_seed(key)
    value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))


def draw_integers(count: int, below: int, key: int) -> Tensor:
    """So many whole numbers from 0 up to `below`, drawn by torch on the host."""
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(key))


def _chunk(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else CHUNK


def _drawn(start: int, size: int, key: int | Tensor, bound: float, device: torch.device) -> Tensor:
    """The numbers from `start` on, in float64; with keys [P, 1] those of each, [P, size]."""
    count = torch.arange(start + 1, start + 1 + size, dtype=torch.int32, device=device)
    bits = mixed(count * signed(STRIDE) ^ key)
    # Shifted arithmetically, the top 24 bits are a whole number from −2²³ up to 2²³.
    return (bits >> 8).double().mul_(bound * 2.0**-23)
