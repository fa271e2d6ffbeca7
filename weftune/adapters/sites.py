"""Groups of sites (adapted linears), the adapters attached to them, and their outputs in the current pass.

A group of linears with the same input multiplies all rows by the stacked frozen weights once, and the
adapters change the inputs and outputs of their jobs' rows. On the tiled route (the GPU kernels), kernels do
all of this at once for every kind that has the form of LoRA with scales. If no pass is bound, the base's own
forward runs.

Shapes: T rows, K inputs, N outputs of a site or a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn

from weftune.adapters.experts import ExpertBank
from weftune.adapters.kind import Frozen, Pass, SiteBank, SiteParts
from weftune.adapters.tiled import TiledBank
from weftune.core.batch import Microbatch, to_device
from weftune.core.shapes import SiteShape
from weftune.core.weights import (
    CODED_PARAMETERS,
    FrozenWeight,
    Weight,
    WeightHolder,
    adjacent_view,
    is_coded,
    join_tensors,
    stack_weights,
)
from weftune.ops.experts import ExpertSite, experts_output
from weftune.ops.fallback import KernelsFailed
from weftune.ops.lora.choice import PlanTrial
from weftune.ops.lora.experts import lora_experts, multiplies_at_once
from weftune.ops.lora.routes import Route
from weftune.ops.site import change_rows, replace_rows, scaled_outputs, scaled_rows, zero_where_changed


@dataclass(slots=True)
class CurrentPass:
    """The pass that is currently bound, if any. All groups of adapted linears of a base share this object."""

    active_pass: Pass | None = None
    untiled_pass: Pass | None = None
    """Copy of `active_pass` with only the segments (rows) of jobs whose adapters the tiled kernels do not
    compute."""
    row_jobs: tuple[Tensor, tuple[str | None, ...]] | None = None
    """For each row of the pass the index of its job, and the jobs by this index. None until the first layer
    with experts computes them."""

    def replace(self, new_pass: CurrentPass) -> CurrentPass:
        """Bind another pass, and return the pass that was bound before."""
        before = CurrentPass(self.active_pass, self.untiled_pass, self.row_jobs)
        self.active_pass, self.untiled_pass, self.row_jobs = (
            new_pass.active_pass,
            new_pass.untiled_pass,
            new_pass.row_jobs,
        )
        return before


@dataclass(slots=True)
class SiteGroup:
    """Linears that share their input, with all adapters that are attached to them."""

    sites: tuple[SiteShape, ...]
    frozen: Frozen
    current_pass: CurrentPass
    banks: dict[str, SiteBank] = field(default_factory=dict)
    """Maps the name of each kind of adapter to the object that holds the parameters of its jobs."""
    tiled: TiledBank | None = None
    """Adapters of all kinds that the tiled kernels compute. None until the first of them is attached."""
    adds_residual: bool = False
    """Whether the caller of `linear` passes a residual to which the outputs are added."""

    def timing_trial(self, active_pass: Pass) -> PlanTrial | None:
        """Return the trial that times the possible methods of the tiled kernels for the group's linears. None
        unless these kernels compute an adapter of the group and there is a choice."""
        return (
            None
            if self.tiled is None
            else self.tiled.timing_trial(self.frozen, self.adds_residual, active_pass)
        )

    def forward(self, plain_forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the linear of a group that has only one, with adapters if a pass is bound. `plain_forward`
        is the forward of the base."""
        if self.current_pass.active_pass is None or not self.banks:
            return plain_forward(x)
        return self.linear(x.flatten(0, -2), None).view(*x.shape[:-1], -1)

    def linear(self, x_TK: Tensor, residual_TN: Tensor | None) -> Tensor:
        """Return the concatenated outputs of all linears of the group, with adapters if a pass is bound, plus
        the residual if it is given."""
        active_pass = self.current_pass.active_pass
        if active_pass is not None and active_pass.route is Route.tiled:
            found = self._tiled_output(x_TK, residual_TN, active_pass)
            if found is not None:
                return found
        kinds = (
            []
            if active_pass is None
            else [bank for bank in self.banks.values() if bank.segments(active_pass)]
        )
        pieces = []
        for name, low, high in self._output_columns():
            frozen = self.frozen.part(low, high)
            parts = [] if active_pass is None else [bank.parts(name, frozen, active_pass) for bank in kinds]
            pieces.append(_site_output(frozen, x_TK, parts))
        y_TN = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return (y_TN if residual_TN is None else residual_TN + y_TN).to(x_TK.dtype)

    def _output_columns(self) -> Iterator[tuple[str, int, int]]:
        low = 0
        for site in self.sites:
            yield site.name, low, low + site.out_features
            low += site.out_features

    def _tiled_output(self, x_TK: Tensor, residual_TN: Tensor | None, active_pass: Pass) -> Tensor | None:
        """Return the outputs of the tiled kernels, after which adapters that the kernels do not support have
        been applied, each to the rows of its own job. Return None if one of these adapters changes more than
        the outputs of its rows, or if the kernels do not run on the device."""
        untiled = self.current_pass.untiled_pass
        assert untiled is not None
        banks = [bank for bank in self.banks.values() if bank.segments(untiled)]
        if not banks:
            return self._kernel_output(x_TK, residual_TN, active_pass)
        columns = list(self._output_columns())
        parts = [
            [bank.parts(name, self.frozen.part(low, high), untiled) for bank in banks]
            for name, low, high in columns
        ]
        if any(part.add or part.g_in or part.g_out for own in parts for part in own):
            return None
        changes = [
            (rows, slice(low, high), change)
            for (_, low, high), own in zip(columns, parts, strict=True)
            for part in own
            for rows, change in part.output_changes
        ]
        active_pass = replace(active_pass, graph_only=False)  # The changes read the outputs.
        around_TN = None if residual_TN is None else zero_where_changed(residual_TN, changes)
        y_TN = self._kernel_output(x_TK, around_TN, active_pass)
        return None if y_TN is None else change_rows(y_TN, residual_TN, changes, active_pass.anchor)

    def _kernel_output(self, x_TK: Tensor, residual_TN: Tensor | None, active_pass: Pass) -> Tensor | None:
        """Compute the outputs of the group, with the tiled kernels if the group has adapters that they
        compute. None if the kernels do not run on the device."""
        if self.tiled is not None:
            try:
                return self.tiled.linear(x_TK, self.frozen, residual_TN, active_pass)
            except KernelsFailed:
                return None
        y_TN = self.frozen.product(x_TK)
        return (y_TN if residual_TN is None else residual_TN + y_TN).to(x_TK.dtype)


