"""The decision when to capture a pass as a CUDA graph.

A replayed pass saves the time in which the device waits for the host to launch kernels: much if passes are
small, nothing if the device is slower than the host. How often a pass will recur is not known, so the pass is
captured once its uncaptured runs have lost as many seconds as a capture takes. The total loss is never more
than twice the loss of an optimal choice made in hindsight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from weftune.run.measure.timers import DeviceSpan


@dataclass(slots=True)
class WatchedPass:
    """A pass of a microbatch over a stage, with its times on the device: the time of its forward and, once
    launched, of its backward."""

    key: Hashable
    rows: int
    is_replayed: bool
    spans: list[DeviceSpan] = field(default_factory=list)

    def is_over(self) -> bool:
        return len(self.spans) == 2 and all(span.is_over() for span in self.spans)


class Payback:
    def __init__(self, always_captures: bool) -> None:
        """Create the decision when to capture passes as CUDA graphs, with no pass measured yet. With
        `always_captures`, every pass is captured at once, as measurements and tests require."""
        self._at_once = always_captures
        self._captures = 0
        self._capture_seconds = 0.0
        self._row_seconds = float("inf")
        """Fewest seconds per row that a replayed pass has taken. Infinite if no pass has been replayed."""
        self._lost_seconds: dict[Hashable, float] = defaultdict(float)
        self._running_passes: list[WatchedPass] = []

    def should_capture(self, key: Hashable) -> bool:
        """Return whether to capture passes with this key (the sizes that a CUDA graph fixes) now. True if no
        pass has been captured yet, to measure the time of a capture."""
        if self._at_once or not self._captures:
            return True
        self._record_finished()
        return self._lost_seconds[key] >= self._capture_seconds / self._captures

    def record_capture(self, seconds: float) -> None:
        self._captures += 1
        self._capture_seconds += seconds

    def watch(self, watched_pass: WatchedPass) -> None:
        """Add a pass whose time is taken into account once the device has finished the pass."""
        if not self._at_once:
            self._running_passes.append(watched_pass)

    def _record_finished(self) -> None:
        still = []
        for one in self._running_passes:
            if one.is_over():
                self.record_pass(
                    one.key, one.rows, sum(span.seconds() for span in one.spans), one.is_replayed
                )
            else:
                still.append(one)
        self._running_passes = still

    def record_pass(self, key: Hashable, rows: int, seconds: float, is_replayed: bool) -> None:
        if is_replayed:
            self._row_seconds = min(self._row_seconds, seconds / rows)
        elif self._row_seconds < float("inf"):
            self._lost_seconds[key] += max(0.0, seconds - self._row_seconds * rows)
