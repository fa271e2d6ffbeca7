"""All banks of a base: woven into its sites, bound to one microbatch around each pass.

Each site's linear gets a forward of ours: it multiplies all rows by the frozen weight once and hands input
and output to every kind that has somebody aboard there. Outside a bound pass it is the base's own forward.
Sites that share their input may form a group, whose weights are stacked and multiplied at once.

Shapes: T rows, K inputs, N outputs of a site or a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from weftune.adapters.kind import Frozen, Member, Parameters, Pass, SiteBank
from weftune.adapters.registry import kind_named
from weftune.adapters.vector import VectorLayout
from weftune.core.batch import Microbatch
from weftune.core.shapes import SiteShape
from weftune.ops.dropout import step_key
from weftune.ops.lora.choice_trial import choices_on
from weftune.ops.lora.routes import Route
from weftune.ops.lora.rows import Rows, Seat

SLOTS = 64
"""Jobs that the kernels' tables have room for at first; doubled when more come aboard."""


@dataclass(slots=True)
class Aboard:
    """A job and its flat vectors: what passes read, and where gradients add up."""

    member: Member
    layout: VectorLayout
    slot: int
    weights: Tensor
    gradient: Tensor
    totals: Parameters


@dataclass(slots=True)
class SiteGroup:
    """Sites that share their input, with whoever is aboard there."""

    sites: tuple[SiteShape, ...]
    frozen: Frozen
    banks: dict[str, SiteBank] = field(default_factory=dict)

    def columns(self) -> Iterator[tuple[str, int, int]]:
        low = 0
        for site in self.sites:
            yield site.name, low, low + site.out_features
            low += site.out_features


