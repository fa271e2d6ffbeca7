"""The bytes of a streamed stage while it is not on the device: in host memory, or in its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from weftune.base.host.mapped import MappedTensor
from weftune.base.host.pinned import host_bytes
from weftune.plan.layout.need import STAGING_BYTES

CHUNK_BYTES = STAGING_BYTES // 2


class StageSource(Protocol):
    @property
    def size(self) -> int:
        """Bytes of the stage."""
        ...

    @property
    def blocks(self) -> bool:
        """Whether `copy_to` waits for files, so that a thread should call it."""
        ...

    def copy_to(self, slot: Tensor) -> None:
        """Copy all bytes, on the current stream."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Return a range of its bytes on the host, for inspection."""
        ...


@dataclass(frozen=True, slots=True)
class HostStage:
    """A stage in contiguous host memory, page-locked if the device is a GPU."""

    held: Tensor
    blocks = False

    @property
    def size(self) -> int:
        return len(self.held)

    def copy_to(self, slot: Tensor) -> None:
        # In chunks, between which the link can serve transfers for Steps.
        for start in range(0, self.size, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, self.size)
            slot[start:stop].copy_(self.held[start:stop], non_blocking=True)

    def read(self, start: int, stop: int) -> Tensor:
        return self.held[start:stop]


@dataclass(slots=True)
class _Buffer:
    held: Tensor
    sent: torch.cuda.Event | None
    """Event on a GPU that is done when the buffer's last content has arrived."""


class Staging:
    """Two page-locked buffers: one is filled while the other is copied."""

    def __init__(self, device: torch.device, chunk: int = CHUNK_BYTES) -> None:
        self.chunk = chunk
        both = host_bytes(2 * chunk, device)
        on_gpu = device.type == "cuda"
        # Blocking: a thread that waits for one sleeps, and leaves its core to the arithmetic's host side.
        self._next, self._other = (
            _Buffer(part, torch.cuda.Event(blocking=True) if on_gpu else None) for part in both.split(chunk)
        )

    def bring(self, fill: Callable[[Tensor], None], place: Tensor) -> None:
        """Call `fill` to write at most one chunk of bytes for `place`, and copy them to it."""
        buffer = self._next
        if buffer.sent is not None:
            buffer.sent.synchronize()
        chunk = buffer.held[: len(place)]
        fill(chunk)
        place.copy_(chunk, non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record()
        self._next, self._other = self._other, buffer


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A parameter of a stage, at the byte `start` of it."""

    start: int
    held: MappedTensor

    @property
    def stop(self) -> int:
        return self.start + self.held.stop - self.held.start

    def read(self, start: int, out: Tensor) -> None:
        """Read the part of it that `out` covers; `out` holds the stage's bytes from `start` on."""
        first, last = max(self.start, start), min(self.stop, start + len(out))
        if first < last:
            self.held.read(first - self.start, last - self.start, out[first - start : last - start])

    def expect(self, start: int, stop: int) -> None:
        """Make the system read ahead its part of these bytes of the stage."""
        self.held.expect(max(self.start, start) - self.start, min(self.stop, stop) - self.start)


@dataclass(frozen=True, slots=True)
class MappedStage:
    """A stage in mapped files, copied a chunk at a time."""

    parts: tuple[SourcePart, ...]
    staging: Staging | None
    """Buffers for the copies. None if the device is simulated: its memory can be read into directly."""
    blocks = True

    @property
    def size(self) -> int:
        return self.parts[-1].stop

    def copy_to(self, slot: Tensor) -> None:
        # Another stage may be between its forward and its backward. For autograd all slots are one tensor,
        # which must not appear to change meanwhile.
        here = slot.data
        chunk = CHUNK_BYTES if self.staging is None else self.staging.chunk
        for start in range(0, self.size, chunk):
            stop = min(start + chunk, self.size)
            self._expect(stop, stop + chunk)
            fill = partial(self._read, start)
            if self.staging is None:
                fill(here[start:stop])
            else:
                self.staging.bring(fill, here[start:stop])

    def read(self, start: int, stop: int) -> Tensor:
        out = torch.zeros(stop - start, dtype=torch.uint8)
        self._read(start, out)
        return out

    def _read(self, start: int, out: Tensor) -> None:
        """Read the stage's bytes from `start` on into `out`. Nothing is written between two parameters."""
        for part in self.parts:
            part.read(start, out)

    def _expect(self, start: int, stop: int) -> None:
        for part in self.parts:
            part.expect(start, stop)
