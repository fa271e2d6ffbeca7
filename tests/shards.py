"""Shards of a base as threads of one process, for what needs no worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from weftune.core.shards import ShardTeam, WaitForSum

Result = TypeVar("Result")


@contextmanager
def released(turn: Any) -> Iterator[None]:
    """Let other threads run, if they take turns."""
    if isinstance(turn, nullcontext):
        yield
        return
    turn.release()
    try:
        yield
    finally:
        turn.acquire_pages()


def on_shards(
    shards: int, function: Callable[[ShardTeam], Result], one_at_a_time: bool = False
) -> list[Result]:
    """What `function(team)` returns on every shard. A shard that fails ends the sums of the others. If
    `one_at_a_time`, a shard runs until its next sum before another goes on, as what threads may not share
    needs."""
    barrier = Barrier(shards, timeout=60)
    given: dict[int, Tensor] = {}
    turn = Lock() if one_at_a_time else nullcontext()

    def on_shard(shard: int) -> Result:
        def sum_over_shards(tensor: Tensor) -> None:
            given[shard] = tensor.clone()
            with released(turn):
                barrier.wait()
            assert len({(one.shape, one.dtype) for one in given.values()}) == 1, "the sums do not match"
            total = torch.stack([given[number] for number in range(shards)]).sum(dim=0)
            with released(turn):
                barrier.wait()
            tensor.copy_(total)

        def start_sum(tensor: Tensor) -> WaitForSum:
            own = tensor.clone()
            # Whoever reads the tensor too early, finds no numbers.
            tensor.fill_(math.nan)

            def wait() -> None:
                sum_over_shards(own)
                tensor.copy_(own)

            return wait

        try:
            with turn:
                return function(ShardTeam(shard, shards, sum_over_shards, start_sum=start_sum))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(shards) as threads:
        return [future.result() for future in [threads.submit(on_shard, shard) for shard in range(shards)]]
