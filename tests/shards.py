"""Shards of a base as threads of one process, for what needs no worker processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from weftune.core.shards import ShardTeam

Result = TypeVar("Result")


def on_shards(shards: int, function: Callable[[ShardTeam], Result]) -> list[Result]:
    """What `function(team)` returns on every shard. A shard that fails ends the sums of the others."""
    barrier = Barrier(shards, timeout=60)
    given: dict[int, Tensor] = {}

    def on_shard(shard: int) -> Result:
        def sum_over_shards(tensor: Tensor) -> None:
            given[shard] = tensor.clone()
            barrier.wait()
            assert len({(one.shape, one.dtype) for one in given.values()}) == 1, "the sums do not match"
            total = torch.stack([given[number] for number in range(shards)]).sum(dim=0)
            barrier.wait()
            tensor.copy_(total)

        try:
            return function(ShardTeam(shard, shards, sum_over_shards))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(shards) as threads:
        return [future.result() for future in [threads.submit(on_shard, shard) for shard in range(shards)]]
