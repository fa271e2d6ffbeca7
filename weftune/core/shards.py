"""Tensor parallelism: workers divide the layers of a base, so that each holds a slice of every linear and a
part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from weftune.core.shapes import SiteSlice

SumOverShards = Callable[[Tensor], None]
"""All-reduce: a function that replaces a tensor by its sum over all shards, on every shard."""
WaitForSum = Callable[[], None]
"""Function that waits until an all-reduce over shards, which was started before, has finished."""
StartSum = Callable[[Tensor], WaitForSum]
"""Function that starts an all-reduce of a tensor over all shards, and returns a function that waits for the
sum. The tensor must not be used in the meantime."""


def indices_in_whole(part: SiteSlice, device: torch.device | None = None) -> Tensor:
    """Return the indices that a shard's slice of a linear has among the inputs or outputs of the whole
    linear."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in part.ranges])


@dataclass(frozen=True, slots=True)
class ShardTeam:
    """One worker's view of the workers among which each layer is divided: its index and the functions to
    communicate."""

    shard: int
    """Index of the shard that the worker holds."""
    shards: int
    sum_over_shards: SumOverShards
    is_capturable: bool = False
    """Whether a CUDA graph can contain all-reduces over shards, as with NCCL."""
    start_sum: StartSum | None = None
    """Function that starts an all-reduce over shards while the device computes. None if microbatches do not
    overlap."""

    def part(self, size: int) -> tuple[int, int]:
        """Return the part of `size` consecutive indices that belongs to this shard, as (start, stop). The
        sizes of two parts differ by at most 1."""
        return size * self.shard // self.shards, size * (self.shard + 1) // self.shards

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all K shards, [K, ...]. The values are gathered by an all-reduce, to which
        every shard contributes zeros except in its own row."""
        gathered = values.new_zeros(self.shards, *values.shape)
        gathered[self.shard] = values
        self.sum_over_shards(gathered)
        return gathered

    def max_over_shards(self, values: Tensor) -> Tensor:
        """Return the largest of the values of all shards, element by element. NaN counts as larger than any
        number."""
        return self.gather(values).amax(dim=0)


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """A shard's part of the vocabulary: the consecutive tokens whose rows of the embedding and of the head it
    holds."""

    team: ShardTeam
    vocabulary: int
    """Number of tokens in the whole vocabulary."""

    @property
    def start(self) -> int:
        return self.team.part(self.vocabulary)[0]

    @property
    def stop(self) -> int:
        return self.team.part(self.vocabulary)[1]

    @property
    def max_rows(self) -> int:
        """Number of tokens of the vocabulary in the largest shard."""
        return -(-self.vocabulary // self.team.shards)

    def local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each token's row among this shard's rows of the vocabulary, and whether the
        shard has the row. The index of a missing row is 0."""
        is_local = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(is_local, tokens - self.start, 0), is_local
