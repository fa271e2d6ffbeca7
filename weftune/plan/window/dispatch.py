"""Greedy dispatch: an order of the passes in a pipeline, in which each device always runs a pass that is
ready.

Times are predicted by a simulation with the costs of passes. All replicas are simulated together, since a
job's next batch waits for the backwards of every replica. A dispatch may begin with microbatches that the
previous window (a few global batches of every job) has left in flight."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from weftune.plan.program.prices import Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    Forward,
    Inherited,
    MicrobatchPlan,
    batch_samples,
)


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The rules of a dispatch: limits on the microbatches in flight, and whether forwards or backwards go
    first if both are ready. A microbatch is in flight on a stage between its forward and its backward."""

    max_in_flight: tuple[int, ...]
    """Maximum number of microbatches in flight on each stage."""
    forward_first: tuple[bool, ...]
    max_bytes: tuple[int, ...] = ()
    """Maximum bytes that microbatches in flight keep on each stage. Empty means no limit."""
    exchange_seconds: float = 0.0
    """Seconds for which replicas exchange the gradients of a global batch after its last backward."""


def previous_chunks(microbatches: Sequence[MicrobatchPlan]) -> dict[int, int]:
    """Return a dict from the index of each microbatch that is a chunk of a sample, except for first chunks,
    to the index of the microbatch with the sample's previous chunk. The chunks of a sample must be in
    order."""
    last: dict[tuple[str, int, int], int] = {}
    before: dict[int, int] = {}
    for number, plan in enumerate(microbatches):
        if (chunk := plan.chunk) is not None:
            key = plan.segments[0].job, plan.segments[0].step, chunk.sample_offset
            if key in last:
                before[number] = last[key]
            last[key] = number
    return before


@dataclass(frozen=True, slots=True)
class PassBegan:
    """The event that a device has begun a pass, in the simulation of a pipeline."""

    device: int
    action: Forward | Backward


@dataclass(frozen=True, slots=True)
class BatchClosed:
    """The event that a global batch has ended on a stage in all replicas and its gradients have been
    exchanged, in the simulation of a pipeline."""

    stage: int
    job: str
    step: int


@dataclass(slots=True)
class _Device:
    stage: int
    next_chunk: int | None = None
    """Index of the microbatch with the next chunk of the sample whose earlier chunks have run their forward
    here. None if no sample is unfinished."""
    ready_forwards: deque[int] = field(default_factory=deque)
    ready_backwards: deque[int] = field(default_factory=deque)
    in_flight: int = 0
    kept_bytes: int = 0
    is_busy: bool = False
    actions: list[Action] = field(default_factory=list)


