"""LoRA on the experts of a mixture: every job's A and B for every expert, and how PEFT stores them.

PEFT calls it `target_parameters`: one A [E · r, K] and one B [N, r · E] for all experts of a layer. Rows of A
go expert by expert; columns of B rank by rank, and for each rank expert by expert.

Shapes: E experts, r ranks of one of them, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.kind import JobAdapter, Parameters, Pass
from weftune.adapters.lora.spec import A, B
from weftune.core.shapes import SiteShape
from weftune.ops.accumulate import accumulated
from weftune.ops.experts import ExpertPart
from weftune.ops.lora.table import Entry, Group, SlotTable, bands_for
from weftune.ops.lora.tiling import MIN_RANK


def stacked(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A [E, r, K] and B [E, r, N] from PEFT's."""
    a_ErK = a.view(experts, -1, a.shape[1])
    return a_ErK, b.view(b.shape[0], -1, experts).permute(2, 1, 0)


def flattened(a_ErK: Tensor, b_ErN: Tensor) -> tuple[Tensor, Tensor]:
    """Return PEFT's A and B."""
    return a_ErK.flatten(0, 1), b_ErN.permute(2, 1, 0).flatten(1)


LEAST_SEATS = 8
"""Initial number of jobs that the kernels' tables have room for."""


@dataclass(frozen=True, slots=True)
class _ExpertSeat:
    adapter: JobAdapter
    number: int
    """Index in the kernels' tables."""
    weights: Parameters
    totals: Parameters

    def entry(self, site: str) -> Entry | None:
        if (site, A) not in self.weights:
            return None
        a_ErK, b_ErN = (self.weights[site, name] for name in (A, B))
        da_ErK, db_ErN = (self.totals[site, name] for name in (A, B))
        return Entry(a_ErK, b_ErN, da_ErK, db_ErN, self.adapter.spec.scale_at(site), dropout=0.0)


class LoraExperts:
    """The adapters of all attached jobs that have one at the experts of a layer."""

    tiled = False

    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._sites = {site.name: site for site in sites}
        self._seats: dict[str, _ExpertSeat] = {}
        self._room, self._rank = LEAST_SEATS, MIN_RANK
        self._tables: dict[str, SlotTable] = {}
        """Site → table, until a job is attached or detached."""
        self._numbers: dict[tuple[str | None, ...], Tensor] = {}

    def attach(self, adapter: JobAdapter, weights: Parameters, totals: Parameters) -> None:
        """Attach a job. Jobs with adapters at these experts are numbered separately."""
        taken = {seat.number for seat in self._seats.values()}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self._seats[adapter.job] = _ExpertSeat(adapter, number, weights, totals)
        # Both only grow, so that detaching a job does not cause kernels to be compiled.
        self._room = max(self._room, 1 << number.bit_length())
        self._rank = max(self._rank, *(adapter.spec.rank_at(site) for site in self._sites))
        self._forget()

    def detach(self, job: str) -> None:
        del self._seats[job]
        self._forget()

    def _forget(self) -> None:
        self._tables, self._numbers = {}, {}

    def present(self, bound: Pass) -> bool:
        return any(segment.through in self._seats for segment in bound.microbatch.segments)

    def parts(self, site: str, bound: Pass) -> Iterator[ExpertPart]:
        for segment in bound.microbatch.segments:
            seat = self._seats.get(segment.through or "")
            if seat is None or (site, A) not in seat.weights:
                continue
            totals = bound.totals[seat.adapter.job]
            a_ErK, b_ErN = (
                accumulated(seat.weights[site, name], totals[site, name], bound.anchor) for name in (A, B)
            )
            yield ExpertPart(segment.start, segment.stop, a_ErK, b_ErN, seat.adapter.spec.scale_at(site))

    def numbers(self, jobs: tuple[str | None, ...], device: torch.device) -> Tensor:
        if jobs not in self._numbers:
            seats = [self._seats.get(job or "") for job in jobs]
            found = torch.tensor([-1 if seat is None else seat.number for seat in seats], dtype=torch.int32)
            self._numbers[jobs] = found.to(device)
        return self._numbers[jobs]

    def group(self, site: str, device: torch.device) -> Group | None:
        if not any((site, A) in seat.weights for seat in self._seats.values()):
            return None
        shape = self._sites[site]
        if site not in self._tables:
            self._tables[site] = self._table(shape, device)
        return Group(((0, shape.out_features),), self._tables[site], self._rank, drops=False)

    def _table(self, site: SiteShape, device: torch.device) -> SlotTable:
        aligned = all(width % 8 == 0 for width in (site.in_features, site.out_features))
        slots, bands = self._room * site.experts, bands_for(self._rank)
        table = SlotTable.empty([site.name], slots, device, aligned, bands)
        views = table.host_views()
        for seat in self._seats.values():
            if (entry := seat.entry(site.name)) is not None:
                table.put_experts(views, seat.number * site.experts, entry)
        table.send()
        return table
