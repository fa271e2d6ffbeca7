"""Memory that a run will need on each device, predicted for every layout before anything is loaded.

peak = process + base + state of every attached adapter + activations of one microbatch + logits of one chunk
+ slack. A layer keeps activations for its backward in proportion to the widths of its sites (adapted
linears). Logits count only on the worker with the head. If several stages share a device in turn, forwards
are recomputed: the inputs of all stages are kept, and the activations of the largest stage. Every prediction
is logged with the measured peak, and `memory_fit.py` fits the model to both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape, LayerRange, ModelShape, logit_rows
from weftune.plan.cost.estimate import stage_shape
from weftune.plan.cost.ring import optimizer_bytes, optimizer_ring_bytes
from weftune.plan.cost.streamed_memory import (
    ON_THE_WAY,
    StreamedMemory,
    matrix_bytes,
    offloaded_token_bytes,
    rest_bytes,
    state_bytes,
    tile_bytes,
    token_bytes,
)
from weftune.plan.program.layout import BUFFERED, Layout, OnWorker, one_device
from weftune.plan.program.program import NOTHING, Recompute

ENOUGH_TOKENS = 2048
"""Tokens per microbatch that keep a device busy. Layers are recomputed before microbatches become smaller."""

TILE_ROWS, SMALL_TILE_ROWS = 8192, 1024
"""Rows of a tile: enough to keep a device busy, and the fewest that are tried where memory is short. Longer
samples always run in tiles: capturing their passes would need their memory twice."""

SMALL_BYTES, TINY_BYTES = 50 << 20, 50 << 10
SLACK_BYTES = 256 << 20
FUSED_SLACK_BYTES = 3 << 30
"""Bytes for logits of one chunk, temporaries and the allocator's rounding. GPUs use larger chunks."""
TILED_SLACK_BYTES = 512 << 20
"""Slack bytes of passes in tiles, which are not captured and have freed their logits in the backward."""
LOGIT_COPIES = 2
"""Number of copies of a chunk's logits: the logits, and the softmax, which is overwritten by the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Correction factors for each part of the predicted memory, fitted to measured peaks."""

    state: float = 1.0
    activations: float = 1.0
    slack: float = 1.0
    head: float = 0.0
    """Factor for the logits; 0 if they were not measured separately and are covered by the slack."""
    error: int = 0
    """Bytes by which predictions may be too low. They are added when checking whether jobs fit."""


