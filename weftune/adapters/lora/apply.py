"""LoRA: the matrices A and B of every job at linears (sites) that share their input.

Shapes: T rows, K inputs, N outputs, r rank of a job. B is stored transposed, [r, N], so that each row of
either matrix belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from weftune.adapters.experts import ExpertBank
from weftune.adapters.kind import (
    Frozen,
    JobAdapter,
    NewAdapter,
    Parameters,
    Pass,
    SiteBank,
    SiteParts,
    SiteTensors,
    TiledPart,
)
from weftune.adapters.lora.files import (
    flatten_experts,
    merge,
    read_start,
    read_token_and_head_tensors,
    stack_experts,
    token_and_head_tensors,
    write_adapter,
    write_portable,
)
from weftune.adapters.lora.spec import A, B, LoraSpec, read_spec
from weftune.adapters.plain import PlainKind
from weftune.adapters.token_rows import fill_tokens
from weftune.core.batch import Segment
from weftune.core.shapes import SiteShape
from weftune.ops.draw import fill_uniform_batch
from weftune.ops.dropout import mask_key
from weftune.ops.lora.routes import Block, Blocks, add_lora
from weftune.ops.lora.table import LowRank


class LoraBank(SiteBank):
    def parts(self, site: str, frozen: Frozen, active_pass: Pass) -> SiteParts:
        found = [
            (segment, *self._attached[segment.adapter_job or ""]) for segment in self.segments(active_pass)
        ]
        blocks = tuple(
            _lora_block(adapter, weights, self._sites[site], segment, active_pass)
            for segment, adapter, weights in found
            if (site, A) in weights
        )
        if not blocks:
            return SiteParts()
        together = Blocks(blocks, active_pass.microbatch.token_index_T, active_pass.anchor)
        return SiteParts(add=partial(add_lora, blocks=together, route=active_pass.route))


def _lora_block(
    adapter: JobAdapter, weights: Parameters, shape: SiteShape, segment: Segment, active_pass: Pass
) -> Block:
    spec: LoraSpec = adapter.spec
    drops = active_pass.training and spec.dropout > 0.0
    site, totals = shape.name, active_pass.totals[adapter.job]
    own = LowRank(
        a_RK=weights[site, A],
        b_RN=weights[site, B],
        da_RK=totals[site, A],
        db_RN=totals[site, B],
        scale=spec.scale_at(site),
        dropout=spec.dropout if drops else 0.0,
    )
    block_key = mask_key(adapter.seed, segment.step, site) if drops else 0
    return Block(segment.start, segment.stop, own, block_key, shape.first_input)


def low_rank(tensors: SiteTensors) -> LowRank:
    """Return a job's A and B at one linear, and the accumulators of their gradients, for the tiled
    kernels."""
    spec: LoraSpec = tensors.adapter.spec
    scale = spec.scale_at(tensors.site.name)
    return LowRank(
        tensors.weight(A), tensors.weight(B), tensors.total(A), tensors.total(B), scale, spec.dropout
    )


def draw_lora(new_adapter: NewAdapter) -> None:
    """Draw A uniformly between −1/√K and 1/√K, as PEFT does, and set B to zero. Other parameters are not
    changed."""
    if zeros := [value for (_, name), value in new_adapter.parameters.items() if name == B]:
        torch._foreach_zero_(zeros)
    sites_by_shape: dict[tuple[int, ...], list[str]] = {}
    for (site, name), value in new_adapter.parameters.items():
        if name == A:
            sites_by_shape.setdefault(tuple(value.shape), []).append(site)
    for shape, names in sites_by_shape.items():
        values = [new_adapter.parameters[site, A] for site in names]
        keys = [new_adapter.key(site, A) for site in names]
        fill_uniform_batch(values, keys, bound=shape[-1] ** -0.5, draw_device=new_adapter.draw_device)


class Lora(PlainKind):
    name = "lora"

    def start(self, new_adapter: NewAdapter) -> None:
        draw_lora(new_adapter)
        fill_tokens(new_adapter)

    def rate(self, spec: LoraSpec, name: str) -> float:
        return spec.loraplus_lr_ratio if name == B else 1.0

    def bank(self, sites: Sequence[SiteShape]) -> LoraBank:
        return LoraBank(sites)

    def expert_bank(self, sites: Sequence[SiteShape]) -> ExpertBank:
        return ExpertBank(sites)

    def is_tiled(self, spec: LoraSpec) -> bool:
        return True

    def tiled_part(self, tensors: SiteTensors) -> TiledPart | None:
        return TiledPart(low_rank=low_rank(tensors)) if (tensors.site.name, A) in tensors.weights else None

    def read_start(self, spec: LoraSpec, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        experts = {site.name: site.experts for site in sites}
        parameters: dict[tuple[str, str], Tensor] = {}
        for site, (a, b) in read_start(spec, sites).items():
            parameters[site, A], parameters[site, B] = (
                stack_experts(a, b, experts[site]) if experts[site] else (a, b.T)
            )
        return parameters | read_token_and_head_tensors(spec, sites)

    def save(
        self, folder: Path, spec: LoraSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        weights = {
            site: flatten_experts(a, parameters[site, B]) if a.ndim == 3 else (a, parameters[site, B].T)
            for (site, name), a in parameters.items()
            if name == A
        }
        write_adapter(folder, spec, weights, sites, base, token_and_head_tensors(parameters))

    def portable(self, folder: Path, target: Path) -> int:
        return write_portable(folder, target)

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        merge(folder, modules, sites)

    def spec_of(self, folder: Path) -> LoraSpec:
        return read_spec(folder)
