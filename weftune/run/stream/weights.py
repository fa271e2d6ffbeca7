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
from dataclasses import dataclass

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.run.measure.waited import Waited

NOTHING_THERE = 0xFF
"""What a pretended device's place is filled with when its stage has gone: NaN in every format, so that a use
of it shows."""

Beside = Callable[[int], None]
"""What else is to be done for a stage, on the same queue."""


@dataclass(frozen=True, slots=True)
class Gone:
    """What the device was asked for: done when all of these have come to pass."""

    events: tuple[torch.cuda.Event, ...] = ()

    def query(self) -> bool:
        return all(event.query() for event in self.events)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class ResidentWeights:
    """All stages here stay: there is nothing to bring."""

    def __init__(self) -> None:
        self.waited = Waited()

    def settle(self) -> None:
        """Have there what a window begins with."""

    def load(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and is not brought")

    def evict(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and does not go")

    def use(self, stage: int) -> bool:
        """From here on the device may read the stage; whether it may have to wait for it."""
        return False


class StreamedWeights:
    """Stages come to their places and go; those that stay are always there."""

    def __init__(self, base: StreamedBase) -> None:
        self.base = base
        self.there: set[int] = set()
        """Streamed stages that were brought and not given up."""
        self.waited = Waited()
        self._coming: Beside = lambda stage: None
        self._going: Beside = lambda stage: None
        self._queue = _queue(self)

    def accompany(self, coming: Beside, going: Beside) -> None:
        """What else is to be done for a stage that comes or goes, on the queue of its bytes."""
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
        """From here on the device may read the stage; whether it may have to wait for it."""
        if not self.base.part.stages[stage].resident:
            assert stage in self.there, f"stage {stage} is used but was not brought"
            self._queue.use(stage)
        return True

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

    def gone(self) -> Gone:
        return Gone()

    def writable(self, stage: int) -> Gone:
        return Gone()


class _GpuQueue:
    """Streams for what comes and what goes, and events between them and the arithmetic's."""

    def __init__(self, weights: StreamedWeights, stage_bytes: _Copied | _Read) -> None:
        device = weights.base.whole.device
        self._weights, self._bytes = weights, stage_bytes
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, torch.cuda.Event] = {}
        """Slot → when nobody needs any longer what is in it."""
        self._beside: dict[int, torch.cuda.Event] = {}
        """Stage → when the adapters have come with it, until it is first used."""
        self._came: dict[int, torch.cuda.Event] = {}
        """Stage → when the adapters last came with it."""
        self._writable: dict[int, torch.cuda.Event] = {}
        """Stage → when nobody writes or reads any longer what it finds of adapters in its slot."""
        self._stepped: torch.cuda.Event | None = None
        """When the last pass before the last Step was made."""

    def load(self, stage: int, slot: int) -> None:
        # If nobody has left it yet, room for adapters there may just be being made.
        free = self._free.pop(slot, None) or torch.cuda.current_stream().record_event()
        self._in.wait_event(free)
        with torch.cuda.stream(self._in):
            self._bytes.ask(stage, free)
            self._weights.come(stage)
            self._came[stage] = self._beside[stage] = _marked()
        # Weights whose Step has been asked for do not come beside it.
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


class _Copied:
    """A stage's bytes are copied in the stream that they are asked for in."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights

    def ask(self, stage: int, free: torch.cuda.Event) -> None:
        """Have the bytes come once their place is free."""
        self._weights.fetch(stage)

    def there(self, stage: int) -> torch.cuda.Event | None:
        """When they have come; None: with what was asked for behind them."""
        return None


class _Read:
    """A thread reads stages out of their files and sends them on, in a stream of its own, so that nothing the
    main thread asks for stands behind a stage that is still being read, or before one."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._pages = torch.cuda.Stream(weights.base.whole.device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reads: dict[int, Future[torch.cuda.Event]] = {}
        """Stage → known once all of it has been asked for: when it will have come."""

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
    """When the current stream comes here."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_Queue = _HostQueue | _GpuQueue


def _queue(weights: StreamedWeights) -> _Queue:
    if weights.base.whole.device.type != "cuda":
        return _HostQueue(weights)
    read = any(source.blocks for source in weights.base.sources.values())
    return _GpuQueue(weights, _Read(weights) if read else _Copied(weights))
