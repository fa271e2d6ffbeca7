"""Tiny models with a layer for each of four workers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.families import config, randomised, with_exact_norms

LAYERS = 4


def deep(family: str, dtype: torch.dtype) -> PreTrainedModel:
    settings = config(family)
    settings.num_hidden_layers = LAYERS
    if types := getattr(settings, "layer_types", None):
        settings.layer_types = [types[number % len(types)] for number in range(LAYERS)]
    model = randomised(settings, dtype)
    return with_exact_norms(model) if dtype is torch.float64 else model
