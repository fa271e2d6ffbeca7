"""How long a device's compute waited for the host, and how many bytes came from there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Waited:
    """How long compute waited for the host: for stages to be loaded, and for what Steps need."""

    seconds: float = 0.0
    copied_bytes: int = 0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """On a GPU: when the device was ready for something, and when it had arrived."""

    def note(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        """Note a wait that is to come. Finished waits are summed up, so that a long run gathers no marks."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._count(*self.marks.pop(0))
        self.marks.append((ready, there))

    def total(self) -> float:
        """Seconds waited in all; waits for the device."""
        for ready, there in self.marks:
            there.synchronize()
            ready.synchronize()
            self._count(ready, there)
        self.marks.clear()
        return self.seconds

    def _count(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready.elapsed_time(there) / 1000)
