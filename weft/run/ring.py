"""What pieces of Steps pass through on the device: buffers, and streams of a GPU to come and go on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops.adamw import State


@dataclass(slots=True, eq=False)
class Buffer:
    """Pieces on the device."""

    state: State
    free: torch.cuda.Event | None = None
    """When what it held last has gone back."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Streams of a GPU, beside that of the passes."""

    up: torch.cuda.Stream
    """What comes, and the updates."""
    down: torch.cuda.Stream
    """What goes back."""

    @classmethod
    def on(cls, device: torch.device) -> Lanes:
        # What comes is needed sooner than stages that were asked for before it.
        return cls(torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device))


def bring(host: State, here: State) -> None:
    """Everything but the weights, which will be made."""
    here.gradient.copy_(host.gradient, non_blocking=True)
    here.master.copy_(host.master, non_blocking=True)
    here.exp_avg.copy_(host.exp_avg, non_blocking=True)
    here.exp_avg_sq.copy_(host.exp_avg_sq, non_blocking=True)


def give_back(here: State, host: State) -> None:
    """Everything but the gradient, which nobody needs any longer."""
    host.master.copy_(here.master, non_blocking=True)
    host.exp_avg.copy_(here.exp_avg, non_blocking=True)
    host.exp_avg_sq.copy_(here.exp_avg_sq, non_blocking=True)
    host.weights.copy_(here.weights, non_blocking=True)
