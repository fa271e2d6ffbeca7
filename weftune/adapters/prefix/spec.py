"""The keys of a prefix tuning adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import ATTENTION, KEYS, VALUES, TargetSpec, ends_with
from weftune.core.bounds import SIZE
from weftune.core.shapes import SiteShape

QUERIES_AND_KEYS = ("q_proj", "k_proj")
VALUE_LINEAR = "v_proj"
FUSED_LINEARS = ("qkv_proj", "attn.c_attn", "query_key_value")
"""Names, in different model families, of linears that compute queries, keys and values in one product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSpec(TargetSpec):
    """Prefix tuning: trained keys and values in every layer, to which all tokens of a sample attend."""

    implementation: ClassVar[str] = "weftune.adapters.prefix.apply:PrefixTuning"
    runs_on_shards: ClassVar[bool] = True
    peft_type: ClassVar[str | None] = "PREFIX_TUNING"
    is_mergeable: ClassVar[bool] = False
    unused_keys: ClassVar[frozenset[str]] = frozenset({"targets", "layers"})

    kind: Literal["prefix"] = "prefix"
    num_virtual_tokens: Annotated[int, SIZE] = 16

    def targets_site(self, name: str) -> bool:
        """Return False, since prefix tuning changes no linears."""
        return False

    def adapts(self, site: SiteShape) -> bool:
        """Return whether the linear computes a layer's values. The layer's prefix keys and values are stored
        under the name of this linear."""
        return any(ends_with(site.name, ending) for ending in (VALUE_LINEAR, *FUSED_LINEARS))

    @property
    def keys_before(self) -> int:
        return self.num_virtual_tokens

    def copied_values(self, sites: Sequence[SiteShape]) -> int:
        """Return the number of values per token that prefix keys add to the memory of a pass. Rows with
        prefix keys have a second copy of queries, keys, values and attention's output, and the output without
        prefix keys is kept too."""
        inputs = (*QUERIES_AND_KEYS, VALUE_LINEAR, *FUSED_LINEARS)
        copies = sum(site.out_features for site in sites if any(ends_with(site.name, one) for one in inputs))
        outputs = (site.in_features for site in sites if any(ends_with(site.name, one) for one in ATTENTION))
        return copies + 2 * sum(outputs)

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        if site.part is not None:
            start, stop = site.part.ranges[-1]
            width = stop - start
        elif ends_with(site.name, VALUE_LINEAR):
            width = site.out_features
        else:
            # The linear also has as many outputs for queries as it has inputs.
            width = (site.out_features - site.in_features) // 2
        return dict.fromkeys((KEYS, VALUES), (self.num_virtual_tokens, width))