UNFITTED = MemoryFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Predicted bytes of each part on one device, before correction factors are applied."""

    resident: int
    """Bytes of the process and the base."""
    state: int
    activations: int
    slack: int
    head: int = 0
    """Bytes of the logits of one chunk; 0 if the worker does not have the head."""

    def total(self, fit: MemoryFit) -> int:
        fitted = fit.state * self.state + fit.activations * self.activations + fit.slack * self.slack
        return self.resident + int(fitted + fit.head * self.head)


ADVISED_SHARE = 0.1
"""Smallest share of a job's bytes that a setting must affect for the user to be advised to change it."""
SPARE = 1
"""Microbatches in flight in addition to those of 1F1B, so that a late input does not leave a stage idle."""
WHOLE = one_device()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    shape: ModelShape
    """Shape of the whole base."""
    budget: int
    """Total bytes that the run may use on each worker's device."""
    taken: int = 0
    """Bytes that the first worker's process holds before anything of the run is loaded."""
    fused: bool = False
    """Whether layers run as fused ops, which keep fewer activations and support recomputation."""
    fit: MemoryFit = UNFITTED
    layout: Layout = WHOLE
    slack: int | None = None
    """Bytes for logits of one chunk, temporaries and the allocator's rounding. None selects the default."""
    spare: int = SPARE
    first_only_bytes: int = 0
    """Bytes of `taken` that only the first worker holds: the tokenizer and the data."""
    host_budget: int = 0
    """Bytes of host memory that the run may use for an offloaded optimizer and for tensors of layers."""

    # -- bytes -------------------------------------------------------------------------------------------

    def need(
        self,
        jobs: Iterable[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> Need:
        """Return the need of the worker that needs the most memory. Microbatches have `tokens` tokens, of
        which `supervised` (None means all) go through the head."""
        return self._most(self.worker_needs(list(jobs), tokens, recompute, supervised))

    def worker_needs(
        self,
        jobs: Sequence[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> list[Need]:
        """Return the need of each worker of a replica."""
        scored = tokens if supervised is None else supervised
        if self._keeps:
            kept = [int(tokens * self._kept_bytes(part, recompute, jobs)) for part in self._parts]
            if tokens and recompute.tile_rows:
                kept = [
                    own + self._tile_bytes(part, tokens, recompute, jobs)
                    for own, part in zip(kept, self._parts, strict=True)
                ]
            return self._keeping(jobs, kept, scored, recompute)
        layout, rounds = self.layout, sum(job.batch_tokens for job in jobs)
        memory = StreamedMemory(
            self.shape,
            tuple(jobs),
            self.fused,
            rounds,
            int(tokens),
            layout.travels,
            layout.offloads,
            layout.workers,
        )
        return [
            self._streamed_worker_need(layout.on(worker), memory, scored) for worker in range(layout.workers)
        ]

    def holding(
        self, jobs: Sequence[JobShape], rows: Sequence[float], recompute: Recompute, supervised: float
    ) -> Need:
        """Return the need of the pipeline worker that needs the most memory. Worker i keeps activations of
        `rows[i]` rows at a time, and `supervised` rows of one microbatch go through the head."""
        held = [
            int(count * token_bytes(part, self.shape.layers, self.fused, recompute, jobs))
            for part, count in zip(self._parts, rows, strict=True)
        ]
        return self._most(self._keeping(jobs, held, supervised, recompute))

    def head_bytes(self, supervised: float) -> int:
        """Return the bytes of the logits of `supervised` rows, or of one chunk if that is less."""
        rows = min(supervised, logit_rows("cuda" if self.fused else "cpu", self.shape.vocabulary))
        return int(LOGIT_COPIES * rows * 4 * self.shape.vocabulary)

    def _most(self, needs: Sequence[Need]) -> Need:
        return max(needs, key=lambda one: one.total(self.fit))

    @property
    def _keeps(self) -> bool:
        """Whether every worker has one resident stage that keeps the activations of its forward."""
        return self.layout.pipelined or (len(self.layout.stages) == 1 and self.layout.stages[0].resident)

    @property
    def _parts(self) -> list[ModelShape]:
        """Model shape of each worker's part of the base."""
        held = self._held
        return [self.shape] if len(held) == 1 else [stage_shape(self.shape, one) for one in held]

    @property
    def _held(self) -> list[LayerRange]:
        """Layers of each stage."""
        stages, layers = self.layout.stages, self.shape.layers
        if len(stages) == 1:
            return [LayerRange(0, layers, layers)]
        return [LayerRange(one.start, one.stop, layers) for one in stages]

    def _keeping(
        self, jobs: Sequence[JobShape], activations: Sequence[int], supervised: float, recompute: Recompute
    ) -> list[Need]:
        """Return the need of each worker, given the activation bytes that its stage keeps."""
        parts = zip(self._held, self._parts, activations, strict=True)
        return [
            Need(
                resident=self._process(worker) + part.base_bytes + matrix_bytes(self.shape, self.fused),
                state=self._kept_state(jobs, held),
                activations=kept,
                slack=min(self.slack_bytes, TILED_SLACK_BYTES) if recompute.tile_rows else self.slack_bytes,
                head=self.head_bytes(supervised) if held.last else 0,
            )
            for worker, (held, part, kept) in enumerate(parts)
        ]

    def _kept_state(self, jobs: Sequence[JobShape], held: LayerRange) -> int:
        """Return the device bytes of adapter state. If the optimizer is offloaded, they include the ring of
        buffers for optimizer steps, but not master weights and moments."""
        parameters = sum(job.trainable_in(held) for job in jobs)
        if not self.layout.optimizer_offloaded:
            averaged = sum(job.averaged_in(held) for job in jobs)
            return self.bytes_per_parameter * parameters + self.master_bytes * averaged
        value = self.shape.bytes_per_value
        ring = optimizer_ring_bytes((job.trainable for job in jobs), value)
        return (self.bytes_per_parameter - optimizer_bytes(value)) * parameters + ring

    def _process(self, worker: int) -> int:
        """Return the bytes that a worker's process holds before anything of the run is loaded."""
        return self.taken if worker == 0 else self.taken - self.first_only_bytes

    def _streamed_worker_need(self, on: OnWorker, memory: StreamedMemory, supervised: float) -> Need:
        """Return the need of a worker whose stages share the device in turn. The choice of stages counts in
        the same way, so that the jobs it was made for are admitted."""
        own = [on.stages[stage] for stage in on.own]
        sizes, resident = [stage.count for stage in own], [stage.resident for stage in own]
        weights, state, activations = memory.parts(sizes, resident, on.slots, on.worker, len(on.stages))
        return Need(
            resident=self._process(on.worker) + weights,
            state=state,
            activations=activations,
            slack=self.slack_bytes,
            head=self.head_bytes(supervised) if on.own[-1] == len(on.stages) - 1 else 0,
        )

    @property
    def slack_bytes(self) -> int:
        usual = FUSED_SLACK_BYTES if self.fused else SLACK_BYTES
        return usual if self.slack is None else self.slack

    # -- activations -------------------------------------------------------------------------------------

    def bytes_per_token(self, recompute: Recompute = NOTHING, jobs: Sequence[JobShape] = ()) -> int:
        """Return the bytes that one more token per microbatch adds on the worker where it adds the most."""
        if self._keeps:
            return max(self._kept_bytes(part, recompute, jobs) for part in self._parts)
        largest = max(stage.count for stage in self.layout.stages)
        layers, on = self.shape.layers, self.layout.on(0)
        passing = token_bytes(self.shape, layers, self.fused, recompute, jobs) * largest // layers
        moving = ON_THE_WAY
        if self.layout.workers == 1:
            moving = on.held_microbatches + (BUFFERED if self.fused else 0)
        return passing + moving * self.shape.hidden * self.shape.bytes_per_value

    @property
    def pass_layers(self) -> int:
        """Number of layers whose activations `bytes_per_token` counts."""
        return max(part.layers for part in self._parts) if self._keeps else self.shape.layers

    def _kept_bytes(self, part: ModelShape, recompute: Recompute, jobs: Sequence[JobShape]) -> int:
        """Return the bytes per token kept by all microbatches in flight: one per stage, plus `spare`."""
        workers = self.layout.workers
        each = token_bytes(part, self.shape.layers, self.fused, recompute, jobs)
        return each * (workers + self.spare if workers > 1 else 1)

    # -- adapters ----------------------------------------------------------------------------------------

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per adapter parameter: compute copy, fp32 master, gradient and two moments."""
        return self.shape.bytes_per_value + 4 * self.master_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the master weight of one parameter."""
        return max(4, self.shape.bytes_per_value)

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Return the bytes of adapter state, in device and host memory together."""
        return state_bytes(jobs, self.shape.bytes_per_value)

    def host_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Return the host bytes of an offloaded optimizer."""
        if not self.layout.optimizer_offloaded:
            return 0
        each = optimizer_bytes(self.shape.bytes_per_value)
        return sum(job.trainable * (each + job.means * self.master_bytes) for job in jobs)

    # -- what fits ---------------------------------------------------------------------------------------

    def peak_bytes(self, jobs: Sequence[JobShape], capacity: int, recompute: Recompute = NOTHING) -> int:
        """Return the predicted peak bytes, to which `fit.error` is added when checking whether jobs fit."""
        return self.need(jobs, capacity, recompute).total(self.fit)

    def recompute(self, jobs: Sequence[JobShape], max_tokens: int) -> Recompute:
        """Return the least recomputation with which microbatches of `max_tokens` fit. Whole layers are
        recomputed only as far as `ENOUGH_TOKENS` or the longest sample require: beyond that, smaller
        microbatches cost less. If nothing fits, return the maximum."""
        choices = self._choices(longest(jobs))
        rooms = {choice: self._room(jobs, choice) for choice in choices}
        whole_rows = max(max_tokens, longest(jobs))
        least_rows = max(longest(jobs), min(max_tokens, ENOUGH_TOKENS))
        whole = (choice for choice in choices if not choice.layers and rooms[choice] >= whole_rows)
        less = (choice for choice in choices if choice != NOTHING and rooms[choice] >= least_rows)
        return next(whole, None) or next(less, choices[-1])

    def capacity(self, jobs: Sequence[JobShape], max_tokens: int, recompute: Recompute = NOTHING) -> int:
        """Return the tokens of the largest microbatch that fits, from the longest sample to `max_tokens`."""
        return max(min(max_tokens, self._room(jobs, recompute)), longest(jobs))

    def least_bytes(self, jobs: Sequence[JobShape]) -> int:
        """Return the bytes needed with microbatches of the longest sample and maximum recomputation."""
        return self.peak_bytes(jobs, longest(jobs), self._least_memory(jobs)) + self.fit.error

    def _least_memory(self, jobs: Sequence[JobShape]) -> Recompute:
        """Return the choice that needs the least device memory for the longest sample, among those for which
        host memory suffices."""
        rows = longest(jobs)
        possible = [one for one in self._choices(rows) if self._host_room(jobs, one) >= rows]
        return min(possible, key=lambda one: self.peak_bytes(jobs, rows, one))

    def why_not(self, jobs: Sequence[JobShape]) -> str | None:
        """Return a sentence that says why these jobs do not fit together, or None if they do."""
        if (host := self.host_bytes(jobs)) > self.host_budget:
            return (
                f"needs {gib(host)} of the host's memory for master weights and moments with {len(jobs) - 1} "
                f"other jobs running, but {gib(self.host_budget)} are available there"
            )
        need = self.least_bytes(jobs)
        if need <= self.budget:
            return None
        sentence = (
            f"needs {gib(need)} with {len(jobs) - 1} other jobs running and its longest sample of "
            f"{longest(jobs)} tokens, but {gib(self.budget)} are available"
        )
        room = self._room(jobs, self._least_memory(jobs)) if len(jobs) == 1 else 0
        return f"{sentence}; samples of up to {room} tokens fit" if room > 0 else sentence

    def advice(self, job: JobShape) -> str:
        """Return advice for a job that does not fit even alone: the settings that each affect at least a
        tenth of the bytes that settings can affect."""
        need = self.need([job], job.longest, self._least_memory([job]))
        levers = {
            "data.max_length": self.fit.activations * need.activations + self.fit.head * need.head,
            "rank": self.fit.state * need.state,
            "the base's dtype": need.resident - self.taken,
        }
        least = ADVISED_SHARE * sum(levers.values())
        names = [name for name, size in levers.items() if size >= least]
        listed = " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        return f"lower {listed}, or give more memory"

    def _choices(self, rows: int) -> list[Recompute]:
        """Return the recomputation choices for samples of `rows` rows, the fastest first. Only fused layers
        have a choice, and stages that share a device in turn are always recomputed."""
        if not (self.fused and self._keeps):
            return [NOTHING]
        tiled = self._tiled_choices()
        if rows > TILE_ROWS:
            return tiled
        untiled = [NOTHING]
        if not self.shape.mixes:
            layers = (Recompute(True, count) for count in range(1, self.pass_layers + 1))
            untiled += [Recompute(outputs=True), *layers]
        if rows > 2 * SMALL_TILE_ROWS:
            untiled += [choice for choice in tiled if choice.layers == self.pass_layers]
        return untiled

    def _tiled_choices(self) -> list[Recompute]:
        """Return the choices with layers in tiles, the fastest first: attention is recomputed only if its
        output fits neither on the device nor in host memory."""
        layers = self.pass_layers
        everything = Recompute(True, layers, TILE_ROWS, keeps_attention=True)
        counts = range(layers if self.shape.mixes else 0, layers)
        choices = [replace(everything, layers=count) for count in counts]
        # Several workers have several microbatches in flight, whose tensors stay on the device.
        offloaded = range(1, layers + 1) if self.layout.workers == 1 and self.host_budget else ()
        choices += [everything, *(replace(everything, offloaded_layers=count) for count in offloaded)]
        without = replace(everything, keeps_attention=False)
        choices += [without, *(replace(without, offloaded_layers=count) for count in offloaded)]
        return [*choices, replace(choices[-1], tile_rows=SMALL_TILE_ROWS)]

    def _room(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        """Return the number of tokens in the largest microbatch that fits in memory."""
        # The head is given a full chunk, however few rows are supervised.
        head = int(self.fit.head * self.head_bytes(math.inf))
        free = self.budget - self.peak_bytes(jobs, 0, recompute) - self.fit.error - head
        each = self.fit.activations * self.bytes_per_token(recompute, jobs)
        fits = int(free / each)
        if recompute.tile_rows:
            tile, rest = max((tile_bytes(part, recompute, jobs), rest_bytes(part)) for part in self._parts)
            fits = min(fits, int((free - self.fit.activations * tile) / (each - self.fit.activations * rest)))
        return min(fits, self._host_room(jobs, recompute))

    def _tile_bytes(
        self, part: ModelShape, tokens: float, recompute: Recompute, jobs: Sequence[JobShape]
    ) -> int:
        """Return the bytes of a tile beyond those that the backward of attention needs at another time."""
        return max(0, tile_bytes(part, recompute, jobs) - int(tokens * rest_bytes(part)))

    def _host_room(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        """Return the tokens of the largest microbatch whose offloaded tensors fit in host memory."""
        if not recompute.offloaded_layers:
            return sys.maxsize
        return (self.host_budget - self.host_bytes(jobs)) // offloaded_token_bytes(self.shape, recompute)


def longest(jobs: Iterable[JobShape]) -> int:
    return max((job.longest for job in jobs), default=0)


def gib(count: float) -> str:
    """Format a byte count in GiB, or in MiB or bytes if it is small."""
    if 0 < count < SMALL_BYTES:
        return f"{count / 2**20:.2f} MiB" if count >= TINY_BYTES else f"{count:.0f} bytes"
    return f"{count / 2**30:.2f} GiB"
