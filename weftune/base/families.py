"""Which models Weftune trains: the families it knows, and the kinds that it names and refuses."""

from __future__ import annotations

import re

from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.decoders.known import DECODERS
from weftune.base.decoders.mixtures import MIXTURES
from weftune.errors import BaseModelError

KNOWN = frozenset({*DECODERS, *MIXTURES, "opt", "gpt2"})
"""Model types tested with packed samples; any other must pass the check at load to be accepted."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_MODULES = re.compile(r"Experts|MoE|Moe")
TRAINED = (
    "Weftune trains dense text-only causal language models, and of mixtures of experts "
    f"{' and '.join(MIXTURES)}."
)
OTHER_SENSES = {"vision_config": "vision", "audio_config": "audio"}


def refuse_config(config: PretrainedConfig, name: str) -> None:
    """Raise a sentence if the config alone says that this model cannot be a base."""
    kind = kind_refused(config)
    if kind is not None:
        raise BaseModelError(f"{name} is {kind}; {TRAINED}")
    if getattr(config, "quantization_config", None) is not None:
        raise BaseModelError(f"{name} has quantised weights; name the unquantised model as the base instead.")


def refuse_modules(model: PreTrainedModel, name: str) -> None:
    """Mixtures of experts whose config does not say so are known by the names of their modules."""
    if model.config.model_type in MIXTURES:
        return
    if any(EXPERT_MODULES.search(type(module).__name__) for module in model.modules()):
        raise BaseModelError(f"{name} is a mixture of experts; {TRAINED}")


def kind_refused(config: PretrainedConfig) -> str | None:
    for key, sense in OTHER_SENSES.items():
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
