"""The models that Weftune trains: the families it knows, and the kinds that it names and refuses."""

from __future__ import annotations

import re

from transformers import PretrainedConfig, PreTrainedModel

from weftune.base.decoders.known import DECODERS
from weftune.base.decoders.mixtures import MIXTURES
from weftune.errors import BaseModelError

KNOWN = frozenset({*DECODERS, *MIXTURES, "opt", "gpt2", "qwen3_5_text"})
"""Model types tested with packed samples; any other must pass the check at load to be accepted."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_MODULES = re.compile(r"Experts|MoE|Moe")
TRAINED = (
    "Weftune trains dense text-only causal language models, and of mixtures of experts "
    f"{' and '.join(MIXTURES)}."
)
SEPARATED = frozenset({"qwen3_5_text"})
"""Model types whose recurrent layers begin anew with every sample (base/delta_net.py)."""
LAYER_KINDS = ("layer_types", "layers_block_type")
"""Keys of a config that hold a word for each layer."""
RECURRENT = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
)
OTHER_SENSES = {"vision_config": "vision", "audio_config": "audio"}


def refuse_config(config: PretrainedConfig, name: str) -> None:
    """Raise if the config of a causal language model alone shows that it cannot be a base."""
    kind = kind_refused(config)
    if kind is not None:
        raise BaseModelError(f"{name} is {kind}; {TRAINED}")
    refuse_quantised(config, name)
    if config.model_type not in SEPARATED and (layers := recurrent_layers(config)):
        raise BaseModelError(
            f"{name} ({config.model_type}) has {layers} layers, whose state would flow from one sample of a "
            "pack into the next one, so Weftune cannot train on it."
        )


def recurrent_layers(config: PretrainedConfig) -> str | None:
    """Return the config's name for layers that carry a state from row to row. None if the model has none."""
    kinds = [str(kind) for key in LAYER_KINDS for kind in getattr(config, key, None) or ()]
    found = [kind for kind in kinds if kind in RECURRENT]
    if not found and getattr(config, "state_size", None) is not None:
        return "recurrent"
    return found[0].replace("_", "-") if found else None


def refuse_quantised(config: PretrainedConfig, name: str) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise BaseModelError(f"{name} has quantised weights; name the unquantised model as the base instead.")


def refuse_modules(model: PreTrainedModel, name: str) -> None:
    """Raise for a mixture of experts whose config does not say so: the names of its modules show it."""
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
