"""Models without weights, made from configs; the text tower of a wrapper under the wrapper's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from weftune.base.quant.stored import Quantised
from weftune.base.towers import ROTATES_IMAGES, SAME_ON_TEXT, WRAPPERS, within


@dataclass(frozen=True, slots=True)
class BaseConfig:
    text: PretrainedConfig
    """Of the causal language model that is trained."""
    wrapped: bool = False
    """Whether that is the text tower of a wrapper."""
    quantised: Quantised | None = None
    """What the weights of its layers are held in, if they are no matrices."""


class Tower(nn.Module):
    """Stands for a wrapper's own model, and has its text tower only."""

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
    """`head_stored` tells whether the files hold an output layer; None: there are none."""
    if config.model_type not in WRAPPERS:
        return BaseConfig(config)
    text = _of_causal_model(copy.deepcopy(config.text_config))
    outer, inner = (bool(getattr(one, "tie_word_embeddings", None)) for one in (config, text))
    # The two disagree where one of them is a default; then the files know.
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
    """The model on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config.text, dtype=dtype)
    return as_tower(model) if config.wrapped else model


def as_tower(model: PreTrainedModel) -> PreTrainedModel:
    """Give the modules and weights of a text model the names that they have in a wrapper."""
    tied = model._tied_weights_keys or {}
    setattr(model, model.base_model_prefix, Tower(model.base_model))
    model._tied_weights_keys = {within(name): within(source) for name, source in dict(tied).items()}
    return model
