"""Copies of the stages of a streamed base into slots on the device (Load) and their eviction (Evict),
concurrently with compute. A slot is device memory in which several stages take turns.

Copies go through one queue in the order of the Program's Loads, which is the order in which the stages are
needed. A slot is overwritten only when the device no longer needs its content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from weftune.base.host.streamed import StreamedBase
from weftune.run.measure.timers import WaitTime, recorded_event
from weftune.run.stream.adapter_steps import Events

EVICTED_BYTE = 0xFF
"""Value of the bytes with which a slot (the device memory of a stage) is filled after its stage has been
evicted, if a CPU acts as the device. It is NaN in every format, so that reading an evicted stage is
noticed."""

StageCallback = Callable[[int], None]
"""Function that is called with a stage's index when the stage is loaded or evicted. It launches work on the
stream that copies the stage."""


class ResidentWeights:
    """The part of an executor that provides the weights of a base that stays on the device. Nothing is loaded
    or evicted."""

    def __init__(self) -> None:
        self.wait_time = WaitTime()

    def begin_window(self) -> None:
        """Load the stages that must be on the device when a Program begins. A resident base is always
        loaded."""

    def load(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and is not brought")

    def evict(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays, and does not go")

    def make_readable(self, stage: int) -> bool:
        """Make the stage's weights readable by the device, and return whether the device may have to wait for
        them."""
        return False


class StreamedWeights:
    """The part of an executor that provides the weights of a streamed base. Resident stages stay on the
    device; others are loaded into slots, which stages share in turn, and evicted."""

    def __init__(self, base: StreamedBase) -> None:
        self.base = base
        self.loaded_stages: set[int] = set()
        """Streamed stages that are on the device now, or are being copied there."""
        self.wait_time = WaitTime()
        self.on_load: StageCallback = lambda stage: None
        self.on_evict: StageCallback = lambda stage: None
        self._queue: _GpuQueue | None = None
        """Queue of copies on a GPU. None if a CPU acts as the device; then every copy is made at once."""
        if base.whole.device.type == "cuda":
            read = any(source.blocks for source in base.sources.values())
            self._queue = _GpuQueue(self, _StageReader(self) if read else None)

    def set_callbacks(self, on_load: StageCallback, on_evict: StageCallback) -> None:
        """Register functions that are called with the stage's index at every Load and every Evict, on the
        CUDA stream that copies the stage."""
        self.on_load, self.on_evict = on_load, on_evict

    def load(self, stage: int) -> None:
        assert stage not in self.loaded_stages, f"stage {stage} is there already"
        slot = self.base.part.slot_of_stage(stage)
        taken = [other for other in self.loaded_stages if self.base.part.slot_of_stage(other) == slot]
        assert not taken, f"stage {stage} would overwrite stage {taken[0]}"
        self.loaded_stages.add(stage)
        self.wait_time.copied_bytes += self.base.sources[stage].size
        if self._queue is not None:
            self._queue.load(stage, slot)
            return
        with self.count_waiting():
            self.copy_stage(stage)
            self.on_load(stage)

    def evict(self, stage: int) -> None:
        self.loaded_stages.remove(stage)
        if self._queue is not None:
            self._queue.evict(stage, self.base.part.slot_of_stage(stage))
            return
        self.on_evict(stage)
        self.base.slot(stage).fill_(EVICTED_BYTE)

    def make_readable(self, stage: int) -> bool:
        """Make the stage's weights readable by the device, and return whether the device may have to wait for
        them."""
        if not self.base.part.stages[stage].is_resident:
            assert stage in self.loaded_stages, f"stage {stage} is used but was not brought"
            if self._queue is not None:
                self._queue.make_readable(stage)
        return True

    def mark_step(self) -> Events:
        """Return CUDA events after which everything sent to the host until now has arrived there, and all
        passes launched until now are finished. Called when an optimizer step (Step) is requested."""
        return () if self._queue is None else self._queue.mark_step()

    def writable_events(self, stage: int) -> Events:
        """Return CUDA events after which a stage's adapter weights may be overwritten by the optimizer step
        for which `mark_step` was called last. No pass over the stage may have been launched since then."""
        return () if self._queue is None else self._queue.writable_events(stage)

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Return a context whose time counts as waiting time of the device, except the time in which the
        device still computes earlier work."""
        if self.base.whole.device.type != "cuda":
            began = time.perf_counter()
            yield
            self.wait_time.seconds += time.perf_counter() - began
            return
        ready = recorded_event()
        yield
        self.wait_time.record_wait(ready, recorded_event())

    def begin_window(self) -> None:
        """Load the stages that must be on the device when a Program begins, and evict others that an
        unfinished Program has left there."""
        waiting = set(self.base.part.initial_stages)
        for stage in sorted(self.loaded_stages - waiting):
            self.evict(stage)
        if self._queue is not None:
            self._queue.wait_for_compute()
        for stage in sorted(waiting - self.loaded_stages):
            self.load(stage)

    def copy_stage(self, stage: int) -> None:
        """Copy a stage's bytes from host memory or files into the stage's slot, device memory in which stages
        take turns."""
        self.base.sources[stage].copy_to(self.base.slot(stage))


