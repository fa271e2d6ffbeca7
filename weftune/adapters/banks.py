"""All banks of a base: attached to its sites, and bound to one microbatch around each pass.

Each site's linear gets a forward of Weftune's: it multiplies all rows by the frozen weight once, and the
kinds with rows there change input and output. On the tiled route, kernels do all of this at once for every
kind that has the form of LoRA with scales. Outside a bound pass the base's own forward runs. Sites that share
their input may form a group, whose weights are stacked.

Shapes: T rows, K inputs, N outputs of a site or a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from weftune.adapters.form import Scratch, SiteTensors, TiledPart
from weftune.adapters.kind import (
    ExpertBank,
    Frozen,
    JobAdapter,
    Kind,
    Parameters,
    Pass,
    SiteBank,
    SiteParts,
)
from weftune.adapters.registry import kind_named
from weftune.adapters.target import KEYS, ROWS, VALUES
from weftune.adapters.tiled import TiledBank
from weftune.adapters.token_rows import TrainedTokens, trained_tokens
from weftune.adapters.tokens import TOKENS
from weftune.adapters.vector import SHARED, VectorLayout
from weftune.core.batch import Microbatch, Segment, to_device
from weftune.core.shapes import SiteShape, layer_of
from weftune.core.weights import (
    CODED_PARAMETERS,
    FrozenWeight,
    HeadRows,
    HoldsWeight,
    Weight,
    is_coded,
    joined,
    side_by_side,
    stacked,
)
from weftune.errors import AdapterError
from weftune.ops.accumulate import accumulated
from weftune.ops.dropout import step_key
from weftune.ops.experts import ExpertLinear, experts_output
from weftune.ops.lora.choice import Candidates
from weftune.ops.lora.choice_trial import choices_on
from weftune.ops.lora.experts import ExpertSite, Owners, lora_experts, multiplies_at_once
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows, Seat
from weftune.ops.lora.tiling import ProductPlan
from weftune.ops.site import (
    GatheredRows,
    changed_rows,
    scaled_outputs,
    scaled_rows,
    with_rows,
    zero_where_changed,
)

SLOTS = 64
"""Initial number of jobs that the kernels' tables have room for. It is doubled when more jobs are
attached."""


@dataclass(slots=True)
class Aboard:
    """An attached job and its flat vectors: the weights that passes read, and the accumulated gradient."""

    adapter: JobAdapter
    layout: VectorLayout
    slot: int
    weights: Tensor
    gradient: Tensor
    totals: Parameters
    groups: tuple[SiteGroup | ExpertGroup, ...]
    """Groups of sites that have the job's adapter."""
    serial: int
    """Number of the attachment. A job that is attached again has different memory."""
    tiled: bool
    """Whether the tiled route's kernels compute everything that the job's adapter does."""
    gathers: bool
    """Whether a captured pass can apply its adapter to rows found by their indices (`Kind.gathers`)."""
    tiled_linears: bool
    """Whether the tiled route's kernels compute what the adapter does at linears."""
    rows_before: Tensor | None
    """Rows that the job puts before every sample, [rows, D]."""
    prefixes: Mapping[int, LayerPrefix]
    """Layer → the keys and values that the job puts before every sample."""
    tokens: TrainedTokens | None
    """The job's own rows of the embedding."""

    @property
    def keys(self) -> int:
        """Number of keys that the job puts before every sample."""
        return len(next(iter(self.prefixes.values())).keys) if self.prefixes else 0


