"""The bytes of quantised weights, by format and shape. No torch here: verbs that only count import this."""

from __future__ import annotations

from collections.abc import Iterable

from weftune.base.spec import Quantize
from weftune.core.shapes import SiteShape, layer_of

NF4_BLOCK, NESTED_BLOCK = 64, 256
"""Values that share a maximum, and maxima that share one in turn: as bitsandbytes has it."""
NF4_CODES, NESTED_CODES = 16, 256
MULTIPLIED_AS_STORED: tuple[Quantize, ...] = ("fp8",)
"""Formats of which products are made, so that no matrix is computed for them."""


def nf4_bytes(values: int, nested: bool = True) -> int:
    """Two values a byte and a maximum a block; `nested`: a byte a maximum, and what those are relative to."""
    packed, blocks = -(-values // 2), -(-values // NF4_BLOCK)
    if not nested:
        return packed + 4 * blocks + 4 * NF4_CODES
    return packed + blocks + 4 * (-(-blocks // NESTED_BLOCK) + NESTED_CODES + NF4_CODES + 1)


def int8_bytes(outputs: int, inputs: int) -> int:
    """A byte a value and a float32 scale a row."""
    return outputs * inputs + 4 * outputs


def fp8_bytes(outputs: int, inputs: int) -> int:
    """A byte a value in either order and a float32 scale a row."""
    return 2 * outputs * inputs + 4 * outputs


def stored_bytes(quantize: Quantize, outputs: int, inputs: int, nested: bool = True) -> int:
    match quantize:
        case "int8":
            return int8_bytes(outputs, inputs)
        case "fp8":
            return fp8_bytes(outputs, inputs)
        case "nf4":
            return nf4_bytes(outputs * inputs, nested)


def site_bytes_per_value(
    sites: Iterable[SiteShape], quantize: Quantize, bytes_per_value: int, nested: bool = True
) -> float:
    """Of the sites' weights, where those of the layers are quantised."""
    stored = values = 0
    for site in sites:
        values += site.weights
        if layer_of(site.name) is None:
            stored += site.weights * bytes_per_value
        else:
            stored += stored_bytes(quantize, site.out_features, site.in_features, nested)
    return stored / values
