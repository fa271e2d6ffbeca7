"""DoRA: y = g ⊙ (xWᵀ + scale · xAᵀBᵀ) + b with g = m / ‖W + scale · BA‖, row by row, and trained norms m.

The norms ‖W + scale · BA‖ are constants in the backward, as in the paper and in PEFT. With dropout, PEFT
keeps xWᵀ + b and applies dropout only to the terms that are added: y = xWᵀ + b + (g − 1) ⊙ x̃Wᵀ + g ⊙ scale ·
x̃AᵀBᵀ, where x̃ is x after dropout.

Shapes: K inputs, N outputs of a site (an adapted linear), r ranks; L rows of one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftune.adapters.dora.spec import MAGNITUDE, DoraSpec
from weftune.adapters.folder import read_config
from weftune.adapters.kind import NewAdapter, SiteTensors, TiledPart
from weftune.adapters.lora.apply import draw_lora, low_rank
from weftune.adapters.lora.files import lora_config
from weftune.adapters.lora.spec import A, B, spec_from_config, stored_token_name, weight_names
from weftune.adapters.plain import PREFIX, JobAt, JobPart, MergeAt, PlainKind
from weftune.adapters.scalar_head import read_head
from weftune.adapters.target import TOKENS
from weftune.adapters.token_rows import fill_tokens, refuse_other_tokens
from weftune.core.shapes import SiteShape
from weftune.core.weights import weight_matrix
from weftune.ops.lora.scales import SiteScale
from weftune.ops.lora.tiling import DIRECT_RANKS


class Dora(PlainKind):
    name = "dora"

    def part(self, job_site: JobAt) -> JobPart:
        spec: DoraSpec = job_site.adapter.spec
        scale = spec.scale_at(job_site.site.name)
        a_rK, b_rN = job_site.trained(A), job_site.trained(B)
        length_N = _row_lengths(job_site, scale, a_rK.detach(), b_rN.detach())
        g_N = job_site.trained(MAGNITUDE) / length_N
        if not job_site.drops:
            return JobPart(add=lambda x_LK: scale * (x_LK @ a_rK.T @ b_rN), g_out_N=g_N)

        def add(x_LK: Tensor) -> Tensor:
            dropped_LK = job_site.dropped(x_LK)
            low_rank_LN = scale * (dropped_LK @ a_rK.T @ b_rN)
            return (g_N - 1.0) * job_site.frozen.unrounded_product(dropped_LK) + g_N * low_rank_LN

        return JobPart(add=add)

    def is_tiled(self, spec: DoraSpec) -> bool:
        """Return whether the tiled kernels can compute the adapter. They support neither dropout, which in
        DoRA applies to xWᵀ too, nor large ranks."""
        ranks = (spec.rank, *spec.rank_pattern.values())
        return spec.dropout == 0.0 and max(ranks) <= DIRECT_RANKS

    def tiled_part(self, tensors: SiteTensors) -> TiledPart | None:
        if (tensors.site.name, MAGNITUDE) not in tensors.weights:
            return None
        value_N = tensors.weight(MAGNITUDE)
        inverse_N = torch.zeros(len(value_N), dtype=torch.float32, device=value_N.device)
        g_out = SiteScale(value_N, tensors.total(MAGNITUDE), inverse_N)
        return TiledPart(low_rank=low_rank(tensors), g_out=g_out)

    def start(self, new_adapter: NewAdapter) -> None:
        """Initialise A, B and the trained norms m. B is zero, so m starts as the norm of each row of W."""
        draw_lora(new_adapter)
        fill_tokens(new_adapter)
        for (site, name), value in new_adapter.parameters.items():
            if name == MAGNITUDE:
                value.copy_(torch.linalg.vector_norm(new_adapter.weight_at(site), dim=1, dtype=value.dtype))

    def rate(self, spec: DoraSpec, name: str) -> float:
        return spec.loraplus_lr_ratio if name == B else 1.0

    def read_start(self, spec: DoraSpec, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        found = PlainKind.read_start(self, spec, sites)
        folder = Path(str(spec.init_from))
        refuse_other_tokens(folder, self.spec_of(folder), spec)
        return found | read_head(folder, spec, sites)

    def stored_name(self, site: str, name: str) -> str:
        if name == TOKENS:
            return stored_token_name(site)
        if name == MAGNITUDE:
            return f"{PREFIX}{site}.lora_magnitude_vector"
        return weight_names(site)[0 if name == A else 1]

    def to_stored(self, spec: DoraSpec, site: str, name: str, value: Tensor) -> Tensor:
        return value.T if name == B else value

    from_stored = to_stored

    def config(
        self, spec: DoraSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str
    ) -> Any:
        return lora_config(spec, adapted_sites, sites, base, use_dora=True)

    def spec_of(self, folder: Path) -> DoraSpec:
        return spec_from_config(DoraSpec, folder, read_config(folder))

    def merged(self, merge_site: MergeAt) -> tuple[Tensor, Tensor | None]:
        whole_NK = (
            merge_site.weight_NK
            + merge_site.spec.scale_at(merge_site.site.name) * merge_site.own[B].T @ merge_site.own[A]
        )
        return (merge_site.own[MAGNITUDE] / whole_NK.norm(dim=1))[:, None] * whole_NK, merge_site.bias_N


def _row_lengths(job_site: JobAt, scale: float, a_rK: Tensor, b_rN: Tensor) -> Tensor:
    """Compute the norm ‖W + scale · BA‖ of each row. The squared norm is a sum of products of rank r: ‖w‖² +
    2 scale w·(BA) + scale² ‖BA‖²."""
    weight_NK = weight_matrix(job_site.frozen.weight)
    summed = torch.promote_types(weight_NK.dtype, torch.float32)
    own_N = job_site.once("row_lengths", lambda: weight_NK.to(summed).square().sum(dim=1))
    b_rN = b_rN.to(summed)
    across_rN = (a_rK @ weight_NK.T).to(summed)
    gram_rr = (a_rK @ a_rK.T).to(summed)
    cross_N = (b_rN * across_rN).sum(dim=0)
    square_N = (b_rN * (gram_rr @ b_rN)).sum(dim=0)
    squares_N = job_site.over_all_inputs(own_N + 2 * scale * cross_N + scale**2 * square_N)
    return squares_N.clamp_min(0.0).sqrt()
