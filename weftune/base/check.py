"""Rules for which models can be a base model: known families, unsupported model types, and a check at load
that packed samples get the same logits as transformers computes for each sample alone.

Shapes: T rows of the pack, L rows of one sample, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.decoders import DECODERS, MIXTURES, ROUTER
from weftune.core.batch import IGNORED, Microbatch
from weftune.core.clock import Phase, phase
from weftune.errors import BaseModelError, UserError

if TYPE_CHECKING:
    from weftune.base.model import Base

KNOWN_MODEL_TYPES = frozenset({*DECODERS, *MIXTURES, "opt", "gpt2", "qwen3_5_text"})
"""Model types that the tests cover. A model of another type is accepted if it passes the check at load."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_MODULES = re.compile(r"Experts|MoE|Moe")
SUPPORTED_MODELS = (
    "Weftune trains dense text-only causal language models, and of mixtures of experts "
    f"{' and '.join(MIXTURES)}."
)
RESETTABLE_MODEL_TYPES = frozenset({"qwen3_5_text"})
"""Model types whose recurrent layers are reset at the start of every sample (base/delta_net.py)."""
LAYER_KINDS = ("layer_types", "layers_block_type")
"""Keys of a model's config whose value is a list with the type of each layer."""
RECURRENT = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
)
OTHER_MODALITIES = {"vision_config": "vision", "audio_config": "audio"}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Maps the base's dtype to the largest allowed `logit_distance` between packed and separate samples. Rows
that attend to another sample, or have a wrong position, exceed this limit by far; rounding errors, including
those of eager attention, are far smaller."""

CHEAP_WINDOW = 64
"""Largest sliding window, in tokens, that the check at load covers for a known model family. Longer windows
are covered by tests only."""
MAX_WINDOW = 8192


def refuse_config(config: PretrainedConfig, name: str) -> None:
    """Raise BaseModelError if the config of a model shows that it cannot be a base."""
    kind = find_unsupported_kind(config)
    if kind is not None:
        raise BaseModelError(f"{name} is {kind}; {SUPPORTED_MODELS}")
    if getattr(config, "quantization_config", None) is not None:
        raise BaseModelError(f"{name} has quantised weights; name the unquantised model as the base instead.")
    if config.model_type not in RESETTABLE_MODEL_TYPES and (layers := recurrent_layers(config)):
        raise BaseModelError(
            f"{name} ({config.model_type}) has {layers} layers, whose state would flow from one sample of a "
            "pack into the next one, so Weftune cannot train on it."
        )


def recurrent_layers(config: PretrainedConfig) -> str | None:
    """Return the type of the model's first layer with a recurrent state, in words for a message. None if the
    model has no such layer."""
    kinds = [str(kind) for key in LAYER_KINDS for kind in getattr(config, key, None) or ()]
    found = [kind for kind in kinds if kind in RECURRENT]
    if not found and getattr(config, "state_size", None) is not None:
        return "recurrent"
    return found[0].replace("_", "-") if found else None


def refuse_modules(model: PreTrainedModel, name: str) -> None:
    """Raise BaseModelError for a mixture of experts that can be recognised only by the names of its modules,
    not by its config."""
    if model.config.model_type in MIXTURES:
        return
    if any(EXPERT_MODULES.search(type(module).__name__) for module in model.modules()):
        raise BaseModelError(f"{name} is a mixture of experts; {SUPPORTED_MODELS}")


def find_unsupported_kind(config: PretrainedConfig) -> str | None:
    for key, sense in OTHER_MODALITIES.items():
        if getattr(config, key, None) is not None:
            return f"a {sense} model ({config.model_type})"
    if getattr(config, "is_encoder_decoder", False):
        return f"an encoder-decoder model ({config.model_type})"
    mixes = any((getattr(config, key, None) or 0) > 1 for key in EXPERT_COUNTS)
    if mixes and config.model_type not in MIXTURES:
        return f"a mixture of experts ({config.model_type})"
    if getattr(config, "use_bidirectional_attention", False):
        return f"a bidirectional model ({config.model_type})"
    return None


@phase(Phase.CHECKING)
@torch.no_grad()
def check_packing(base: Base, attention_name: str) -> None:
    """Raise BaseModelError if a forward of packed samples gives other logits than a forward of each sample
    with transformers' attention `attention_name`."""
    name, known = base.spec.model, base.model.config.model_type in KNOWN_MODEL_TYPES
    samples = [sample_tokens(length, base) for length in sample_lengths(base, known)]
    routing = Routing(base.model)
    try:
        with use_attention(base.model, attention_name), routing.record_decisions():
            separate = [base.model(tokens_L[None], use_cache=False).logits[0] for tokens_L in samples]
        with routing.replay_decisions():
            packed_TV = base.head().logits(base.hidden(make_microbatch(samples)))
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
    worst = torch.tensor([logit_distance(*pair) for pair in zip(packed, separate, strict=True)]).max().item()
    if not worst <= TOLERANCE[base.dtype]:
        raise BaseModelError(
            f"{name} ({base.model.config.model_type}) computes something else when samples are packed "
            f"together (logits off by {worst:.1%}), so Weftune cannot train on it."
        )


