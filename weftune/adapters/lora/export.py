"""Two exports of an adapter folder: one that every server scales correctly, and a merge into the base's
weights.

Shapes: r rank at a site, R the largest rank, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from weftune.adapters.folder import read_config
from weftune.adapters.lora.experts import stacked
from weftune.adapters.lora.files import read_adapter, read_tokens, refuse_misfit, write_adapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.token_rows import merge_tokens
from weftune.core.shapes import SiteShape
from weftune.errors import AdapterError


def write_portable(folder: Path, target: Path) -> int:
    """Write the adapter of `folder` with one rank and the scale 1 everywhere, and return the rank."""
    spec, weights = read_adapter(folder)
    config = read_config(folder)
    if spec.target_parameters:
        raise AdapterError(
            f"{folder} has adapters on experts, which servers do not load as PEFT stores them; for a model "
            "that they do load, run weftune export --merged"
        )
    if spec.trainable_token_indices:
        raise AdapterError(
            f"{folder} has embeddings of its own (trainable_token_indices), which servers do not load; for a "
            "model that they do load, run weftune export --merged"
        )
    rank = max(a_rK.shape[0] for a_rK, _ in weights.values())
    folded = {
        site: (_padded(a_rK, rank), _padded((b_Nr.double() * spec.scale_at(site)).to(b_Nr.dtype).T, rank).T)
        for site, (a_rK, b_Nr) in weights.items()
    }
    transposed = bool(config.get("fan_in_fan_out"))
    sites = [SiteShape(site, a.shape[1], b.shape[0], transposed) for site, (a, b) in weights.items()]
    portable = LoraSpec(rank=rank, alpha=float(rank), targets=_names(spec, list(weights)))
    write_adapter(target, portable, folded, sites, config.get("base_model_name_or_path"))
    return rank


def _padded(value_rM: Tensor, rank: int) -> Tensor:
    """Add zero rows up to `rank`: they do not change the product of A and B."""
    missing = rank - value_rM.shape[0]
    return torch.cat([value_rM, value_rM.new_zeros(missing, value_rM.shape[1])]) if missing else value_rM


def _names(spec: LoraSpec, targeted: Sequence[str]) -> tuple[str, ...]:
    """Return a list, since SGLang reads no regular expression: the spec's own, or else every module path."""
    return tuple(sorted(targeted)) if isinstance(spec.targets, str) else spec.targets


def merge(folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
    """Add the adapter of `folder` to the weights of the base's linears, rounding once."""
    spec, weights = read_adapter(folder)
    shapes = {site.name: site for site in sites}
    if spec.trainable_token_indices:
        stored = read_tokens(folder, spec)
        merge_tokens(folder, stored.path, spec.trainable_token_indices, stored.rows_nD, modules)
    for site, (a_rK, b_Nr) in weights.items():
        if site not in shapes:
            raise AdapterError(f"{folder} is for another base: this one has no linear {site}")
        refuse_misfit(folder, shapes[site], a_rK, b_Nr)
        if shapes[site].experts:
            _merge_experts(modules[site], site, shapes[site].experts, spec.scale_at(site), a_rK, b_Nr)
            continue
        module = modules[site]
        weight = module.weight
        assert isinstance(weight, Tensor)
        change_NK = spec.scale_at(site) * (b_Nr.double() @ a_rK.double())
        change = change_NK.T if shapes[site].fan_in_fan_out else change_NK
        # A new parameter: written in place, the change would reach anything tied to this weight.
        module.weight = nn.Parameter((weight.double() + change).to(weight.dtype), requires_grad=False)


def _merge_experts(module: nn.Module, site: str, count: int, scale: float, a: Tensor, b: Tensor) -> None:
    """Merge experts one after another: all experts of a layer in float64 may not fit in memory."""
    weight_ENK = getattr(module, site.rpartition(".")[2])
    for weight_NK, a_rK, b_rN in zip(weight_ENK.data, *stacked(a, b, count), strict=True):
        change_NK = scale * (b_rN.double().T @ a_rK.double())
        weight_NK.copy_(weight_NK.double() + change_NK)
