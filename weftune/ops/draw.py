"""Uniform numbers as a pure function of (seed, site, parameter, index), the same bits on every device.

Each index is hashed by the 32-bit finaliser of MurmurHash3 (`dropout.mixed`), and the top 24 bits are the
number. So any part can be drawn by itself, in any order, where it is wanted.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

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
    chunk = CPU_CHUNK if device.type == "cpu" else CHUNK
    for low in range(0, len(flat), chunk):
        part = flat[low : low + chunk]
        first = start + low + 1
        count = torch.arange(first, first + len(part), dtype=torch.int32, device=device)
        bits = mixed(count * signed(STRIDE) ^ signed(key))
        # Shifted arithmetically, the top 24 bits are a whole number from −2²³ up to 2²³.
        part.copy_((bits >> 8).double().mul_(bound * 2.0**-23))
