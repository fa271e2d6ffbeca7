"""Points in time and durations on a device. On a GPU, which works asynchronously, they are measured with CUDA
events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch

Moment = float | torch.cuda.Event
"""A point in time on a device: seconds of the machine's clock, or a CUDA event on a GPU."""


def recorded_event() -> torch.cuda.Event:
    """Return an event that records the time when the current stream reaches this point."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class DeviceClock:
    """A clock that converts points in time on a device to seconds of the machine's clock, by which the
    actions of several workers can be compared."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._zero = recorded_event()
            self._zero.synchronize()
            self._zero_seconds = time.time()

    def mark(self) -> Moment:
        """Return the point in time at which the device has finished all work launched so far."""
        return recorded_event() if self._on_gpu else time.time()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._zero_seconds + self._zero.elapsed_time(moment) / 1000


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """The time between two points in time on a device."""

    start: Moment
    stop: Moment

    def is_over(self) -> bool:
        """Return whether the device has passed the end of the span."""
        return isinstance(self.stop, float) or self.stop.query()

    def seconds(self) -> float:
        """Return the duration in seconds. Waits until the device has passed the end of the span."""
        if isinstance(self.start, float) and isinstance(self.stop, float):
            return self.stop - self.start
        assert not isinstance(self.start, float), "both moments are of one clock"
        assert not isinstance(self.stop, float), "both moments are of one clock"
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop) / 1000


class ActionTimer:
    """A timer of actions that run one after another on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_asynchronous = device.type == "cuda"
        """Whether the device works asynchronously, so that durations are known only later."""
        self._clock = DeviceClock(device)
        self._began = self._clock.mark()

    def begin_window(self) -> None:
        """Restart the clock for a new window. A GPU's clock drifts from that of the machine."""
        self._clock = DeviceClock(self._device)

    def start(self) -> None:
        """Start timing an action. A second call restarts the time, to exclude waits for other workers."""
        self._began = self._clock.mark()

    def await_start(self) -> None:
        """Wait until the device has begun the action, after all earlier work."""
        if not isinstance(self._began, float):
            self._began.synchronize()

    def stop(self) -> DeviceSpan:
        return DeviceSpan(self._began, self._clock.mark())

    def machine_times(self, span: DeviceSpan) -> tuple[float, float]:
        """Return start and end of an action in seconds of the machine's clock. This is valid only in the
        window of the action."""
        return self._clock.seconds(span.start), self._clock.seconds(span.stop)


class Stopwatch:
    """A timer of the seconds between marks on a device. On a GPU they are known only once the device has
    passed the marks."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._on_gpu:
            self._events.append(recorded_event())
        else:
            self._times.append(time.perf_counter())

    def seconds_between_marks(self) -> list[float]:
        """Return the seconds from each mark to the next. Waits until the device has passed the last mark."""
        if self._on_gpu:
            self._events[-1].synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._times)]


@dataclass(slots=True)
class WaitTime:
    """The time that the device waited for data from the host: for streamed stages, and for the optimizer
    state of steps."""

    seconds: float = 0.0
    copied_bytes: int = 0
    """Number of bytes copied from the host to the device."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Pairs of CUDA events: when the device was ready for a copy, and when the copy arrived."""

    def record_wait(self, ready_event: torch.cuda.Event, arrived_event: torch.cuda.Event) -> None:
        """Record a wait, the time between two CUDA events that the device may not have reached yet. Waits
        that have ended are added to `seconds`, so that events do not accumulate in a long run."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._add_wait(*self.marks.pop(0))
        self.marks.append((ready_event, arrived_event))

    def total_seconds(self) -> float:
        """Return the total seconds waited. Waits until the device has passed all marks."""
        for ready, arrived in self.marks:
            arrived.synchronize()
            ready.synchronize()
            self._add_wait(ready, arrived)
        self.marks.clear()
        return self.seconds

    def _add_wait(self, ready_event: torch.cuda.Event, arrived_event: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready_event.elapsed_time(arrived_event) / 1000)
