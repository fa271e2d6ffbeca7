"""Tokens whose embeddings an adapter trains, as in PEFT's `trainable_token_indices`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from weftune.core.shapes import SiteShape, layer_of

TOKENS = "token_rows_nD"
"""Parameter of the embeddings themselves, not their difference from the base's. Its site is the embedding."""
STORED = "token_adapter.trainable_tokens_delta"
"""PEFT's name for this parameter, after the path of the embedding."""
EMBEDDINGS = {"layers": "embed_tokens", "h": "wte"}
"""Name of the list of layers → name of the embedding beside it, as families call them."""


def embedding_path(sites: Sequence[SiteShape]) -> str | None:
    """Return the path of the embedding in a base with these sites. None if they lack its first layer."""
    first = _first_layer(sites)
    if first is None:
        return None
    beside, _, _ = first.name.partition(".0.")
    parent, _, layers = beside.rpartition(".")
    return f"{parent}.{EMBEDDINGS.get(layers, 'embed_tokens')}"


def token_shapes(ids: Sequence[int], sites: Sequence[SiteShape]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return site → parameter → shape of these tokens' embeddings, on the stage with the first layer."""
    path, first = embedding_path(sites), _first_layer(sites)
    if not ids or path is None or first is None:
        return {}
    return {path: {TOKENS: (len(ids), first.in_features)}}


def _first_layer(sites: Sequence[SiteShape]) -> SiteShape | None:
    """Return the first site of the first layer, which is as wide as the embeddings that go into it."""
    return next((site for site in sites if layer_of(site.name) == 0), None)
