"""CUDA graphs of decode steps, which compute logits from token ids with one launch.

A graph is captured for each key: the number of sequences, of adapters and of pages (each rounded up), and the
size limits of the buffers for adapters. The graph reads the indices of sequences and adapters from tensors,
so these can change without another capture.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weftune.base import attention
from weftune.core.batch import IGNORED, Microbatch, copy_to
from weftune.core.weights import Head
from weftune.generate.cache import CachedSequence, DecodedRows, PagedCache
from weftune.ops.lora.few_rows import TILE_ROWS
from weftune.ops.lora.rows import Rows, SlotRows
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graphs import capture_graph
from weftune.run.passes.rows import bucket

MAX_SEQUENCES = 256
"""Maximum number of sequences in a decode step that is captured as a CUDA graph. With more sequences, the
time of kernel launches does not matter."""
LEAST_PAGES = 32
"""Minimum number of pages per sequence for which a captured decode step has room. Larger numbers are rounded
up to a power of two."""


class DecodeGraphs:
    """The captured decode steps of a decoder. The first step of each key (a combination of sizes) runs
    uncaptured, so that its kernels are compiled."""

    def __init__(self, adapted_base: AdaptedBase, cache: PagedCache, head: Head) -> None:
        self._adapted, self._cache, self._head = adapted_base, cache, head
        self._graphs: dict[tuple[object, ...], DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def logits(self, microbatch: Microbatch, sequences: Sequence[CachedSequence]) -> Tensor | None:
        """Return the logits of one new row per sequence, valid until the next call. None if the step cannot
        be captured."""
        banks = self._adapted.banks
        if len(sequences) > MAX_SEQUENCES or not banks.is_decode_capturable(microbatch):
            return None
        count = bucket(len(sequences), 1)
        pages = bucket(max(len(one.pages) for one in sequences), LEAST_PAGES)
        runs = bucket(len(microbatch.segments), 1) + 1  # The last run is padding.
        key = count, pages, runs, banks.limits()
        if key not in self._graphs:
            # Older limits do not come back while the same adapters are attached.
            self._graphs = {known: graph for known, graph in self._graphs.items() if known[3] == key[3]}
            self._graphs[key] = DecodeGraph(self._adapted, self._cache, self._head, count, pages, runs)
        return self._graphs[key].logits(microbatch, sequences, self._pool)


class DecodeGraph:
    """A CUDA graph of one decode step, and the tensors that the graph reads."""

    def __init__(
        self, adapted_base: AdaptedBase, cache: PagedCache, head: Head, count: int, pages: int, runs: int
    ) -> None:
        """Allocate the tensors for `count` sequences with up to `pages` pages each. `runs` is the maximum
        number of runs, the groups of adjacent rows: one per adapter, one for the base alone and one of
        padding."""
        device = adapted_base.base.device
        self._adapted, self._head = adapted_base, head
        self._cached = DecodedRows(cache, count, pages, device)
        self._rows = Rows.empty(count, adapted_base.banks.slots, device, TILE_ROWS, max_runs=runs)
        self._slot_rows: list[SlotRows] = []
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        self._microbatch = Microbatch(
            tokens_T=zeros.clone(),
            positions_T=zeros.clone(),
            targets_T=torch.full_like(zeros, IGNORED),
            token_index_T=zeros,
            sample_lengths=(1,) * count,
            segments=(),
        )
        self._pack = replace(attention.pack((1,) * count, device), cache=self._cached)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_BV: Tensor | None = None
        self._warm = False

    def logits(self, microbatch: Microbatch, sequences: Sequence[CachedSequence], pool: object) -> Tensor:
        self._fill_tensors(microbatch, sequences)
        if not self._warm:
            self._warm = True
            return self._compute_logits()[: len(sequences)]
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with capture_graph(graph, pool, torch.cuda.current_stream(self._adapted.base.device)):
                self._logits_BV = self._compute_logits()
            self._graph = graph
        self._graph.replay()
        assert self._logits_BV is not None
        return self._logits_BV[: len(sequences)]

    def _fill_tensors(self, microbatch: Microbatch, sequences: Sequence[CachedSequence]) -> None:
        count, own = len(sequences), self._microbatch
        for target, source in (
            (own.tokens_T, microbatch.tokens_T),
            (own.positions_T, microbatch.positions_T),
        ):
            copy_to(target[:count], source)
        self._cached.fill(sequences)
        # Most steps have the sequences of the step before.
        if (seats := self._adapted.banks.slot_rows(microbatch)) != self._slot_rows:
            self._rows.fill(seats, np.zeros(0, dtype=np.int32))
            self._slot_rows = seats

    def _compute_logits(self) -> Tensor:
        adapted = self._adapted
        with adapted.banks.bind(self._microbatch, adapted.route, False, self._rows):
            h_BD = adapted.base.hidden(self._microbatch, self._pack)
        return self._head.logits(h_BD)