def _site_output(frozen: Frozen, x_TK: Tensor, parts: Sequence[SiteParts]) -> Tensor:
    """Compute a linear with the changes by adapters of all kinds: after(g_out ⊙ ((x ⊙ g_in)Wᵀ + added
    outputs) + b), with the fields of `SiteParts`. With scales or several kinds, sums are in at least
    float32."""
    g_in = [scale for part in parts for scale in part.g_in]
    g_out = [scale for part in parts for scale in part.g_out]
    alone = len(parts) <= 1 and not g_in and not g_out
    y_TN = frozen.product(x_TK) if alone else frozen.unrounded_product(scaled_rows(x_TK, g_in))
    for part in parts:
        if part.add is not None:
            y_TN = part.add(x_TK, y_TN)
    y_TN = y_TN if alone else scaled_outputs(y_TN, frozen.bias_N, g_out)
    behind = []
    for rows, change in (one for part in parts for one in part.output_changes):
        assert isinstance(rows, slice), "rows are gathered where kernels run"
        behind.append((rows, change(y_TN[rows])))
    return replace_rows(y_TN, behind) if behind else y_TN


@dataclass(slots=True)
class ExpertGroup:
    """The experts of a layer, with all adapters that are attached to them."""

    module: nn.Module
    sites: tuple[SiteShape, ...]
    current_pass: CurrentPass
    banks: dict[str, ExpertBank] = field(default_factory=dict)

    def forward(
        self, plain_forward: Callable[..., Tensor], x_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor
    ) -> Tensor:
        """Compute the experts of a layer. If a job in the pass adapts them, its adapters are applied.
        Otherwise kernels that multiply by all experts at once are used where available, or else the experts'
        own forward."""
        active_pass = self.current_pass.active_pass
        banks = (
            []
            if active_pass is None
            else [bank for bank in self.banks.values() if bank.has_expert_rows(active_pass)]
        )
        if (
            active_pass is not None
            and active_pass.route is Route.tiled
            and len(banks) <= 1
            and self._is_gated()
        ):
            sites = [
                ExpertSite(
                    self._stacked_weight(site), banks[0].group(site.name, x_TD.device) if banks else None
                )
                for site in self.sites
            ]
            if banks or all(map(multiplies_at_once, sites)):
                current = self.current_pass
                current.row_jobs = current.row_jobs or _row_owners(
                    active_pass.microbatch, len(x_TD), x_TD.device
                )
                owner_T, jobs = current.row_jobs
                if banks:
                    numbers_J = banks[0].adapter_indices(jobs, x_TD.device)
                else:
                    numbers_J = owner_T.new_full((len(jobs),), -1)
                with suppress(KernelsFailed):
                    return lora_experts(
                        x_TD, experts_Tk, weights_Tk, active_pass.anchor, sites, owner_T, numbers_J
                    )
        if active_pass is None or not banks:
            return plain_forward(x_TD, experts_Tk, weights_Tk)
        gate_up, down = (
            ExpertSite(
                self._stacked_weight(site),
                parts=[part for bank in self.banks.values() for part in bank.parts(site.name, active_pass)],
            )
            for site in self.sites
        )
        activation = cast(Callable[[Tensor], Tensor], self.module.act_fn)
        return experts_output(x_TD, experts_Tk, weights_Tk, gate_up, down, activation)

    def _stacked_weight(self, site: SiteShape) -> Tensor:
        return cast(Tensor, getattr(self.module, site.name.rpartition(".")[2]))

    def _is_gated(self) -> bool:
        """Return whether the kernels support the experts' activation, which must be SwiGLU."""
        return getattr(getattr(self.module, "config", None), "hidden_act", None) == "silu"