class Banks:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        sites: Sequence[SiteShape],
        like: Tensor,
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        self.aboard: dict[str, Aboard] = {}
        self.slots = SLOTS
        self._like = like
        self._anchor = torch.zeros((), device=like.device, requires_grad=True)
        self._choices = choices_on(like.device)
        self._pass: Pass | None = None
        self._modules = {site.name: modules[site.name] for site in sites}
        shapes = {site.name: site for site in sites}
        grouped = {name for names in groups for name in names}
        alone = [(name,) for name in shapes if name not in grouped]
        self._groups: dict[str, SiteGroup] = {}
        """By the name of each of its sites."""
        for names in (*map(tuple, groups), *alone):
            frozen = _stack([self._modules[name] for name in names], shapes[names[0]].fan_in_fan_out)
            group = SiteGroup(tuple(shapes[name] for name in names), frozen)
            self._groups |= dict.fromkeys(names, group)
        for (name,) in alone:
            module = self._modules[name]
            module.forward = partial(self._weave, name, module.forward)

    def unweave(self) -> None:
        """Give every site its own forward back: the base is as it was."""
        for module in self._modules.values():
            module.__dict__.pop("forward", None)

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(
        self,
        member: Member,
        layout: VectorLayout,
        weights: Tensor,
        gradient: Tensor,
        read: Parameters | None = None,
        totals: Parameters | None = None,
    ) -> None:
        """Give a job its slot. Passes read the flat vector `weights` and add to the flat `gradient`.

        Where those vectors are not on the device, `read` and `totals` are the parameters of them that are.
        """
        assert weights.dtype == self._like.dtype
        slot = self._free_slot()
        aboard = Aboard(member, layout, slot, weights, gradient, totals or layout.views(gradient))
        self.aboard[member.job] = aboard
        kind, views = kind_named(member.spec.kind), read or layout.views(weights)
        for group in self._of(aboard):
            if kind.name not in group.banks:
                group.banks[kind.name] = kind.bank(group.sites, self.slots)
            group.banks[kind.name].attach(member, slot, views, aboard.totals)

    def detach(self, job: str) -> None:
        aboard = self.aboard.pop(job)
        for group in self._of(aboard):
            group.banks[aboard.member.spec.kind].detach(job)

    def write(self, job: str, master: Tensor) -> None:
        """Let passes read the values of `master`, in the base's dtype."""
        self.aboard[job].weights.copy_(master)

    def zero(self, job: str) -> None:
        """A dead job's weights are zeros until it is detached, so that nothing of it can spread."""
        self.aboard[job].weights.zero_()

    def _free_slot(self) -> int:
        taken = {aboard.slot for aboard in self.aboard.values()}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        if slot >= self.slots:
            self.slots *= 2
            for group in self._distinct():
                for bank in group.banks.values():
                    bank.resize(self.slots)
        return slot

    def _of(self, aboard: Aboard) -> list[SiteGroup]:
        sites = dict.fromkeys(parameter.site for parameter in aboard.layout.parameters)
        return list({id(group): group for group in map(self._groups.__getitem__, sites)}.values())

    def _distinct(self) -> list[SiteGroup]:
        return list({id(group): group for group in self._groups.values()}.values())

    def limits(self) -> tuple[object, ...]:
        """What a captured pass was made for, beside its rows: room for slots, ranks, and who may drop."""
        limits = [bank.limits() for group in self._distinct() for bank in group.banks.values()]
        return self.slots, tuple(limits)

    # -- passes ------------------------------------------------------------------------------------------

    def _totals(self, microbatch: Microbatch) -> dict[str, Parameters]:
        """Where each job's gradients of a pass are added."""
        found = ((segment.job, self.aboard.get(segment.job)) for segment in microbatch.segments)
        return {job: aboard.totals for job, aboard in found if aboard is not None}

    def seats(self, microbatch: Microbatch) -> list[Seat]:
        """Whose rows are where, as the tiled kernels want to know it."""
        return [
            Seat(segment.start, segment.stop, aboard.slot, step_key(aboard.member.seed, segment.step))
            for segment in microbatch.segments
            if (aboard := self.aboard.get(segment.job)) is not None
        ]

    @contextmanager
    def bound(
        self, microbatch: Microbatch, route: Route, training: bool, rows: Rows | None = None
    ) -> Iterator[None]:
        """Weave the adapters of `microbatch` through every forward inside, recomputation included."""
        assert self._pass is None, "a pass is already bound"
        if route is Route.tiled and rows is None:
            rows = Rows.empty(microbatch.rows, self.slots, self._like.device)
            rows.fill(self.seats(microbatch), microbatch.token_index_T.cpu().numpy())
        totals = {} if route is Route.tiled else self._totals(microbatch)
        self._pass = Pass(microbatch, route, training, self._anchor, totals, rows, self._choices)
        try:
            yield
        finally:
            self._pass = None

    def linear(self, site: str) -> Callable[[Tensor, Tensor | None], Tensor]:
        """(x_TK, residual_TN or None) → residual + the outputs, side by side, of all sites in the group."""
        return partial(self._linear, self._groups[site])

    def _weave(self, name: str, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        group = self._groups[name]
        if self._pass is None or not group.banks:
            return plain(x)
        return self._linear(group, x.flatten(0, -2), None).view(*x.shape[:-1], -1)

    def _linear(self, group: SiteGroup, x_TK: Tensor, residual_TN: Tensor | None) -> Tensor:
        bound, kinds = self._pass, list(group.banks.values())
        if bound is not None and bound.route is Route.tiled and len(kinds) == 1:
            return kinds[0].linear(x_TK, group.frozen, residual_TN, bound)
        parts = []
        for name, low, high in group.columns():
            y_TN = group.frozen.part(low, high).product(x_TK)
            if bound is not None:
                for bank in kinds:
                    y_TN = bank.add(name, x_TK, y_TN, bound)
            parts.append(y_TN)
        y_TN = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y_TN if residual_TN is None else residual_TN + y_TN


def _stack(modules: Sequence[nn.Module], fan_in_fan_out: bool) -> Frozen:
    """The weights of the modules as one; of several, each keeps its own as a view of the stack."""
    weights = [cast(Tensor, module.weight) for module in modules]
    biases = [cast(Tensor | None, module.bias) for module in modules]
    if len(modules) == 1:
        return Frozen(weights[0].T if fan_in_fan_out else weights[0], biases[0])
    assert not fan_in_fan_out
    has_bias = {bias is not None for bias in biases}
    assert len(has_bias) == 1, "either all sites of a group have a bias or none"
    bias_N = _laid_together(modules, "bias") if True in has_bias else None
    return Frozen(_laid_together(modules, "weight"), bias_N)


def _laid_together(modules: Sequence[nn.Module], name: str) -> Tensor:
    """The modules' parameters of that name as one; where they must be moved for it, each becomes a view."""
    parts = [cast(Tensor, getattr(module, name)) for module in modules]
    if (lying := _side_by_side(parts)) is not None:
        return lying
    together = torch.cat(parts)
    for module, part in zip(modules, together.split([len(part) for part in parts]), strict=True):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return together


def _side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """What lies end to end in one storage already, as one tensor."""
    first = parts[0]
    rows = 0
    for part in parts:
        follows = part.data_ptr() == first.data_ptr() + rows * first[0].numel() * first.element_size()
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and follows and part.is_contiguous()):
            return None
        rows += len(part)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
