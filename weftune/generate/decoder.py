"""The decoder, which generates text with many adapters, and with the base model alone, in shared passes.

A call of `run_pass` runs one pass. The pass processes either the prompts of newly admitted sequences or one
more token of every running sequence. Sequences of one adapter are adjacent, so a pass is a microbatch like
those of training and uses the same base, the same adapters and the same kernels.

Shapes: T rows of a pass, B sequences, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Literal

import torch
from torch import Tensor

from weftune.base import attention
from weftune.core.batch import IGNORED, Microbatch, Segment, to_device
from weftune.errors import UserError
from weftune.generate.cache import (
    PAGE_ROWS,
    CachedRows,
    CachedSequence,
    CacheProbe,
    DecodedRows,
    PagedCache,
    PageKey,
    RecurrentStates,
    page_keys,
)
from weftune.generate.graphs import DecodeGraphs
from weftune.generate.sampling import GREEDY, SampledRow, Sampling, sample_tokens
from weftune.ops.logprobs import target_logprobs
from weftune.plan.program.program import Recompute
from weftune.run.passes.adapted import AdaptedBase

PROMPT_ROWS = 8192
"""Maximum rows of prompts in one pass; a longer prompt has a pass of its own."""

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence: its prompt, and the tokens generated so far."""

    adapter: str | None
    """Name of the attached adapter that generates the sequence. None selects the base model alone."""
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    """Generated tokens, including a token that ends the sequence."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each generated token."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each prompt token except the first. Empty unless `sampling.prompt_logprobs`."""
    versions: list[int] = field(default_factory=list)
    """For each generated token, the version of the adapter that generated it: for a training job, its
    optimizer step."""
    finish_reason: FinishReason | None = None
    inserted_rows: int = 0
    """Number of virtual tokens that the adapter inserts before the prompt, as in prompt tuning."""
    prefix_keys: int = 0
    """Number of keys that the adapter adds before the prompt in every layer, as in prefix tuning."""
    pages: list[int] = field(default_factory=list)
    page_keys: list[PageKey] = field(default_factory=list)
    """Keys of the prompt's full pages, by which other sequences find these pages."""
    cached_prompt_positions: int = 0
    """Number of prompt positions whose keys and values an earlier sequence had already computed and
    cached."""
    cached_positions: int = 0
    """Number of positions whose keys and values are in the cache."""
    state: RecurrentStates = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Number of positions of the sequence up to its latest token, including virtual tokens and prefix
        keys of the adapter."""
        return self.prefix_keys + self.inserted_rows + len(self.prompt) + len(self.tokens)

    @property
    def max_positions(self) -> int:
        """Maximum number of positions that the sequence needs in the cache. The last token needs no position
        there, since no later token attends to it."""
        return self.positions - len(self.tokens) + self.sampling.max_tokens - 1

    def uncached_tokens(self) -> list[int]:
        """Return the tokens at the positions whose keys and values are not cached yet. Virtual tokens appear
        as token 0."""
        if self.tokens:
            return self.tokens[-1:]
        return ([0] * self.inserted_rows + list(self.prompt))[
            max(0, self.cached_positions - self.prefix_keys) :
        ]


@dataclass(frozen=True, slots=True)
class StepAhead:
    """The inputs of the next decode step (one token of every sequence), prepared while the step that
    generates these tokens still runs."""

    batch: list[Generation]
    microbatch: Microbatch
    sequences: list[CachedSequence]


class Decoder:
    def __init__(
        self,
        adapted_base: AdaptedBase,
        cache_bytes: int,
        max_positions: int | None = None,
        max_prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        """Allocate the KV cache, whose maximum size is `cache_bytes`. If `max_positions` is given, the cache
        has room for no more positions than that. A pass has at most `max_prompt_rows` rows of prompts, unless
        a single prompt is longer."""
        base = adapted_base.base
        self._adapted, self._base, self._max_prompt_rows = adapted_base, base, max_prompt_rows
        if base.local_layers is not None or base.read_stored is not None:
            raise UserError(
                "Text is generated on one device that holds the whole base; this run divides or streams it."
            )
        self._head = base.head()
        with adapted_base.on_stream():
            probe = self._probe_cache()
            like = torch.empty(0, dtype=base.dtype, device=base.device)
            self._page_bytes = max(1, probe.bytes_per_row(like.element_size()) * PAGE_ROWS)
            self._sequence_bytes = probe.bytes_per_sequence()
            pages = cache_bytes // self._page_bytes
            if max_positions is not None:
                pages = min(pages, -(-max_positions // PAGE_ROWS))
            self._cache = PagedCache(probe, pages, like)
        self._graphs = None
        if base.device.type == "cuda" and adapted_base.can_capture and not self._cache.is_recurrent:
            self._graphs = DecodeGraphs(adapted_base, self._cache, self._head)
        self._waiting_sequences: deque[Generation] = deque()
        self._running_sequences: list[Generation] = []
        self._prepared_step: StepAhead | None = None
        """Inputs of the next decode step, used only if that step has the same sequences as the last step."""

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits for admission or is being generated."""
        return not self._waiting_sequences and not self._running_sequences

    @property
    def is_waiting(self) -> bool:
        """Whether any sequence is still waiting to be admitted."""
        return bool(self._waiting_sequences)

    def submit(
        self, prompt: Sequence[int], sampling: Sampling = GREEDY, adapter: str | None = None
    ) -> Generation:
        """Add a prompt to the queue and return its `Generation`, to which later calls of `run_pass` append
        tokens."""
        new = Generation(adapter, tuple(prompt), sampling)
        if not prompt:
            raise UserError("The prompt is empty: there is nothing that the model could continue.")
        if adapter is not None:
            attached = self._adapted.banks.attached[adapter]
            if attached.adapter.spec.scalar_head:
                raise UserError("The adapter is a reward model, which gives rewards and no answers.")
            new.inserted_rows = 0 if attached.rows_before is None else len(attached.rows_before)
            new.prefix_keys = attached.prefix_keys
        context = self._base.shape.context
        if new.positions + 1 > context:
            raise UserError(
                f"The prompt has {len(prompt):,} tokens, and the base has {context:,} positions, "
                "of which the answer needs at least one; shorten the prompt."
            )
        room = context - new.positions
        if sampling.max_tokens > room:
            new.sampling = replace(sampling, max_tokens=room)
        if self._acquire_pages(new) > self._cache.pool.pages:
            cached_rows = self._cache.pool.pages * PAGE_ROWS
            raise UserError(
                f"The prompt and its answer need {new.max_positions:,} positions, and the cache has room for "
                f"{cached_rows:,}; lower --max-tokens."
            )
        self._waiting_sequences.append(new)
        return new

    def cancel(self, generation: Generation) -> None:
        """End a sequence early, whether it is waiting or running."""
        if generation in self._waiting_sequences:
            self._waiting_sequences.remove(generation)
        elif generation in self._running_sequences:
            self._end_sequence(generation)

    def run_until_idle(self) -> None:
        """Run passes until every sequence has ended."""
        while not self.is_idle:
            self.run_pass()

    @torch.no_grad()
    def run_pass(self) -> list[Generation]:
        """Run one pass, and return the sequences that got one more token from it. The list is empty if no
        sequence is waiting or running."""
        batch = self._admit() or self._running_sequences
        if not batch:
            return []
        with self._adapted.on_stream():
            logits_BV = self._next_logits(batch)
            rows = [SampledRow(one.sampling, one.prompt, one.tokens) for one in batch]
            tokens_B, logprobs_B = sample_tokens(logits_BV, rows)
            # While the device computes.
            ahead = self._build_next_step(batch) if batch is self._running_sequences else None
            tokens, logprobs = tokens_B.tolist(), logprobs_B.tolist()
        for generation, token, logprob in zip(batch, tokens, logprobs, strict=True):
            self._append_token(generation, token, logprob)
        self._prepared_step = ahead
        continued = list(batch)
        for generation in continued:
            if generation.finish_reason is not None:
                self._end_sequence(generation)
        return continued

    # -- admission ---------------------------------------------------------------------------------------

    def _admit(self) -> list[Generation]:
        """Admit waiting sequences in order, while there are enough pages for the longest possible answer of
        each. An admitted sequence therefore never runs out of memory. Return the admitted sequences."""
        admitted_sequences: list[Generation] = []
        rows = 0
        while self._waiting_sequences:
            new = self._waiting_sequences[0]
            if admitted_sequences and rows + new.positions > self._max_prompt_rows:
                break
            if self._can_share_pages(new):
                new.page_keys = page_keys(new.adapter, self._weights_version(new), new.prompt)
            # The last row of the prompt is always computed, since its logits select the first token.
            usable = new.page_keys[: (len(new.prompt) - 1) // PAGE_ROWS]
            if (found := self._cache.pool.acquire_pages(usable, self._acquire_pages(new))) is None:
                break
            new.pages, known = found
            new.cached_prompt_positions = known * PAGE_ROWS
            new.cached_positions = max(new.cached_prompt_positions, new.prefix_keys)
            rows += new.positions - new.cached_positions
            admitted_sequences.append(self._waiting_sequences.popleft())
        # Sequences of one adapter are neighbours, as the rows of a job are in a microbatch.
        admitted_sequences.sort(key=lambda one: one.adapter or "")
        self._running_sequences = sorted(
            self._running_sequences + admitted_sequences, key=lambda one: one.adapter or ""
        )
        return admitted_sequences

    def _can_share_pages(self, generation: Generation) -> bool:
        """Return whether the cached pages of a sequence's prompt can be shared with other sequences."""
        starts_with_tokens = not generation.inserted_rows and not generation.prefix_keys
        return starts_with_tokens and not self._cache.is_recurrent and not generation.sampling.prompt_logprobs

    def _acquire_pages(self, generation: Generation) -> int:
        return -(-generation.max_positions // PAGE_ROWS)

    def _weights_version(self, generation: Generation) -> tuple[int, int]:
        """Return two numbers that change with the weights of the sequence's adapter: the serial number of its
        attachment, and its version."""
        if generation.adapter is None:
            return 0, 0
        attached = self._adapted.banks.attached[generation.adapter]
        return attached.serial, attached.version

    def _append_token(self, generation: Generation, token: int, logprob: float) -> None:
        if not generation.tokens:
            for page, key in zip(generation.pages, generation.page_keys, strict=False):
                self._cache.pool.publish_page(page, key)
        generation.cached_positions = generation.positions
        generation.tokens.append(token)
        generation.logprobs.append(logprob)
        generation.versions.append(self._weights_version(generation)[1])
        if token in generation.sampling.stop_ids:
            generation.finish_reason = "stop"
        elif len(generation.tokens) == generation.sampling.max_tokens:
            generation.finish_reason = "length"

    def _end_sequence(self, generation: Generation) -> None:
        self._running_sequences.remove(generation)
        self._cache.pool.release_pages(generation.pages)
        generation.pages, generation.state = [], {}

    # -- passes ------------------------------------------------------------------------------------------

    def _next_logits(self, batch: Sequence[Generation]) -> Tensor:
        """Run the tokens of the sequences that are not cached yet through the base and the adapters, and
        return the logits [B, V] of the last row of each sequence."""
        microbatch, sequences = self._build_batch(batch)
        counts = microbatch.sample_lengths
        decodes = all(one.tokens for one in batch)
        if decodes and self._graphs is not None:
            with self._run_whole_layers():
                if (logits_BV := self._graphs.logits(microbatch, sequences)) is not None:
                    return logits_BV
        microbatch = microbatch.to(self._base.device)
        h_TD = self._hidden_states(microbatch, batch, sequences, decodes)
        self._score_prompts(h_TD, batch, counts)
        last = to_device(torch.tensor(list(accumulate(counts))) - 1, self._base.device)
        return self._logits(h_TD[last], batch)

    def _build_batch(self, batch: Sequence[Generation]) -> tuple[Microbatch, list[CachedSequence]]:
        """Return the tokens of the sequences that are not cached yet as a microbatch, and the positions of
        these tokens in the cache."""
        if (ahead := self._prepared_step) is not None and ahead.batch == batch:
            tokens_T = torch.tensor([one.tokens[-1] for one in batch])
            return replace(ahead.microbatch, tokens_T=tokens_T), ahead.sequences
        return self._build_rows(
            batch, [one.uncached_tokens() for one in batch], [one.cached_positions for one in batch]
        )

    def _build_next_step(self, batch: Sequence[Generation]) -> StepAhead:
        """Prepare the inputs of the decode step after the current one, assuming that none of these sequences
        ends and no other is admitted."""
        laid = self._build_rows(batch, [[0]] * len(batch), [one.positions for one in batch])
        return StepAhead(list(batch), *laid)

    def _build_rows(
        self, batch: Sequence[Generation], rows: Sequence[list[int]], first_positions: Sequence[int]
    ) -> tuple[Microbatch, list[CachedSequence]]:
        """Return `rows`, the new tokens of each sequence, as a microbatch. `first_positions` is the position
        of the first of these tokens in each sequence."""
        counts = [len(own) for own in rows]
        segments, start = [], 0
        for adapter, run in groupby(zip(batch, counts, strict=True), key=lambda one: one[0].adapter):
            own = list(run)
            stop = start + sum(count for _, count in own)
            inserted = sum(one.inserted_rows for one, _ in own if not one.tokens)
            job = adapter or ""
            segments.append(Segment(job, 0, start, stop, adapter=adapter, prefix_rows=inserted))
            start = stop
        stops = [first + count for first, count in zip(first_positions, counts, strict=True)]
        positions = [
            position for span in zip(first_positions, stops, strict=True) for position in range(*span)
        ]
        tokens_T = torch.tensor([token for own in rows for token in own])
        microbatch = Microbatch(
            tokens_T=tokens_T,
            positions_T=torch.tensor(positions),
            targets_T=torch.full_like(tokens_T, IGNORED),
            token_index_T=torch.zeros_like(tokens_T),
            sample_lengths=tuple(counts),
            segments=tuple(segments),
        )
        sequences = [
            CachedSequence(one.pages, first, stop, one.prefix_keys, one.state)
            for one, first, stop in zip(batch, first_positions, stops, strict=True)
        ]
        return microbatch, sequences

    def _hidden_states(
        self,
        microbatch: Microbatch,
        batch: Sequence[Generation],
        sequences: Sequence[CachedSequence],
        is_decode: bool,
    ) -> Tensor:
        """Run a microbatch through the layers and return its last hidden states [T, D]. `is_decode` says that
        every sequence has just one new row."""
        banks, device = self._adapted.banks, self._base.device
        pack = attention.pack(microbatch.sample_lengths, device)
        cached_rows: CachedRows | DecodedRows
        if is_decode and device.type == "cuda" and not self._cache.is_recurrent:
            cached_rows = DecodedRows(self._cache, len(batch), max(len(one.pages) for one in batch), device)
            cached_rows.fill(sequences)
        else:
            cached_rows = CachedRows(
                self._cache,
                sequences,
                pack,
                lambda layer: _repeat_prefixes(banks.read_prefix_keys(layer), batch),
            )
        with self._run_whole_layers(), banks.bind(microbatch, self._adapted.route, training=False):
            return self._base.hidden(microbatch, replace(pack, cache=cached_rows))

    def _logits(self, h_BD: Tensor, batch: Sequence[Generation]) -> Tensor:
        """Return the logits [B, V] of one row per sequence. The logits of an adapter that has trained its own
        rows of the output layer are computed separately."""
        logits_BV = self._head.logits(h_BD)
        start = 0
        for adapter, run in groupby(batch, key=lambda one: one.adapter):
            stop = start + len(list(run))
            own = self._adapted.banks.trained_head_rows(
                Segment(adapter or "", 0, start, stop, adapter=adapter)
            )
            if own is not None:
                logits_BV[start:stop] = self._head.logits(h_BD[start:stop], own)
            start = stop
        return logits_BV

    def _score_prompts(self, h_TD: Tensor, batch: Sequence[Generation], counts: Sequence[int]) -> None:
        """Store the log-probabilities of the prompt tokens in each sequence whose sampling settings request
        them."""
        stops = list(accumulate(counts))
        for generation, stop in zip(batch, stops, strict=True):
            if generation.tokens or not generation.sampling.prompt_logprobs:
                continue
            first = stop - len(generation.prompt)
            targets = to_device(torch.tensor(generation.prompt[1:]), h_TD.device)
            job = generation.adapter or ""
            own = self._adapted.banks.trained_head_rows(
                Segment(job, 0, first, stop, adapter=generation.adapter)
            )
            logprobs, _ = target_logprobs(h_TD[first : stop - 1], targets, self._head, own)
            generation.prompt_logprobs = logprobs.tolist()

    @contextmanager
    def _run_whole_layers(self) -> Iterator[None]:
        """Return a context manager within which each layer runs over all rows at once, even if training
        currently uses tiles of rows."""
        layers = self._adapted.layers
        if layers is None:
            yield
            return
        before, layers.recompute = layers.recompute, Recompute()
        try:
            yield
        finally:
            layers.recompute = before

    @torch.no_grad()
    def _probe_cache(self) -> CacheProbe:
        """Run one token through the base model to find out the shapes of its keys, values and recurrent
        states."""
        token = torch.zeros(1, dtype=torch.int64, device=self._base.device)
        pack = attention.pack((1,), self._base.device)
        probe = CacheProbe(pack, states=({},))
        microbatch = Microbatch(token, token, token, token, (1,), ())
        with self._run_whole_layers():
            self._base.hidden(microbatch, replace(pack, cache=probe))
        return probe


def _repeat_prefixes(
    prefixes: Sequence[tuple[Tensor, Tensor]], batch: Sequence[Generation]
) -> list[tuple[Tensor, Tensor]]:
    """Return the prefix keys and values (of prefix tuning) for each sequence that is in its first pass and
    whose adapter has prefix keys. `prefixes` has one entry per such adapter."""
    by_adapter = dict(
        zip(dict.fromkeys(one.adapter for one in batch if one.prefix_keys), prefixes, strict=True)
    )
    return [by_adapter[one.adapter] for one in batch if one.prefix_keys and not one.tokens]
