"""Brings stages of a streamed base to the device and gives their places up again, beside the arithmetic.

Copies go through one queue in the order of the Program's Loads, which is the order of need: nothing that
waits in it is more urgent than what is ahead of it. A place is overwritten only when the device is through
with what it held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weftune.base.host.streamed import StreamedBase

NOTHING_THERE = 0xFF
"""What a pretended device's place is filled with when its stage has gone: NaN in every format, so that a use
of it shows."""

Beside = Callable[[int], None]
"""What else is to be done for a stage, on the same queue."""


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


@dataclass(frozen=True, slots=True)
class Gone:
    """What the device was asked for: done when all of these have come to pass."""

    events: tuple[torch.cuda.Event, ...] = ()

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class Streamer:
    def __init__(self, base: StreamedBase, coming: Beside, going: Beside) -> None:
        self.base = base
        self.there: set[int] = set()
        """Streamed stages that were brought and not given up."""
        self.waited = Waited()
        self._coming, self._going = coming, going
        self._queue = _queue(self)

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

    def use(self, stage: int) -> None:
        """From here on the device may read the stage."""
        if not self.base.part.stages[stage].resident:
            assert stage in self.there, f"stage {stage} is used but was not brought"
            self._queue.use(stage)

    def gone(self) -> Gone:
        """What has been sent to the host until now. Every pass before a Step is behind the device then."""
        return self._queue.gone()

    def writable(self, stage: int) -> Gone:
        """When weights of adapters whose Step was asked for with the last `gone`, and which no pass has read
        since, may be written where the stage is."""
        return self._queue.writable(stage)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done in here keeps the arithmetic waiting, unless the device is still busy."""
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
        """Have those stages there that a window begins with, whatever an unfinished one has left."""
        waiting = set(self.base.part.waiting)
        for stage in sorted(self.there - waiting):
            self.evict(stage)
        self._queue.settle()
        for stage in sorted(waiting - self.there):
            self.load(stage)

    def copy(self, stage: int) -> None:
        self.fetch(stage)
        self.come(stage)

    def fetch(self, stage: int) -> None:
        """A stage's own bytes."""
        self.base.sources[stage].copy_to(self.base.slot(stage))

    def come(self, stage: int) -> None:
        """What comes beside them."""
        self._coming(stage)

    def leave(self, stage: int) -> None:
        self._going(stage)


class _HostQueue:
    """On a pretended device every copy is made at once, and waited for."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def load(self, stage: int, slot: int) -> None:
        with self._streamer.waiting():
            self._streamer.copy(stage)

    def evict(self, stage: int, slot: int) -> None:
        self._streamer.leave(stage)
        self._streamer.base.slot(stage).fill_(NOTHING_THERE)

    def use(self, stage: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def gone(self) -> Gone:
        return Gone()

    def writable(self, stage: int) -> Gone:
        return Gone()


class _GpuQueue:
    """Streams for what comes and what goes, and events between them and the arithmetic's."""

    def __init__(self, streamer: Streamer) -> None:
        device = streamer.base.whole.device
        self._streamer = streamer
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, torch.cuda.Event] = {}
        """Slot → when nobody needs any longer what is in it."""
        self._there: dict[int, torch.cuda.Event] = {}
        """Stage → when all of it has come; until it is first used."""
        self._came: dict[int, torch.cuda.Event] = {}
        """Stage → when it last came, with the adapters' weights that came beside it."""
        self._writable: dict[int, torch.cuda.Event] = {}
        """Stage → when nobody writes or reads any longer what it finds of adapters in its slot."""
        self._stepped: torch.cuda.Event | None = None
        """When the last pass before the last Step was made."""

    def load(self, stage: int, slot: int) -> None:
        free = self._freed(slot)
        self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            self._streamer.copy(stage)
            self._came[stage] = self._there[stage] = torch.cuda.Event(enable_timing=True)
            self._there[stage].record()
        # Weights whose Step has been asked for do not come beside it.
        self._writable[stage] = free

    def _freed(self, slot: int) -> torch.cuda.Event:
        # If nobody has left it yet, room for adapters there may just be being made.
        return self._free.pop(slot, None) or torch.cuda.current_stream().record_event()

    def evict(self, stage: int, slot: int) -> None:
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            self._streamer.leave(stage)
            self._free[slot] = torch.cuda.Event()
            self._free[slot].record()

    def use(self, stage: int) -> None:
        there = self._there.pop(stage, None)
        if there is None:
            return
        ready = torch.cuda.Event(enable_timing=True)
        ready.record()
        torch.cuda.current_stream().wait_event(there)
        self._streamer.waited.note(ready, there)

    def settle(self) -> None:
        """A job that came aboard since a slot was left may still be given its room there."""
        self._in.wait_stream(torch.cuda.current_stream())

    def gone(self) -> Gone:
        left, self._stepped = torch.cuda.Event(), torch.cuda.Event()
        left.record(self._out)
        self._stepped.record()
        # What has come until now came with weights from before this Step.
        self._writable = dict(self._came)
        return Gone((left, self._stepped))

    def writable(self, stage: int) -> Gone:
        """A stage that came since the last Step may lie where others were read since."""
        events = (self._stepped, self._writable.get(stage))
        return Gone(tuple(event for event in events if event is not None))


@dataclass(frozen=True, slots=True)
class _Read:
    """A stage on its way out of its files, and the adapters that come with it."""

    there: Future[torch.cuda.Event]
    """Known once all of the stage has been asked for: when it will have come."""
    beside: torch.cuda.Event


class _ReadQueue(_GpuQueue):
    """A thread reads stages out of their files and sends them on, in a stream of its own, so that nothing the
    main thread asks for stands behind a stage that is still being read, or before one."""

    def __init__(self, streamer: Streamer) -> None:
        super().__init__(streamer)
        self._pages = torch.cuda.Stream(streamer.base.whole.device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reads: dict[int, _Read] = {}

    def load(self, stage: int, slot: int) -> None:
        free = self._freed(slot)
        self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            self._streamer.come(stage)
            self._came[stage] = beside = self._in.record_event()
        self._writable[stage] = free
        self._reads[stage] = _Read(self._reader.submit(self._read, stage, free), beside)

    def _read(self, stage: int, free: torch.cuda.Event) -> torch.cuda.Event:
        self._pages.wait_event(free)
        with torch.cuda.stream(self._pages):
            self._streamer.fetch(stage)
            return self._pages.record_event(torch.cuda.Event(enable_timing=True))

    def use(self, stage: int) -> None:
        read = self._reads.pop(stage, None)
        if read is None:
            return
        ready = torch.cuda.Event(enable_timing=True)
        ready.record()
        there = read.there.result()
        for came in (there, read.beside):
            torch.cuda.current_stream().wait_event(came)
        self._streamer.waited.note(ready, there)


_Queue = _HostQueue | _GpuQueue


def _queue(streamer: Streamer) -> _Queue:
    if streamer.base.whole.device.type != "cuda":
        return _HostQueue(streamer)
    read = any(source.blocks for source in streamer.base.sources.values())
    return _ReadQueue(streamer) if read else _GpuQueue(streamer)
