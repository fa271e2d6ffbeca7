"""Host memory that a GPU reads and writes by itself, taken in one piece.

Torch's own pinned allocator rounds up to powers of two, which a base of many gigabytes cannot afford; so
pages are mapped here and registered by hand.
"""

from __future__ import annotations

import mmap
import weakref
from itertools import accumulate

import torch
from torch import Tensor

from weft.errors import BaseModelError

ALIGNMENT = 256


def host_bytes(size: int, device: torch.device) -> Tensor:
    """So many bytes, page-locked if `device` is a GPU; given back when the tensor and its views are gone."""
    try:
        pages = mmap.mmap(-1, max(size, 1))
    except OSError as error:
        raise BaseModelError(
            f"The host has no {size / 2**30:.1f} GiB of memory left ({error.strerror}); use a smaller base "
            "or fewer jobs."
        ) from None
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        address = buffer.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, len(pages), 0)
        if int(status) != 0:
            raise BaseModelError(
                f"The system does not let Weft lock {len(pages) / 2**30:.1f} GiB of host memory for the GPU "
                f"({status}); raise the limit (ulimit -l, or the container's), or use a smaller base."
            )
        weakref.finalize(pages, torch.cuda.cudart().cudaHostUnregister, address)
    return buffer


def host_vectors(shapes: list[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Vectors of so many values each, zero, in one such piece."""
    sizes = [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in shapes]
    buffer = host_bytes(sum(sizes), device)
    starts = [0, *accumulate(sizes)]
    return [
        buffer[start : start + count * dtype.itemsize].view(dtype)
        for start, (count, dtype) in zip(starts, shapes, strict=False)
    ]
