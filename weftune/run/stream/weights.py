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

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.run.measure.timers import Waited, recorded_event
from weftune.run.stream.adapter_steps import Events

NOTHING_THERE = 0xFF
"""Byte that fills a slot whose stage has been evicted if a CPU acts as the device: NaN in every format, so
that wrong uses are noticed."""

Beside = Callable[[int], None]
"""Work to be done with a stage's copy, on the same queue."""


class ResidentWeights:
    """Weights of stages that all stay on the device: nothing is loaded."""

    def __init__(self) -> None:
        self.waited = Waited()

    def begin_window(self) -> None:
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
        self.come: Beside = lambda stage: None
        self.leave: Beside = lambda stage: None
        self._queue: _GpuQueue | None = None
        """Queue of copies on a GPU. None if a CPU acts as the device: every copy is made at once."""
        if base.whole.device.type == "cuda":
            read = any(source.blocks for source in base.sources.values())
            self._queue = _GpuQueue(self, _StageRead(self) if read else None)

    def accompany(self, come: Beside, leave: Beside) -> None:
        """Register work to be done with every Load and Evict, on the queue of its bytes."""
        self.come, self.leave = come, leave

    def load(self, stage: int) -> None:
        assert stage not in self.there, f"stage {stage} is there already"
        slot = self.base.part.slot(stage)
        taken = [other for other in self.there if self.base.part.slot(other) == slot]
        assert not taken, f"stage {stage} would overwrite stage {taken[0]}"
        self.there.add(stage)
        self.waited.copied_bytes += self.base.sources[stage].size
        if self._queue is not None:
            self._queue.load(stage, slot)
            return
        with self.waiting():
            self.fetch(stage)
            self.come(stage)

    def evict(self, stage: int) -> None:
        self.there.remove(stage)
        if self._queue is not None:
            self._queue.evict(stage, self.base.part.slot(stage))
            return
        self.leave(stage)
        self.base.slot(stage).fill_(NOTHING_THERE)

    def use(self, stage: int) -> bool:
        """Make the stage readable by the device, and return whether the device may have to wait for it."""
        if not self.base.part.stages[stage].resident:
            assert stage in self.there, f"stage {stage} is used but was not brought"
            if self._queue is not None:
                self._queue.use(stage)
        return True

    def gone(self) -> Events:
        """Return events that are done when everything sent to the host until now has arrived. All passes
        before a Step are finished then."""
        return () if self._queue is None else self._queue.gone()

    def writable(self, stage: int) -> Events:
        """Return events that are done when the stage's adapter weights may be overwritten: those whose Step
        was requested with the last `gone`, and which no pass has read since."""
        return () if self._queue is None else self._queue.writable(stage)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as waiting, unless the device is still busy."""
        if self.base.whole.device.type != "cuda":
            began = time.perf_counter()
            yield
            self.waited.seconds += time.perf_counter() - began
            return
        ready = recorded_event()
        yield
        self.waited.note(ready, recorded_event())

    def begin_window(self) -> None:
        """Load the stages that a window begins with, whatever state an unfinished window has left."""
        waiting = set(self.base.part.waiting)
        for stage in sorted(self.there - waiting):
            self.evict(stage)
        if self._queue is not None:
            self._queue.wait_for_compute()
        for stage in sorted(waiting - self.there):
            self.load(stage)

    def fetch(self, stage: int) -> None:
        """Copy a stage's bytes."""
        self.base.sources[stage].copy_to(self.base.slot(stage))


class _GpuQueue:
    """Streams for Loads and for Evicts, and events between them and the compute stream."""

    def __init__(self, weights: StreamedWeights, reader: _StageRead | None) -> None:
        """Without a `reader`, stages are copied on the stream of Loads."""
        device = weights.base.whole.device
        self._weights, self._reader = weights, reader
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, torch.cuda.Event] = {}
        """Maps each slot to an event that is done when its content is no longer needed."""
        self._beside: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters have arrived, until its first use."""
        self._came: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters last arrived with it."""
        self._writable: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when the adapters in its slot are no longer used."""
        self._stepped: torch.cuda.Event | None = None
        """Event that is done when the last pass before the last Step is finished."""

    def load(self, stage: int, slot: int) -> None:
        # If no stage has been evicted from it yet, room for adapters there may still be being allocated.
        free = self._free.pop(slot, None) or torch.cuda.current_stream().record_event()
        self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            if self._reader is None:
                self._weights.fetch(stage)
            else:
                self._reader.start(stage, free)
            self._weights.come(stage)
            self._came[stage] = self._beside[stage] = recorded_event()
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
        ready = recorded_event()
        there = beside if self._reader is None else self._reader.arrival(stage)
        for came in dict.fromkeys((there, beside)):
            torch.cuda.current_stream().wait_event(came)
        self._weights.waited.note(ready, there)

    def wait_for_compute(self) -> None:
        """Make Loads wait for compute: a job attached since a slot was freed may still be copied there."""
        self._in.wait_stream(torch.cuda.current_stream())

    def gone(self) -> Events:
        evicted, self._stepped = torch.cuda.Event(), torch.cuda.Event()
        evicted.record(self._out)
        self._stepped.record()
        # Stages loaded until now have weights from before this Step.
        self._writable = dict(self._came)
        return evicted, self._stepped

    def writable(self, stage: int) -> Events:
        """Return the events after which the stage's adapters may be overwritten. A stage that was loaded
        since the last Step may be in a slot in which others were read since."""
        events = (self._stepped, self._writable.get(stage))
        return tuple(event for event in events if event is not None)


class _StageRead:
    """A thread that reads stages from their files and copies them on a separate stream. So no request of the
    main thread waits for a stage that is still being read, or delays one."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._pages = torch.cuda.Stream(weights.base.whole.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reads: dict[int, Future[torch.cuda.Event]] = {}
        """Maps each stage to its arrival event, available once all of its copies have been started."""

    def start(self, stage: int, free: torch.cuda.Event) -> None:
        self._reads[stage] = self._thread.submit(self._read, stage, free)

    def arrival(self, stage: int) -> torch.cuda.Event:
        """Return the event of the stage's arrival; waits until its copies have been started."""
        return self._reads.pop(stage).result()

    def _read(self, stage: int, free: torch.cuda.Event) -> torch.cuda.Event:
        self._pages.wait_event(free)
        with torch.cuda.stream(self._pages):
            self._weights.fetch(stage)
            return self._pages.record_event(torch.cuda.Event(enable_timing=True))
