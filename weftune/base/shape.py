"""From a transformers model, real or on the meta device, to the records of its sizes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weftune.core.shapes import ModelShape, SiteShape


def linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear but the output layer, by module path: what PEFT calls all-linear."""
    output = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output
    }


def site_shape(name: str, module: nn.Module) -> SiteShape:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if isinstance(module, Conv1D):
        return SiteShape(name, weight.shape[0], weight.shape[1], fan_in_fan_out=True)
    return SiteShape(name, weight.shape[1], weight.shape[0])


def model_shape(model: PreTrainedModel, dtype: torch.dtype) -> ModelShape:
    config = model.config
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes_per_value=dtype.itemsize,
        sites=tuple(site_shape(name, module) for name, module in linears(model).items()),
        context=context(config),
    )


def context(config: PretrainedConfig) -> int:
    """The longest sample whose positions do not depend on its neighbours in the pack.

    Long rope changes the rotation of all rows once the longest sample passes the original length, so
    such a base ends there.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for layer_rope in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if layer_rope.get("rope_type") == "longrope":
            longest = min(longest, int(layer_rope["original_max_position_embeddings"]))
    return longest