@dataclass(frozen=True, slots=True)
class LayerPrefix:
    """Keys and values before every sample in one layer, [rows, width of all heads]."""

    site: str
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class SiteGroup:
    """Sites that share their input, with the adapters attached there."""

    sites: tuple[SiteShape, ...]
    frozen: Frozen
    banks: dict[str, SiteBank] = field(default_factory=dict)
    """Kind → bank."""
    tiled: TiledBank | None = None
    """Adapters of all kinds whose form the tiled kernels take. None until the first is attached."""
    adds_residual: bool = False
    """Whether the group's linear is given a residual to add its outputs to."""

    def columns(self) -> Iterator[tuple[str, int, int]]:
        low = 0
        for site in self.sites:
            yield site.name, low, low + site.out_features
            low += site.out_features

    def output(self, x_TK: Tensor, residual_TN: Tensor | None, bound: Pass) -> Tensor:
        """Compute the outputs, with the tiled kernels if an adapter of the group is in their form."""
        if self.tiled is not None:
            return self.tiled.linear(x_TK, self.frozen, residual_TN, bound)
        y_TN = self.frozen.product(x_TK)
        return (y_TN if residual_TN is None else residual_TN + y_TN).to(x_TK.dtype)

    def contest(self, bound: Pass) -> Candidates | None:
        """Return the linear's choices between kernels in a pass. None unless kernels compute all of it."""
        return None if self.tiled is None else self.tiled.contest(self.frozen, self.adds_residual, bound)


@dataclass(slots=True)
class ExpertGroup:
    """The experts of a layer, with the adapters attached there."""

    module: nn.Module
    sites: tuple[SiteShape, ...]
    banks: dict[str, ExpertBank] = field(default_factory=dict)

    def weight(self, site: SiteShape) -> Tensor:
        return cast(Tensor, getattr(self.module, site.name.rpartition(".")[2]))

    def linear(self, site: SiteShape, bound: Pass) -> ExpertLinear:
        parts = [part for bank in self.banks.values() for part in bank.parts(site.name, bound)]
        return ExpertLinear(self.weight(site), parts)

    def site(self, site: SiteShape, banks: Sequence[ExpertBank], device: torch.device) -> ExpertSite:
        """Return the site as the kernels take it, with the adapters of the only bank, if there is one."""
        return ExpertSite(self.weight(site), banks[0].group(site.name, device) if banks else None)

    @property
    def gated(self) -> bool:
        """Whether the kernels support the experts' activation."""
        return getattr(getattr(self.module, "config", None), "hidden_act", None) == "silu"


