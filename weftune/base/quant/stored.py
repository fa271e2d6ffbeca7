"""The quantisation of a base model's weights, from the user's spec or the model's config, and the size of the
weights in bytes. This module does not import torch, which commands that only compute sizes do not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from weftune.base.decoders import MIXTURES
from weftune.base.spec import BaseSpec, Quantize
from weftune.core.shapes import SiteShape, layer_number
from weftune.errors import BaseModelError

CONFIG_KEY = "quantization_config"
REMEDY = "name the unquantised model as the base, with quantize: nf4 or int8 where memory is short"
NF4_BLOCK, NESTED_BLOCK = 64, 256
"""Number of values per block, for which one maximum is stored, and number of maxima per nested block, as in
bitsandbytes."""
NF4_CODES, NESTED_CODES = 16, 256
MULTIPLIED_AS_STORED: tuple[Quantize, ...] = ("fp8",)
"""Quantisation formats for which matrix products are computed from the 8-bit codes directly, without
dequantising the matrix."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Quantisation format of the weights of a base's layers."""

    quantize: Quantize
    is_stored: bool = False
    """Whether the base's files hold the weights in this format."""
    is_nested: bool = True
    """Whether the maxima of nf4 blocks are also quantised."""


def read_quantisation(config: Mapping[str, Any], spec: BaseSpec) -> Quantised | None:
    """Return the quantisation format of a base's weights, or None if they are not quantised. Raise
    BaseModelError if `spec` contradicts the base's files."""
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
    stored = _stored_quantisation(values if isinstance(values, Mapping) else values.to_dict(), spec.model)
    if spec.quantize not in (None, stored.quantize):
        raise BaseModelError(
            f"{spec.model} is stored in {stored.quantize} and cannot be quantised to {spec.quantize}: leave "
            "quantize out, or name the unquantised model."
        )
    return stored


def _stored_quantisation(values: Mapping[str, Any], model: str) -> Quantised:
    in_4_bits = bool(values.get("load_in_4bit") or values.get("_load_in_4bit"))
    method = str(values.get("quant_method") or ("bitsandbytes" if in_4_bits else "an unknown method"))
    if method != "bitsandbytes":
        raise BaseModelError(
            f"{model} has quantised weights ({method}), which Weftune cannot read; {REMEDY}."
        )
    kind = str(values.get("bnb_4bit_quant_type", "fp4")) if in_4_bits else "LLM.int8"
    if kind != "nf4":
        raise BaseModelError(
            f"{model} has quantised weights ({kind} of bitsandbytes), of which Weftune reads nf4 only; "
            f"{REMEDY}."
        )
    return Quantised("nf4", is_stored=True, is_nested=bool(values.get("bnb_4bit_use_double_quant")))


def stored_bytes(quantize: Quantize, outputs: int, inputs: int, nested: bool = True) -> int:
    """Return the size of a quantised matrix in bytes. int8 has one byte per value and a float32 scale per
    row; fp8 additionally stores its bytes transposed. nf4 has two values per byte and a maximum per block; if
    `nested`, each maximum is one byte, plus the nested maxima."""
    values = outputs * inputs
    if quantize != "nf4":
        return (2 if quantize == "fp8" else 1) * values + 4 * outputs
    packed, blocks = -(-values // 2), -(-values // NF4_BLOCK)
    if not nested:
        return packed + 4 * blocks + 4 * NF4_CODES
    return packed + blocks + 4 * (-(-blocks // NESTED_BLOCK) + NESTED_CODES + NF4_CODES + 1)


def site_bytes_per_value(
    sites: Iterable[SiteShape], quantize: Quantize, bytes_per_value: int, nested: bool = True
) -> float:
    """Return the mean number of bytes per weight value of the sites (adaptable linears), given that those in
    layers are quantised and all others have `bytes_per_value`."""
    stored = values = 0
    for site in sites:
        values += site.weight_count
        if layer_number(site.name) is None:
            stored += site.weight_count * bytes_per_value
        else:
            stored += stored_bytes(quantize, site.out_features, site.in_features, nested)
    return stored / values
