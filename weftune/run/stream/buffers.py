"""Buffers that pieces of Steps pass through on the device, and the GPU streams that copy them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops.adamw import AdamState


@dataclass(slots=True, eq=False)
class Buffer:
    """Pieces of Steps on the device."""

    state: AdamState
    free: torch.cuda.Event | None = None
    """Done when its last content is back on the host."""


@dataclass(frozen=True, slots=True)
class PieceLanes:
    """Streams of a GPU beside the compute stream.

    Updates have a stream of their own: a matrix product takes every multiprocessor, so an update waits for
    its end, and the next copies must not wait with it.
    """

    up: torch.cuda.Stream
    """Copies to the device."""
    make: torch.cuda.Stream
    """Updates of pieces that have arrived."""
    down: torch.cuda.Stream
    """Copies back to the host."""

    @classmethod
    def on(cls, device: torch.device) -> PieceLanes:
        # What comes is needed sooner than stages that were asked for before it.
        up, make = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        return cls(up, make, torch.cuda.Stream(device))


def bring(host: Sequence[AdamState], here: Sequence[AdamState]) -> None:
    """Copy everything to the device but the weights, which will be computed."""
    copy([vector for one in here for vector in _coming(one)], [v for one in host for v in _coming(one)])


def give_back(here: Sequence[AdamState], host: Sequence[AdamState]) -> None:
    """Copy everything back but the gradient, which is no longer needed."""
    copy([vector for one in host for vector in _going(one)], [v for one in here for v in _going(one)])


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all at once: one by one, Python takes longer to launch small copies than the link to make them."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _coming(state: AdamState) -> tuple[Tensor, ...]:
    return state.gradient, state.master, state.exp_avg, state.exp_avg_sq


def _going(state: AdamState) -> tuple[Tensor, ...]:
    return state.master, state.exp_avg, state.exp_avg_sq, state.weights
