"""The paged key/value cache of a decoder, and the attention of new rows to the cached ones.

A page holds the keys and values of PAGE_ROWS consecutive rows of one sequence in every layer. Pages are
numbered; the same page number selects the memory in all layers. Sequences with the same adapter, the same
version of it and the same first tokens share the pages of those tokens.

Shapes: T rows of a pass, L rows of one sequence, C rows of the whole cache, H query heads, G key and value
heads, D width of a head.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from weftune.base.attention import Pack, Rule, attend_packed, attend_within, attend_within_capped
from weftune.core.batch import copy_to, to_device
from weftune.ops.paged import paged_attention

PAGE_ROWS = 16
"""Number of rows (positions) of a sequence in one page."""

PageKey = bytes
"""A digest of an adapter, the version of its weights, and all tokens of a sequence up to the end of a
page."""
RecurrentStates = dict[int, tuple[Tensor, Tensor]]
"""Maps a layer number to the state of the layer's recurrence for one sequence."""


def page_keys(adapter: str | None, weights_version: Hashable, tokens: Sequence[int]) -> list[PageKey]:
    """Return the key of every full page of a sequence that begins with these tokens. Two keys are equal only
    if the adapter, the version of its weights and all tokens up to the page's end are equal."""
    digest = hashlib.blake2b(repr((adapter, weights_version)).encode(), digest_size=16).digest()
    keys = []
    for end in range(PAGE_ROWS, len(tokens) + 1, PAGE_ROWS):
        own = np.asarray(tokens[end - PAGE_ROWS : end], dtype=np.int64).tobytes()
        digest = hashlib.blake2b(digest + own, digest_size=16).digest()
        keys.append(digest)
    return keys


class PagePool:
    """The page numbers of a cache. This pool records which pages are free, and which can be shared because
    they hold the first tokens of a sequence.

    A page with a key stays readable after its last user has released it, until another sequence needs the
    memory. The page that has been unused for longest is reused first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._page_by_key: dict[PageKey, int] = {}
        self._key_by_page: dict[int, PageKey] = {}
        self._unused_pages: OrderedDict[int, None] = OrderedDict()
        """Pages with a key that no sequence uses, in the order in which they were released."""

    @property
    def available_pages(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free) + len(self._unused_pages)

    def acquire_pages(self, keys: Sequence[PageKey], count: int) -> tuple[list[int], int] | None:
        """Return `count` pages for a new sequence whose first full pages have these `keys`, and how many of
        these pages are shared ones that already hold keys and values. Return None if there are not enough
        pages."""
        shared_pages: list[int] = []
        for key in keys:
            if (page := self._page_by_key.get(key)) is None:
                break
            shared_pages.append(page)
        if count - len(shared_pages) > self.available_pages - sum(
            page in self._unused_pages for page in shared_pages
        ):
            return None
        for page in shared_pages:
            self._unused_pages.pop(page, None)
            self._users[page] += 1
        return shared_pages + [self._take_page() for _ in range(count - len(shared_pages))], len(shared_pages)

    def publish_page(self, page: int, key: PageKey) -> None:
        """Register a page whose rows have been computed under `key`, so that later sequences can share it."""
        if key not in self._page_by_key and page not in self._key_by_page:
            self._page_by_key[key], self._key_by_page[page] = page, key

    def release_pages(self, pages: Sequence[int]) -> None:
        """Release the pages of a sequence that has ended."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key_by_page:
                self._unused_pages[page] = None
            else:
                self._free.append(page)

    def _take_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._unused_pages.popitem(last=False)
            del self._page_by_key[self._key_by_page.pop(page)]
        self._users[page] = 1
        return page


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """The shapes (number and width of heads) of the keys and of the values of one row (token) in one
    layer."""

    keys: tuple[int, int]
    values: tuple[int, int]

    @property
    def value_count(self) -> int:
        """Number of elements that the keys and values of one row have in one layer."""
        return self.keys[0] * self.keys[1] + self.values[0] * self.values[1]