class Dispatch:
    """A simulation of all devices of a pipeline, which determines the order of their passes. `launches`
    contains, for each replica of the pipeline, the indices of its microbatches in their preferred order."""

    def __init__(
        self,
        microbatches: Sequence[MicrobatchPlan],
        launches: Sequence[Sequence[int]],
        prices: Prices,
        rules: DispatchRules,
        inherited: Sequence[Inherited] = (),
    ) -> None:
        """Prepare the simulation. `inherited` is the progress of microbatches that the previous window (a few
        global batches of every job) has begun; `launches` does not contain these microbatches."""
        self.microbatches, self.prices, self.rules = microbatches, prices, rules
        self.last = len(rules.max_in_flight) - 1
        samples = batch_samples(microbatches)
        self._remaining = [samples.copy() for _ in rules.max_in_flight]
        """For each stage, the number of samples of each global batch that still need a backward in any
        replica."""
        self._open = [set(samples) for _ in rules.max_in_flight]
        """For each stage, the global batches whose gradients are still incomplete or not yet exchanged
        between replicas."""
        self.devices = [_Device(stage) for _ in launches for stage in range(len(rules.max_in_flight))]
        self.jobs = [frozenset(one.jobs) for one in microbatches]
        self.before = [
            frozenset((segment.job, segment.step - 1) for segment in one.segments) for one in microbatches
        ]
        """For each microbatch, the global batches whose optimizer steps must come before its forward."""
        for first, numbers in zip(self.devices[:: len(rules.max_in_flight)], launches, strict=True):
            first.ready_forwards.extend(numbers)
        self._chunk_before = previous_chunks(microbatches)
        self._chunk_behind = {before: number for number, before in self._chunk_before.items()}
        self.delayed: set[int] = set()
        """Indices of the stages on which a microbatch had to wait for memory."""
        self.log: list[PassBegan | BatchClosed] = []
        """Events on all devices, in the order in which they happened."""
        everyone = set(range(len(self.devices)))
        self._near = [
            {max(0, device - 1), device, min(self.last, device + 1)} if len(launches) == 1 else everyone
            for device in everyone
        ]
        """For each device, the devices on which a pass may become ready when this device has ended a pass."""
        for number, progress in enumerate(inherited):
            self._inherit_microbatch(number, progress)
        self._ends: list[tuple[float, int, int, Forward | Backward | BatchClosed]] = []
        self._number = count()

    def run(self) -> list[list[Action]]:
        """Run the simulation and return the passes of every device, in order."""
        now = 0.0
        self._start_passes(range(len(self.devices)), now)
        while self._ends:
            now = self._ends[0][0]
            # An idle device can begin a pass only after it or a neighbour has ended one.
            touched: set[int] = set()
            while self._ends and self._ends[0][0] == now:
                _, _, device, end = heapq.heappop(self._ends)
                if isinstance(end, BatchClosed):
                    self._close_batch(end)
                else:
                    self._end_pass(device, end, now)
                touched |= self._near[device]
            self._start_passes(sorted(touched), now)
        stuck = [number for one in self.devices for number in one.ready_forwards]
        assert not stuck, f"microbatch {stuck[0]} never runs: it waits for a batch behind it, or for room"
        return [one.actions for one in self.devices]

    def _inherit_microbatch(self, number: int, progress: Inherited) -> None:
        """Add a microbatch that the previous window (a few global batches of every job) has begun. Such a
        microbatch is in flight, or waits for the rest of its global batch."""
        stages = self.last + 1
        first = progress.replica * stages
        devices = self.devices[first : first + stages]
        for stage, one in enumerate(devices):
            if progress.is_in_flight(stage, stages):
                one.in_flight += 1
                one.kept_bytes += self.prices.passes[number][stage].kept_bytes
            elif progress.has_backward(stage, stages):
                for segment in self.microbatches[number].segments:
                    key = segment.job, segment.step
                    self._remaining[stage][key] -= len(segment.samples)
                    if not self._remaining[stage][key]:
                        self._open[stage].remove(key)
        if 0 < progress.forwards < stages:
            devices[progress.forwards].ready_forwards.append(number)
        elif progress.forwards == stages and progress.backwards < stages:
            devices[self.last - progress.backwards].ready_backwards.append(number)

    def _start_passes(self, devices: Iterable[int], now: float) -> None:
        for device in devices:
            one = self.devices[device]
            if not one.is_busy and (action := self._choose_pass(one)) is not None:
                one.is_busy = True
                one.actions.append(action)
                self.log.append(PassBegan(device, action))
                price = self.prices.passes[action.microbatch][one.stage]
                forward = isinstance(action, Forward)
                if forward:
                    one.next_chunk = self._chunk_behind.get(action.microbatch)
                one.in_flight += forward
                one.kept_bytes += price.kept_bytes if forward else 0
                seconds = price.forward if forward else price.backward
                heapq.heappush(self._ends, (now + seconds, next(self._number), device, action))

    def _choose_pass(self, device_state: _Device) -> Forward | Backward | None:
        if device_state.ready_backwards and not self.rules.forward_first[device_state.stage]:
            return Backward(device_state.ready_backwards.popleft(), device_state.stage)
        number = self._next_microbatch(device_state)
        if number is not None:
            device_state.ready_forwards.remove(number)
            return Forward(number, device_state.stage)
        return (
            Backward(device_state.ready_backwards.popleft(), device_state.stage)
            if device_state.ready_backwards
            else None
        )

    def _next_microbatch(self, device_state: _Device) -> int | None:
        """Return the first ready microbatch whose forward may start on this device now, or None."""
        if device_state.in_flight >= self.rules.max_in_flight[device_state.stage]:
            return None
        if (chunk := device_state.next_chunk) is not None:
            # Parts of two samples might leave no room to finish either of them.
            ready = chunk in device_state.ready_forwards and self._has_memory(device_state, chunk)
            return chunk if ready else None
        blocked: set[str] = set()
        for number in device_state.ready_forwards:
            closed = self._open[device_state.stage].isdisjoint(self.before[number])
            if closed and blocked.isdisjoint(self.jobs[number]):
                return number if self._has_memory(device_state, number) else None
            blocked |= self.jobs[number]
        return None

    def _has_memory(self, device_state: _Device, number: int) -> bool:
        if not self.rules.max_bytes:
            return True
        kept = self.prices.passes[number][device_state.stage].kept_bytes
        fits = device_state.kept_bytes + kept <= self.rules.max_bytes[device_state.stage]
        if not fits:
            self.delayed.add(device_state.stage)
        return fits

    def _end_pass(self, device: int, action: Forward | Backward, now: float) -> None:
        one = self.devices[device]
        one.is_busy = False
        if isinstance(action, Forward):
            if one.stage < self.last:
                self.devices[device + 1].ready_forwards.append(action.microbatch)
            elif action.microbatch not in self._chunk_behind:
                one.ready_backwards.append(action.microbatch)
            return
        one.in_flight -= 1
        one.kept_bytes -= self.prices.passes[action.microbatch][one.stage].kept_bytes
        for segment in self.microbatches[action.microbatch].segments:
            key = segment.job, segment.step
            self._remaining[one.stage][key] -= len(segment.samples)
            if not self._remaining[one.stage][key]:
                closed = BatchClosed(one.stage, *key)
                if self.rules.exchange_seconds:
                    heapq.heappush(
                        self._ends, (now + self.rules.exchange_seconds, next(self._number), device, closed)
                    )
                else:
                    self._close_batch(closed)
        if one.stage == self.last and action.microbatch in self._chunk_before:
            one.ready_backwards.appendleft(self._chunk_before[action.microbatch])
        if one.stage > 0:
            self.devices[device - 1].ready_backwards.append(action.microbatch)

    def _close_batch(self, closed: BatchClosed) -> None:
        self._open[closed.stage].remove((closed.job, closed.step))
        self.log.append(closed)
