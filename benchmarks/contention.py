"""Event simulation of a streamed step in which uploads under one root complex share its bandwidth.

If every GPU has its own root complex, it agrees with the recurrence of `mobius_step.step_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftune.plan.layout.mapping import (
    EXACT_GPUS,
    Topology,
    every_order,
    least_contention_order,
    sequential_order,
)
from weftune.plan.layout.mobius_step import Host, MobiusVisit, MobiusVisits


@dataclass(slots=True)
class _Upload:
    """Bytes in transit for one visit."""

    visit: int
    remaining_bytes: float
    """Bytes that have room from `ready` on."""
    delayed_bytes: float
    """Bytes that have no room before `freed`."""
    ready: float
    freed: float


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
        self.visits, self.roots, self.host = visits, roots, host
        self.more = microbatches - 1
        self.arrived = [0.0 if not visit.upload_bytes else math.inf for visit in visits]
        self.first: list[float] = []
        self.last: list[float] = []
        self.uploads: list[_Upload] = []
        self._start_visits()

    def seconds(self, root: Root) -> float:
        now = 0.0
        while len(self.first) < len(self.visits):
            for upload in self.uploads:
                if now >= upload.freed:
                    upload.remaining_bytes += upload.delayed_bytes
                    upload.delayed_bytes = 0.0
            flows = self._flows(root, now)
            ends = [now + upload.remaining_bytes / rate for upload, rate in flows]
            changes = [time for one in self.uploads for time in (one.ready, one.freed) if time > now]
            after = min(changes + ends)
            for (upload, rate), end in zip(flows, ends, strict=True):
                # Set to 0, not subtracted: a rounding remainder would never end.
                moved = upload.remaining_bytes if end <= after else rate * (after - now)
                upload.remaining_bytes -= moved
            now = after
            for upload in [one for one in self.uploads if one.remaining_bytes == one.delayed_bytes == 0]:
                self.uploads.remove(upload)
                self.arrived[upload.visit] = now
                self._start_visits()
        return self.last[-1] + self.visits[-1].seconds

    def _start_visits(self) -> None:
        """Start every visit up to the first whose upload has not arrived."""
        while len(self.first) < len(self.visits) and self.arrived[len(self.first)] < math.inf:
            self._start(len(self.first))

    def _start(self, number: int) -> None:
        visit = self.visits[number]
        start, final = self.arrived[number], 0.0
        if number:
            before = self.visits[number - 1].seconds + visit.received_bytes / self.host.bandwidth
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
            early = after.upload_bytes - after.delayed_bytes
            self.uploads.append(_Upload(below, early, after.delayed_bytes, start, freed))

    def _flows(self, root: Root, now: float) -> list[tuple[_Upload, float]]:
        """Return the uploads that currently progress, with their bytes per second."""
        moving: dict[int, list[_Upload]] = {}
        for upload in sorted(self.uploads, key=lambda one: one.visit):
            if now >= upload.ready and upload.remaining_bytes > 0:
                moving.setdefault(self.roots[upload.visit], []).append(upload)
        flows: list[tuple[_Upload, float]] = []
        for uploads in moving.values():
            chosen = uploads[:1] if root.ordered else uploads
            rate = min(self.host.bandwidth, root.bandwidth / len(chosen))
            flows += [(upload, rate) for upload in chosen]
        return flows


def contended_seconds(
    visits: MobiusVisits, order: Sequence[int], topology: Topology, host: Host, microbatches: int, root: Root
) -> float:
    """Return the seconds of one step of `visits` with the GPUs in this order."""
    assert topology.gpus == host.gpus == len(order), "the order is not one of this host's GPUs"
    gpu_roots = topology.gpu_roots
    forward = [gpu_roots[order[stage % host.gpus]] for stage in range(len(visits.forward))]
    return sum(
        _Pass(direction, roots, host, microbatches).seconds(root)
        for direction, roots in ((visits.forward, forward), (visits.backward, forward[::-1]))
    )


def fastest_order(
    visits: MobiusVisits, topology: Topology, host: Host, microbatches: int, root: Root
) -> tuple[int, ...]:
    """Return the order with the shortest step: of all orders up to EXACT_GPUS GPUs, else of the two mappings.

    Equation 13 considers the distance between stages, but not their bytes or compute times.
    """
    orders = [sequential_order(topology), least_contention_order(topology, len(visits.forward))]
    if topology.gpus <= EXACT_GPUS:
        orders += every_order(topology)
    return min(orders, key=lambda order: contended_seconds(visits, order, topology, host, microbatches, root))