def _row_owners(
    microbatch: Microbatch, rows: int, device: torch.device
) -> tuple[Tensor, tuple[str | None, ...]]:
    index_by_job: dict[str | None, int] = {None: 0}
    owner_T = torch.zeros(rows, dtype=torch.int32)
    for segment in microbatch.segments:
        owner_T[segment.rows] = index_by_job.setdefault(segment.adapter_job, len(index_by_job))
    return to_device(owner_T, device), tuple(index_by_job)


def expert_groups(
    modules: Mapping[str, nn.Module], sites: Sequence[SiteShape], current_pass: CurrentPass
) -> dict[str, ExpertGroup]:
    """Return a dict from the module path of each layer's experts to their group."""
    mixed = groupby((site for site in sites if site.experts), key=lambda site: site.name.rpartition(".")[0])
    found = {path: tuple(own) for path, own in mixed}
    return {path: ExpertGroup(modules[own[0].name], own, current_pass) for path, own in found.items()}


def site_groups(
    modules: Mapping[str, nn.Module],
    sites: Sequence[SiteShape],
    groups: Sequence[Sequence[str]],
    current_pass: CurrentPass,
) -> dict[str, SiteGroup]:
    """Return a dict from the name of each linear to its group of linears that share their input: one of
    `groups`, or the linear alone."""
    shapes = {site.name: site for site in sites if not site.experts}
    grouped = {name for names in groups for name in names}
    group_by_site: dict[str, SiteGroup] = {}
    for names in (*map(tuple, groups), *((name,) for name in shapes if name not in grouped)):
        frozen = _stack_weights([modules[name] for name in names], shapes[names[0]].fan_in_fan_out)
        group = SiteGroup(tuple(shapes[name] for name in names), frozen, current_pass)
        group_by_site |= dict.fromkeys(names, group)
    return group_by_site


def _stack_weights(modules: Sequence[nn.Module], fan_in_fan_out: bool) -> Frozen:
    """Return the stacked weights of the modules. If there are several, each module's weight becomes a view of
    the stack."""
    biases = [cast(Tensor | None, module.bias) for module in modules]
    has_bias = {bias is not None for bias in biases}
    assert len(has_bias) == 1, "either all sites of a group have a bias or none"
    bias_N = _stack_parameter(modules, "bias") if True in has_bias else None
    if any(isinstance(module, WeightHolder) for module in modules):
        return Frozen(_stack_any_weights(modules), bias_N)
    if not fan_in_fan_out:
        return Frozen(_stack_parameter(modules, "weight"), bias_N)
    (module,) = modules
    return Frozen(cast(Tensor, module.weight).T, bias_N)


def _stack_any_weights(modules: Sequence[nn.Module]) -> FrozenWeight:
    """Return the stacked weights of modules of which at least one stores its weight in another form than a
    matrix, such as quantised."""
    outputs = [cast(int, module.out_features) for module in modules]
    weights: list[Weight] = [
        module.frozen_weight() if isinstance(module, WeightHolder) else cast(Tensor, module.weight)
        for module in modules
    ]
    if all(map(is_coded, weights)):
        for name, dim in CODED_PARAMETERS.items():
            _stack_codes(modules, name, dim)
    return stack_weights(weights, outputs)


def _stack_codes(modules: Sequence[nn.Module], name: str, dim: int) -> None:
    """Make the modules' parameters with the name `name` views of one tensor. Parameters that share a storage
    with other parameters, as in a streamed base, are not moved."""
    parts = [cast(Tensor, getattr(module, name)) for module in modules]
    alone = all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    if len(parts) == 1 or not alone:
        return
    views = join_tensors(parts, dim).split([part.shape[dim] for part in parts], dim)
    for module, view in zip(modules, views, strict=True):
        setattr(module, name, nn.Parameter(view, requires_grad=False))


def _stack_parameter(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Return the modules' parameters with the name `name` as one tensor. Each module's parameter becomes a
    view of it."""
    parts = [cast(Tensor, getattr(module, name)) for module in modules]
    if len(parts) == 1:
        return parts[0]
    if (lying := adjacent_view(parts, dim=0)) is not None:
        return lying
    together = torch.cat(parts)
    for module, part in zip(modules, together.split([len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return together
