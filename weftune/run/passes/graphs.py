"""CUDA graphs of whole passes: one launch instead of thousands.

A graph is captured for a key: rows, bucket of the longest sample and of the number of samples (or both as
they are where all samples are equally long), limits of the banks, what is recomputed. Who is aboard and whose
rows are where is content of tensors that it reads, so jobs come and go without another capture. All graphs
share one memory pool: one pass is open at a time.

Shapes: T rows, D hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weftune.adapters.banks import Banks
from weftune.base.model import Base
from weftune.ops.lora.routes import Route
from weftune.run.passes.graph_inputs import Feed, Key, key_of
from weftune.run.passes.graph_pool import captured
from weftune.run.passes.layers import Layers
from weftune.run.passes.rows import LaidMicrobatch

MOST_GRAPHS = 128
"""When so many are kept, the one that was used longest ago is dropped."""


class Graphs:
    def __init__(self, base: Base, banks: Banks, layers: Layers) -> None:
        self.base = base
        self.banks = banks
        self.layers = layers
        self.captures = 0
        self._seen: set[Key] = set()
        self._graphs: dict[Key, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def serve(self, laid: LaidMicrobatch) -> Graph | None:
        """The graph for a microbatch; None the first time its key is met, which compiles its kernels, and
        where a kind is in it that has no kernels to capture."""
        if not self.banks.capturable(laid.microbatch):
            return None
        key = key_of(laid, self.banks, self.layers.recompute)
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
        self._feed = feed = Feed(banks, key, base.device)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(base.device)
        with banks.bound(feed.microbatch, Route.tiled, True, feed.rows):
            with captured(self._forward, pool, stream):
                h_TD = base.hidden(feed.microbatch, feed.pack)
            self._dh_TD = torch.empty_like(h_TD)
            with captured(self._backward, pool, stream):
                h_TD.backward(self._dh_TD)
        self._h_TD = h_TD.detach()

    def forward(self, laid: LaidMicrobatch) -> Tensor:
        self._feed.fill(laid)
        self._forward.replay()
        return self._h_TD

    def backward(self, dh_TD: Tensor) -> None:
        self._dh_TD.copy_(dh_TD)
        self._backward.replay()
