"""The LoRA matrices A and B of all attached jobs for every expert of a layer.

Shapes: E experts, r rank of the adapter of one expert, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.adapters.kind import JobAdapter, Parameters, Pass
from weftune.adapters.lora.spec import A, B
from weftune.core.shapes import SiteShape
from weftune.ops.accumulate import accumulate_gradient
from weftune.ops.experts import ExpertPart
from weftune.ops.lora.table import Group, LowRank, SlotTable, required_bands
from weftune.ops.lora.tiling import MIN_RANK

MIN_SLOTS = 8
"""Initial number of jobs for which the kernels' tables of an expert layer have room."""


@dataclass(frozen=True, slots=True)
class _ExpertSlot:
    adapter: JobAdapter
    index: int
    """Index of the job in the kernels' tables of these experts."""
    weights: Parameters
    totals: Parameters

    def entry(self, site: str) -> LowRank | None:
        if (site, A) not in self.weights:
            return None
        a_ErK, b_ErN = (self.weights[site, name] for name in (A, B))
        da_ErK, db_ErN = (self.totals[site, name] for name in (A, B))
        return LowRank(a_ErK, b_ErN, da_ErK, db_ErN, self.adapter.spec.scale_at(site), dropout=0.0)


class ExpertBank:
    """The adapters of all attached jobs on the experts of a layer: one A and one B for each expert and
    job."""

    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._sites = {site.name: site for site in sites}
        self._slots_by_job: dict[str, _ExpertSlot] = {}
        self._slots, self._rank = MIN_SLOTS, MIN_RANK
        self._tables: dict[str, SlotTable] = {}
        """Maps the name of each stacked weight (gate and up, or down, of all experts) to the kernels' table
        of its adapters. Emptied when a job is attached or detached."""
        self._adapter_indices: dict[tuple[str | None, ...], Tensor] = {}

    def attach(self, adapter: JobAdapter, weights: Parameters, totals: Parameters) -> None:
        """Attach a job with its parameters and the accumulators of their gradients. Its index in the kernels'
        tables counts only jobs with adapters on these experts, and may differ from the job's slot, its index
        in the tables of linears."""
        taken = {slot.index for slot in self._slots_by_job.values()}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self._slots_by_job[adapter.job] = _ExpertSlot(adapter, number, weights, totals)
        # Both only grow, so that detaching a job does not cause kernels to be compiled.
        self._slots = max(self._slots, 1 << number.bit_length())
        self._rank = max(self._rank, *(adapter.spec.rank_at(site) for site in self._sites))
        self._clear_tables()

    def detach(self, job: str) -> None:
        del self._slots_by_job[job]
        self._clear_tables()

    def _clear_tables(self) -> None:
        self._tables, self._adapter_indices = {}, {}

    def has_expert_rows(self, active_pass: Pass) -> bool:
        """Return whether a job with adapters on these experts has rows in the pass."""
        return any(segment.adapter_job in self._slots_by_job for segment in active_pass.microbatch.segments)

    def parts(self, site: str, active_pass: Pass) -> Iterator[ExpertPart]:
        """Yield the adapter of each segment (range of a job's rows) at one stacked weight of the experts. The
        backward adds gradients to the jobs' accumulators."""
        for segment in active_pass.microbatch.segments:
            slot = self._slots_by_job.get(segment.adapter_job or "")
            if slot is None or (site, A) not in slot.weights:
                continue
            totals = active_pass.totals[slot.adapter.job]
            a_ErK, b_ErN = (
                accumulate_gradient(slot.weights[site, name], totals[site, name], active_pass.anchor)
                for name in (A, B)
            )
            yield ExpertPart(segment.start, segment.stop, a_ErK, b_ErN, slot.adapter.spec.scale_at(site))

    def adapter_indices(self, jobs: tuple[str | None, ...], device: torch.device) -> Tensor:
        """Return the index of each job's adapter in the kernels' tables as int32, −1 for jobs without one."""
        if jobs not in self._adapter_indices:
            slots = [self._slots_by_job.get(job or "") for job in jobs]
            found = torch.tensor([-1 if slot is None else slot.index for slot in slots], dtype=torch.int32)
            self._adapter_indices[jobs] = found.to(device)
        return self._adapter_indices[jobs]

    def group(self, site: str, device: torch.device) -> Group | None:
        """Return all adapters at one stacked weight of the experts as a table for the tiled kernels. Entry n
        · E + e of the table is adapter n at expert e. None if there are no adapters."""
        if not any((site, A) in slot.weights for slot in self._slots_by_job.values()):
            return None
        shape = self._sites[site]
        if site not in self._tables:
            self._tables[site] = self._expert_table(shape, device)
        return Group(((0, shape.out_features),), self._tables[site], self._rank, has_dropout=False)

    def _expert_table(self, site: SiteShape, device: torch.device) -> SlotTable:
        aligned = all(width % 8 == 0 for width in (site.in_features, site.out_features))
        slots, bands = self._slots * site.experts, required_bands(self._rank)
        table = SlotTable.empty([site.name], slots, device, aligned, bands)
        for slot in self._slots_by_job.values():
            if (entry := slot.entry(site.name)) is not None:
                table.set_experts(slot.index * site.experts, entry)
        table.copy_to_device()
        return table
