"""How long a device's arithmetic waited for the host, and what came from there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Waited:
    """How long the arithmetic waited for the host: for stages to come, and for what Steps need."""

    seconds: float = 0.0
    copied_bytes: int = 0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """On a GPU: when the device was ready for something, and when it was there."""

    def note(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        """Such a wait is to come; those that are over are counted, so that a long run gathers no marks."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._count(*self.marks.pop(0))
        self.marks.append((ready, there))

    def total(self) -> float:
        """Waits for the device."""
        for ready, there in self.marks:
            there.synchronize()
            ready.synchronize()
            self._count(ready, there)
        self.marks.clear()
        return self.seconds

    def _count(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready.elapsed_time(there) / 1000)
