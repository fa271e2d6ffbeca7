"""Moments and durations on a device. On a GPU they are events, since it works asynchronously."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch

Moment = float | torch.cuda.Event
"""Moment on a device: seconds of the machine's clock, or an event on a GPU."""


def recorded_event() -> torch.cuda.Event:
    """Return an event with a time at the current point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class DeviceClock:
    """Moments on a device, in seconds of the machine's clock, so that workers can be compared."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._zero = recorded_event()
            self._zero.synchronize()
            self._zero_seconds = time.time()

    def mark(self) -> Moment:
        """Return the current moment on the device: after all work launched so far."""
        return recorded_event() if self._on_gpu else time.time()

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._zero_seconds + self._zero.elapsed_time(moment) / 1000


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """The time between two moments."""

    start: Moment
    stop: Moment

    def is_over(self) -> bool:
        """Return whether the device has reached its end."""
        return isinstance(self.stop, float) or self.stop.query()

    def seconds(self) -> float:
        """Return the duration; waits until the device has reached its end."""
        if isinstance(self.start, float) and isinstance(self.stop, float):
            return self.stop - self.start
        assert not isinstance(self.start, float), "both moments are of one clock"
        assert not isinstance(self.stop, float), "both moments are of one clock"
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop) / 1000


class ActionTimer:
    """Start and end of actions that run one after another on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.runs_behind = device.type == "cuda"
        """Whether the device works asynchronously, so that durations are known later."""
        self._clock = DeviceClock(device)
        self._began = self._clock.mark()

    def begin_window(self) -> None:
        """Restart the clock: on a GPU it drifts."""
        self._clock = DeviceClock(self._device)

    def start(self) -> None:
        """Start an action, or restart it, so that time spent waiting for others is not counted."""
        self._began = self._clock.mark()

    def stop(self) -> DeviceSpan:
        return DeviceSpan(self._began, self._clock.mark())

    def machine_times(self, span: DeviceSpan) -> tuple[float, float]:
        """Return start and end in seconds of the machine's clock; only valid within the window."""
        return self._clock.seconds(span.start), self._clock.seconds(span.stop)


class Stopwatch:
    """Seconds between marks on a device; on a GPU they are known only once it has reached them."""

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

    def lap_seconds(self) -> list[float]:
        """Return the seconds from each mark to the next."""
        if self._on_gpu:
            self._events[-1].synchronize()
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._times)]


@dataclass(slots=True)
class Waited:
    """The time that compute waited for the host: for stages to be loaded, and for the data of Steps."""

    seconds: float = 0.0
    copied_bytes: int = 0
    """Bytes copied from the host."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events on a GPU: when the device was ready for a copy, and when the copy had arrived."""

    def note(self, ready: torch.cuda.Event, arrived: torch.cuda.Event) -> None:
        """Note a future wait. Finished waits are summed, so that a long run does not accumulate marks."""
        while self.marks and all(mark.query() for mark in self.marks[0]):
            self._count(*self.marks.pop(0))
        self.marks.append((ready, arrived))

    def total(self) -> float:
        """Return the total seconds waited; waits for the device."""
        for ready, arrived in self.marks:
            arrived.synchronize()
            ready.synchronize()
            self._count(ready, arrived)
        self.marks.clear()
        return self.seconds

    def _count(self, ready: torch.cuda.Event, arrived: torch.cuda.Event) -> None:
        self.seconds += max(0.0, ready.elapsed_time(arrived) / 1000)
