"""The check at load: packed samples must give the logits that transformers gives them one by one.

Shapes: T rows of the pack, L rows of one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weftune.base.decoders.routing import Routing
from weftune.base.families import KNOWN
from weftune.core.batch import IGNORED, Microbatch
from weftune.core.clock import Phase, phase
from weftune.errors import BaseModelError, UserError

if TYPE_CHECKING:
    from weftune.base.model import Base

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Dtype → tolerance relative to the logits' spread. Rows that see another sample, or have a wrong position,
miss it by far; rounding, and eager attention's softmax in float32, stay far below it."""

CHEAP_WINDOW = 64
"""Largest sliding window of a known family that is exercised at load; the tests cover longer ones."""
LONGEST_WINDOW = 8192


@phase(Phase.CHECKING)
@torch.no_grad()
def check_packing(base: Base, plain: str) -> None:
    """Compare with the separate forwards under the attention `plain`, and refuse the model if they differ."""
    name, known = base.spec.model, base.model.config.model_type in KNOWN
    samples = [sample(length, base) for length in sample_lengths(base, known)]
    routing = Routing(base.model)
    try:
        with attention_set(base.model, plain), routing.recorded():
            separate = [base.model(tokens_L[None], use_cache=False).logits[0] for tokens_L in samples]
        with routing.replayed():
            packed_TV = base.head().logits(base.hidden(microbatch_of(samples)))
    except UserError as refusal:
        raise BaseModelError(f"{name} cannot be a base: {refusal}") from refusal
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        if known:
            raise
        raise BaseModelError(
            f"{name} ({base.model.config.model_type}) cannot run packed samples: {error}"
        ) from error
    if not all(logits_LV.isfinite().all() for logits_LV in separate):
        raise BaseModelError(
            f"{name} gives logits that are not finite: its weights are broken, or too large for {base.dtype}."
        )
    packed = packed_TV.split([len(tokens_L) for tokens_L in samples])
    # A tensor's maximum is NaN if any of its values is NaN, unlike Python's `max`.
    worst = torch.tensor([distance(*pair) for pair in zip(packed, separate, strict=True)]).max().item()
    if not worst <= TOLERANCE[base.dtype]:
        raise BaseModelError(
            f"{name} ({base.model.config.model_type}) computes something else when samples are packed "
            f"together (logits off by {worst:.1%}), so Weftune cannot train on it."
        )


def sample_lengths(base: Base, known: bool) -> tuple[int, ...]:
    """Return three lengths, one past the sliding window if it has to be exercised, or can be cheaply."""
    config, context = base.model.config, base.shape.context
    window = getattr(config, "sliding_window", None)
    longest = 12
    if window is not None and window < context and (window <= CHEAP_WINDOW or not known):
        if window > LONGEST_WINDOW:
            raise BaseModelError(
                f"{base.spec.model} ({config.model_type}) is no family that Weftune knows, and its sliding "
                f"window of {window} rows is too long to be checked at load."
            )
        longest = max(longest, window + 5)
    return 7, min(longest, context), 3


def sample(length: int, base: Base) -> Tensor:
    """Return tokens spread over the vocabulary, the same ones every time."""
    return (torch.arange(length, device=base.device) * 7919 + 13 * length) % base.shape.vocabulary


def microbatch_of(samples: list[Tensor]) -> Microbatch:
    tokens_T = torch.cat(samples)
    positions_T = torch.cat([torch.arange(len(tokens_L), device=tokens_T.device) for tokens_L in samples])
    return Microbatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        targets_T=torch.full_like(tokens_T, IGNORED),
        token_index_T=torch.arange(len(tokens_T), device=tokens_T.device),
        sample_lengths=tuple(len(tokens_L) for tokens_L in samples),
        segments=(),
    )


def distance(a_LV: Tensor, b_LV: Tensor) -> float:
    """Return the distance of the logits relative to their spread. NaN if either tensor is not finite."""
    a_LV, b_LV = a_LV.double(), b_LV.double()
    spread = (b_LV - b_LV.mean(dim=-1, keepdim=True)).norm()
    return ((a_LV - b_LV).norm() / spread).item()


@contextmanager
def attention_set(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
