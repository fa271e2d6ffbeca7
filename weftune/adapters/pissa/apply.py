"""PiSSA: LoRA initialised with the principal singular vectors of the frozen weight W.

PEFT subtracts scale · B₀A₀, the product of the initial matrices, from the weights of the base. Here the base
is shared and stays unchanged: the product with A₀ and B₀ is subtracted from the outputs. A₀ and B₀ are
parameters of the job with the learning rate 0, so that checkpoints, stages and exports contain them bit for
bit along with A and B, and W is decomposed once per job.

Shapes: K inputs, N outputs of a site (an adapted linear), r rank; L rows of one job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from weftune.adapters.kind import JobAdapter, NewAdapter, Parameters
from weftune.adapters.lora.files import (
    merge,
    read_start,
    read_token_and_head_tensors,
    token_and_head_tensors,
    write_adapter,
    write_portable,
)
from weftune.adapters.lora.spec import A, B
from weftune.adapters.pissa.spec import FIRST_A, FIRST_B, PissaSpec
from weftune.adapters.plain import JobAt, JobPart, PlainKind
from weftune.adapters.token_rows import fill_tokens
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError
from weftune.ops.draw import fill_normal, parameter_key

OVERSAMPLING = 8
"""Number of random directions that a randomised SVD uses in addition to the rank."""


class Pissa(PlainKind):
    name = "pissa"

    def part(self, job_site: JobAt) -> JobPart:
        scale = job_site.adapter.spec.scale_at(job_site.site.name)
        a_rK, b_rN = job_site.trained(A), job_site.trained(B)
        first_a_rK, first_b_rN = job_site.detached_parameter(FIRST_A), job_site.detached_parameter(FIRST_B)

        def add(x_LK: Tensor) -> Tensor:
            # Not one product of rank 2r: as long as A is A₀ and B is B₀, the difference is exactly 0.
            return scale * (job_site.dropped(x_LK) @ a_rK.T @ b_rN - x_LK @ first_a_rK.T @ first_b_rN)

        return JobPart(add=add)

    def start(self, new_adapter: NewAdapter) -> None:
        fill_tokens(new_adapter)
        for site in [site for site, name in new_adapter.parameters if name == FIRST_A]:
            like_rK = new_adapter.parameters[site, FIRST_A]
            weight_NK = new_adapter.weight_at(site).to(
                device=new_adapter.draw_device or like_rK.device, dtype=like_rK.dtype
            )
            decomposed = decompose(site, weight_NK, len(like_rK), new_adapter.adapter)
            a_rK, b_rN = principal_factors(decomposed, len(like_rK), new_adapter.adapter.spec.scale_at(site))
            for name, value in ((A, a_rK), (FIRST_A, a_rK), (B, b_rN), (FIRST_B, b_rN)):
                new_adapter.parameters[site, name].copy_(value)

    def rate(self, spec: PissaSpec, name: str) -> float:
        return {B: spec.loraplus_lr_ratio, FIRST_A: 0.0, FIRST_B: 0.0}.get(name, 1.0)

    def read_start(self, spec: PissaSpec, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters A, A₀, B and B₀, read from the folder `spec.init_from`, which stores them as
        a LoRA adapter of rank 2r."""
        parameters: dict[tuple[str, str], Tensor] = {}
        for site, (both_RK, both_NR) in read_start(spec.as_lora(), sites).items():
            (a_rK, first_a_rK), (b_Nr, first_b_Nr) = both_RK.chunk(2), both_NR.chunk(2, dim=1)
            parameters |= {(site, A): a_rK, (site, FIRST_A): first_a_rK}
            parameters |= {(site, B): b_Nr.T, (site, FIRST_B): -first_b_Nr.T}
        return parameters | read_token_and_head_tensors(spec, sites)

    def save(
        self, folder: Path, spec: PissaSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write the adapter as an equivalent LoRA adapter of twice the rank, which applies to the unchanged
        base."""
        weights = {
            site: (
                torch.cat([value, parameters[site, FIRST_A]]),
                torch.cat([parameters[site, B], -parameters[site, FIRST_B]]).T,
            )
            for (site, name), value in parameters.items()
            if name == A
        }
        lora = replace(spec.as_lora(), init_from=None)
        write_adapter(folder, lora, weights, sites, base, token_and_head_tensors(parameters))

    def portable(self, folder: Path, target: Path) -> int:
        return write_portable(folder, target)

    def merge(self, folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
        merge(folder, modules, sites)


Decomposition = tuple[Tensor, Tensor, Tensor]
"""Singular value decomposition U [N, R], s [R] and V [R, K] of W = U diag(s) V, with the largest singular
values first. A randomised SVD has only the first few."""


def decompose(site: str, weight_NK: Tensor, rank: int, adapter: JobAdapter) -> Decomposition:
    """Return a singular value decomposition of a linear's weight with at least `rank` singular values. It is
    exact or randomised, depending on `svd_iterations` in the adapter's spec."""
    if rank > min(weight_NK.shape):
        raise AdapterError(
            f"adapter.rank is {rank}, but {site} has only {min(weight_NK.shape)} singular values to start "
            "from; choose a smaller rank, or other targets"
        )
    iterations = adapter.spec.svd_iterations
    if iterations is None:
        left_NR, values_R, right_RK = torch.linalg.svd(weight_NK, full_matrices=False)
        return left_NR, values_R, right_RK
    return randomised_svd(weight_NK, rank, iterations, parameter_key(adapter.seed, site, FIRST_A))


def randomised_svd(weight_NK: Tensor, rank: int, iterations: int, key: int) -> Decomposition:
    """Compute a randomised SVD (Halko, Martinsson and Tropp 2011, algorithm 4.4). The random directions are
    drawn on the host, so that they do not depend on the device."""
    count = min(rank + OVERSAMPLING, *weight_NK.shape)
    drawn_KR = torch.empty(weight_NK.shape[1], count, dtype=weight_NK.dtype)
    fill_normal(drawn_KR, key)
    basis_NR = torch.linalg.qr(weight_NK @ drawn_KR.to(weight_NK.device)).Q
    for _ in range(iterations):
        basis_KR = torch.linalg.qr(weight_NK.T @ basis_NR).Q
        basis_NR = torch.linalg.qr(weight_NK @ basis_KR).Q
    left_RR, values_R, right_RK = torch.linalg.svd(basis_NR.T @ weight_NK, full_matrices=False)
    return basis_NR @ left_RR, values_R, right_RK


def principal_factors(decomposition: Decomposition, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A₀ [r, K] and B₀ [r, N] such that scale · B₀A₀ is the best approximation of W with this rank."""
    left_NR, values_R, right_RK = decomposition
    root_r = (values_R[:rank] / scale).sqrt()
    return root_r[:, None] * right_RK[:rank], root_r[:, None] * left_NR[:, :rank].T
