"""The adapters of all attached jobs on one base. In each pass, every job's adapter is applied to the job's
rows of the microbatch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor, nn

from weftune.adapters.kind import JobAdapter, Parameters, Pass, SiteTensors, TiledPart
from weftune.adapters.plain import PlainKind
from weftune.adapters.registry import get_kind
from weftune.adapters.sites import CurrentPass, ExpertGroup, SiteGroup, expert_groups, site_groups
from weftune.adapters.target import KEYS, ROWS, TOKENS, VALUES
from weftune.adapters.tiled import TiledBank
from weftune.adapters.token_rows import TrainedTokens, insert_rows_before, trained_tokens
from weftune.adapters.vector import SHARED, VectorLayout
from weftune.core.batch import Microbatch, Segment
from weftune.core.shapes import SiteShape, layer_number
from weftune.core.weights import HeadRows
from weftune.errors import AdapterError
from weftune.ops.accumulate import accumulate_gradient
from weftune.ops.dropout import step_key
from weftune.ops.fallback import has_failed
from weftune.ops.lora.choice_trial import device_choices
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.ops.lora.tiled import OP
from weftune.ops.site import GatheredRows

SLOTS = 64
"""Initial number of jobs for which the kernels' tables have room. The tables are doubled when more jobs are
attached."""


@dataclass(slots=True)
class AttachedJob:
    """A job whose adapter is applied in passes, with its weights and its accumulated gradient as flat
    vectors."""

    adapter: JobAdapter
    layout: VectorLayout
    slot: int
    weights: Tensor
    gradient: Tensor
    read_parameters: Parameters
    """Tensors on the device that passes read: the parameters in `weights`, and constants of the adapter's
    kind (such as VeRA's random matrices)."""
    totals: Parameters
    """Views of the gradient vector on the device, by parameter, to which the backward adds."""
    groups: tuple[SiteGroup | ExpertGroup, ...]
    """Groups of linears that share their input, and groups of a layer's experts, that the job's adapter
    changes."""
    serial: int
    """Serial number of this attachment of a job to the base. A job that is attached again gets a new number,
    since its tensors may have moved to other addresses."""
    version: int
    """Version number of the weights that passes read: the step that computed them, a negative number for a
    mean of several steps' weights, or 0 without training."""
    is_tiled: bool
    """Whether the tiled kernels compute all parts of the job's adapter."""
    gathers_rows: bool
    """Whether a CUDA graph can apply the adapter to rows that are selected by index (`PlainKind.gathers`)."""
    has_tiled_linears: bool
    """Whether the tiled kernels compute the job's adapter at all linears. Parts of the adapter outside
    linears, such as virtual tokens, do not matter."""
    rows_before: Tensor | None
    """Embeddings of the virtual tokens that the job inserts before every sample, [rows, D]. None if it
    inserts none."""
    prefix_sites: Mapping[int, str]
    """Maps the number of each layer with prefix keys and values to the name of the linear under which they
    are stored."""
    tokens: TrainedTokens | None
    """The trained rows of the embedding, one for each trained token. None if the job trains none."""

    @property
    def prefix_keys(self) -> int:
        """Number of prefix keys (trained attention keys) that the job inserts before every sample in every
        layer."""
        return (
            len(self.read_parameters[next(iter(self.prefix_sites.values())), KEYS])
            if self.prefix_sites
            else 0
        )


class Banks:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        sites: Sequence[SiteShape],
        example: Tensor,
        groups: Sequence[Sequence[str]] = (),
        whole_sites: Sequence[SiteShape] | None = None,
        embedding: nn.Module | None = None,
        tied: bool = False,
        tiled: bool = True,
        sum_over_shards: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Replace the forwards of the modules named by `sites`, the linears and experts on this worker.
        `whole_sites` are those of the whole base, if it has more. `groups` are names of linears that share
        their input. `embedding` is the module that inserts virtual tokens and trained token embeddings; None
        if it is on another stage or no job has such rows. If the embedding is `tied` to the head, trained
        rows are used there, too. `tiled` says whether passes may use the tiled kernels. `sum_over_shards` is
        given if linears are divided among workers."""
        self.attached: dict[str, AttachedJob] = {}
        self.slots = SLOTS
        self.choices = device_choices(example.device)
        """Choices between methods of the kernels, measured on this device."""
        self._attachments = 0
        self._freed_slots: list[int] = []
        """Heap of the slots (indices in the kernels' tables) freed by detached jobs. All are lower than the
        slots that were never used."""
        self._like, self._embedding, self._tied, self._tiled = example, embedding, tied, tiled
        self.anchor = torch.zeros((), device=example.device, requires_grad=True)
        """A scalar that requires a gradient but never gets one. It makes the outputs of linears require a
        gradient."""
        self._compiled_launches: set[Hashable] = set()
        self._sum_over_shards = sum_over_shards
        self._whole_sites = tuple(whole_sites or sites)
        self._is_partial = len(self._whole_sites) > len(sites)
        self._constants: dict[tuple[str, Hashable], Parameters] = {}
        """Maps (kind, key) to constant tensors that jobs share, such as VeRA's random matrices. An entry
        exists while an attached job uses it."""
        self._current = CurrentPass()
        self._tiles: dict[int, CurrentPass] = {}
        """Maps the first row of each range of rows for which `bind_tile` has been called in the bound pass to
        a pass over that range alone."""
        self._groups = site_groups(modules, sites, groups, self._current)
        self._all_groups = list({id(group): group for group in self._groups.values()}.values())
        self._experts = expert_groups(modules, sites, self._current)
        self._replaced_modules: list[nn.Module] = []
        """Modules of the base whose forward has been replaced."""
        grouped = {name for names in groups for name in names}
        for name, group in self._groups.items():
            if name not in grouped:
                self._replace_forward(modules[name], group.forward)
        for experts in self._experts.values():
            self._replace_forward(experts.module, experts.forward)
        if embedding is not None:
            self._replace_forward(embedding, self._embed_tokens)

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Replace a module's forward by `forward`, which gets the original forward as its first argument."""
        module.forward = partial(forward, module.forward)
        self._replaced_modules.append(module)

    def restore_base(self) -> None:
        """Restore the original forward of every module."""
        for module in self._replaced_modules:
            module.__dict__.pop("forward", None)

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
        """Attach a job. Passes read the flat vector `weights` and add gradients to the flat vector
        `gradient`. If these are on the host, `read` and `totals` are the corresponding tensors on the
        device."""
        assert weights.dtype == self._like.dtype
        self._refuse_shared_parameters(adapter, layout, in_host_memory=read is not None)
        kind, spec, slot = get_kind(adapter.spec.kind), adapter.spec, self._free_slot()
        linears = self._linear_groups(kind, spec)
        at_experts = self._expert_groups(kind, layout)
        totals = totals or layout.parameter_views(gradient)
        views = {**(read or layout.parameter_views(weights)), **self._shared_constants(spec)}
        # Only the stage with the first layer has these rows.
        before = views.get((SHARED, ROWS)) if kind.rows_before(spec) else None
        tokens = trained_tokens(spec, views, totals)
        inserted = before is not None or tokens is not None
        assert not inserted or self._embedding is not None, "rows of a job's own go in at the embedding"
        prefix_sites = {
            layer: parameter.site
            for parameter in layout.parameters
            if parameter.name == KEYS and (layer := layer_number(parameter.site)) is not None
        }
        tiled_parts = self._tiled_parts(kind, adapter, linears, views, totals)
        if self._freed_slots:
            heappop(self._freed_slots)
        self._attachments += 1
        self.attached[adapter.job] = AttachedJob(
            adapter=adapter,
            layout=layout,
            slot=slot,
            weights=weights,
            gradient=gradient,
            read_parameters=views,
            totals=totals,
            groups=(*linears, *at_experts),
            serial=self._attachments,
            version=0,
            is_tiled=not (inserted or prefix_sites or at_experts) and tiled_parts is not None,
            gathers_rows=not inserted and not at_experts and kind.gathers(spec),
            has_tiled_linears=tiled_parts is not None,
            rows_before=before,
            prefix_sites=prefix_sites,
            tokens=tokens,
        )
        for group in linears:
            group.banks[kind.name].attach(adapter, views)
        for experts in at_experts:
            experts.banks[kind.name].attach(adapter, views, totals)
        for group, parts in zip(linears, tiled_parts or (), strict=False):
            group.tiled = group.tiled or TiledBank(group.sites, self.slots)
            group.tiled.attach(adapter.job, slot, parts)

    def _tiled_parts(
        self,
        kind: PlainKind,
        adapter: JobAdapter,
        groups: Sequence[SiteGroup],
        views: Parameters,
        totals: Parameters,
    ) -> list[list[TiledPart | None]] | None:
        """Return, for every linear of each group, the adapter in the form that the tiled kernels compute.
        None if the kernels cannot compute this adapter."""
        if not (self._tiled and kind.is_tiled(adapter.spec)):
            return None
        scratch: dict[Hashable, Tensor] = {}
        found = [
            [kind.tiled_part(SiteTensors(adapter, site, views, totals, scratch)) for site in group.sites]
            for group in groups
        ]
        # Sites that share their input have one scale for it, or none.
        shared = any(part and part.g_in for parts in found if len(parts) > 1 for part in parts)
        return None if shared or _has_partial_norms(groups, found) else found

    def _linear_groups(self, kind: PlainKind, spec: Any) -> list[SiteGroup]:
        """Return the groups of linears that an adapter changes. Create the banks (parameters of all adapters
        of a kind) that do not exist there yet."""
        adapted = {id(group) for site, group in self._groups.items() if kind.adapts(spec, site)}
        groups = [group for group in self._all_groups if id(group) in adapted]
        for group in groups:
            if kind.name not in group.banks:
                group.banks[kind.name] = kind.bank(group.sites)
        return groups

    def _expert_groups(self, kind: PlainKind, layout: VectorLayout) -> list[ExpertGroup]:
        named = {parameter.site.rpartition(".")[0] for parameter in layout.parameters}
        groups = [group for path, group in self._experts.items() if path in named]
        for group in groups:
            if kind.name not in group.banks:
                group.banks[kind.name] = kind.expert_bank(group.sites)
        return groups

    def _refuse_shared_parameters(
        self, adapter: JobAdapter, layout: VectorLayout, in_host_memory: bool
    ) -> None:
        """Raise AdapterError if all linears share parameters of the adapter, whose gradient is a sum over all
        linears, and the base is divided among workers or adapters are in host memory. Virtual tokens are
        allowed, since they get their gradient at the embedding alone. Trained rows of the embedding are
        allowed unless they are tied to the head."""
        names = {parameter.name for parameter in layout.parameters if parameter.site == SHARED}
        in_both = self._tied and any(parameter.name == TOKENS for parameter in layout.parameters)
        if not (self._is_partial or in_host_memory) or (not in_both and names <= {ROWS}):
            return
        where = "where adapters are kept in host memory; train fewer jobs at once"
        if self._is_partial:
            where = "where the base is divided among workers; train it on one"
        what = "parameters that all layers share"
        if in_both:
            what = "trainable_token_indices, whose rows the embedding of this base shares with its head"
        job, kind = adapter.job, adapter.spec.kind
        raise AdapterError(f"job {job}: a {kind} adapter has {what}, which cannot be trained {where}")

    def detach(self, job: str) -> None:
        attached = self.attached.pop(job)
        heappush(self._freed_slots, attached.slot)
        for group in attached.groups:
            group.banks[attached.adapter.spec.kind].detach(job)
            if attached.has_tiled_linears and isinstance(group, SiteGroup) and group.tiled is not None:
                group.tiled.detach(job)
        if self._constants:
            read = {_constants_key(one.adapter.spec) for one in self.attached.values()}
            self._constants = {key: found for key, found in self._constants.items() if key in read}

    def _shared_constants(self, spec: Any) -> Parameters:
        """Return the constants of the adapter's kind, such as VeRA's random matrices, computed once for all
        jobs that share them."""
        if (key := _constants_key(spec)) is None:
            return {}
        if key not in self._constants:
            drawn = get_kind(spec.kind).constants(spec, self._whole_sites, self._like)
            self._constants[key] = {(SHARED, name): value for name, value in drawn.items()}
        return self._constants[key]

    def _free_slot(self) -> int:
        """Return the lowest free slot (index in the kernels' tables), after doubling full tables."""
        slot = self._freed_slots[0] if self._freed_slots else len(self.attached)
        if slot >= self.slots:
            self.slots *= 2
            for bank in self._tiled_banks():
                bank.resize(self.slots)
        return slot

    def _tiled_banks(self) -> Iterator[TiledBank]:
        return (group.tiled for group in self._all_groups if group.tiled is not None)

    # -- passes ------------------------------------------------------------------------------------------

    def limits(self) -> tuple[object, ...]:
        """Return the properties of the attached jobs on which a CUDA graph depends, such as the size of the
        kernels' tables, the largest rank, and whether there is dropout. A graph can be replayed while these
        properties are unchanged."""
        return self.slots, tuple(bank.limits() for bank in self._tiled_banks())

    def is_capturable(self, microbatch: Microbatch, gathers_rows: bool = False) -> bool:
        """Return whether a CUDA graph can run the microbatch. The graph can later be replayed for other jobs,
        so the tiled kernels must compute every adapter or, if `gathers_rows`, the adapter must apply to rows
        selected by index. False if kernels have failed, since plain torch reads each job's rows on the
        host."""
        if has_failed(OP):
            return False
        found = self._segments(microbatch)
        return all(attached.is_tiled or (gathers_rows and attached.gathers_rows) for _, attached in found)

    def is_decode_capturable(self, microbatch: Microbatch) -> bool:
        """Return whether a CUDA graph can run a decode step with this microbatch. This requires that the
        tiled kernels compute every adapter that changes linears, and that no job has trained token
        embeddings, which are looked up on the host."""
        found = [attached for _, attached in self._segments(microbatch)]
        return not has_failed(OP) and all(
            attached.tokens is None and (attached.has_tiled_linears or not attached.groups)
            for attached in found
        )

    def gathered_segments(self, microbatch: Microbatch) -> list[tuple[Segment, AttachedJob]]:
        """Return the jobs whose rows a CUDA graph selects by index. Each has a single segment, the range from
        the job's first row to its last."""
        segments_by_job: dict[str, tuple[Segment, AttachedJob]] = {}
        for segment, attached in self._segments(microbatch):
            if not attached.is_tiled:
                first, _ = segments_by_job.get(segment.job, (segment, attached))
                segments_by_job[segment.job] = replace(first, stop=segment.stop), attached
        return list(segments_by_job.values())

    def _segments(self, microbatch: Microbatch) -> Iterator[tuple[Segment, AttachedJob]]:
        """Yield each segment (range of one job's rows) that an adapter changes, with the attached job whose
        adapter this is."""
        for segment in microbatch.segments:
            if (
                segment.adapter_job is not None
                and (attached := self.attached.get(segment.adapter_job)) is not None
            ):
                yield segment, attached

    def slot_rows(self, microbatch: Microbatch) -> list[SlotRows]:
        """Return each job's range of rows with its slot (index in the tables of the tiled kernels). Before
        that, copy changed tables to the device, once for all jobs that were attached or detached since the
        last pass."""
        for bank in self._tiled_banks():
            bank.send_tables()
        slot_ranges: list[SlotRows] = []
        for segment, attached in self._segments(microbatch):
            key = step_key(attached.adapter.seed, segment.step)
            if slot_ranges and (slot_ranges[-1].slot, slot_ranges[-1].stop) == (attached.slot, segment.start):
                slot_ranges[-1] = replace(slot_ranges[-1], stop=segment.stop)
            else:
                slot_ranges.append(SlotRows(segment.start, segment.stop, attached.slot, key))
        return slot_ranges

    @contextmanager
    def bind(
        self,
        microbatch: Microbatch,
        route: Route,
        training: bool,
        rows: Rows | None = None,
        gathered_rows: Mapping[str, GatheredRows] | None = None,
        in_tiles: bool = False,
    ) -> Iterator[None]:
        """Return a context in which every forward applies the adapters of `microbatch`, also when it is
        recomputed. The rows of the jobs in `gathered_rows` are selected by index, not as a range. If
        `in_tiles`, linears run only within `bind_tile`."""
        assert self._current.active_pass is None, "a pass is already bound"
        own = all(segment.adapter_job in (segment.job, None) for segment in microbatch.segments)
        assert own or not training, "rows are trained through their own adapter only, or through none"
        if route is Route.tiled and rows is None and not in_tiles:
            rows = self._rows(microbatch)
        self._current.replace(self._make_pass(microbatch, route, training, rows, gathered_rows))
        try:
            yield
        finally:
            self._current.replace(CurrentPass())
            self._tiles.clear()

    @contextmanager
    def bind_tile(self, rows: slice) -> Iterator[None]:
        """Return a context in which forwards compute only the rows `rows` of the bound pass, with the
        adapters of these rows."""
        active_pass = self._current.active_pass
        assert active_pass is not None, "no pass is bound"
        if rows.start not in self._tiles:
            part = active_pass.microbatch.part(rows)
            own = self._rows(part) if active_pass.route is Route.tiled else None
            self._tiles[rows.start] = self._make_pass(part, active_pass.route, active_pass.training, own)
        whole = self._current.replace(self._tiles[rows.start])
        try:
            yield
        finally:
            self._current.replace(whole)

    @contextmanager
    def graph_only(self) -> Iterator[None]:
        """Return a context in which linears may return arbitrary outputs, because only their backward is
        needed."""
        active_pass, untiled = self._current.active_pass, self._current.untiled_pass
        assert active_pass is not None, "no pass is bound"
        whole = self._current.replace(CurrentPass(replace(active_pass, graph_only=True), untiled))
        try:
            yield
        finally:
            self._current.replace(whole)

    def _rows(self, microbatch: Microbatch) -> Rows:
        rows = Rows.empty(microbatch.rows, self.slots, self._like.device)
        rows.fill(self.slot_rows(microbatch), microbatch.token_index_T.cpu().numpy())
        return rows

    def _make_pass(
        self,
        microbatch: Microbatch,
        route: Route,
        training: bool,
        rows: Rows | None,
        gathered_rows: Mapping[str, GatheredRows] | None = None,
    ) -> CurrentPass:
        found = list(self._segments(microbatch))
        totals = {attached.adapter.job: attached.totals for _, attached in found}
        active_pass = Pass(
            microbatch,
            route,
            training,
            self.anchor,
            totals,
            rows,
            self.choices,
            gathered_rows or {},
            self._sum_over_shards,
        )
        plain = tuple(segment for segment, attached in found if not attached.has_tiled_linears)
        if rows is not None and training:
            self._compile_ahead(active_pass, (microbatch.rows, self.limits()))
        return CurrentPass(active_pass, replace(active_pass, microbatch=replace(microbatch, segments=plain)))

    def _compile_ahead(self, active_pass: Pass, launch_key: Hashable) -> None:
        """Compile the kernels that the linears of a pass launch. Do nothing if an earlier pass had the same
        `launch_key`."""
        if launch_key in self._compiled_launches or not self.choices.can_compile:
            return
        self._compiled_launches.add(launch_key)
        found = (group.timing_trial(active_pass) for group in self._all_groups)
        self.choices.compile_ahead(one for one in found if one is not None)

    def linear(self, site: str, adds_residual: bool = False) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return the function that computes the group of linears that `site` belongs to. It maps (x_TK,
        residual_TN or None) to the residual plus the linears' outputs."""
        self._groups[site].adds_residual = adds_residual
        return self._groups[site].linear

    def _embed_tokens(self, plain_forward: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Compute the embeddings of `tokens`, with the virtual tokens and the trained token embeddings of the
        adapters."""
        h, active_pass = plain_forward(tokens), self._current.active_pass
        if active_pass is None:
            return h
        for segment, attached in self._segments(active_pass.microbatch):
            # Rows that continue a sample, as in decoding, have no virtual tokens before them.
            if attached.rows_before is not None and segment.prefix_rows:
                total = active_pass.totals[attached.adapter.job][SHARED, ROWS]
                rows_ID = accumulate_gradient(attached.rows_before, total, active_pass.anchor)
                h = insert_rows_before(h, rows_ID, active_pass.microbatch, segment)
            if attached.tokens is not None and self._embedding is not None:
                h = attached.tokens.replace_embeddings(
                    h, active_pass.microbatch, segment, self._embedding, active_pass.anchor
                )
        return h

    def trained_head_rows(self, segment: Segment) -> HeadRows | None:
        """Return the trained token embeddings of a segment's job if they replace rows of a head that is tied
        to the embedding, else None."""
        attached = self.attached.get(segment.adapter_job or "")
        if not self._tied or attached is None or attached.tokens is None:
            return None
        return attached.tokens.head_rows(self.anchor)

    def keys_before(self, microbatch: Microbatch) -> list[tuple[Segment, int]]:
        """Return the segments (ranges of one job's rows) whose jobs have prefix keys and values (prefix
        tuning), each with their number."""
        return [
            (segment, attached.prefix_keys)
            for segment, attached in self._segments(microbatch)
            if attached.prefix_keys
        ]

    def read_prefix_keys(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return the prefix keys and values (prefix tuning) in one layer, for each segment of the bound pass
        whose job has any."""
        active_pass = self._current.active_pass
        assert active_pass is not None, "keys before samples exist only in a bound pass"
        found = []
        for _, attached in self._segments(active_pass.microbatch):
            if attached.prefix_keys:
                site, totals = attached.prefix_sites[layer], active_pass.totals[attached.adapter.job]
                keys = accumulate_gradient(
                    attached.read_parameters[site, KEYS], totals[site, KEYS], active_pass.anchor
                )
                values = accumulate_gradient(
                    attached.read_parameters[site, VALUES], totals[site, VALUES], active_pass.anchor
                )
                found.append((keys, values))
        return found


def _has_partial_norms(
    groups: Sequence[SiteGroup], tiled_parts: Sequence[Sequence[TiledPart | None]]
) -> bool:
    """Return whether an adapter divides by norms of weight rows (DoRA) at a linear of which this shard
    (worker) has only some inputs. The kernels do not sum norms over shards."""
    parts = (
        (site, part)
        for group, own in zip(groups, tiled_parts, strict=True)
        for site, part in zip(group.sites, own, strict=True)
    )
    return any(
        site.sums_outputs and part and part.g_out and part.g_out.inverse_M is not None for site, part in parts
    )


def _constants_key(spec: Any) -> tuple[str, Hashable] | None:
    key = get_kind(spec.kind).constants_key(spec)
    return None if key is None else (spec.kind, key)
