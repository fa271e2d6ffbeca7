"""Host memory that a GPU reads and writes directly, allocated in one piece.

Torch's own pinned allocator rounds up to powers of two, which is too much for a base of many gigabytes;
therefore pages are mapped here and registered explicitly.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from weftune.errors import BaseModelError

ALIGNMENT = 256
ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")
"""Flags passed to `madvise`. The flags request huge pages, which are allocated and locked many times as fast
as small ones, and exclude the pages from forks, since pages that a GPU writes to must not be copied."""


class Pages(mmap.mmap):
    """A private memory mapping of this process. The function `on_unmap` is called before the memory is
    unmapped. A weak reference's callback would be called too late, when the addresses may already be in use
    again."""

    on_unmap: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.on_unmap is not None:
            self.on_unmap()


def allocate_host_bytes(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes of host memory, page-locked if `device` is a GPU. The memory is freed with the
    last tensor that views it."""
    try:
        pages = Pages(-1, max(size, 1), flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise BaseModelError(
            f"The host has no {size / 2**30:.1f} GiB of memory left ({error.strerror}); use a smaller base "
            "or fewer jobs."
        ) from None
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        _lock_pages(pages, buffer)
    return buffer


def _lock_pages(pages: Pages, buffer: Tensor) -> None:
    for name in ADVICE:
        # Not every system supports each flag, and none is required.
        with suppress(OSError, AttributeError):
            pages.madvise(getattr(mmap, name))
    # All threads touch the pages at once; locking untouched pages would fetch them in a single thread.
    buffer[:: mmap.PAGESIZE].zero_()
    library, address = torch.cuda.cudart(), buffer.data_ptr()
    status = library.cudaHostRegister(address, len(pages), 0)
    if int(status) != 0:
        raise BaseModelError(
            f"The system does not let Weftune lock {len(pages) / 2**30:.1f} GiB of host memory for the GPU "
            f"({status}); raise the limit (ulimit -l, or the container's), or use a smaller base."
        )
    pages.on_unmap = partial(library.cudaHostUnregister, address)


def host_vectors(shapes: list[tuple[int, torch.dtype]], device: torch.device) -> list[Tensor]:
    """Allocate vectors of zeros in host memory with these sizes and dtypes, all in one buffer that is
    page-locked if `device` is a GPU."""
    sizes = [-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in shapes]
    buffer = allocate_host_bytes(sum(sizes), device)
    starts = [0, *accumulate(sizes)]
    return [
        buffer[start : start + count * dtype.itemsize].view(dtype)
        for start, (count, dtype) in zip(starts, shapes, strict=False)
    ]
