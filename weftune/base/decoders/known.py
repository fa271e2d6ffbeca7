"""The families with facts, by the model type of their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftune.base.decoders.facts import DecoderFacts
from weftune.base.decoders.gemma3 import GEMMA3
from weftune.base.decoders.llama import LLAMA
from weftune.base.decoders.mistral import MISTRAL
from weftune.base.decoders.phi3 import PHI3
from weftune.base.decoders.qwen2 import QWEN2
from weftune.base.decoders.qwen3 import QWEN3
from weftune.core.shapes import SiteShape

DECODERS: Mapping[str, DecoderFacts] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "gemma3_text": GEMMA3,
}


def extra_values(family: str, sites: Sequence[SiteShape]) -> int:
    """Return the extra values of fused layers; 0 for an unknown family, whose layers are not fused."""
    return DECODERS[family].extra_values(sites) if family in DECODERS else 0
