"""Buffers that pieces of Steps pass through on the device, and the GPU streams that copy them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops.adamw import AdamState
from weftune.plan.cost.ring import PIECES


@dataclass(slots=True, eq=False)
class Buffer:
    """Pieces of Steps on the device."""

    state: AdamState
    free: torch.cuda.Event | None = None
    """Event that is done when its last content is back on the host."""


@dataclass(frozen=True, slots=True)
class PieceLanes:
    """Streams of a GPU beside the compute stream.

    Updates have a separate stream: a matrix product occupies every multiprocessor, so an update waits for its
    end, and the next copies must not wait with it.
    """

    up: torch.cuda.Stream
    """Copies to the device."""
    make: torch.cuda.Stream
    """Updates of pieces that have arrived."""
    down: torch.cuda.Stream
    """Copies back to the host."""

    @classmethod
    def on(cls, device: torch.device) -> PieceLanes:
        # Incoming pieces are needed sooner than stages that were requested before them.
        up, make = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        return cls(up, make, torch.cuda.Stream(device))


class PieceRing:
    """Buffers used in rotation: while one is updated, another is filled and a third is copied back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Buffer] = []
        self.lanes = PieceLanes.on(device) if device.type == "cuda" else None
        self._turn = 0

    @property
    def room(self) -> int:
        """Number of parameters that a buffer holds."""
        return len(self.buffers[0].state.master) if self.buffers else 0

    def refill(self, new: Callable[[], AdamState]) -> None:
        """Replace the buffers by new ones; they must not be in use."""
        self.buffers = []
        self.buffers = [Buffer(new()) for _ in range(PIECES)]

    def next(self) -> Buffer:
        buffer = self.buffers[self._turn]
        self._turn = (self._turn + 1) % PIECES
        return buffer

    @contextmanager
    def coming(self, buffer: Buffer) -> Iterator[None]:
        """Run on the incoming stream, once the buffer is free; later updates wait for it."""
        if self.lanes is None:
            yield
            return
        with torch.cuda.stream(self.lanes.up):
            if buffer.free is not None:
                self.lanes.up.wait_event(buffer.free)
            yield
        self.lanes.make.wait_stream(self.lanes.up)

    def making(self) -> AbstractContextManager[object]:
        """Run on the stream of updates."""
        return nullcontext() if self.lanes is None else torch.cuda.stream(self.lanes.make)

    @contextmanager
    def leaving(self, buffer: Buffer) -> Iterator[None]:
        """Run on the outgoing stream; the buffer is free afterwards."""
        if self.lanes is None:
            yield
            return
        self.lanes.down.wait_stream(self.lanes.make)
        with torch.cuda.stream(self.lanes.down):
            yield
            buffer.free = self.lanes.down.record_event()


def bring(host: Sequence[AdamState], here: Sequence[AdamState]) -> None:
    """Copy everything to the device except the weights, which will be computed."""
    copy([vector for one in here for vector in _coming(one)], [v for one in host for v in _coming(one)])


def give_back(here: Sequence[AdamState], host: Sequence[AdamState]) -> None:
    """Copy everything back except the gradient, which is no longer needed."""
    copy([vector for one in host for vector in _going(one)], [v for one in here for v in _going(one)])


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all at once: one by one, Python takes longer to launch small copies than the link to make them."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _coming(state: AdamState) -> tuple[Tensor, ...]:
    return state.gradient, state.master, state.exp_avg, state.exp_avg_sq


def _going(state: AdamState) -> tuple[Tensor, ...]:
    return state.master, state.exp_avg, state.exp_avg_sq, state.weights
