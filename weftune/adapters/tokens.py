"""Tokens whose embeddings an adapter trains, as PEFT's `trainable_token_indices` has it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from weftune.core.shapes import SiteShape, layer_of

TOKENS = "token_rows_nD"
"""The parameter: the embeddings themselves, not their difference to the base's; its site is the embedding."""
STORED = "token_adapter.trainable_tokens_delta"
"""What PEFT calls it behind the path of the embedding."""
EMBEDDINGS = {"layers": "embed_tokens", "h": "wte"}
"""What families call their embedding, by the name of the list of layers that stands beside it."""


def embedding_path(sites: Sequence[SiteShape]) -> str | None:
    """Where the embedding is in a base with these sites; None where its first layer is not among them."""
    first = _first_layer(sites)
    if first is None:
        return None
    beside, _, _ = first.name.partition(".0.")
    parent, _, layers = beside.rpartition(".")
    return f"{parent}.{EMBEDDINGS.get(layers, 'embed_tokens')}"


def token_shapes(ids: Sequence[int], sites: Sequence[SiteShape]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Site → parameter → shape of the embeddings of these tokens, on the stage that has the first layer."""
    path, first = embedding_path(sites), _first_layer(sites)
    if not ids or path is None or first is None:
        return {}
    return {path: {TOKENS: (len(ids), first.in_features)}}


def _first_layer(sites: Sequence[SiteShape]) -> SiteShape | None:
    """The first site of the first layer, which is as wide as the embeddings that go into it."""
    return next((site for site in sites if layer_of(site.name) == 0), None)
