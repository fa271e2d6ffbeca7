"""What pieces of Steps pass through on the device: buffers, and streams of a GPU to come and go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.ops.adamw import AdamState


@dataclass(slots=True, eq=False)
class Buffer:
    """Pieces on the device."""

    state: AdamState
    free: torch.cuda.Event | None = None
    """When what it held last has gone back."""


@dataclass(frozen=True, slots=True)
class PieceLanes:
    """Streams of a GPU, beside that of the passes.

    Updates have one of their own: a frozen product takes every multiprocessor, so that an update waits for
    its end, and what comes next must not wait with it.
    """

    up: torch.cuda.Stream
    """What comes."""
    make: torch.cuda.Stream
    """Updates of what has come."""
    down: torch.cuda.Stream
    """What goes back."""

    @classmethod
    def on(cls, device: torch.device) -> PieceLanes:
        # What comes is needed sooner than stages that were asked for before it.
        up, make = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        return cls(up, make, torch.cuda.Stream(device))


def bring(host: Sequence[AdamState], here: Sequence[AdamState]) -> None:
    """Everything but the weights, which will be made."""
    copy([vector for one in here for vector in _coming(one)], [v for one in host for v in _coming(one)])


def give_back(here: Sequence[AdamState], host: Sequence[AdamState]) -> None:
    """Everything but the gradient, which nobody needs any longer."""
    copy([vector for one in host for vector in _going(one)], [v for one in here for v in _going(one)])


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All at once: one by one, Python takes longer to ask for small ones than a link to move them."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _coming(state: AdamState) -> tuple[Tensor, ...]:
    return state.gradient, state.master, state.exp_avg, state.exp_avg_sq


def _going(state: AdamState) -> tuple[Tensor, ...]:
    return state.master, state.exp_avg, state.exp_avg_sq, state.weights
