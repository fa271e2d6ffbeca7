"""The sizes of a transformers model, which is loaded or on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weftune.base.decoders import DOWN, EXPERTS, GATE_UP, MIXTURES, extra_value_count, query_width
from weftune.base.rope import context_length, unscaled_context
from weftune.core.shapes import ModelShape, SiteShape, layer_number
from weftune.core.weights import Weight, WeightHolder, is_coded, stored_bytes


def linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a dict from module path to linear. The output layer is left out. In a mixture of experts,
    linears outside attention, which a few layers may have, are left out as well: PEFT would take their names
    for names of experts."""
    output, mixes = model.get_output_embeddings(), model.config.model_type in MIXTURES
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and not (mixes and ".mlp." in name)
    }


def experts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a dict from module path to the module with all experts of a layer. The dict is empty for a model
    without experts."""
    if model.config.model_type not in MIXTURES:
        return {}
    return {name: module for name, module in model.named_modules() if name.endswith(f".{EXPERTS}")}


def site_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a dict from the name of each site (where adapters can attach) to its module: a linear, or the
    module with all experts of a layer."""
    mixed = {f"{path}.{name}": module for path, module in experts(model).items() for name in (GATE_UP, DOWN)}
    return linears(model) | mixed


def embedding_module(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return a dict from the embedding's module path to the embedding."""
    embedding = model.get_input_embeddings()
    return {name: module for name, module in model.named_modules() if module is embedding}


def model_sites(model: PreTrainedModel) -> Iterator[SiteShape]:
    """Yield the shape of every site (an adaptable linear, or the experts of a layer), in the model's own
    order."""
    found, mixed = linears(model), experts(model)
    last_layer = model.config.num_hidden_layers - 1
    for name, _ in model.named_modules():
        in_last_layer = layer_number(name) == last_layer
        if name in found:
            yield replace(site_shape(name, found[name]), in_last_layer=in_last_layer)
        elif name in mixed:
            for part in (GATE_UP, DOWN):
                count, outputs, inputs = cast(Tensor, getattr(mixed[name], part)).shape
                active = model.config.num_experts_per_tok
                yield SiteShape(
                    f"{name}.{part}",
                    inputs,
                    outputs,
                    experts=count,
                    active_matrices=active,
                    in_last_layer=in_last_layer,
                )


def site_shape(name: str, module: nn.Module) -> SiteShape:
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return SiteShape(name, inputs, outputs, fan_in_fan_out=True)
    assert isinstance(module, nn.Linear)
    turned = bool(getattr(module, "fan_in_fan_out", False))
    return SiteShape(name, module.in_features, module.out_features, fan_in_fan_out=turned)


def model_shape(model: PreTrainedModel, dtype: torch.dtype) -> ModelShape:
    config = model.config
    configured = config.to_dict()
    modules = linears(model)
    sites = tuple(model_sites(model))
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        parameters=parameter_count(model),
        bytes_per_value=dtype.itemsize,
        sites=sites,
        context=context_length(configured),
        unscaled_context=unscaled_context(configured) if hasattr(config, "rope_parameters") else None,
        site_bytes_per_value=_site_bytes(modules.values()),
        multiplies_stored_format=any(
            isinstance(module, WeightHolder) and is_coded(module.frozen_weight())
            for module in modules.values()
        ),
        extra_values=extra_value_count(config.model_type, sites),
        query_width=query_width(config.model_type, sites),
    )


def parameter_count(model: PreTrainedModel) -> int:
    """Return the number of parameter values. A quantised weight counts as its dequantised matrix."""
    count = sum(parameter.numel() for parameter in model.parameters())
    for module in linears(model).values():
        if isinstance(module, WeightHolder):
            own = sum(value.numel() for name, value in module.named_parameters() if name != "bias")
            count += _weight_count(module) - own
    return count


def _site_bytes(modules: Collection[nn.Module]) -> float | None:
    """Return the mean number of bytes per weight value of the linears `modules`. None if no linear is
    quantised."""
    if not any(isinstance(module, WeightHolder) for module in modules):
        return None
    stored = 0
    for module in modules:
        weight = module.frozen_weight() if isinstance(module, WeightHolder) else module.weight
        stored += stored_bytes(cast(Weight, weight))
    return stored / sum(map(_weight_count, modules))


def _weight_count(module: nn.Module) -> int:
    shape = site_shape("", module)
    return shape.in_features * shape.out_features
