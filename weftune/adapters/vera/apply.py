"""VeRA: two trained vectors at every site (an adapted linear), which scale two frozen random matrices that
all sites share.

Shapes: K inputs, N outputs of a site, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weftune.adapters.files import is_transposed, layers_to_transform, peft_config, target_modules
from weftune.adapters.folder import target_fields
from weftune.adapters.kind import NewAdapter, SiteTensors, TiledPart
from weftune.adapters.plain import PREFIX, JobAt, JobPart, MergeAt, PlainKind
from weftune.adapters.vector import SHARED
from weftune.adapters.vera.spec import D, E, VeraSpec
from weftune.core.shapes import SiteShape
from weftune.ops.lora.computed import ComputedPair
from weftune.ops.lora.table import LowRank

A, B = "vera_A", "vera_B"


class Vera(PlainKind):
    name = "vera"

    def part(self, job_site: JobAt) -> JobPart:
        a_rK, b_rN = _local_columns(job_site.site, job_site.constant(A), job_site.constant(B))
        d_r, e_N = job_site.trained(D), job_site.trained(E)
        return JobPart(add=lambda x_LK: e_N * ((job_site.dropped(x_LK) @ a_rK.T * d_r) @ b_rN))

    def is_tiled(self, spec: VeraSpec) -> bool:
        return True

    def tiled_part(self, tensors: SiteTensors) -> TiledPart | None:
        """Return the adapter in the form of LoRA: A is a random constant with rows scaled by the vector d,
        and B another constant with columns scaled by the vector e. Kernels compute both again at every
        linear."""
        if (tensors.site.name, D) not in tensors.weights:
            return None
        d_r, e_N, spec = tensors.weight(D), tensors.weight(E), tensors.adapter.spec
        module = tensors.site.name.rpartition(".")[2]
        shapes = {A: (spec.rank, tensors.site.in_features), B: (spec.rank, tensors.site.out_features)}

        def scratch(name: str, purpose: str, dtype: torch.dtype) -> Tensor:
            key = (module, name, purpose, shapes[name])
            if key not in tensors.scratch:
                tensors.scratch[key] = torch.zeros(shapes[name], dtype=dtype, device=d_r.device)
            return tensors.scratch[key]

        a_rK, b_rN = (scratch(name, "weight", d_r.dtype) for name in (A, B))
        da_rK, db_rN = (scratch(name, "gradient", torch.float32) for name in (A, B))
        constant_a, constant_b = _local_columns(
            tensors.site, tensors.weights[SHARED, A], tensors.weights[SHARED, B]
        )
        # Columns that are not consecutive are a copy, which all layers share.
        constant_b = tensors.scratch.setdefault((module, B, tensors.site.output_ranges), constant_b)
        return TiledPart(
            low_rank=LowRank(a_rK, b_rN, da_rK, db_rN, scale=1.0, dropout=spec.dropout),
            computed_pair=ComputedPair(d_r, e_N, tensors.total(D), tensors.total(E), constant_a, constant_b),
        )

    def start(self, new_adapter: NewAdapter) -> None:
        for (_, name), value in new_adapter.parameters.items():
            value.fill_(new_adapter.adapter.spec.d_initial if name == D else 0.0)

    def constants_key(self, spec: VeraSpec) -> Hashable:
        return spec.rank, spec.projection_prng_key, spec.targets, spec.layers

    def constants(self, spec: VeraSpec, sites: Sequence[SiteShape], like: Tensor) -> dict[str, Tensor]:
        """Return the random matrices A and B that all linears share. B is stored transposed, with one row per
        rank, like B of LoRA."""
        drawn = self._draw_matrices(spec, sites)
        return {A: drawn[A].to(like), B: drawn[B].T.contiguous().to(like)}

    def _draw_matrices(self, spec: VeraSpec, sites: Sequence[SiteShape]) -> dict[str, Tensor]:
        """Draw the random matrix A, then B, in float32 on the CPU, as PEFT does. They are as wide as the
        widest adapted linear."""
        own = [site for site in sites if spec.adapts(site)]
        generator = torch.Generator().manual_seed(spec.projection_prng_key)
        inputs, outputs = max(site.in_features for site in own), max(site.out_features for site in own)
        return {
            A: _draw_uniform((spec.rank, inputs), generator),
            B: _draw_uniform((outputs, spec.rank), generator),
        }

    def stored_name(self, site: str, name: str) -> str:
        return f"{PREFIX}{site}.vera_{name}"

    extra_tensor_names = f"base_model.{A}", f"base_model.{B}"

    def extra_tensors(self, spec: VeraSpec, sites: Sequence[SiteShape]) -> dict[str, Tensor]:
        return dict(zip(self.extra_tensor_names, self._draw_matrices(spec, sites).values(), strict=True))

    def config(
        self, spec: VeraSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str
    ) -> Any:
        modules = target_modules(spec, adapted_sites, sites)
        return peft_config(
            "VeraConfig",
            base,
            r=spec.rank,
            projection_prng_key=spec.projection_prng_key,
            save_projection=True,
            vera_dropout=spec.dropout,
            d_initial=spec.d_initial,
            target_modules=modules,
            layers_to_transform=layers_to_transform(spec, modules),
            fan_in_fan_out=is_transposed(adapted_sites, sites),
        )

    def read_spec(self, config: Mapping[str, Any]) -> VeraSpec:
        seed = int(config["projection_prng_key"])
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"projection_prng_key is no seed of torch: {seed}")
        return VeraSpec(
            rank=int(config["r"]),
            dropout=float(config.get("vera_dropout", 0.0)),
            d_initial=float(config.get("d_initial", 0.1)),
            projection_prng_key=seed,
            **target_fields(config),
        )

    def merged(self, merge_site: MergeAt) -> tuple[Tensor, Tensor | None]:
        a_rK, b_rN = (
            merge_site.own[A][:, : merge_site.site.in_features],
            merge_site.own[B][:, : merge_site.site.out_features],
        )
        return merge_site.weight_NK + merge_site.own[E][:, None] * (
            (b_rN.T * merge_site.own[D]) @ a_rK
        ), merge_site.bias_N


def _local_columns(site: SiteShape, a_rK: Tensor, b_rN: Tensor) -> tuple[Tensor, Tensor]:
    """Return those columns of both random matrices that belong to the inputs and outputs that this shard
    (worker) has of a linear."""
    first = site.first_input
    parts = [b_rN[:, start:stop] for start, stop in site.output_ranges]
    return (
        a_rK[:, first : first + site.in_features],
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
    )


def _draw_uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw a matrix uniformly between −√(6 / inputs) and √(6 / inputs), as PEFT does (Kaiming
    initialisation)."""
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
