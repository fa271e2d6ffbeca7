"""LoRA in a bank: the ranks of all jobs at a site side by side.

Shapes: T rows, K inputs, N outputs, R ranks of all jobs at the site. B is held transposed, [R, N], so that a
job's part of either matrix is a run of whole rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.adapters.kind import Member, Parameters
from weft.adapters.layout import Layout, ParameterShape
from weft.adapters.lora.export import merge, write_portable
from weft.adapters.lora.files import read_start, write_adapter
from weft.adapters.lora.spec import LoraSpec
from weft.batch import Microbatch
from weft.ops.dropout import key
from weft.ops.lora import Block, Blocks, Route, add_lora
from weft.shapes import SiteShape

A, B = "a_rK", "b_rN"


@dataclass(frozen=True, slots=True)
class _Slot:
    member: Member
    low: int
    rank: int

    @property
    def ranks(self) -> slice:
        return slice(self.low, self.low + self.rank)


class LoraBank:
    def __init__(self, site: SiteShape, like: Tensor) -> None:
        self.site = site
        self.slots: dict[str, _Slot] = {}
        self.a_RK = torch.empty(0, site.in_features, dtype=like.dtype, device=like.device)
        self.b_RN = torch.empty(0, site.out_features, dtype=like.dtype, device=like.device)

    def attach(self, member: Member) -> None:
        rank = member.spec.rank_at(self.site.name)
        self.slots[member.job] = _Slot(member, self.a_RK.shape[0], rank)
        self.a_RK = _trainable(torch.cat([self.a_RK, self.a_RK.new_zeros(rank, self.site.in_features)]))
        self.b_RN = _trainable(torch.cat([self.b_RN, self.b_RN.new_zeros(rank, self.site.out_features)]))

    def detach(self, job: str) -> None:
        gone = self.slots.pop(job).ranks
        self.a_RK = _trainable(torch.cat([self.a_RK[: gone.start], self.a_RK[gone.stop :]]))
        self.b_RN = _trainable(torch.cat([self.b_RN[: gone.start], self.b_RN[gone.stop :]]))
        low = 0
        for name, slot in self.slots.items():
            self.slots[name] = replace(slot, low=low)
            low += slot.rank

    def holds(self, job: str) -> bool:
        return job in self.slots

    def parameters(self, job: str) -> dict[str, Tensor]:
        ranks = self.slots[job].ranks
        return {A: self.a_RK.detach()[ranks], B: self.b_RN.detach()[ranks]}

    def gradients(self, job: str) -> dict[str, Tensor]:
        if self.a_RK.grad is None or self.b_RN.grad is None:
            return {}
        ranks = self.slots[job].ranks
        return {A: self.a_RK.grad[ranks], B: self.b_RN.grad[ranks]}

    def clear_gradients(self) -> None:
        self.a_RK.grad = self.b_RN.grad = None

    def scratch(self) -> Sequence[Tensor]:
        return [grad for grad in (self.a_RK.grad, self.b_RN.grad) if grad is not None]

    def apply(
        self, x_TK: Tensor, y_TN: Tensor, microbatch: Microbatch, route: Route, training: bool
    ) -> Tensor:
        blocks = tuple(
            self._block(self.slots[segment.job], segment.start, segment.stop, segment.step, training)
            for segment in microbatch.segments
            if segment.job in self.slots
        )
        if not blocks:
            return y_TN
        site = Blocks(blocks, microbatch.token_index_T, self.a_RK.shape[0])
        return add_lora(x_TK, y_TN, self.a_RK, self.b_RN, site, route)

    def _block(self, slot: _Slot, start: int, stop: int, step: int, training: bool) -> Block:
        spec: LoraSpec = slot.member.spec
        return Block(
            start=start,
            stop=stop,
            low=slot.low,
            high=slot.low + slot.rank,
            scale=spec.scale_at(self.site.name),
            dropout=spec.dropout if training else 0.0,
            key=key(slot.member.seed, step, self.site.name) if training and spec.dropout else 0,
        )


class Lora:
    name = "lora"

    def layout(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> Layout:
        shapes: list[ParameterShape] = []
        for site in sites:
            if spec.targets_site(site.name):
                rank = spec.rank_at(site.name)
                shapes.append(ParameterShape(site.name, A, (rank, site.in_features)))
                shapes.append(ParameterShape(site.name, B, (rank, site.out_features)))
        return Layout(tuple(shapes))

    def check_start(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> None:
        if spec.init_from is not None:
            read_start(spec, sites)

    def initialise(self, member: Member, sites: Sequence[SiteShape], parameters: Parameters) -> None:
        """A uniform within ±1/√K as PEFT draws it, B zero; or both from the member's `init_from` folder."""
        if member.spec.init_from is not None:
            for site, (a_rK, b_Nr) in read_start(member.spec, sites).items():
                parameters[site, A].copy_(a_rK)
                parameters[site, B].copy_(b_Nr.T)
            return
        for (site, name), value in parameters.items():
            if name == B:
                value.zero_()
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(site.encode()) << 32 ^ member.seed)
            bound = value.shape[1] ** -0.5
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.copy_((2 * drawn - 1) * bound)

    def bank(self, site: SiteShape, like: Tensor) -> LoraBank:
        return LoraBank(site, like)

    def save(
        self, folder: Path, spec: LoraSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        weights = {
            site: (value, parameters[site, B].T) for (site, name), value in parameters.items() if name == A
        }
        write_adapter(folder, spec, weights, sites, base)

    def portable(self, folder: Path, target: Path) -> int:
        return write_portable(folder, target)

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        merge(folder, modules, sites)


def _trainable(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
