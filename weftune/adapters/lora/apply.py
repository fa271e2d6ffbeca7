"""LoRA in a bank: every job's A and B at a group of sites, in the job's own flat vector.

Shapes: T rows, K inputs, N outputs, r ranks of a job. B is held transposed, [r, N], so that rows of either
matrix belong to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from weftune.adapters.kind import Frozen, Member, Parameters, Pass, SiteParts, WeightOf
from weftune.adapters.lora.experts import LoraExperts, flattened, stacked
from weftune.adapters.lora.export import merge, write_portable
from weftune.adapters.lora.files import read_start, write_adapter
from weftune.adapters.lora.spec import A, B, LoraSpec
from weftune.adapters.vector import ParameterShape, VectorLayout
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.ops.draw import fill_uniform_alike, parameter_key
from weftune.ops.dropout import key
from weftune.ops.lora.choice import Contest
from weftune.ops.lora.routes import Block, Blocks, Factors, Route, add_lora
from weftune.ops.lora.table import Entry, Group, SlotTable, bands_for
from weftune.ops.lora.tiled import contest_at, woven_linear
from weftune.ops.lora.weave import DIRECT_RANKS

LEAST_RANK = 16
"""Kernels multiply at least so many ranks at once."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """A job in its slot: its A and B at each site that it adapts."""

    member: Member
    slot: int
    weights: Mapping[str, Factors]
    totals: Mapping[str, Factors]

    def entry(self, site: str) -> Entry | None:
        """The job as the tiled kernels find it at a site; None if it does not adapt that one."""
        if site not in self.weights:
            return None
        weights, totals, spec = self.weights[site], self.totals[site], self.member.spec
        return Entry(weights.a_rK, weights.b_rN, totals.a_rK, totals.b_rN, spec.scale_at(site), spec.dropout)


class LoraBank:
    tiled = True

    def __init__(self, sites: Sequence[SiteShape], slots: int) -> None:
        self.sites = tuple(sites)
        self._slots = slots
        self._seats: dict[str, _Seat] = {}
        self._table: SlotTable | None = None
        self._views: tuple[np.ndarray, ...] = ()
        """The table on the host."""
        self._unsent = False
        self._rank, self._large_rank, self._drops = LEAST_RANK, LEAST_RANK, False
        self._large: set[str] = set()
        """Jobs that have more ranks than a fused product takes by itself."""
        stops = list(accumulate(site.out_features for site in sites))
        self._columns = tuple(zip([0, *stops[:-1]], stops, strict=True))

    def attach(self, member: Member, slot: int, weights: Parameters, totals: Parameters) -> None:
        names = [site.name for site in self.sites if (site.name, A) in weights]
        seat = _Seat(member, slot, _factors(weights, names), _factors(totals, names))
        self._seats[member.job] = seat
        self._grow(member, max((member.spec.rank_at(name) for name in names), default=1))
        self._put(slot, [seat.entry(site.name) for site in self.sites])

    def detach(self, job: str) -> None:
        seat = self._seats.pop(job)
        self._large.discard(job)
        self._put(seat.slot, [None] * len(self.sites))

    def _grow(self, member: Member, most: int) -> None:
        """Limits only grow, so that who leaves does not change what a captured graph was made for. But large
        ranks count only while one is aboard: then there are two limits, and graphs of both are kept."""
        most = 1 << (most - 1).bit_length()
        if most > DIRECT_RANKS:
            self._large.add(member.job)
            self._large_rank = max(self._large_rank, most)
        else:
            self._rank = max(self._rank, most)
        self._drops = self._drops or member.spec.dropout > 0.0
        if self._table is not None and self._table.bands < self._bands:
            self._table = None

    @property
    def _limit(self) -> int:
        """No rank aboard is above this."""
        return max(self._rank, self._large_rank) if self._large else self._rank

    @property
    def _bands(self) -> int:
        return bands_for(self._large_rank)

    def resize(self, slots: int) -> None:
        self._slots, self._table = slots, None

    def settle(self) -> None:
        if self._table is not None and self._unsent:
            self._table.send()
            self._unsent = False

    def _put(self, slot: int, entries: Sequence[Entry | None]) -> None:
        """Into the table on the host: many jobs may come and go before the next pass."""
        if self._table is not None:
            self._table.put(self._views, slot, entries)
            self._unsent = True

    def limits(self) -> tuple[int, int, bool]:
        return self._limit, self._bands, self._drops

    def present(self, bound: Pass) -> bool:
        """On the tiled route always: who has rows is content of tensors there."""
        return bound.route is Route.tiled or any(
            segment.through in self._seats for segment in bound.microbatch.segments
        )

    def parts(self, site: str, frozen: Frozen, bound: Pass) -> SiteParts:
        blocks = tuple(
            self._block(seat, site, segment, bound)
            for segment in bound.microbatch.segments
            if (seat := self._seats.get(segment.through or "")) is not None and site in seat.weights
        )
        if not blocks:
            return SiteParts()
        together = Blocks(blocks, bound.microbatch.token_index_T, bound.anchor)
        return SiteParts(add=partial(add_lora, blocks=together, route=bound.route))

    def linear(self, x_TK: Tensor, frozen: Frozen, residual_TN: Tensor | None, bound: Pass) -> Tensor:
        assert bound.rows is not None, "the rows were not dealt out"
        return woven_linear(
            x_TK,
            frozen.weight,
            frozen.bias_N,
            residual_TN,
            bound.anchor,
            self._group(x_TK),
            bound.rows,
            bound.training,
            bound.choices,
        )

    def contest(self, frozen: Frozen, residual: bool, bound: Pass) -> Contest | None:
        weight = frozen.weight
        if bound.rows is None or (isinstance(weight, Tensor) and weight.dim() != 2):
            return None
        like = weight if isinstance(weight, Tensor) else weight.like
        return contest_at(weight, residual, self._group(like), bound.rows, like.dtype)

    def _group(self, like: Tensor) -> Group:
        if self._table is None:
            self._make_table(like)
        assert self._table is not None
        assert not self._unsent, "the pass was bound before who came or went was known"
        return Group(self._columns, self._table, self._limit, self._drops)

    def _block(self, seat: _Seat, site: str, segment: Segment, bound: Pass) -> Block:
        spec: LoraSpec = seat.member.spec
        drops = bound.training and spec.dropout > 0.0
        totals = bound.totals[seat.member.job]
        return Block(
            start=segment.start,
            stop=segment.stop,
            weights=seat.weights[site],
            gradient=Factors(totals[site, A], totals[site, B]),
            scale=spec.scale_at(site),
            dropout=spec.dropout if drops else 0.0,
            key=key(seat.member.seed, segment.step, site) if drops else 0,
        )

    def _make_table(self, like: Tensor) -> None:
        # A flat vector holds its parameters end to end: one odd width moves all that come after it.
        widths = [width for site in self.sites for width in (site.in_features, site.out_features)]
        aligned = all(width % 8 == 0 for width in widths)
        names = [site.name for site in self.sites]
        self._table = SlotTable.empty(names, self._slots, like.device, aligned, self._bands)
        self._views = self._table.host_views()
        for seat in self._seats.values():
            self._put(seat.slot, [seat.entry(site.name) for site in self.sites])
        self.settle()


def _factors(parameters: Parameters, sites: Sequence[str]) -> dict[str, Factors]:
    return {site: Factors(parameters[site, A], parameters[site, B]) for site in sites}


def _as_held(a: Tensor, b: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of PEFT's as a bank has them, at a site whose parameters are shaped like one of them."""
    return stacked(a, b, len(like)) if like.ndim == 3 else (a, b.T)


