"""A job's trained embeddings: virtual tokens before every sample, and embeddings of single tokens.

Shapes: T rows of a microbatch, of which L belong to the job; D hidden width; n trained tokens; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from weftune.adapters.kind import NewAdapter, Parameters
from weftune.adapters.target import TOKENS
from weftune.core.batch import Microbatch, Segment
from weftune.core.shapes import EMBED_SCALE
from weftune.core.weights import HeadRows
from weftune.errors import AdapterError
from weftune.ops.accumulate import accumulate_gradient


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The rows of the embedding that a job trains, with the accumulator of their gradient."""

    ids_n: Tensor
    rows_nD: Tensor
    total_nD: Tensor

    def head_rows(self, anchor: Tensor) -> HeadRows:
        """Return the trained embedding rows as replacements of rows of an output layer that is tied to the
        embedding."""
        return HeadRows(self.ids_n, accumulate_gradient(self.rows_nD, self.total_nD, anchor))

    def replace_embeddings(
        self, h: Tensor, microbatch: Microbatch, segment: Segment, embedding: nn.Module, anchor: Tensor
    ) -> Tensor:
        """Return the embeddings `h` with the job's trained rows at the positions of its trained tokens. The
        padding token gets no gradient, as in the embedding itself."""
        tokens_L = microbatch.tokens_T[segment.rows]
        places, which = (tokens_L[:, None] == self.ids_n).nonzero(as_tuple=True)
        rows_nD = accumulate_gradient(self.rows_nD, self.total_nD, anchor)
        if (padding := getattr(embedding, "padding_idx", None)) is not None:
            rows_nD = torch.where((self.ids_n != padding)[:, None], rows_nD, self.rows_nD)
        values = rows_nD[which] * _embedding_scale(embedding, rows_nD)
        flat_TD = h.flatten(0, -2).index_copy(0, places + segment.start, values.to(h.dtype))
        return flat_TD.view(h.shape)


def insert_rows_before(h: Tensor, rows_ID: Tensor, microbatch: Microbatch, segment: Segment) -> Tensor:
    """Return the hidden states `h` with the virtual tokens `rows_ID` at the start of every sample of the
    segment (the rows of one job)."""
    stops = accumulate(microbatch.sample_lengths)
    starts = [stop - length for stop, length in zip(stops, microbatch.sample_lengths, strict=True)]
    own = [start for start in starts if segment.start <= start < segment.stop]
    indices = (torch.tensor(own)[:, None] + torch.arange(len(rows_ID))).flatten().to(h.device)
    flat_TD = h.flatten(0, -2).index_copy(0, indices, rows_ID.repeat(len(own), 1).to(h.dtype))
    return flat_TD.view(h.shape)


def _embedding_scale(embedding: nn.Module, example: Tensor) -> Tensor | float:
    """Return the factor by which the model multiplies its embeddings. It is 1 except in some model families,
    such as Gemma."""
    scale = getattr(embedding, EMBED_SCALE, 1.0)
    return scale.to(example.dtype) if isinstance(scale, Tensor) else float(scale)


def trained_tokens(spec: Any, weights: Parameters, totals: Parameters) -> TrainedTokens | None:
    """Return the trained token embeddings among a job's parameters. None if the job, or this stage of the
    base, has none."""
    for (site, name), rows_nD in weights.items():
        if name == TOKENS:
            ids_n = torch.tensor(spec.trained_tokens, device=rows_nD.device)
            return TrainedTokens(ids_n, rows_nD, totals[site, name])
    return None


def fill_tokens(new_adapter: NewAdapter) -> None:
    """Initialise a new adapter's trained token rows with the base's embeddings of these tokens."""
    ids = new_adapter.adapter.spec.trained_tokens
    for (site, name), value in new_adapter.parameters.items():
        if name == TOKENS:
            weight_VD = new_adapter.weight_at(site)
            value.copy_(weight_VD[torch.tensor(ids, device=weight_VD.device)])


def merge_tokens(
    folder: object, path: str, token_ids: Sequence[int], rows_nD: Tensor, modules: Mapping[str, nn.Module]
) -> None:
    """Write an adapter's trained rows into the base's embedding. This also changes an output layer that is
    tied to the embedding."""
    weight_VD = modules[path].weight if path in modules else None
    if not isinstance(weight_VD, Tensor) or weight_VD.shape[1:] != rows_nD.shape[1:]:
        raise AdapterError(f"{folder} is for another base: this one has no embedding {path} of that width")
    if max(token_ids) >= len(weight_VD):
        raise AdapterError(f"{folder} is for another base: this one has no token {max(token_ids)}")
    weight_VD.data[torch.tensor(token_ids)] = rows_nD.to(weight_VD)


def refuse_other_tokens(folder: object, folder_spec: Any, spec: Any) -> None:
    """Raise AdapterError unless the adapter in a folder and the job that is initialised from it train the
    same tokens."""
    if folder_spec.trained_tokens != spec.trained_tokens:
        raise AdapterError(
            f"{folder} trains the embeddings of the tokens {list(folder_spec.trained_tokens)}, the job those "
            f"of {list(spec.trained_tokens)}; set adapter.trainable_token_indices as the folder has it"
        )