@dataclass(slots=True)
class CacheProbe:
    """A stand-in for a cache that records the shapes of a model's keys and values. The size of the real cache
    is computed from these shapes."""

    pack: Pack
    states: tuple[RecurrentStates, ...]
    layers: dict[int, KeyValueShape] = field(default_factory=dict)

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: Rule, layer: int) -> Tensor:
        (_, *keys), (_, *values) = k_TGD.shape, v_TGD.shape
        self.layers[layer] = KeyValueShape((keys[0], keys[1]), (values[0], values[1]))
        return attend_packed(q_THD, k_TGD, v_TGD, self.pack, rule)

    def bytes_per_row(self, itemsize: int) -> int:
        return itemsize * sum(shape.value_count for shape in self.layers.values())

    def bytes_per_sequence(self) -> int:
        """Return the size in bytes of the recurrent states of one sequence, which does not depend on its
        length."""
        return sum(tensor.nbytes for state in self.states for pair in state.values() for tensor in pair)


class PagedCache:
    """The memory of a paged KV cache: per layer one tensor of keys and one of values, [C, G, D]."""

    def __init__(self, probe: CacheProbe, pages: int, example: Tensor) -> None:
        self.pool = PagePool(pages)
        self.spare_page = pages
        """Number of a page for rows that belong to no sequence: padded passes write the keys and values of
        their padding there."""
        rows = (pages + 1) * PAGE_ROWS
        self.layers = {
            layer: (example.new_empty(rows, *shape.keys), example.new_empty(rows, *shape.values))
            for layer, shape in probe.layers.items()
        }
        self.is_recurrent = any(probe.states)
        """Whether some layers have a recurrent state. Sequences then cannot share pages, because the state
        after the shared tokens is not stored."""


def page_rows(pages: Sequence[int], start: int, stop: int) -> Tensor:
    """Return the indices of the cache rows that hold the positions `start` to `stop` of a sequence with these
    pages."""
    positions = torch.arange(start, stop)
    return torch.tensor(pages)[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS


@dataclass(slots=True)
class CachedSequence:
    """The rows (tokens) of one sequence that a pass computes, and the pages that hold the sequence in the
    cache."""

    pages: Sequence[int]
    start: int
    """Position of the sequence's first row in this pass; all earlier positions are in the cache."""
    stop: int
    prefix_keys: int = 0
    """Number of keys and values that the adapter adds before the sequence (prefix tuning). They are written
    to the cache in the sequence's first pass."""
    state: RecurrentStates = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.stop - self.start


class CachedRows:
    """A view of the cache for one pass: the cache rows that the pass writes, and the cache rows that each
    sequence attends to."""

    def __init__(
        self,
        cache: PagedCache,
        sequences: Sequence[CachedSequence],
        pack: Pack,
        read_prefixes: Callable[[int], Sequence[tuple[Tensor, Tensor]]],
    ) -> None:
        """Create the view for the rows of `sequences`. `read_prefixes` returns a layer's prefix keys and
        values, each [P, G · D] for P prefix tokens, of every adapter in the pass that has them, in the order
        of the sequences."""
        self._layers, self._pack, self._read_prefixes = cache.layers, replace(pack, cache=None), read_prefixes
        self.states = tuple(sequence.state for sequence in sequences)
        device = pack.boundaries.device
        self._counts = [sequence.rows for sequence in sequences]
        written = [page_rows(one.pages, one.start, one.stop) for one in sequences]
        self._written_T = to_device(torch.cat(written), device)
        is_first = [one.start == one.prefix_keys for one in sequences]
        self._prefix_rows = [
            to_device(page_rows(one.pages, 0, one.prefix_keys), device)
            for one, first in zip(sequences, is_first, strict=True)
            if first and one.prefix_keys
        ]
        """Indices of the cache rows for the prefix keys of each sequence that has prefix keys and is in its
        first pass."""
        self._is_fresh = all(is_first) and not self._prefix_rows
        """Whether the pass's rows attend only to one another, as in training, so that no row is read from the
        cache."""
        self._read_rows: list[Tensor] = []
        if not self._is_fresh:
            self._read_rows = [to_device(page_rows(one.pages, 0, one.stop), device) for one in sequences]

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: Rule, layer: int) -> Tensor:
        keys_CGD, values_CGD = self._layers[layer]
        keys_CGD.index_copy_(0, self._written_T, k_TGD)
        values_CGD.index_copy_(0, self._written_T, v_TGD)
        if self._is_fresh:
            return attend_packed(q_THD, k_TGD, v_TGD, self._pack, rule)
        if self._prefix_rows:
            self._write_prefixes(keys_CGD, values_CGD, layer)
        attend_one = attend_within if rule.softcap is None else attend_within_capped
        seen = []
        for q, rows_L in zip(q_THD.split(self._counts), self._read_rows, strict=True):
            q_1HLD, k_1GLD, v_1GLD = (
                x.transpose(0, 1)[None] for x in (q, keys_CGD[rows_L], values_CGD[rows_L])
            )
            seen.append(attend_one(q_1HLD, k_1GLD, v_1GLD, rule)[0].transpose(0, 1))
        return torch.cat(seen)

    def _write_prefixes(self, keys_CGD: Tensor, values_CGD: Tensor, layer: int) -> None:
        for rows_P, (keys_PN, values_PN) in zip(self._prefix_rows, self._read_prefixes(layer), strict=True):
            for target_CGD, before_PN in ((keys_CGD, keys_PN), (values_CGD, values_PN)):
                target_CGD[rows_P] = before_PN.view(-1, *target_CGD.shape[1:]).to(target_CGD.dtype)


