"""Jobs of several kinds at the linears of one layer, in one pass, on any route and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.adapters.attached_banks import together
from tests.base.packs import random_samples
from weftune.adapters.banks import Banks
from weftune.adapters.dora.spec import MAGNITUDE, DoraSpec
from weftune.adapters.ia3.spec import Ia3Spec
from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.adapters.vera.spec import VeraSpec
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.run.training.state import master_dtype

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
SPECS: dict[str, AdapterSpec] = {
    "lora": LoraSpec(rank=3, alpha=6.0, targets=TARGETS, dropout=0.2),
    "dora": DoraSpec(rank=5, alpha=3.0, targets=TARGETS),
    "vera": VeraSpec(rank=6, targets=TARGETS, dropout=0.1),
    "ia3": Ia3Spec(targets=TARGETS, feedforward=("down_proj",)),
    "other-dora": DoraSpec(rank=2, alpha=1.0, targets=TARGETS),
}
LENGTHS = (5, 9, 7, 6, 4)
Draw = Callable[[Base, AdapterSpec, int], Tensor]
"""(base, spec, number of the job) → the flat vector of its weights."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Outputs, the gradient of the input, and that of every job."""

    y_TN: Tensor
    dx_TK: Tensor
    gradients: Mapping[str, Tensor]


def drawn(base: Base, spec: AdapterSpec, seed: int) -> Tensor:
    """Weights near where they begin, none of them zero."""
    layout = get_kind(spec.kind).layout(spec, base.shape.sites)
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    flat = 0.2 * noise + {"ia3": 1.0, "vera": 0.3}.get(spec.kind, 0.0)
    for (_, name), value in layout.parameter_views(flat).items():
        if name == MAGNITUDE:
            value += 1.0
    return flat


def grouped(base: Base) -> Banks:
    """Queries, keys and values together, as fused layers have them."""
    stems = [site.name.removesuffix("q_proj") for site in base.shape.sites if site.name.endswith("q_proj")]
    groups = [tuple(f"{stem}{end}_proj" for end in "qkv") for stem in stems]
    return Banks(base.sites(), base.shape.sites, next(base.model.parameters()), groups)


def passed(
    base: Base,
    specs: Mapping[str, AdapterSpec],
    jobs: Sequence[str],
    route: Route,
    draw: Draw = drawn,
    lengths: Sequence[int] = LENGTHS,
) -> Passed:
    """Through the groups of one layer, one after the other; each of `jobs` has a sample of its length."""
    banks, device = grouped(base), base.device
    for number, (job, spec) in enumerate(specs.items()):
        layout = get_kind(spec.kind).layout(spec, base.shape.sites)
        weights = draw(base, spec, number).to(device, torch.bfloat16).to(base.dtype)
        gradient = torch.zeros(layout.size, dtype=master_dtype(base.dtype), device=device)
        banks.attach(JobAdapter(job, spec, seed=0), layout, weights, gradient)
    microbatch = together(jobs, random_samples(lengths[: len(jobs)]))
    microbatch = replace(microbatch, token_index_T=microbatch.token_index_T.to(device))
    stem, width = "model.layers.1", base.shape.hidden
    noise_TK = torch.randn(microbatch.rows, width, generator=torch.Generator().manual_seed(7))
    x_TK = noise_TK.to(device, torch.bfloat16).to(base.dtype).requires_grad_()
    with banks.bind(microbatch, route, training=True):
        qkv_TN = banks.linear(f"{stem}.self_attn.q_proj")(x_TK, None)
        o_TN = banks.linear(f"{stem}.self_attn.o_proj", adds_residual=True)(qkv_TN[:, :width], x_TK)
        inner = base.shape.site(f"{stem}.mlp.down_proj").in_features
        inner_TK = torch.cat([o_TN, 0.5 * o_TN], dim=1)[:, :inner]
        y_TN = banks.linear(f"{stem}.mlp.down_proj", adds_residual=True)(inner_TK, o_TN)
        (y_TN.double().pow(2).sum() + qkv_TN.double().sin().sum()).backward()
    assert x_TK.grad is not None
    return Passed(y_TN.detach(), x_TK.grad, {job: banks.attached[job].gradient for job in specs})


def differences(got: Passed, want: Passed) -> dict[str, float]:
    """How far each is from what it should be, over the size of that."""
    pairs = {"y": (got.y_TN, want.y_TN), "dx": (got.dx_TK, want.dx_TK)}
    pairs |= {job: (gradient, want.gradients[job]) for job, gradient in got.gradients.items()}
    return {
        name: float((mine.cpu().double() - other.double()).norm() / other.double().norm())
        for name, (mine, other) in pairs.items()
    }
