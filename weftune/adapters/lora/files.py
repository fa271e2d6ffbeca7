"""PEFT adapter folders of LoRA: reading, writing, export with one scale for servers, and merging into the
weights of a base.

Shapes: r rank, K inputs, N outputs of a linear; E experts; n trained tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weftune.adapters.files import (
    is_transposed,
    layers_to_transform,
    peft_config,
    read_tensors,
    target_modules,
    write_folder,
)
from weftune.adapters.folder import SEQUENCE_TASK, WEIGHTS, read_config, refuse_slow_patterns
from weftune.adapters.kind import Parameters
from weftune.adapters.lora.spec import (
    EXPERTS,
    LoraSpec,
    embedding_of_tokens,
    read_spec,
    site_at_path,
    site_of_weight,
    stored_path,
    stored_token_name,
    weight_names,
)
from weftune.adapters.scalar_head import STORED_HEAD, read_head, stored_head
from weftune.adapters.target import TOKENS
from weftune.adapters.token_rows import merge_tokens, refuse_other_tokens
from weftune.core.shapes import SCORE, SiteShape
from weftune.errors import AdapterError

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""Maps the name of each adapted linear to its LoRA matrices (A [r, K], B [N, r])."""


# PEFT calls adapters on experts `target_parameters`: one A [E · r, K] and one B [N, r · E] for all experts of
# a layer. Rows of A go expert by expert; columns of B rank by rank, and for each rank expert by expert.


def stack_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A [E, r, K] and B [E, r, N] with the experts stacked, given the two matrices in which PEFT
    stores all experts."""
    a_ErK = a.view(experts, -1, a.shape[1])
    return a_ErK, b.view(b.shape[0], -1, experts).permute(2, 1, 0)


def flatten_experts(a_ErK: Tensor, b_ErN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two matrices in which PEFT stores all experts, given A [E, r, K] and B [E, r, N]. This is
    the inverse of `stack_experts`."""
    return a_ErK.flatten(0, 1), b_ErN.permute(2, 1, 0).flatten(1)


