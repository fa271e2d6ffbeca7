"""The adapter keys of a prefix tuning job. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from weftune.adapters.target import KEYS, VALUES, TargetSpec, ends_with
from weftune.core.shapes import SiteShape

VALUE = "v_proj"
TOGETHER = ("qkv_proj", "attn.c_attn", "query_key_value")
"""Linears that make queries, keys and values at once, as families call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSpec(TargetSpec):
    """In every layer, trained keys and values that all rows of a sample see before their own."""

    implementation: ClassVar[str] = "weftune.adapters.prefix.apply:PrefixTuning"
    peft_type: ClassVar[str | None] = "PREFIX_TUNING"
    merges: ClassVar[bool] = False
    unused: ClassVar[frozenset[str]] = frozenset({"targets", "layers"})

    kind: Literal["prefix"] = "prefix"
    num_virtual_tokens: int = 16

    def targets_site(self, name: str) -> bool:
        """No linear computes anything else."""
        return False

    def adapts(self, site: SiteShape) -> bool:
        """Its parameters are named after the linear that makes the layer's values."""
        return any(ends_with(site.name, ending) for ending in (VALUE, *TOGETHER))

    @property
    def keys_before(self) -> int:
        return self.num_virtual_tokens

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        alone = ends_with(site.name, VALUE)
        # Beside as many queries as there are inputs.
        width = site.out_features if alone else (site.out_features - site.in_features) // 2
        return dict.fromkeys((KEYS, VALUES), (self.num_virtual_tokens, width))