class DecodedRows:
    """A view of the cache for passes with one new row per sequence. Its tensors are filled in place for every
    pass, so a captured CUDA graph can read them."""

    states: tuple[RecurrentStates, ...] = ()

    def __init__(self, cache: PagedCache, sequences: int, max_pages: int, device: torch.device) -> None:
        """Allocate the tensors for a number of sequences with up to `max_pages` pages each."""
        self._layers = cache.layers
        self._spare_page = cache.spare_page
        self.new_rows_B = torch.zeros(sequences, dtype=torch.int64, device=device)
        """For each sequence, the index of the cache row to which its new row (token) is written."""
        self.lengths_B = torch.zeros(sequences, dtype=torch.int32, device=device)
        """For each sequence, its number of rows (tokens) in the cache, including the new one."""
        self.tables_BP = torch.full(
            (sequences, max_pages), self._spare_page, dtype=torch.int32, device=device
        )
        self._pages: list[Sequence[int]] = []
        """Page numbers of each sequence that `tables_BP` holds."""
        self.fill(())

    def fill(self, sequences: Sequence[CachedSequence]) -> None:
        """Fill the tensors with the data of these sequences. The remaining entries belong to no sequence;
        they read and write the spare page."""
        count, width = self.tables_BP.shape
        lengths = np.ones(count, dtype=np.int32)
        written = np.full(count, self._spare_page * PAGE_ROWS)
        for index, one in enumerate(sequences):
            page, row = divmod(one.stop - 1, PAGE_ROWS)
            lengths[index], written[index] = one.stop, one.pages[page] * PAGE_ROWS + row
        copy_to(self.lengths_B, torch.from_numpy(lengths))
        copy_to(self.new_rows_B, torch.from_numpy(written))
        pages = [one.pages for one in sequences]
        # The pages of a sequence never change, so most steps have those of the step before.
        if len(pages) == len(self._pages) and all(map(operator.is_, pages, self._pages)):
            return
        tables = np.full((count, width), self._spare_page, dtype=np.int32)
        for index, own in enumerate(pages):
            tables[index, : len(own)] = own
        copy_to(self.tables_BP, torch.from_numpy(tables))
        self._pages = pages

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rule: Rule, layer: int) -> Tensor:
        keys_CGD, values_CGD = self._layers[layer]
        keys_CGD.index_copy_(0, self.new_rows_B, k_TGD)
        values_CGD.index_copy_(0, self.new_rows_B, v_TGD)
        return paged_attention(
            q_THD,
            keys_CGD,
            values_CGD,
            self.tables_BP,
            self.lengths_B,
            PAGE_ROWS,
            rule.scale,
            rule.window,
            rule.softcap,
        )