class Banks:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        sites: Sequence[SiteShape],
        like: Tensor,
        groups: Sequence[Sequence[str]] = (),
        whole_sites: Sequence[SiteShape] | None = None,
        embedding: nn.Module | None = None,
        tied: bool = False,
        tiled: bool = True,
    ) -> None:
        """Attach to the modules of `sites`, the sites that are here; `whole_sites` are those of the whole
        base, if it has more. `embedding` is the module where rows before a sample, and a job's own rows, are
        inserted. It is None if the embedding is on another stage, or if no job has such rows. If it is `tied`
        to the head, a job's own rows are used there, too. `tiled` says whether passes may take the tiled
        route, for which adapters are laid out."""
        self.aboard: dict[str, Aboard] = {}
        self.slots = SLOTS
        self._attached = 0
        self._free: list[int] = []
        """A heap of the slots that detached jobs have freed, all below the slots that were never taken."""
        self._like = like
        self._anchor = torch.zeros((), device=like.device, requires_grad=True)
        self._choices = choices_on(like.device)
        self._compiled: set[Hashable] = set()
        self._pass: Pass | None = None
        self._beside: Pass | None = None
        """The pass with the rows of jobs whose adapters the kernels do not compute."""
        self._owners: Owners | None = None
        """Owners of the pass's rows, computed when the first layer of experts needs them."""
        self._whole_sites = tuple(whole_sites or sites)
        self._divided = len(self._whole_sites) > len(sites)
        mixed = [site for site in sites if site.experts]
        sites = [site for site in sites if not site.experts]
        self._constants: dict[tuple[str, Hashable], Parameters] = {}
        """(kind, key) → constants, kept while an attached job reads them."""
        self._modules = {site.name: modules[site.name] for site in sites}
        shapes = {site.name: site for site in sites}
        grouped = {name for names in groups for name in names}
        alone = [(name,) for name in shapes if name not in grouped]
        self._groups: dict[str, SiteGroup] = {}
        """Name of each site → its group."""
        for names in (*map(tuple, groups), *alone):
            frozen = _stack([self._modules[name] for name in names], shapes[names[0]].fan_in_fan_out)
            group = SiteGroup(tuple(shapes[name] for name in names), frozen)
            self._groups |= dict.fromkeys(names, group)
        for (name,) in alone:
            module = self._modules[name]
            module.forward = partial(self._adapted_forward, name, module.forward)
        self._experts = {path: ExpertGroup(module, own) for path, module, own in _by_module(modules, mixed)}
        """Path of the experts' module → its group."""
        for experts in self._experts.values():
            experts.module.forward = partial(self._mix, experts, experts.module.forward)
        self._embedding, self._tied, self._tiled = embedding, tied, tiled
        if embedding is not None:
            embedding.forward = partial(self._embed, embedding.forward)

    def restore_base(self) -> None:
        """Restore every site's own forward, so that the base is as it was."""
        for module in self._modules.values():
            module.__dict__.pop("forward", None)
        for experts in self._experts.values():
            experts.module.__dict__.pop("forward", None)
        if self._embedding is not None:
            self._embedding.__dict__.pop("forward", None)

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(
        self,
        adapter: JobAdapter,
        layout: VectorLayout,
        weights: Tensor,
        gradient: Tensor,
        read: Parameters | None = None,
        totals: Parameters | None = None,
    ) -> None:
        """Give a job its slot. Passes read the flat vector `weights` and add to the flat `gradient`.

        If those vectors are not on the device, `read` and `totals` are their parameters that are.
        """
        assert weights.dtype == self._like.dtype
        self._refuse_shared(adapter, layout, travels=read is not None)
        kind, spec, slot = kind_named(adapter.spec.kind), adapter.spec, self._free_slot()
        groups: tuple[SiteGroup | ExpertGroup, ...]
        groups = (*self._linear_groups(kind, spec), *self._expert_groups(kind, layout))
        totals = totals or layout.views(gradient)
        views = {**(read or layout.views(weights)), **self._constants_for(spec)}
        # Only the stage with the first layer has these rows.
        before = views.get((SHARED, ROWS)) if kind.rows_before(spec) else None
        assert before is None or self._embedding is not None, "rows before a sample go in at the embedding"
        prefixes = _prefixes(layout, views)
        tiled_parts = self._tiled_parts(kind, adapter, groups, views, totals)
        at_experts = [group for group in groups if isinstance(group, ExpertGroup)]
        tokens = trained_tokens(spec, views, totals)
        assert tokens is None or self._embedding is not None, "rows of a job's own go in at the embedding"
        if self._free:
            heappop(self._free)
        self._attached += 1
        self.aboard[adapter.job] = Aboard(
            adapter=adapter,
            layout=layout,
            slot=slot,
            weights=weights,
            gradient=gradient,
            totals=totals,
            groups=groups,
            serial=self._attached,
            tiled=before is tokens is None
            and not prefixes
            and tiled_parts is not None
            and all(group.banks[kind.name].tiled for group in at_experts),
            gathers=before is tokens is None and not at_experts and kind.gathers(spec),
            tiled_linears=tiled_parts is not None,
            rows_before=before,
            prefixes=prefixes,
            tokens=tokens,
        )
        for group in groups:
            if isinstance(group, ExpertGroup):
                group.banks[kind.name].attach(adapter, views, totals)
            else:
                group.banks[kind.name].attach(adapter, views)
        for linears, parts in tiled_parts or ():
            linears.tiled = linears.tiled or TiledBank(linears.sites, self.slots)
            linears.tiled.attach(adapter.job, slot, parts)

    def _tiled_parts(
        self,
        kind: Kind,
        adapter: JobAdapter,
        groups: Sequence[SiteGroup | ExpertGroup],
        views: Parameters,
        totals: Parameters,
    ) -> list[tuple[SiteGroup, list[TiledPart | None]]] | None:
        """Return the job's adapter at each group of linears in the tiled kernels' form, or None."""
        if not (self._tiled and kind.is_tiled(adapter.spec)):
            return None
        scratch = Scratch(self._like)
        found = [
            (
                group,
                [kind.tiled_part(adapter, SiteTensors(site, views, totals, scratch)) for site in group.sites],
            )
            for group in groups
            if isinstance(group, SiteGroup)
        ]
        # Sites that share their input have one scale for it, or none.
        shared = any(part and part.g_in for group, parts in found for part in parts if len(group.sites) > 1)
        return None if shared else found

    def _linear_groups(self, kind: Kind, spec: Any) -> list[SiteGroup]:
        """Return the groups to which an adapter attaches, each with a bank of its kind."""
        places = [group for site, group in self._groups.items() if kind.adapts(spec, site)]
        groups = list({id(group): group for group in places}.values())
        for group in groups:
            if kind.name not in group.banks:
                group.banks[kind.name] = kind.bank(group.sites)
        return groups

    def _expert_groups(self, kind: Kind, layout: VectorLayout) -> list[ExpertGroup]:
        named = {parameter.site.rpartition(".")[0] for parameter in layout.parameters}
        groups = [group for path, group in self._experts.items() if path in named]
        for group in groups:
            if kind.name not in group.banks:
                group.banks[kind.name] = kind.expert_bank(group.sites)
        return groups

    def _refuse_shared(self, adapter: JobAdapter, layout: VectorLayout, travels: bool) -> None:
        """Refuse parameters shared by all sites if not all sites are here: their gradient is a sum over all
        sites. Rows before a sample get their gradient at the embedding alone, and so do rows of the embedding
        unless the head uses them, too."""
        shared = [parameter.name for parameter in layout.parameters if parameter.site == SHARED]
        in_both = self._tied and any(parameter.name == TOKENS for parameter in layout.parameters)
        if not in_both and all(name == ROWS for name in shared):
            return
        where = None
        if self._divided:
            where = "where the base is divided among workers; train it on one"
        elif travels:
            where = "where adapters are kept in host memory; train fewer jobs at once"
        if where:
            what = "parameters that all layers share"
            if in_both:
                what = "trainable_token_indices, whose rows the embedding of this base shares with its head"
            job, kind = adapter.job, adapter.spec.kind
            raise AdapterError(f"job {job}: a {kind} adapter has {what}, which cannot be trained {where}")

    def detach(self, job: str) -> None:
        aboard = self.aboard.pop(job)
        heappush(self._free, aboard.slot)
        for group in aboard.groups:
            group.banks[aboard.adapter.spec.kind].detach(job)
            if aboard.tiled_linears and isinstance(group, SiteGroup) and group.tiled is not None:
                group.tiled.detach(job)
        if self._constants:
            read = {_constants_of(one.adapter.spec) for one in self.aboard.values()}
            self._constants = {key: found for key, found in self._constants.items() if key in read}

    def _constants_for(self, spec: Any) -> Parameters:
        """Return the kind's constants for all sites, computed once for all jobs that share them."""
        if (key := _constants_of(spec)) is None:
            return {}
        if key not in self._constants:
            made = kind_named(spec.kind).constants(spec, self._whole_sites, self._like)
            self._constants[key] = {(SHARED, name): value for name, value in made.items()}
        return self._constants[key]

    def write(self, job: str, master: Tensor) -> None:
        """Make passes read the values of `master`, in the base's dtype."""
        self.aboard[job].weights.copy_(master)

    def zero(self, job: str) -> None:
        """Zero the weights of a failed job until it is detached, so that its values cannot spread."""
        self.aboard[job].weights.zero_()

    def _free_slot(self) -> int:
        """Return the lowest free slot."""
        slot = self._free[0] if self._free else len(self.aboard)
        if slot >= self.slots:
            self.slots *= 2
            for bank in self._tiled_banks():
                bank.resize(self.slots)
        return slot

    def _tiled_banks(self) -> Iterator[TiledBank]:
        return (group.tiled for group in self._distinct() if group.tiled is not None)

    def _distinct(self) -> list[SiteGroup]:
        return list({id(group): group for group in self._groups.values()}.values())

    def limits(self) -> tuple[object, ...]:
        """Return what a captured pass depends on besides its rows: slots, ranks, and possible dropout."""
        return self.slots, tuple(bank.limits() for bank in self._tiled_banks())

    def capturable(self, microbatch: Microbatch, gathers: bool = False) -> bool:
        """Whether a captured pass can serve the microbatch. A pass is captured without knowing which jobs'
        rows it will have, so kinds whose form the kernels do not take would be missing from it, except for
        those whose rows it `gathers` by their indices."""
        found = (aboard for aboard in map(self._through, microbatch.segments) if aboard is not None)
        return all(aboard.tiled or (gathers and aboard.gathers) for aboard in found)

    def gathered(self, microbatch: Microbatch) -> list[tuple[Segment, Aboard]]:
        """Return the jobs whose rows in the microbatch a captured pass has to gather, each with one run."""
        found: dict[str, tuple[Segment, Aboard]] = {}
        for segment in microbatch.segments:
            if (aboard := self._through(segment)) is None or aboard.tiled:
                continue
            first, _ = found.get(segment.job, (segment, aboard))
            found[segment.job] = replace(first, stop=segment.stop), aboard
        return list(found.values())

    def _through(self, segment: Segment) -> Aboard | None:
        """Return the job whose adapter the rows of a segment pass through."""
        return None if segment.through is None else self.aboard.get(segment.through)

    # -- passes ------------------------------------------------------------------------------------------

    def _totals(self, microbatch: Microbatch) -> dict[str, Parameters]:
        """Return the accumulators of each job's gradients."""
        found = map(self._through, microbatch.segments)
        return {aboard.adapter.job: aboard.totals for aboard in found if aboard is not None}

    def seats(self, microbatch: Microbatch) -> list[Seat]:
        """Return the slots of the rows, as the tiled kernels need them: rows of a slot are contiguous.

        Every pass calls this before it begins, so the kernels' tables are brought up to date here, in one
        copy no matter how many jobs were attached and detached.
        """
        for bank in self._tiled_banks():
            bank.settle()
        seats: list[Seat] = []
        for segment in microbatch.segments:
            if (aboard := self._through(segment)) is None:
                continue
            key = step_key(aboard.adapter.seed, segment.step)
            if seats and (seats[-1].slot, seats[-1].stop) == (aboard.slot, segment.start):
                seats[-1] = replace(seats[-1], stop=segment.stop)
            else:
                seats.append(Seat(segment.start, segment.stop, aboard.slot, key))
        return seats

    @contextmanager
    def bound(
        self,
        microbatch: Microbatch,
        route: Route,
        training: bool,
        rows: Rows | None = None,
        gathered: Mapping[str, GatheredRows] | None = None,
    ) -> Iterator[None]:
        """Apply the adapters of `microbatch` in every forward inside, also in recomputation. The rows of the
        jobs in `gathered` are found by their indices, not by their segments."""
        assert self._pass is None, "a pass is already bound"
        if route is Route.tiled and rows is None:
            rows = Rows.empty(microbatch.rows, self.slots, self._like.device)
            rows.fill(self.seats(microbatch), microbatch.token_index_T.cpu().numpy())
        own = all(segment.through in (segment.job, None) for segment in microbatch.segments)
        assert own or not training, "rows are trained through their own adapter only, or through none"
        totals = self._totals(microbatch)
        self._pass = Pass(
            microbatch, route, training, self._anchor, totals, rows, self._choices, gathered or {}
        )
        self._beside = self._beside_kernels(self._pass)
        try:
            if rows is not None and training:
                self._compile_ahead(self._pass, (microbatch.rows, self.limits()))
            yield
        finally:
            self._pass = self._beside = self._owners = None

    def _beside_kernels(self, bound: Pass) -> Pass:
        """Return the pass with only the rows of jobs whose adapters at linears the kernels do not compute."""
        plain = [
            segment
            for segment in bound.microbatch.segments
            if (aboard := self._through(segment)) is not None and not aboard.tiled_linears
        ]
        return replace(bound, microbatch=replace(bound.microbatch, segments=tuple(plain)))

    def force_order(self, order: ProductPlan) -> None:
        """Force the tiled route to take one order at all sites, for measurements."""
        self._choices.forced = order

    def _compile_ahead(self, bound: Pass, launches: Hashable) -> None:
        """Compile what the sites of a pass will launch, unless an earlier pass had the same `launches`."""
        if launches in self._compiled or not self._choices.compiles:
            return
        self._compiled.add(launches)
        found = (group.contest(bound) for group in self._distinct())
        self._choices.compile_ahead(one for one in found if one is not None)

    def linear(self, site: str, adds_residual: bool = False) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return (x_TK, residual_TN or None) → residual + the outputs of all sites in the group, side by
        side."""
        self._groups[site].adds_residual = adds_residual
        return partial(self._linear, self._groups[site])

    def _adapted_forward(self, name: str, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        group = self._groups[name]
        if self._pass is None or not group.banks:
            return plain(x)
        return self._linear(group, x.flatten(0, -2), None).view(*x.shape[:-1], -1)

    def _mix(
        self,
        group: ExpertGroup,
        plain: Callable[..., Tensor],
        x_TD: Tensor,
        chosen_Tk: Tensor,
        weights_Tk: Tensor,
    ) -> Tensor:
        """Run the experts' own forward, unless a job in the pass has adapters on them or kernels are
        available that multiply all experts at once."""
        bound = self._pass
        banks = [] if bound is None else [bank for bank in group.banks.values() if bank.present(bound)]
        if bound is not None and bound.route is Route.tiled and len(banks) <= 1 and group.gated:
            sites = [group.site(site, banks, x_TD.device) for site in group.sites]
            if banks or all(map(multiplies_at_once, sites)):
                owners = self._owners = self._owners or _owners(bound.microbatch, len(x_TD), x_TD.device)
                numbers_J = banks[0].numbers(owners.jobs, x_TD.device) if banks else None
                return lora_experts(x_TD, chosen_Tk, weights_Tk, bound.anchor, sites, owners, numbers_J)
        if bound is None or not banks:
            return plain(x_TD, chosen_Tk, weights_Tk)
        gate_up, down = (group.linear(site, bound) for site in group.sites)
        activation = cast(Callable[[Tensor], Tensor], group.module.act_fn)
        return experts_output(x_TD, chosen_Tk, weights_Tk, gate_up, down, activation)

    def _embed(self, plain: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Compute the embedding, with adapters' rows before their samples and the rows of their tokens."""
        h, bound = plain(tokens), self._pass
        for segment in () if bound is None else bound.microbatch.segments:
            aboard = self._through(segment)
            if bound is None or aboard is None:
                continue
            if aboard.rows_before is not None:
                total = bound.totals[aboard.adapter.job][SHARED, ROWS]
                rows_ID = accumulated(aboard.rows_before, total, bound.anchor)
                h = _with_rows_before(h, rows_ID, bound.microbatch, segment)
            if aboard.tokens is not None and self._embedding is not None:
                h = aboard.tokens.embedded(h, bound.microbatch, segment, self._embedding, bound.anchor)
        return h

    def rows_in_head(self, segment: Segment) -> HeadRows | None:
        """Return the rows that a segment's adapter puts in place of rows of the head, outside any pass."""
        aboard = self._through(segment)
        if not self._tied or aboard is None or aboard.tokens is None:
            return None
        return aboard.tokens.in_head(self._anchor)

    def keys_before(self, microbatch: Microbatch) -> list[tuple[Segment, int]]:
        """Return the segments whose jobs put keys and values before their samples, each with their number."""
        found = [(segment, self._through(segment)) for segment in microbatch.segments]
        return [(segment, aboard.keys) for segment, aboard in found if aboard is not None and aboard.keys]

    def read_keys(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of each of these segments in one layer, in the pass that is bound."""
        bound = self._pass
        assert bound is not None, "outside a pass nobody has keys before samples"
        found = []
        for segment, _ in self.keys_before(bound.microbatch):
            aboard = self._through(segment)
            assert aboard is not None
            prefix, totals = aboard.prefixes[layer], bound.totals[aboard.adapter.job]
            keys = accumulated(prefix.keys, totals[prefix.site, KEYS], bound.anchor)
            values = accumulated(prefix.values, totals[prefix.site, VALUES], bound.anchor)
            found.append((keys, values))
        return found

    def _linear(self, group: SiteGroup, x_TK: Tensor, residual_TN: Tensor | None) -> Tensor:
        bound = self._pass
        if bound is not None and bound.route is Route.tiled:
            found = self._by_kernels(group, x_TK, residual_TN, bound)
            if found is not None:
                return found
        kinds = [] if bound is None else [bank for bank in group.banks.values() if bank.segments(bound)]
        pieces = []
        for name, low, high in group.columns():
            frozen = group.frozen.part(low, high)
            parts = [] if bound is None else [bank.parts(name, frozen, bound) for bank in kinds]
            pieces.append(_site_output(frozen, x_TK, parts))
        y_TN = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return (y_TN if residual_TN is None else residual_TN + y_TN).to(x_TK.dtype)

    def _by_kernels(
        self, group: SiteGroup, x_TK: Tensor, residual_TN: Tensor | None, bound: Pass
    ) -> Tensor | None:
        """Return what the kernels compute, with the outputs of other jobs' rows changed afterwards. None if
        the adapter of such a job takes part in the product itself."""
        beside = self._beside
        assert beside is not None
        banks = [bank for bank in group.banks.values() if bank.segments(beside)]
        if not banks:
            return group.output(x_TK, residual_TN, bound)
        columns = list(group.columns())
        parts = [
            [bank.parts(name, group.frozen.part(low, high), beside) for bank in banks]
            for name, low, high in columns
        ]
        if any(part.add or part.g_in or part.g_out for own in parts for part in own):
            return None
        changes = [
            (rows, slice(low, high), change)
            for (_, low, high), own in zip(columns, parts, strict=True)
            for part in own
            for rows, change in part.after
        ]
        around_TN = None if residual_TN is None else zero_where_changed(residual_TN, changes)
        return changed_rows(group.output(x_TK, around_TN, bound), residual_TN, changes, bound.anchor)


def _by_module(
    modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]
) -> Iterator[tuple[str, nn.Module, tuple[SiteShape, ...]]]:
    """Yield the sites of experts, layer by layer."""
    for path, own in groupby(sites, key=lambda site: site.name.rpartition(".")[0]):
        together = tuple(own)
        yield path, modules[together[0].name], together


def _owners(microbatch: Microbatch, rows: int, device: torch.device) -> Owners:
    jobs: dict[str | None, int] = {None: 0}
    owner_T = torch.zeros(rows, dtype=torch.int32)
    for segment in microbatch.segments:
        owner_T[segment.rows] = jobs.setdefault(segment.through, len(jobs))
    return Owners(to_device(owner_T, device), tuple(jobs))


def _site_output(frozen: Frozen, x_TK: Tensor, parts: Sequence[SiteParts]) -> Tensor:
    """Compute after(g_out ⊙ ((x ⊙ g_in)Wᵀ + what the kinds add) + b); for several, in at least float32."""
    g_in = [scale for part in parts for scale in part.g_in]
    g_out = [scale for part in parts for scale in part.g_out]
    alone = len(parts) <= 1 and not g_in and not g_out
    y_TN = frozen.product(x_TK) if alone else frozen.summed(scaled_rows(x_TK, g_in))
    for part in parts:
        if part.add is not None:
            y_TN = part.add(x_TK, y_TN)
    y_TN = y_TN if alone else scaled_outputs(y_TN, frozen.bias_N, g_out)
    behind = []
    for rows, change in (one for part in parts for one in part.after):
        assert isinstance(rows, slice), "rows are gathered where kernels run"
        behind.append((rows, change(y_TN[rows])))
    return with_rows(y_TN, behind) if behind else y_TN


def _with_rows_before(h: Tensor, rows_ID: Tensor, microbatch: Microbatch, segment: Segment) -> Tensor:
    """Return h with these rows at the beginning of every sample of the segment."""
    stops = accumulate(microbatch.sample_lengths)
    starts = [stop - length for stop, length in zip(stops, microbatch.sample_lengths, strict=True)]
    own = [start for start in starts if segment.start <= start < segment.stop]
    places = (torch.tensor(own)[:, None] + torch.arange(len(rows_ID))).flatten().to(h.device)
    flat_TD = h.flatten(0, -2).index_copy(0, places, rows_ID.repeat(len(own), 1).to(h.dtype))
    return flat_TD.view(h.shape)


def _prefixes(layout: VectorLayout, views: Parameters) -> dict[int, LayerPrefix]:
    found = {}
    for parameter in layout.parameters:
        layer, site = layer_of(parameter.site), parameter.site
        if parameter.name == KEYS and layer is not None:
            found[layer] = LayerPrefix(site, views[site, KEYS], views[site, VALUES])
    return found


def _constants_of(spec: Any) -> tuple[str, Hashable] | None:
    key = kind_named(spec.kind).constants_key(spec)
    return None if key is None else (spec.kind, key)


def _stack(modules: Sequence[nn.Module], fan_in_fan_out: bool) -> Frozen:
    """Return the weights of the modules as one. Of several, each module keeps a view of the stack."""
    biases = [cast(Tensor | None, module.bias) for module in modules]
    has_bias = {bias is not None for bias in biases}
    assert len(has_bias) == 1, "either all sites of a group have a bias or none"
    bias_N = _laid_together(modules, "bias") if True in has_bias else None
    if any(isinstance(module, HoldsWeight) for module in modules):
        return Frozen(_held_together(modules), bias_N)
    if not fan_in_fan_out:
        return Frozen(_laid_together(modules, "weight"), bias_N)
    (module,) = modules
    return Frozen(cast(Tensor, module.weight).T, bias_N)


def _held_together(modules: Sequence[nn.Module]) -> FrozenWeight:
    """Return the weights of modules of which some are not plain matrices, stacked."""
    outputs = [cast(int, module.out_features) for module in modules]
    weights: list[Weight] = [
        module.frozen_weight() if isinstance(module, HoldsWeight) else cast(Tensor, module.weight)
        for module in modules
    ]
    if all(map(is_coded, weights)):
        for name, dim in CODED_PARAMETERS.items():
            _lay_codes_together(modules, name, dim)
    return stacked(weights, outputs)


def _lay_codes_together(modules: Sequence[nn.Module], name: str, dim: int) -> None:
    """Make the modules' parameters of that name views of one tensor. Parameters that share their memory with
    others, as streamed ones do, stay where they are."""
    parts = [cast(Tensor, getattr(module, name)) for module in modules]
    alone = all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    if len(parts) == 1 or not alone:
        return
    views = joined(parts, dim).split([part.shape[dim] for part in parts], dim)
    for module, view in zip(modules, views, strict=True):
        setattr(module, name, nn.Parameter(view, requires_grad=False))


def _laid_together(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Return the modules' parameters of that name as one. If they have to be moved, each becomes a view."""
    parts = [cast(Tensor, getattr(module, name)) for module in modules]
    if len(parts) == 1:
        return parts[0]
    if (lying := side_by_side(parts, dim=0)) is not None:
        return lying
    together = torch.cat(parts)
    for module, part in zip(modules, together.split([len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return together
