"""Cutting of a base into pipeline stages. A stage consists of consecutive layers; the first stage also has
the embedding, and the last one the final norm and the head.

Modules of other stages are replaced by modules that return their input, so that module paths, layer indices
and the model's forward in transformers remain as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.check import refuse_modules
from weftune.base.decoders import DECODERS, MIXTURES
from weftune.base.load import (
    Tower,
    base_dtype,
    empty_model,
    load_base,
    load_config,
    load_plain,
    model_source,
    wrap_load_errors,
)
from weftune.base.model import Base, copy_config, isolate_samples
from weftune.base.quant.linear import matrix_dtype
from weftune.base.shape import model_shape, model_sites, parameter_count
from weftune.base.spec import BaseSpec
from weftune.base.weights import WeightFiles, read_weights, weight_files
from weftune.core.shapes import LayerRange, ModelShape
from weftune.errors import BaseModelError


@dataclass(frozen=True, slots=True)
class EndModules:
    """Names, in a decoder of one model family, of the attributes that hold its list of layers and the modules
    before and after the layers."""

    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    """Name of the module of learned positions, whose output is added to the embedding in the first stage
    only. None if the family has no such module."""
    before_layers: tuple[str, ...] = ()
    """Paths of other modules between the embedding and the layers. A model may not have them."""
    after_layers: tuple[str, ...] = ("norm",)


ENDS = {
    **dict.fromkeys((*DECODERS, *MIXTURES), EndModules()),
    "qwen3_5_text": EndModules(),
    "gpt2": EndModules(layers="h", embedding="wte", positions="wpe", after_layers=("ln_f",)),
    "opt": EndModules(
        positions="embed_positions",
        before_layers=("project_in",),
        after_layers=("final_layer_norm", "project_out"),
    ),
}


class Elsewhere(nn.Module):
    """A placeholder that returns its input, in place of a module that belongs to another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class NoPositions(nn.Module):
    """A placeholder that returns 0, in place of learned position embeddings, which only the first stage
    adds."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


def load_stage(spec: BaseSpec, device: torch.device, layer_range: LayerRange) -> Base:
    """Load one stage: only the tensors of the layers `layer_range` are read from the base's files."""
    if layer_range.is_first and layer_range.is_last:
        return load_base(spec, device)
    model, files = outline_model(spec, device)
    whole = model_shape(model, matrix_dtype(model))
    with wrap_load_errors(spec):
        keep_stages(model, layer_range)
        if files is None or not read_weights(model, files, device):
            # The names in the files differ from the model's; transformers can map them.
            model = load_plain(spec, torch.device("cpu"))
            keep_stages(model, layer_range)
    return make_stage_base(model, spec, device, layer_range, whole)


def outline_model(spec: BaseSpec, device: torch.device) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Return the base's model on the meta device, with the dtype for `device`, and its weight files, or None
    if there are no safetensors files. Raise BaseModelError if the model cannot be cut into stages."""
    source = model_source(spec)
    config = load_config(spec, source)
    refuse_unknown_family(config.text_config, spec.model)
    with wrap_load_errors(spec):
        files = weight_files(source, spec.revision)
        return empty_model(config, base_dtype(spec, device), files), files


def refuse_unknown_family(config: PretrainedConfig, name: str) -> None:
    if config.model_type not in ENDS:
        raise BaseModelError(
            f"{name} ({config.model_type}) cannot be cut into stages; Weftune knows how to cut "
            f"{', '.join(sorted(ENDS))}. Train it without --pipeline."
        )


def make_stage_base(
    model: PreTrainedModel, spec: BaseSpec, device: torch.device, local_layers: LayerRange, whole: ModelShape
) -> Base:
    """Return a frozen base, with Weftune's attention, for a model that `keep_stages` has reduced to the
    layers `local_layers`. `whole` is the shape (sizes) of the whole base."""
    refuse_modules(model, spec.model)
    nn.Module.to(model, device)
    model.eval().requires_grad_(False)
    copy_config(model)
    isolate_samples(model)
    shape = local_shape(model, whole, local_layers.stop - local_layers.start)
    return Base(model, spec, shape, device, matrix_dtype(model), local_layers, whole.sites)


def local_shape(model: PreTrainedModel, whole_shape: ModelShape, layers: int) -> ModelShape:
    """Return the shape of a base of which `model` contains only `layers` layers."""
    return replace(
        whole_shape, layers=layers, parameters=parameter_count(model), sites=tuple(model_sites(model))
    )


def keep_stages(model: PreTrainedModel, *layer_ranges: LayerRange) -> None:
    """Replace all modules of a model outside this worker's stages by placeholders. `layer_ranges` are the
    layers of the stages, in order."""
    ends = ENDS[model.config.model_type]
    decoder = find_decoder(model)
    layers = cast(nn.ModuleList, getattr(decoder, ends.layers))
    own_layers: set[int] = set()
    for one in layer_ranges:
        assert len(layers) == one.base_layers, f"the base has {len(layers)} layers, not {one.base_layers}"
        assert 0 <= one.start < one.stop <= one.base_layers, f"a stage holds at least one layer, got {one}"
        own_layers |= set(range(one.start, one.stop))
    for index in range(len(layers)):
        if index not in own_layers:
            layers[index] = Elsewhere()
    if not layer_ranges[0].is_first:
        setattr(decoder, ends.embedding, Elsewhere())
        if ends.positions is not None:
            setattr(decoder, ends.positions, NoPositions())
        _replace_children(decoder, ends.before_layers)
    if not layer_ranges[-1].is_last:
        _replace_children(decoder, ends.after_layers)
        model.set_output_embeddings(cast(nn.Module, Elsewhere()))


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the module of a model whose children are the layers, embedding and final norm. In OPT and in
    text towers, this module is nested one level deeper than in other models."""
    base = model.base_model
    if isinstance(base, Tower):
        return base.language_model
    return cast(nn.Module, getattr(base, "decoder", base))


def _replace_children(decoder: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(decoder, name) is not None:
            setattr(decoder, name, Elsewhere())
