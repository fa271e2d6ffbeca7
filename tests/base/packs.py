"""Microbatches of random samples, for the tests of the base."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families import VOCABULARY
from weftune.base.model import Base
from weftune.base.quant.linear import matrix_dtype
from weftune.base.shape import model_shape
from weftune.base.spec import BaseSpec
from weftune.base.stages import keep_stages, make_stage_base, refuse_unknown_family
from weftune.core.batch import IGNORED, Microbatch
from weftune.core.shapes import LayerRange

CPU = torch.device("cpu")
LENGTHS = (5, 13, 1, 13, 8)


def random_samples(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def packed(samples: Sequence[Tensor]) -> Microbatch:
    tokens_T = torch.cat(list(samples))
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=torch.cat([torch.arange(len(tokens_L)) for tokens_L in samples]),
        targets_T=torch.full_like(tokens_T, IGNORED),
        token_index_T=torch.arange(len(tokens_T)),
        sample_lengths=tuple(len(tokens_L) for tokens_L in samples),
        segments=(),
    )


def base_of(model: PreTrainedModel, name: str = "tiny", device: torch.device = CPU) -> Base:
    return Base.from_model(model, BaseSpec(model=name), device)


def cut_base(model: PreTrainedModel, spec: BaseSpec, device: torch.device, held: LayerRange) -> Base:
    """Return one stage of a model in memory; the model is taken over."""
    refuse_unknown_family(model.config, spec.model)
    whole = model_shape(model, matrix_dtype(model))
    keep_stages(model, held)
    return make_stage_base(model, spec, device, held, whole)