def write_adapter(
    folder: Path,
    spec: LoraSpec,
    weights: Weights,
    sites: Sequence[SiteShape],
    base: str | None,
    extra_tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a LoRA adapter folder that PEFT and vLLM load unchanged. `extra_tensors` maps names in the file
    to further tensors, which vLLM does not load."""
    tensors = dict(extra_tensors or {})
    mixed = {site.name for site in sites if site.experts}
    for site, (a_rK, b_Nr) in weights.items():
        a_name, b_name = weight_names(stored_path(site, weights) if site in mixed else site)
        tensors[a_name], tensors[b_name] = a_rK, b_Nr
    write_folder(folder, tensors, lora_config(spec, list(weights), sites, base))


def token_and_head_tensors(parameters: Parameters) -> dict[str, Tensor]:
    """Return the trained embeddings and the scalar head of an adapter as a dict from their names in PEFT's
    files to the tensors."""
    tokens = {stored_token_name(site): value for (site, name), value in parameters.items() if name == TOKENS}
    return tokens | stored_head(parameters)


def read_token_and_head_tensors(spec: LoraSpec, sites: Sequence[SiteShape]) -> dict[tuple[str, str], Tensor]:
    """Return the trained embeddings and the scalar head that are stored in the folder `spec.init_from`."""
    folder = Path(str(spec.init_from))
    found = read_head(folder, spec, sites)
    if spec.trained_tokens:
        path, rows_nD = read_tokens(folder, spec)
        found[path, TOKENS] = rows_nD
    return found


def lora_config(
    spec: LoraSpec, adapted_sites: Sequence[str], sites: Sequence[SiteShape], base: str | None, **more: Any
) -> Any:
    modules = target_modules(spec, adapted_sites, sites)
    return peft_config(
        "LoraConfig",
        base,
        r=spec.rank,
        lora_alpha=_integer_alpha(spec.alpha),
        lora_dropout=spec.dropout,
        target_modules=modules,
        layers_to_transform=layers_to_transform(spec, modules),
        **more,
        target_parameters=list(spec.target_parameters) or None,
        use_rslora=spec.rslora,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern={pattern: _integer_alpha(alpha) for pattern, alpha in spec.alpha_pattern.items()},
        trainable_token_indices=list(spec.trainable_token_indices) or None,
        **({"task_type": SEQUENCE_TASK, "modules_to_save": [SCORE]} if spec.scalar_head else {}),
        fan_in_fan_out=is_transposed(adapted_sites, sites),
        bias="none",
    )


def _integer_alpha(alpha: float) -> float:
    """Return an integral alpha as an int, the declared type in PEFT and vLLM, which some readers require.
    Return other values unchanged."""
    return int(alpha) if float(alpha).is_integer() else alpha


def read_adapter(folder: Path) -> tuple[LoraSpec, dict[str, tuple[Tensor, Tensor]]]:
    """Return the spec and the weights of a PEFT LoRA folder, after checking that they match."""
    spec = read_spec(folder)
    weights = {site_at_path(path, spec): pair for path, pair in read_weights(folder).items()}
    refuse_slow_patterns(folder, spec, list(weights))
    for site, (a_rK, b_Nr) in weights.items():
        rank = spec.rank_at(site)
        ranks = a_rK.shape[0] if spec.targets_parameter(site) else rank
        matrices = a_rK.ndim == b_Nr.ndim == 2
        if not (matrices and a_rK.shape[0] == b_Nr.shape[1] == ranks and ranks % rank == 0):
            raise AdapterError(
                f"{folder} is damaged: at {site} A is {list(a_rK.shape)} and B {list(b_Nr.shape)}, "
                f"but its config says rank {rank}"
            )
    return spec, weights


def read_tokens(folder: Path, spec: LoraSpec) -> tuple[str, Tensor]:
    """Return the module path of the embedding, and its trained rows, from an adapter folder."""
    tensors = read_tensors(folder)
    named = {
        path: value for name, value in tensors.items() if (path := embedding_of_tokens(name)) is not None
    }
    if len(named) != 1:
        raise AdapterError(f"{folder} is damaged: it has the tokens of {len(named)} embeddings, not of one")
    ((path, rows_nD),) = named.items()
    if rows_nD.ndim != 2 or len(rows_nD) != len(spec.trainable_token_indices):
        raise AdapterError(
            f"{folder} is damaged: its rows of {path} are {list(rows_nD.shape)}, but its config has "
            f"{len(spec.trainable_token_indices)} tokens"
        )
    return path, rows_nD


def read_weights(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    path, found = folder / WEIGHTS, read_tensors(folder)
    beside = {name for name in found if name == STORED_HEAD or embedding_of_tokens(name) is not None}
    tensors = {name: value for name, value in found.items() if name not in beside}
    sites = list(dict.fromkeys(site for name in tensors if (site := site_of_weight(name)) is not None))
    expected = {name for site in sites for name in weight_names(site)}
    if odd := sorted(tensors.keys() ^ expected):
        what = "is no LoRA weight of a linear" if odd[0] in tensors else "is missing"
        raise AdapterError(f"{path} is not what plain LoRA has: {odd[0]} {what}")
    if not sites:
        raise AdapterError(f"{path} holds no weights")
    return {site: (tensors[weight_names(site)[0]], tensors[weight_names(site)[1]]) for site in sites}


def read_start(spec: LoraSpec, sites: Sequence[SiteShape]) -> Weights:
    """Return the weights in the folder `spec.init_from`. Raise AdapterError unless it has the linears and
    ranks of the spec."""
    assert isinstance(spec.init_from, str), "the adapter of a job has a folder when it is read"
    folder = Path(spec.init_from)
    before, weights = read_adapter(folder)
    refuse_other_tokens(folder, before, spec)
    for path, shapes in spec.embedding_row_shapes(sites).items():
        (shape,), (stored_path, rows_nD) = shapes.values(), read_tokens(folder, spec)
        if stored_path != path:
            raise AdapterError(f"{folder} is for another base: its embedding is {stored_path}, not {path}")
        if rows_nD.shape != shape:
            has = f"embeddings {rows_nD.shape[1]} wide"
            raise AdapterError(f"{folder} is for another base: it has {has}, the base {shape[1]}")
    adapted_sites = {site.name: site for site in sites if spec.adapts(site)}
    if odd := sorted(weights.keys() ^ adapted_sites.keys()):
        where = "only in the folder" if odd[0] in weights else "not in the folder"
        more = f", and {len(odd) - 1} more differ" if len(odd) > 1 else ""
        mixed = spec.target_parameters or any(EXPERTS in name for name in weights)
        keys = "adapter.targets" + (" and adapter.target_parameters" if mixed else "")
        raise AdapterError(
            f"{folder} and the job's targets do not name the same sites: {odd[0]} is {where}{more}; "
            f"set {keys} as the folder has it"
        )
    for name, site in adapted_sites.items():
        a_rK, b_Nr = weights[name]
        matrices = max(1, site.experts)
        if a_rK.shape[0] != matrices * spec.rank_at(name):
            raise AdapterError(
                f"{folder} has rank {a_rK.shape[0] / matrices:g} at {name}, the job asks for "
                f"{spec.rank_at(name)}; "
                "set adapter.rank and adapter.rank_pattern as the folder has them"
            )
        refuse_other_shape(folder, site, a_rK, b_Nr)
    return weights


def refuse_other_shape(folder: Path, site: SiteShape, a_rK: Tensor, b_Nr: Tensor) -> None:
    has, wants = (a_rK.shape[1], b_Nr.shape[0]), (site.in_features, site.out_features)
    if has != wants:
        raise AdapterError(
            f"{folder} is for another base: at {site.name} it goes from {has[0]} to {has[1]} features, "
            f"the base from {wants[0]} to {wants[1]}"
        )
    if site.experts and a_rK.shape[0] % site.experts:
        raise AdapterError(
            f"{folder} is for another base: at {site.name} it has {a_rK.shape[0]} ranks, which are no "
            f"multiple of the base's {site.experts} experts"
        )


def write_portable(folder: Path, target: Path) -> int:
    """Write an equivalent of the adapter in `folder` to `target`, with one rank and the scale 1 at all
    linears, so that vLLM and SGLang scale it correctly. Return the rank."""
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
        site: (
            _pad_rank(a_rK, rank),
            _pad_rank((b_Nr.double() * spec.scale_at(site)).to(b_Nr.dtype).T, rank).T,
        )
        for site, (a_rK, b_Nr) in weights.items()
    }
    transposed = bool(config.get("fan_in_fan_out"))
    sites = [SiteShape(site, a.shape[1], b.shape[0], transposed) for site, (a, b) in weights.items()]
    # A list, since SGLang reads no regular expression.
    targets = tuple(sorted(weights)) if isinstance(spec.targets, str) else spec.targets
    portable = LoraSpec(rank=rank, alpha=float(rank), targets=targets)
    write_adapter(target, portable, folded, sites, config.get("base_model_name_or_path"))
    return rank


def _pad_rank(value_rM: Tensor, rank: int) -> Tensor:
    """Return the matrix padded with zero rows up to `rank`, which does not change the product of A and B."""
    missing = rank - value_rM.shape[0]
    return torch.cat([value_rM, value_rM.new_zeros(missing, value_rM.shape[1])]) if missing else value_rM


def merge(folder: Path, modules: Mapping[str, nn.Module], sites: Sequence[SiteShape]) -> None:
    """Merge the adapter in `folder` into the weights of the base's linears. Sums are computed in float64 and
    rounded once."""
    spec, weights = read_adapter(folder)
    shapes = {site.name: site for site in sites}
    if spec.trainable_token_indices:
        path, rows_nD = read_tokens(folder, spec)
        merge_tokens(folder, path, spec.trainable_token_indices, rows_nD, modules)
    for site, (a_rK, b_Nr) in weights.items():
        if site not in shapes:
            raise AdapterError(f"{folder} is for another base: this one has no linear {site}")
        refuse_other_shape(folder, shapes[site], a_rK, b_Nr)
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
    """Merge the adapter into a weight of the experts, one expert at a time, since all experts of a layer may
    not fit into memory in float64."""
    weight_ENK = getattr(module, site.rpartition(".")[2])
    for weight_NK, a_rK, b_rN in zip(weight_ENK.data, *stack_experts(a, b, count), strict=True):
        change_NK = scale * (b_rN.double().T @ a_rK.double())
        weight_NK.copy_(weight_NK.double() + change_NK)