def sample_lengths(base: Base, is_known_family: bool) -> tuple[int, ...]:
    """Return the lengths in tokens of the three samples of the check. One sample is longer than the model's
    sliding window if the check has to cover this window."""
    config, context = base.model.config, base.shape.context
    window = getattr(config, "sliding_window", None)
    longest = 12
    if window is not None and window < context and (window <= CHEAP_WINDOW or not is_known_family):
        if window > MAX_WINDOW:
            raise BaseModelError(
                f"{base.spec.model} ({config.model_type}) is no family that Weftune knows, and its sliding "
                f"window of {window} rows is too long to be checked at load."
            )
        longest = max(longest, window + 5)
    return 7, min(longest, context), 3


def sample_tokens(length: int, base: Base) -> Tensor:
    """Return `length` token ids for the check of packing, which are spread over the vocabulary and equal in
    every call."""
    return (torch.arange(length, device=base.device) * 7919 + 13 * length) % base.shape.vocabulary


def make_microbatch(samples: list[Tensor]) -> Microbatch:
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


def logit_distance(a_LV: Tensor, b_LV: Tensor) -> float:
    """Return the norm of `a_LV` − `b_LV`, divided by the norm of `b_LV` after subtracting its row means. NaN
    if a value is not finite."""
    a_LV, b_LV = a_LV.double(), b_LV.double()
    spread = (b_LV - b_LV.mean(dim=-1, keepdim=True)).norm()
    return ((a_LV - b_LV).norm() / spread).item()


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


Decision = tuple[Tensor, ...]
"""Output of a router in a mixture of experts for every token: its logits, and the weights and indices of the
chosen experts."""


class Routing:
    """A recorder of the decisions of the routers in a mixture of experts, which can also replay them. If two
    experts have almost equal scores for a token, a different rounding may select the other one. So when two
    computations of the same rows are compared, the second uses the decisions of the first."""

    def __init__(self, model: PreTrainedModel) -> None:
        mixes = model.config.model_type in MIXTURES
        found = model.named_modules() if mixes else ()
        self._decisions: dict[nn.Module, list[Decision]] = {
            module: [] for name, module in found if name.endswith(f".{ROUTER}")
        }

    @contextmanager
    def record_decisions(self) -> Iterator[None]:
        """Record the routers' decisions in all passes within the context."""

        def record_decision(router: nn.Module, _: Any, decision: Decision) -> None:
            self._decisions[router].append(decision)

        with self._hook_routers(record_decision):
            yield

    @contextmanager
    def replay_decisions(self) -> Iterator[None]:
        """Within the context, make the routers return the recorded decisions. A pass must then have the
        tokens of all recorded passes, concatenated."""

        def replace_decision(router: nn.Module, _: Any, __: Decision) -> Decision:
            return tuple(torch.cat(parts) for parts in zip(*self._decisions[router], strict=True))

        with self._hook_routers(replace_decision):
            yield

    @contextmanager
    def _hook_routers(self, hook: Callable[..., Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for router in self._decisions:
                stack.enter_context(router.register_forward_hook(hook))
            yield
