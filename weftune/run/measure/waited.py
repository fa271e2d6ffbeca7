"""The time that a device's compute waited for the host, and the bytes copied from there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Waited:
    """The time that compute waited for the host: for stages to be loaded, and for the data of Steps."""

    seconds: float = 0.0
    copied_bytes: int = 0
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events on a GPU: when the device was ready for a copy, and when the copy had arrived."""

    def note(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        """Note a future wait. Finished waits are summed, so that a long run does not accumulate marks."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._count(*self.marks.pop(0))
        self.marks.append((ready, there))

    def total(self) -> float:
        """Return the total seconds waited; waits for the device."""
        for ready, there in self.marks:
            there.synchronize()
            ready.synchronize()
            self._count(ready, there)
        self.marks.clear()
        return self.seconds

    def _count(self, ready: torch.cuda.Event, there: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready.elapsed_time(there) / 1000)
