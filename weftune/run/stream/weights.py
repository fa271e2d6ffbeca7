"""Loading of stages of a streamed base into slots of the device, and their eviction, concurrently with
compute.

Copies go through one queue in the order of the Program's Loads, which is the order in which they are needed.
A slot is overwritten only when the device has finished with its content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.run.measure.waited import Waited

NOTHING_THERE = 0xFF
"""Byte that fills a slot whose stage has been evicted if a CPU acts as the device: NaN in every format, so
that wrong uses are noticed."""

Beside = Callable[[int], None]
"""Work to be done with a stage's copy, on the same queue."""


@dataclass(frozen=True, slots=True)
class JointEvent:
    """An event that is done when all its events are."""

    events: tuple[torch.cuda.Event, ...] = ()

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class ResidentWeights:
    """Weights of stages that all stay on the device: nothing is loaded."""

    def __init__(self) -> None:
        self.waited = Waited()

    def settle(self) -> None:
        """Load the stages that a window begins with."""

    def load(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and is not brought")

    def evict(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and does not go")

    def use(self, stage: int) -> bool:
        """Make the stage readable by the device, and return whether the device may have to wait for it."""
        return False


class StreamedWeights:
    """Weights of stages that are loaded into slots and evicted; resident ones are always there."""

    def __init__(self, base: StreamedBase) -> None:
        self.base = base
        self.there: set[int] = set()
        """Streamed stages that are loaded now."""
        self.waited = Waited()
        self._coming: Beside = lambda stage: None
        self._going: Beside = lambda stage: None
        self._queue = _queue(self)

    def accompany(self, coming: Beside, going: Beside) -> None:
        """Register work to be done with every Load and Evict, on the queue of its bytes."""
        self._coming, self._going = coming, going

    def load(self, stage: int) -> None:
        assert stage not in self.there, f"stage {stage} is there already"
        slot = self.base.part.slot(stage)
        taken = [other for other in self.there if self.base.part.slot(other) == slot]
        assert not taken, f"stage {stage} would overwrite stage {taken[0]}"
        self.there.add(stage)
        self.waited.copied_bytes += self.base.sources[stage].size
        self._queue.load(stage, slot)

    def evict(self, stage: int) -> None:
        self.there.remove(stage)
        self._queue.evict(stage, self.base.part.slot(stage))

    def use(self, stage: int) -> bool:
        """Make the stage readable by the device, and return whether the device may have to wait for it."""
        if not self.base.part.stages[stage].resident:
            assert stage in self.there, f"stage {stage} is used but was not brought"
            self._queue.use(stage)
        return True

    def gone(self) -> JointEvent:
        """Return an event that is done when everything sent to the host until now has arrived. All passes
        before a Step are finished then."""
        return self._queue.gone()

    def writable(self, stage: int) -> JointEvent:
        """Return an event that is done when the stage's adapter weights may be overwritten: those whose Step
        was requested with the last `gone`, and which no pass has read since."""
        return self._queue.writable(stage)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as waiting, unless the device is still busy."""
        if self.base.whole.device.type != "cuda":
            began = time.perf_counter()
            yield
            self.waited.seconds += time.perf_counter() - began
            return
        ready, there = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ready.record()
        yield
        there.record()
        self.waited.note(ready, there)

    def settle(self) -> None:
        """Load the stages that a window begins with, whatever state an unfinished window has left."""
        waiting = set(self.base.part.waiting)
        for stage in sorted(self.there - waiting):
            self.evict(stage)
        self._queue.settle()
        for stage in sorted(waiting - self.there):
            self.load(stage)

    def fetch(self, stage: int) -> None:
        """Copy a stage's bytes."""
        self.base.sources[stage].copy_to(self.base.slot(stage))

    def come(self, stage: int) -> None:
        """Do the work registered for a Load."""
        self._coming(stage)

    def leave(self, stage: int) -> None:
        self._going(stage)


class _HostQueue:
    """The queue for a CPU in the role of the device: every copy is made at once."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights

    def load(self, stage: int, slot: int) -> None:
        with self._weights.waiting():
            self._weights.fetch(stage)
            self._weights.come(stage)

    def evict(self, stage: int, slot: int) -> None:
        self._weights.leave(stage)
        self._weights.base.slot(stage).fill_(NOTHING_THERE)

    def use(self, stage: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def gone(self) -> JointEvent:
        return JointEvent()

    def writable(self, stage: int) -> JointEvent:
        return JointEvent()


class _GpuQueue:
    """Streams for Loads and for Evicts, and events between them and the compute stream."""

    def __init__(self, weights: StreamedWeights, stage_bytes: _Copied | _StageRead) -> None:
        device = weights.base.whole.device
        self._weights, self._bytes = weights, stage_bytes
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, torch.cuda.Event] = {}
        """Maps each slot to an event that is done when its content is no longer needed."""
        self._beside: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters have arrived with it; removed at its
        first use."""
        self._came: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters last arrived with it."""
        self._writable: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters in its slot are no longer read or
        written."""
        self._stepped: torch.cuda.Event | None = None
        """Event that is done when the last pass before the last Step is finished."""

    def load(self, stage: int, slot: int) -> None:
        # If no stage has been evicted from it yet, room for adapters there may still be being allocated.
        free = self._free.pop(slot, None) or torch.cuda.current_stream().record_event()
        self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            self._bytes.ask(stage, free)
            self._weights.come(stage)
            self._came[stage] = self._beside[stage] = _marked()
        # Weights whose Step has been requested are not loaded with it.
        self._writable[stage] = free

    def evict(self, stage: int, slot: int) -> None:
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            self._weights.leave(stage)
            self._free[slot] = torch.cuda.Event()
            self._free[slot].record()

    def use(self, stage: int) -> None:
        beside = self._beside.pop(stage, None)
        if beside is None:
            return
        ready = _marked()
        there = self._bytes.there(stage)
        for came in dict.fromkeys((there or beside, beside)):
            torch.cuda.current_stream().wait_event(came)
        self._weights.waited.note(ready, there or beside)

    def settle(self) -> None:
        """Wait for the current stream: a job attached since a slot was freed may still be copied there."""
        self._in.wait_stream(torch.cuda.current_stream())

    def gone(self) -> JointEvent:
        left, self._stepped = torch.cuda.Event(), torch.cuda.Event()
        left.record(self._out)
        self._stepped.record()
        # Stages loaded until now have weights from before this Step.
        self._writable = dict(self._came)
        return JointEvent((left, self._stepped))

    def writable(self, stage: int) -> JointEvent:
        """Return the events after which the stage's adapters may be overwritten. A stage that was loaded
        since the last Step may be in a slot in which others were read since."""
        events = (self._stepped, self._writable.get(stage))
        return JointEvent(tuple(event for event in events if event is not None))


class _Copied:
    """Copies of a stage's bytes on the stream that requests them."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights

    def ask(self, stage: int, free: torch.cuda.Event) -> None:
        """Start the copy once the slot is free."""
        self._weights.fetch(stage)

    def there(self, stage: int) -> torch.cuda.Event | None:
        """Return an event that is done when the bytes have arrived. None means that later requests are
        ordered after them."""
        return None


class _StageRead:
    """A thread that reads stages from their files and copies them on a separate stream. So no request of the
    main thread waits for a stage that is still being read, or delays one."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._pages = torch.cuda.Stream(weights.base.whole.device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reads: dict[int, Future[torch.cuda.Event]] = {}
        """Maps each stage to its arrival event, available once all of its copies have been started."""

    def ask(self, stage: int, free: torch.cuda.Event) -> None:
        self._reads[stage] = self._reader.submit(self._read, stage, free)

    def there(self, stage: int) -> torch.cuda.Event | None:
        return self._reads.pop(stage).result()

    def _read(self, stage: int, free: torch.cuda.Event) -> torch.cuda.Event:
        self._pages.wait_event(free)
        with torch.cuda.stream(self._pages):
            self._weights.fetch(stage)
            return self._pages.record_event(torch.cuda.Event(enable_timing=True))


def _marked() -> torch.cuda.Event:
    """Return an event at the current point of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_Queue = _HostQueue | _GpuQueue


def _queue(weights: StreamedWeights) -> _Queue:
    if weights.base.whole.device.type != "cuda":
        return _HostQueue(weights)
    read = any(source.blocks for source in weights.base.sources.values())
    return _GpuQueue(weights, _StageRead(weights) if read else _Copied(weights))
