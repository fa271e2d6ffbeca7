"""CUDA graphs of whole passes: one launch instead of thousands.

A graph is captured for a key: rows, bucket of the longest sample and of the number of samples (or both as
they are where all samples are equally long), limits of the banks, what is recomputed. Who is aboard and whose
rows are where is content of tensors that it reads, so jobs come and go without another capture. All graphs
share one memory pool: one pass is open at a time.

Shapes: T rows, D hidden width, B boundaries of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.adapters.banks import Banks
from weft.base.attention import Pack
from weft.base.model import Base
from weft.batch import IGNORED, Microbatch
from weft.layers import Layers
from weft.ops.lora import Route
from weft.ops.rows import Rows
from weft.plan.memory import Recompute
from weft.run.lay import Laid

LEAST = 64
"""The smallest bucket of sample lengths."""
MOST_GRAPHS = 128
"""When so many are kept, the one that was used longest ago is dropped."""


@dataclass(frozen=True, slots=True)
class Key:
    rows: int
    longest: int
    samples: int
    even: bool
    limits: tuple[object, ...]
    recompute: Recompute


class Graphs:
    def __init__(self, base: Base, banks: Banks, layers: Layers) -> None:
        self.base = base
        self.banks = banks
        self.layers = layers
        self.captures = 0
        self._seen: set[Key] = set()
        self._graphs: dict[Key, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def serve(self, laid: Laid) -> Graph | None:
        """The graph for a microbatch; None the first time its key is met, which compiles its kernels."""
        lengths = laid.microbatch.sample_lengths
        even = len(set(lengths)) == 1
        key = Key(
            rows=laid.microbatch.rows,
            longest=lengths[0] if even else bucket(max(lengths), LEAST),
            samples=len(lengths) if even else bucket(len(lengths), 1),
            even=even,
            limits=self.banks.limits(),
            recompute=self.layers.recompute,
        )
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)
            return self._graphs[key]
        if key not in self._seen:
            self._seen.add(key)
            return None
        if len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = Graph(self.base, self.banks, key, self._pool)
        self.captures += 1
        return self._graphs[key]

    def clear(self) -> None:
        """Give up all graphs and their memory; they are captured again when they are needed."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()


class Graph:
    """One captured pass: inputs are copied in, forward and backward are replayed."""

    def __init__(self, base: Base, banks: Banks, key: Key, pool: Any) -> None:
        self.banks = banks
        device = base.device
        self._boundaries_B = torch.full((key.samples + 1,), key.rows, dtype=torch.int32, device=device)
        self._tokens_T = torch.zeros(key.rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros_like(self._tokens_T)
        self._rows = Rows.empty(key.rows, banks.slots, device)
        microbatch = Microbatch(
            tokens_T=self._tokens_T,
            positions_T=self._positions_T,
            targets_T=torch.full_like(self._tokens_T, IGNORED),
            token_index_T=self._rows.token_index_T,
            sample_lengths=(key.rows,),
            segments=(),
        )
        pack = Pack((key.rows,), self._boundaries_B, key.longest, key.even)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        with banks.bound(microbatch, Route.tiled, True, self._rows):
            with torch.cuda.graph(self._forward, pool=pool, stream=stream):
                h_TD = base.hidden(microbatch, pack)
            self._dh_TD = torch.empty_like(h_TD)
            with torch.cuda.graph(self._backward, pool=pool, stream=stream):
                h_TD.backward(self._dh_TD)
        self._h_TD = h_TD.detach()

    def forward(self, laid: Laid) -> Tensor:
        lengths = torch.tensor((0, *laid.microbatch.sample_lengths), dtype=torch.int32).cumsum(0)
        boundaries_B = torch.full((len(self._boundaries_B),), len(self._tokens_T), dtype=torch.int32)
        boundaries_B[: len(lengths)] = lengths
        self._boundaries_B.copy_(boundaries_B.pin_memory(), non_blocking=True)
        self._tokens_T.copy_(laid.microbatch.tokens_T)
        self._positions_T.copy_(laid.microbatch.positions_T)
        self._rows.fill(self.banks.seats(laid.microbatch), laid.token_index)
        self._forward.replay()
        return self._h_TD

    def backward(self, dh_TD: Tensor) -> None:
        self._dh_TD.copy_(dh_TD)
        self._backward.replay()


def bucket(value: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (value - 1).bit_length())
