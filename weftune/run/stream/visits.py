"""How long microbatches are at the stages of a base, which they visit there and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weftune.run.measure.timers import Stopwatch


class Visits:
    """The time that a microbatch took in its visits to the stages, not what passed between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watches: list[Stopwatch] = []

    def begin(self) -> None:
        self._watches.append(Stopwatch(self._device))

    def mark(self) -> None:
        """A visit has ended."""
        self._watches[-1].mark()

    def laps(self) -> list[float]:
        return [sum(lap for watch in self._watches for lap in watch.laps())]


@dataclass(frozen=True, slots=True)
class ThereAndBack:
    forward: Visits
    backward: Visits

    def laps(self) -> list[float]:
        return [*self.forward.laps(), *self.backward.laps()]
