"""Event simulation of a streamed step in which uploads under one root complex share its bandwidth.

If every GPU has its own root complex, it agrees with the recurrence of stream_step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.layout.mapping import EXACT_GPUS, Topology, cross_order, every_order, sequential_order
from weftune.plan.layout.mobius_step import Host, MobiusVisit, MobiusVisits


@dataclass(slots=True)
class _Upload:
    """Bytes in transit for one visit."""

    visit: int
    left: float
    """Bytes that have room from `ready` on."""
    late: float
    """Bytes that have no room before `freed`."""
    ready: float
    freed: float

    def advance(self, now: float) -> None:
        if now >= self.freed:
            self.left, self.late = self.left + self.late, 0.0

    def moves(self, now: float) -> bool:
        return now >= self.ready and self.left > 0

    def done(self) -> bool:
        return self.left == self.late == 0


@dataclass(frozen=True, slots=True)
class Root:
    """Policy by which a root complex serves concurrent uploads."""

    bandwidth: float
    ordered: bool = False
    """Whether the earliest stage is served first and alone. False serves all at once, in equal shares."""


class _Pass:
    """One direction of a step; times of visits are computed in order, as their uploads arrive."""

    def __init__(
        self, visits: Sequence[MobiusVisit], roots: Sequence[int], host: Host, microbatches: int
    ) -> None:
        self.visits = visits
        self.roots = roots
        self.host = host
        self.more = microbatches - 1
        self.arrived = [0.0 if not visit.upload_bytes else math.inf for visit in visits]
        self.first: list[float] = []
        self.last: list[float] = []
        self.uploads: list[_Upload] = []
        self._settle()

    def finished(self) -> bool:
        return len(self.first) == len(self.visits)

    def end(self) -> float:
        return self.last[-1] + self.visits[-1].seconds

    def arrive(self, upload: _Upload, now: float) -> None:
        self.uploads.remove(upload)
        self.arrived[upload.visit] = now
        self._settle()

    def _settle(self) -> None:
        while not self.finished() and self.arrived[len(self.first)] < math.inf:
            self._start(len(self.first))

    def _start(self, number: int) -> None:
        visit = self.visits[number]
        start, final = self.arrived[number], 0.0
        if number:
            before = self.visits[number - 1].seconds + visit.hop_bytes / self.host.bandwidth
            start, final = max(start, self.first[-1] + before), self.last[-1] + before
        if number >= self.host.gpus:
            above = number - self.host.gpus
            start = max(start, self.last[above] + self.visits[above].seconds)
        self.first.append(start)
        self.last.append(max(final, start + self.more * visit.seconds))
        below = number + self.host.gpus
        if below < len(self.visits) and self.visits[below].upload_bytes:
            after = self.visits[below]
            freed = self.last[number] + visit.seconds
            early = after.upload_bytes - after.late_bytes
            self.uploads.append(_Upload(below, early, after.late_bytes, start, freed))


def contended_seconds(
    visits: MobiusVisits, order: Sequence[int], topology: Topology, host: Host, microbatches: int, root: Root
) -> float:
    """Return the seconds of one step of `visits` with the GPUs in this order."""
    assert topology.gpus == host.gpus == len(order), "the order is not one of this host's GPUs"
    root_of = topology.root_of
    places = [root_of[gpu] for gpu in order]
    count = len(visits.forward)
    forward = [places[stage % host.gpus] for stage in range(count)]
    return sum(
        _pass_seconds(_Pass(direction, roots, host, microbatches), root)
        for direction, roots in ((visits.forward, forward), (visits.backward, forward[::-1]))
    )


def fastest_order(
    visits: MobiusVisits, topology: Topology, host: Host, microbatches: int, root: Root
) -> tuple[int, ...]:
    """Return the order with the shortest step: of all orders up to EXACT_GPUS GPUs, else of the two mappings.

    Equation 13 considers the distance between stages, but not their bytes or compute times.
    """
    orders = [sequential_order(topology), cross_order(topology, len(visits.forward))]
    if topology.gpus <= EXACT_GPUS:
        orders += every_order(topology)
    return min(orders, key=lambda order: contended_seconds(visits, order, topology, host, microbatches, root))


def _pass_seconds(run: _Pass, root: Root) -> float:
    now = 0.0
    while not run.finished():
        for upload in run.uploads:
            upload.advance(now)
        flows = _flows(run, root, now)
        changes = [time for one in run.uploads for time in (one.ready, one.freed) if time > now]
        after = min(changes + [flow.end(now) for flow in flows])
        for flow in flows:
            # Set to 0, not subtracted: a rounding remainder would never end.
            ended = flow.end(now) <= after
            flow.upload.left = 0.0 if ended else flow.upload.left - flow.rate * (after - now)
        now = after
        for upload in [one for one in run.uploads if one.done()]:
            run.arrive(upload, now)
    return run.end()


@dataclass(frozen=True, slots=True)
class _ContendedFlow:
    upload: _Upload
    rate: float

    def end(self, now: float) -> float:
        return now + self.upload.left / self.rate


def _flows(run: _Pass, root: Root, now: float) -> list[_ContendedFlow]:
    """Return the uploads that currently progress, with their rates."""
    moving: dict[int, list[_Upload]] = {}
    for upload in sorted(run.uploads, key=lambda one: one.visit):
        if upload.moves(now):
            moving.setdefault(run.roots[upload.visit], []).append(upload)
    flows: list[_ContendedFlow] = []
    for uploads in moving.values():
        chosen = uploads[:1] if root.ordered else uploads
        rate = min(run.host.bandwidth, root.bandwidth / len(chosen))
        flows += [_ContendedFlow(upload, rate) for upload in chosen]
    return flows
