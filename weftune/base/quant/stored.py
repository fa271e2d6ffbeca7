"""The quantisation of a base, from its spec or from its own config. No torch here: commands that only count
import this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from weftune.base.decoders.mixtures import MIXTURES
from weftune.base.spec import BaseSpec, Quantize
from weftune.errors import BaseModelError

CONFIG_KEY = "quantization_config"
INSTEAD = "name the unquantised model as the base, with quantize: nf4 or int8 where memory is short"


@dataclass(frozen=True, slots=True)
class Quantised:
    """Format of the weights of the layers."""

    quantize: Quantize
    stored: bool = False
    """Whether the base's files hold the weights in this format."""
    nested: bool = True
    """Whether maxima of blocks are quantised too, for nf4."""


def quantised(config: Mapping[str, Any], spec: BaseSpec) -> Quantised | None:
    """Return the quantisation, None for a base of plain weights. Raise BaseModelError if it cannot be as
    `spec` requests."""
    if spec.quantize is not None and spec.quantize not in get_args(Quantize):
        *others, last = get_args(Quantize)
        known = f"{', '.join(others)} or {last}"
        raise BaseModelError(f"quantize must be {known}, got {spec.quantize!r}.")
    values = config.get(CONFIG_KEY)
    if values is None and spec.quantize is None:
        return None
    if config.get("model_type") in MIXTURES:
        raise BaseModelError(
            f"{spec.model} is a mixture of experts, which Weftune trains in plain weights only: leave "
            "quantize out, and name a model that is not quantised."
        )
    if values is None:
        assert spec.quantize is not None
        return Quantised(spec.quantize)
    stored = _stored(values if isinstance(values, Mapping) else values.to_dict(), spec.model)
    if spec.quantize not in (None, stored.quantize):
        raise BaseModelError(
            f"{spec.model} is stored in {stored.quantize} and cannot be quantised to {spec.quantize}: leave "
            "quantize out, or name the unquantised model."
        )
    return stored


def _stored(values: Mapping[str, Any], model: str) -> Quantised:
    in_4_bits = bool(values.get("load_in_4bit") or values.get("_load_in_4bit"))
    method = str(values.get("quant_method") or ("bitsandbytes" if in_4_bits else "an unknown method"))
    if method != "bitsandbytes":
        raise BaseModelError(
            f"{model} has quantised weights ({method}), which Weftune cannot read; {INSTEAD}."
        )
    kind = str(values.get("bnb_4bit_quant_type", "fp4")) if in_4_bits else "LLM.int8"
    if kind != "nf4":
        raise BaseModelError(
            f"{model} has quantised weights ({kind} of bitsandbytes), of which Weftune reads nf4 only; "
            f"{INSTEAD}."
        )
    return Quantised("nf4", stored=True, nested=bool(values.get("bnb_4bit_use_double_quant")))
