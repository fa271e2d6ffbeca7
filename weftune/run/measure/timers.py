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
    """Return a CUDA event that records the time at which the current stream has done all work launched so
    far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class DeviceClock:
    """A clock that converts points in time on a device to seconds of the machine's clock, so that the actions
    of several workers can be compared."""

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
    """A span of time on a device, between two points in time."""

    start: Moment
    stop: Moment

    def is_over(self) -> bool:
        """Return whether the device has reached the end of the span."""
        return isinstance(self.stop, float) or self.stop.query()

    def seconds(self) -> float:
        """Return the duration of the span in seconds. Waits until the device has reached the end of the
        span."""
        if isinstance(self.start, float) and isinstance(self.stop, float):
            return self.stop - self.start
        assert not isinstance(self.start, float), "both moments are of one clock"
        assert not isinstance(self.stop, float), "both moments are of one clock"
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop) / 1000


class ActionTimer:
    """A timer of the actions of a Program, which run one after another on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_asynchronous = device.type == "cuda"
        """Whether the device runs behind the host, as a GPU does, so that durations are known only later."""
        self._clock = DeviceClock(device)
        self._began = self._clock.mark()

    def begin_window(self) -> None:
        """Restart the clock for a new window (the run of one Program), since a GPU's clock drifts from the
        machine's clock."""
        self._clock = DeviceClock(self._device)

    def start(self) -> None:
        """Start timing an action. A second call restarts the timing, so that waits for other workers are not
        counted."""
        self._began = self._clock.mark()

    def await_start(self) -> None:
        """Block until the device has finished all work launched before the current action."""
        if not isinstance(self._began, float):
            self._began.synchronize()

    def stop(self) -> DeviceSpan:
        return DeviceSpan(self._began, self._clock.mark())

    def machine_times(self, span: DeviceSpan) -> tuple[float, float]:
        """Return start and end of an action in seconds of the machine's clock. The result is valid only until
        the next call of `begin_window`."""
        return self._clock.seconds(span.start), self._clock.seconds(span.stop)


class Stopwatch:
    """A timer of the seconds between marks (recorded points in time) on a device. On a GPU the seconds are
    known only once the device has reached the marks."""

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
        """Return the seconds from each mark (recorded point in time) to the next. Waits until the device has
        reached the last mark."""
        if self._on_gpu:
            self._events[-1].synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._times)]


@dataclass(slots=True)
class WaitTime:
    """The total time that the device has waited for data from the host: for the weights of streamed stages,
    and for the optimizer state that optimizer steps need."""

    seconds: float = 0.0
    copied_bytes: int = 0
    """Number of bytes that have been copied from the host to the device."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Pairs of CUDA events of waits that may not have ended: when the device was ready for a copy, and when
    the copy arrived."""

    def record_wait(self, ready_event: torch.cuda.Event, arrived_event: torch.cuda.Event) -> None:
        """Record a wait of the device, which lasts from the first CUDA event to the second. Waits that have
        ended are added to `seconds` and their events dropped, so that events do not accumulate in a long
        run."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._add_wait(*self.marks.pop(0))
        self.marks.append((ready_event, arrived_event))

    def total_seconds(self) -> float:
        """Return the total seconds that the device has waited. Blocks until the device has reached all
        recorded events."""
        for ready, arrived in self.marks:
            arrived.synchronize()
            ready.synchronize()
            self._add_wait(ready, arrived)
        self.marks.clear()
        return self.seconds

    def _add_wait(self, ready_event: torch.cuda.Event, arrived_event: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready_event.elapsed_time(arrived_event) / 1000)