def _as_stored(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return flattened(a, b) if a.ndim == 3 else (a, b.T)


def draw(seed: int, parameters: Parameters, drawn_on: torch.device | None) -> None:
    """A uniform within ±1/√K as PEFT draws it, B zero; other parameters are left alone."""
    if zeros := [value for (_, name), value in parameters.items() if name == B]:
        torch._foreach_zero_(zeros)
    alike: dict[tuple[int, ...], list[str]] = {}
    for (site, name), value in parameters.items():
        if name == A:
            alike.setdefault(tuple(value.shape), []).append(site)
    for shape, names in alike.items():
        values = [parameters[site, A] for site in names]
        keys = [parameter_key(seed, site, A) for site in names]
        fill_uniform_alike(values, keys, bound=shape[-1] ** -0.5, drawn_on=drawn_on)


class Lora:
    name = "lora"

    def layout(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> VectorLayout:
        shapes = [
            ParameterShape(
                site.name,
                name,
                shape,
                rate=spec.loraplus_lr_ratio if name == B else 1.0,
                active=site.active if site.experts else None,
            )
            for site in sites
            if spec.adapts(site)
            for name, shape in spec.shapes_at(site).items()
        ]
        return VectorLayout(tuple(shapes))

    def adapts(self, spec: LoraSpec, site: str) -> bool:
        return spec.targets_site(site)

    def rows_before(self, spec: LoraSpec) -> int:
        return 0

    def constants_key(self, spec: LoraSpec) -> None:
        return None

    def constants(self, spec: LoraSpec, sites: Sequence[SiteShape], like: Tensor) -> dict[str, Tensor]:
        return {}

    def check_start(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> None:
        if isinstance(spec.init_from, str):
            read_start(spec, sites)

    def initialise(
        self,
        member: Member,
        sites: Sequence[SiteShape],
        parameters: Parameters,
        drawn_on: torch.device | None = None,
        frozen: WeightOf | None = None,
    ) -> None:
        """As PEFT draws them, or from the member's `init_from` folder."""
        if member.spec.init_from is not None:
            start = read_start(member.spec, sites)
            for (site, name), value in parameters.items():
                a_rK, b_rN = _as_held(*start[site], value)
                value.copy_(a_rK if name == A else b_rN)
            return
        draw(member.seed, parameters, drawn_on)

    def before_step(self, member: Member, step: int, masters: Callable[[], Parameters]) -> None:
        """Nothing changes but by the step itself."""

    def bank(self, sites: Sequence[SiteShape], slots: int) -> LoraBank:
        return LoraBank(sites, slots)

    def expert_bank(self, sites: Sequence[SiteShape]) -> LoraExperts:
        return LoraExperts(sites)

    def save(
        self, folder: Path, spec: LoraSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        weights = {
            site: _as_stored(value, parameters[site, B])
            for (site, name), value in parameters.items()
            if name == A
        }
        write_adapter(folder, spec, weights, sites, base)

    def portable(self, folder: Path, target: Path) -> int:
        return write_portable(folder, target)

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        merge(folder, modules, sites)
