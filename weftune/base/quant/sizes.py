"""The bytes of quantised weights, by format and shape. No torch here: commands that only count import
this."""

from __future__ import annotations

from collections.abc import Iterable

from weftune.base.spec import Quantize
from weftune.core.shapes import SiteShape, layer_of

NF4_BLOCK, NESTED_BLOCK = 64, 256
"""Number of values that share a maximum, and of maxima that share one in turn, as in bitsandbytes."""
NF4_CODES, NESTED_CODES = 16, 256
MULTIPLIED_AS_STORED: tuple[Quantize, ...] = ("fp8",)
"""Formats from which products are computed directly, so that no matrix is computed for them."""


def nf4_bytes(values: int, nested: bool = True) -> int:
    """Return the bytes of NF4: two values per byte and one maximum per block. If `nested`, maxima take one
    byte each, plus the values that they are relative to."""
    packed, blocks = -(-values // 2), -(-values // NF4_BLOCK)
    if not nested:
        return packed + 4 * blocks + 4 * NF4_CODES
    return packed + blocks + 4 * (-(-blocks // NESTED_BLOCK) + NESTED_CODES + NF4_CODES + 1)


def int8_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of int8: one per value and a float32 scale per row."""
    return outputs * inputs + 4 * outputs


def fp8_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of fp8: one per value in either order and a float32 scale per row."""
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
    """Return the bytes per value of the sites' weights if those of the layers are quantised."""
    stored = values = 0
    for site in sites:
        values += site.weights
        if layer_of(site.name) is None:
            stored += site.weights * bytes_per_value
        else:
            stored += stored_bytes(quantize, site.out_features, site.in_features, nested)
    return stored / values