class _GpuQueue:
    """CUDA streams for copies to the device (Loads) and evictions (Evicts), and events that order them with
    the compute stream."""

    def __init__(self, weights: StreamedWeights, reader: _StageReader | None) -> None:
        """Create the streams. If `reader` is None, stages are copied on the stream of Loads; otherwise the
        reader's thread reads and copies them."""
        device = weights.base.whole.device
        self._weights, self._reader = weights, reader
        self._load_stream, self._evict_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free_slots: dict[int, torch.cuda.Event] = {}
        """Maps each slot (device memory that stages share in turn) to a CUDA event after which its content is
        no longer needed."""
        self._adapter_arrivals: dict[int, torch.cuda.Event] = {}
        """Maps each loaded stage that has not been used yet to the CUDA event at which its adapters
        arrived."""
        self._last_arrivals: dict[int, torch.cuda.Event] = {}
        """Maps each stage to the CUDA event of its adapters' latest arrival on the device."""
        self._write_events: dict[int, torch.cuda.Event] = {}
        """Maps each stage to a CUDA event after which the last optimizer step may overwrite the stage's
        adapters on the device, since no earlier pass or copy uses that memory any longer."""
        self._last_step: torch.cuda.Event | None = None
        """CUDA event after which all passes launched before the last optimizer step was requested are
        finished."""

    def load(self, stage: int, slot: int) -> None:
        # If no stage has been evicted from it yet, room for adapters there may still be being allocated.
        free = self._free_slots.pop(slot, None) or torch.cuda.current_stream().record_event()
        self._load_stream.wait_event(free)
        with torch.cuda.stream(self._load_stream):
            if self._reader is None:
                self._weights.copy_stage(stage)
            else:
                self._reader.start(stage, free)
            self._weights.on_load(stage)
            self._last_arrivals[stage] = self._adapter_arrivals[stage] = recorded_event()
        # Weights whose Step has been requested are not loaded with it.
        self._write_events[stage] = free

    def evict(self, stage: int, slot: int) -> None:
        self._evict_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._evict_stream):
            self._weights.on_evict(stage)
            self._free_slots[slot] = torch.cuda.Event()
            self._free_slots[slot].record()

    def make_readable(self, stage: int) -> None:
        beside = self._adapter_arrivals.pop(stage, None)
        if beside is None:
            return
        ready = recorded_event()
        there = beside if self._reader is None else self._reader.arrival_event(stage)
        for came in dict.fromkeys((there, beside)):
            torch.cuda.current_stream().wait_event(came)
        self._weights.wait_time.record_wait(ready, there)

    def wait_for_compute(self) -> None:
        """Make the stream of Loads wait for the compute stream, which may still be copying the weights of a
        newly attached job to the memory of a stage."""
        self._load_stream.wait_stream(torch.cuda.current_stream())

    def mark_step(self) -> Events:
        evicted, self._last_step = torch.cuda.Event(), torch.cuda.Event()
        evicted.record(self._evict_stream)
        self._last_step.record()
        # Stages loaded until now have weights from before this Step.
        self._write_events = dict(self._last_arrivals)
        return evicted, self._last_step

    def writable_events(self, stage: int) -> Events:
        """Return the CUDA events after which the stage's adapters may be overwritten by an optimizer step.
        Since the last step was requested, the stage may have been loaded into device memory from which
        another stage's adapters are still read."""
        events = (self._last_step, self._write_events.get(stage))
        return tuple(event for event in events if event is not None)


class _StageReader:
    """A thread that reads stages from their files and copies them to the device on a separate stream, so that
    the main thread never waits for a file."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights
        self._copy_stream = torch.cuda.Stream(weights.base.whole.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._reads: dict[int, Future[torch.cuda.Event]] = {}
        """Maps each stage that is being read to a future of the CUDA event of its arrival. The future is done
        once all copies of the stage have been started."""

    def start(self, stage: int, free_event: torch.cuda.Event) -> None:
        self._reads[stage] = self._thread.submit(self._read, stage, free_event)

    def arrival_event(self, stage: int) -> torch.cuda.Event:
        """Return the CUDA event after which the stage has arrived on the device. Blocks until all copies of
        the stage have been started."""
        return self._reads.pop(stage).result()

    def _read(self, stage: int, free_event: torch.cuda.Event) -> torch.cuda.Event:
        self._copy_stream.wait_event(free_event)
        with torch.cuda.stream(self._copy_stream):
            self._weights.copy_stage(stage)
            return self._copy_stream.record_event(torch.cuda.Event(enable_timing=True))
