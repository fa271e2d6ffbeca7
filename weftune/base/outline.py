"""Models without weights, made from configs; the text tower of a wrapper under the wrapper's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weftune.base.decoders import ROTATES_IMAGES, SAME_ON_TEXT, WRAPPERS, within
from weftune.base.quant.stored import Quantised


@dataclass(frozen=True, slots=True)
class BaseConfig:
    text: PretrainedConfig
    """Config of the causal language model that is trained."""
    wrapped: bool = False
    """Whether that model is the text tower of a wrapper."""
    quantised: Quantised | None = None
    """Format of the weights of its layers, if they are not plain matrices."""


class Tower(nn.Module):
    """A stand-in for a wrapper's own model that has only its text tower."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.language_model(*given, **named)

    def get_input_embeddings(self) -> nn.Module:
        embedding = self.language_model.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(embedding, nn.Module)
        return embedding


def base_config(config: PretrainedConfig, head_stored: Callable[[], bool | None]) -> BaseConfig:
    """Return the config of the model that is trained. `head_stored` returns whether the files hold an output
    layer, or None if there are no files."""
    if config.model_type not in WRAPPERS:
        return BaseConfig(config)
    text = _of_causal_model(copy.deepcopy(config.text_config))
    outer, inner = (bool(getattr(one, "tie_word_embeddings", None)) for one in (config, text))
    # The two disagree if one of them is a default; then the files decide.
    stored = None if outer == inner else head_stored()
    text.tie_word_embeddings = inner if stored is None else not stored
    return BaseConfig(text, wrapped=True)


def _of_causal_model(text: PretrainedConfig) -> PretrainedConfig:
    if text.model_type not in SAME_ON_TEXT:
        return text
    values = text.to_dict()
    family, _ = SAME_ON_TEXT[values.pop("model_type")]
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {key: value for key, value in rope.items() if key not in ROTATES_IMAGES}
    return AutoConfig.for_model(family, **values)


def outline(config: BaseConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config.text, dtype=dtype)
    return as_tower(model) if config.wrapped else model


def as_tower(model: PreTrainedModel) -> PreTrainedModel:
    """Give the modules and weights of a text model the names that they have in a wrapper."""
    tied = model._tied_weights_keys or {}
    setattr(model, model.base_model_prefix, Tower(model.base_model))
    model._tied_weights_keys = {within(name): within(source) for name, source in dict(tied).items()}
    return model
