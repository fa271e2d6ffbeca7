"""Result of a simulated Program: when each action ran, how busy each device was, and its memory use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from weftune.plan.program.program import Action, Evaluate, Forward, Step


class Lane(StrEnum):
    compute = "compute"
    send = "send"
    receive = "receive"
    load = "load"


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Event:
    """An action and the time when it ran."""

    device: int
    lane: Lane
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes in use on a device from `time` on."""

    time: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    devices: int
    events: tuple[Event, ...]
    """Events in the order of their ends; a lane of a device never executes two actions at a time."""
    memory: tuple[tuple[Level, ...], ...]
    """Bytes in use over time, for each device."""

    @property
    def makespan(self) -> float:
        return max((event.stop for event in self.events), default=0.0)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Most bytes in use at any time, for each device."""
        return tuple(max((level.bytes for level in levels), default=0) for levels in self.memory)

    def of(self, device: int, lane: Lane = Lane.compute) -> Iterator[Event]:
        return (event for event in self.events if event.device == device and event.lane is lane)

    def busy(self, span: Span | None = None) -> tuple[float, ...]:
        """Return, for each device, the share of `span` (default: the whole timeline) in which it computes."""
        span = span or Span(0.0, self.makespan)
        return tuple(self.busy_share(device, span) for device in range(self.devices))

    def bubbles(self, span: Span | None = None) -> tuple[float, ...]:
        return tuple(1.0 - share for share in self.busy(span))

    def busy_share(self, device: int, span: Span) -> float:
        if span.seconds <= 0:
            return 1.0
        inside = (min(one.stop, span.stop) - max(one.start, span.start) for one in self.of(device))
        return sum(seconds for seconds in inside if seconds > 0) / span.seconds

    def steady(self) -> Span:
        """Return the span from when every device has begun until one has no Forward left, between filling and
        draining.

        The span is empty if the window is too short.
        """
        begun, feeding = 0.0, self.makespan
        for device in range(self.devices):
            forwards = [one for one in self.of(device) if isinstance(one.action, Forward | Evaluate)]
            if forwards:
                begun = max(begun, forwards[0].start)
                feeding = min(feeding, forwards[-1].stop)
        return Span(begun, max(begun, feeding))

    def between_steps(self, device: int, job: str, first: int, last: int) -> Span:
        """Return the span from the end of a job's Step `first` to the end of its Step `last`: whole periods
        of a repeating pattern."""
        ends = {
            event.action.step: event.stop
            for event in self.of(device)
            if isinstance(event.action, Step) and event.action.job == job
        }
        return Span(ends[first], ends[last])


def levels(changes: Iterable[Level], at_start: int) -> tuple[Level, ...]:
    """Return running sums of changes in bytes; at equal times, freed bytes are subtracted before allocated
    bytes are added."""
    ordered = sorted(changes, key=lambda change: (change.time, change.bytes))
    sums = at_start + np.cumsum([change.bytes for change in ordered], dtype=np.int64)
    return (
        Level(0.0, at_start),
        *(Level(one.time, int(total)) for one, total in zip(ordered, sums, strict=True)),
    )
