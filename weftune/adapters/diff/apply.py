"""Diff-Pruning: a trained difference to the frozen weight W, multiplied by random hard-concrete gates in the
first phase of training, and by a fixed mask in the second.

In the optimizer step that ends the first phase, the largest elements of every target linear are chosen: their
gates stay open from then on, and all others stay shut. This is written into the gates' own parameters, so
that checkpoints contain it. Each target is pruned separately, since a worker has only its own targets.

The L0 penalty belongs to no row. Its gradient is added once per global batch: in the pass with the first row
of the batch. Evaluation and export use the gates without noise and the largest elements in both phases, so
that the evaluated adapter is the one that would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftune.adapters.diff.spec import ALPHA, GROUP, DiffSpec, W
from weftune.adapters.files import read_tensors, write_folder
from weftune.adapters.kind import JobAdapter, NewAdapter, Parameters
from weftune.adapters.plain import PREFIX, JobAt, JobPart, MergeAt, PlainKind
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError
from weftune.ops.dropout import mask_key
from weftune.ops.hard_concrete import DrawnGates, Gated, difference_product, fix_gates, pruned_values

ALPHA_START = 5.0
"""Initial value of the gate parameters α, as in the Diff-Pruning paper, with which almost all gates are
open."""
INDICES, VALUES = "diff_indices", "diff_values"
DELTA = "delta_NK"


class Diff(PlainKind):
    name = "diff"

    def part(self, job_site: JobAt) -> JobPart:
        spec: DiffSpec = job_site.adapter.spec
        values = _gated_difference(job_site.weights, job_site.site.name)
        if not job_site.active_pass.training:
            delta_NK = pruned_values(values, spec.kept_elements(values.w_NK.numel())).to(values.w_NK.dtype)
            return JobPart(add=lambda x_LK: x_LK @ delta_NK.T)
        totals = _gated_difference(job_site.active_pass.totals[job_site.adapter.job], job_site.site.name)
        drawn = (
            self._draw_gates(job_site)
            if job_site.segment.step <= spec.relaxed_steps(job_site.adapter.steps)
            else None
        )
        return JobPart(
            add=lambda x_LK: difference_product(x_LK, values, totals, drawn, job_site.active_pass.anchor)
        )

    def _draw_gates(self, job_site: JobAt) -> DrawnGates:
        def random_key(tensor_name: str) -> int:
            return mask_key(
                job_site.adapter.seed, job_site.segment.step, f"{job_site.site.name}.{tensor_name}"
            )

        index_L = job_site.active_pass.microbatch.token_index_T[job_site.segment.rows]
        return DrawnGates(
            random_key(ALPHA), random_key(GROUP), job_site.adapter.spec.l0_weight, (index_L == 0).any()
        )

    def start(self, new_adapter: NewAdapter) -> None:
        for (_, name), value in new_adapter.parameters.items():
            value.fill_(0.0 if name == W else ALPHA_START)

    def rate(self, spec: DiffSpec, name: str) -> float:
        return 1.0 if name == W else spec.mask_lr_ratio

    def before_step(self, adapter: JobAdapter, step: int, masters: Callable[[], Parameters]) -> None:
        spec: DiffSpec = adapter.spec
        if step != spec.relaxed_steps(adapter.steps):
            return
        if torch.cuda.is_available():
            # Copies to host memory may still be under way.
            torch.cuda.synchronize()
        parameters = masters()
        for site in dict.fromkeys(site for site, _ in parameters):
            values = _gated_difference(parameters, site)
            fix_gates(values, spec.kept_elements(values.w_NK.numel()))

    # -- files -------------------------------------------------------------------------------------------

    def save(
        self, folder: Path, spec: DiffSpec, parameters: Parameters, sites: Sequence[SiteShape], base: str
    ) -> None:
        """Write an adapter folder with the values and the indices (in row-major order) of the differences
        that are not zero, for every target linear."""
        tensors = {}
        adapted_sites = list(dict.fromkeys(site for site, _ in parameters))
        for site in adapted_sites:
            values = _gated_difference(parameters, site)
            flat = pruned_values(values, spec.kept_elements(values.w_NK.numel())).flatten()
            indices = flat.nonzero().flatten()
            tensors[f"{PREFIX}{site}.{INDICES}"], tensors[f"{PREFIX}{site}.{VALUES}"] = indices, flat[indices]
        write_folder(folder, tensors, self.config(spec, adapted_sites, sites, base))

    def read(self, folder: Path, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the differences stored in an adapter folder as dense matrices. The result maps (linear,
        DELTA) to the matrix of each target."""
        tensors = read_tensors(folder, integer_suffix=INDICES)
        adapted = {site.name: site for site in sites if spec.adapts(site)}
        expected = {f"{PREFIX}{name}.{part}" for name in adapted for part in (INDICES, VALUES)}
        self.refuse_other_tensors(folder, spec, tensors.keys(), expected)
        return {
            (name, DELTA): _to_dense(folder, site, tensors[f"{PREFIX}{name}.{INDICES}"], tensors[stored])
            for name, site in adapted.items()
            if (stored := f"{PREFIX}{name}.{VALUES}")
        }

    def read_start(self, spec: Any, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
        """Return the parameters of a job that starts from a saved difference, with all gates open."""
        found = {}
        for (site, _), delta_NK in PlainKind.read_start(self, spec, sites).items():
            found[site, W] = delta_NK
            found[site, ALPHA] = torch.full_like(delta_NK, ALPHA_START)
            found[site, GROUP] = delta_NK.new_full((1,), ALPHA_START)
        return found

    def merged(self, merge_site: MergeAt) -> tuple[Tensor, Tensor | None]:
        return merge_site.weight_NK + merge_site.own[DELTA], merge_site.bias_N


def _gated_difference(parameters: Parameters, site: str) -> Gated:
    return Gated(parameters[site, W], parameters[site, ALPHA], parameters.get((site, GROUP)))


def _to_dense(folder: Path, site: SiteShape, indices: Tensor, values: Tensor) -> Tensor:
    flat = torch.zeros(site.out_features * site.in_features, dtype=values.dtype)
    fits = indices.shape == values.shape and indices.ndim == 1
    if not fits or bool(((indices < 0) | (indices >= len(flat))).any()):
        raise AdapterError(f"{folder} is for another base: its indices at {site.name} are not those of one")
    flat[indices] = values
    return flat.view(site.out_features, site.in_features)
