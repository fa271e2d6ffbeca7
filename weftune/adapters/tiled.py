"""The adapters that the tiled kernels compute: adapters of all kinds that have the form of LoRA with scales.
A slot is a job's index in the kernels' tables.

Shapes: T rows, K inputs, N outputs, r rank of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from weftune.adapters.kind import Frozen, Pass, TiledPart
from weftune.core.shapes import SiteShape
from weftune.ops.lora.choice import PlanTrial
from weftune.ops.lora.computed import computed_table, set_computed_pairs
from weftune.ops.lora.scales import scale_table, set_scales
from weftune.ops.lora.table import Group, SlotTable, required_bands
from weftune.ops.lora.tiled import lora_linear, plan_trial
from weftune.ops.lora.tiling import DIRECT_RANKS, MIN_RANK


class TiledBank:
    """All attached adapters that the tiled kernels compute at linears with the same input. The kernels read
    from `Pass.rows` which job each row belongs to, so that a CUDA graph works for any jobs."""

    def __init__(self, sites: Sequence[SiteShape], slots: int) -> None:
        self.sites = tuple(sites)
        self._slots = slots
        self._parts: dict[str, tuple[int, Sequence[TiledPart | None]]] = {}
        """Maps each job to its slot (index in the kernels' tables) and its adapter at each linear. The
        adapters keep the tensors alive whose addresses are in the tables."""
        self._tables: Group | None = None
        """Tables that the kernels read. None until a pass needs them, and again after a change of their
        sizes."""
        self._needs_copy = False
        self._rank, self._large_rank, self._drops = MIN_RANK, MIN_RANK, False
        self._scales_out = self._scales_in = self._lengths = self._computes = False
        self._large_rank_jobs: set[str] = set()
        """Jobs whose rank is larger than DIRECT_RANKS, up to which one kernel computes the frozen product and
        the adapters together."""
        stops = list(accumulate(site.out_features for site in sites))
        self._columns = tuple(zip([0, *stops[:-1]], stops, strict=True))

    def attach(self, job: str, slot: int, parts: Sequence[TiledPart | None]) -> None:
        """Attach a job to the index `slot` of the kernels' tables. `parts` are its adapter at each linear,
        None for a linear without an adapter."""
        self._parts[job] = slot, parts
        self._raise_limits(job, parts)
        self._write_slot(slot, parts)

    def detach(self, job: str) -> None:
        slot, _ = self._parts.pop(job)
        self._large_rank_jobs.discard(job)
        self._write_slot(slot, [None] * len(self.sites))

    def _raise_limits(self, job: str, parts: Sequence[TiledPart | None]) -> None:
        """Raise the limits for which kernels are compiled, such as the largest rank, if this job exceeds
        them. Limits only grow, so that detaching a job does not invalidate a CUDA graph. Only the limit of
        the rank drops again when the last job with a large rank is detached."""
        before = self._band_count, self._table_flags
        largest = max((part.low_rank.rank for part in parts if part and part.low_rank), default=1)
        rank = 1 << (largest - 1).bit_length()
        if rank > DIRECT_RANKS:
            self._large_rank_jobs.add(job)
            self._large_rank = max(self._large_rank, rank)
        else:
            self._rank = max(self._rank, rank)
        for part in filter(None, parts):
            self._drops |= part.low_rank is not None and part.low_rank.dropout > 0.0
            self._scales_out |= part.g_out is not None
            self._scales_in |= part.g_in is not None
            self._lengths |= part.g_out is not None and part.g_out.inverse_M is not None
            self._computes |= part.computed_pair is not None
        if before != (self._band_count, self._table_flags):
            self._tables = None

    @property
    def _rank_limit(self) -> int:
        """Upper limit of the ranks of all attached jobs, for which kernels are launched."""
        return max(self._rank, self._large_rank) if self._large_rank_jobs else self._rank

    @property
    def _band_count(self) -> int:
        return required_bands(self._large_rank)

    @property
    def _table_flags(self) -> tuple[bool, ...]:
        """Flags that say whether there are tables of scales, of DoRA's factors and of VeRA's vectors in
        addition to the table of A and B."""
        return self._scales_out, self._scales_in, self._lengths, self._computes

    def resize(self, slots: int) -> None:
        """Set the number of jobs for which the tables have room. They are rebuilt before the next pass."""
        self._slots, self._tables = slots, None

    def send_tables(self) -> None:
        """Copy the tables to the device if jobs were attached or detached since the last copy."""
        if self._tables is not None and self._needs_copy:
            _copy_tables(self._tables)
            self._needs_copy = False

    def _write_slot(self, slot: int, parts: Sequence[TiledPart | None]) -> None:
        """Write a job's entries to the tables on the host. The tables are copied to the device later, since
        more jobs may change before the next pass."""
        if self._tables is not None:
            self._set_slot_parts(self._tables, slot, parts)
            self._tables = replace(self._tables, rank=self._rank_limit, has_dropout=self._drops)
            self._needs_copy = True

    def _set_slot_parts(self, tables: Group, slot: int, parts: Sequence[TiledPart | None]) -> None:
        tables.table.set_slot(slot, [part.low_rank if part else None for part in parts])
        if tables.g_out is not None:
            set_scales(tables.g_out, slot, [part.g_out if part else None for part in parts])
        if tables.g_in is not None:
            set_scales(tables.g_in, slot, [part.g_in if part else None for part in parts])
        if tables.computed_table is not None:
            set_computed_pairs(
                tables.computed_table, slot, [part.computed_pair if part else None for part in parts]
            )

    def limits(self) -> tuple[object, ...]:
        """Return the values for which kernels are compiled and launched, such as the largest rank. A CUDA
        graph can be replayed while these values are unchanged."""
        return self._rank_limit, self._band_count, self._drops, self._table_flags

    def linear(self, x_TK: Tensor, frozen: Frozen, residual_TN: Tensor | None, active_pass: Pass) -> Tensor:
        """Return the concatenated outputs of linears that share their input, with every job's adapter, plus
        the residual if it is given."""
        assert active_pass.rows is not None, "the rows have no slots"
        return lora_linear(
            x_TK,
            frozen.weight,
            frozen.bias_N,
            residual_TN,
            active_pass.anchor,
            self._table_group(x_TK),
            active_pass.rows,
            active_pass.training,
            active_pass.choices,
            active_pass.graph_only,
        )

    def timing_trial(self, frozen: Frozen, residual: bool, active_pass: Pass) -> PlanTrial | None:
        """Return the trial that times the possible methods of the tiled kernels for `linear`, so that their
        kernels can be compiled ahead of time. None if there is no choice."""
        weight = frozen.weight
        if active_pass.rows is None or (isinstance(weight, Tensor) and weight.dim() != 2):
            return None
        like = weight if isinstance(weight, Tensor) else weight.empty_rows
        return plan_trial(weight, residual, self._table_group(like), active_pass.rows, like.dtype)

    def _table_group(self, example: Tensor) -> Group:
        if self._tables is None:
            self._tables = self._new_tables(example.device)
            self._needs_copy = False
        assert not self._needs_copy, "jobs were attached or detached after the tables were sent"
        return self._tables

    def _new_tables(self, device: torch.device) -> Group:
        # A flat vector holds its parameters end to end: one odd width shifts all that come after it.
        widths = [width for site in self.sites for width in (site.in_features, site.out_features)]
        names, count = [site.name for site in self.sites], len(self.sites)
        table = SlotTable.empty(
            names,
            self._slots,
            device,
            aligned=all(width % 8 == 0 for width in widths),
            bands=self._band_count,
            first_input=self.sites[0].first_input,
        )
        tables = Group(
            self._columns,
            table,
            self._rank_limit,
            self._drops,
            g_out=scale_table(count, self._slots, device) if self._scales_out else None,
            g_in=scale_table(count, self._slots, device) if self._scales_in else None,
            has_dora=self._lengths,
            computed_table=computed_table(count, self._slots, device) if self._computes else None,
        )
        for slot, parts in self._parts.values():
            self._set_slot_parts(tables, slot, parts)
        _copy_tables(tables)
        return tables


def _copy_tables(tables: Group) -> None:
    for table in (tables.table, tables.g_out, tables.g_in, tables.computed_table):
        if table is not None:
            table.copy_to_device()
