"""What a run needs of each device's memory, before anything is loaded, in every layout.

peak = process + base + state of every adapter aboard + activations of one microbatch + logits of one chunk +
slack. The bytes of activation per token come from the sites: what a layer keeps for its backward is
proportional to the widths of its linears. Logits are only where the head is. Where stages take turns, a
forward is recomputed: what they were given is kept, and what passes of the largest one hold. Every prediction
is logged beside the measured peak, and `memory_fit.py` learns from both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape, LayerRange, ModelShape, logit_rows
from weftune.plan.cost.estimate import layer_bytes
from weftune.plan.cost.layers import stage_shape
from weftune.plan.cost.ring import optimizer_bytes, optimizer_ring_bytes, ring_bytes, stage_parts
from weftune.plan.program.layout import BUFFERED, Layout, OnWorker, one_device, padded_rows
from weftune.plan.program.recompute import NOTHING, Recompute

ACTIVATION_FACTOR = 1.5
"""Values kept per token over the summed widths of the sites: measured 1.1 to 1.4 on the families we test."""
FUSED_FACTOR = 0.92
OUTPUTS_FACTOR = 0.64
"""The same for fused layers: 0.83 to 0.85 by counting, and 0.55 to 0.57 if outputs of norms and activations
are recomputed; the rest is for what a backward holds for a moment."""
RECOMPUTED_FACTOR = 1.4
"""The same for a layer that is recomputed, in its own backward: all that it keeps, and gradients."""

ENOUGH_TOKENS = 2048
"""Microbatches of so many tokens keep a device busy: below, layers are recomputed rather than fewer taken."""

ON_THE_WAY = 4
"""Full microbatches' activations or gradients that a stage of the template may hold to be sent or used."""

SMALL_BYTES, TINY_BYTES = 50 << 20, 50 << 10
SLACK_BYTES = 256 << 20
FUSED_SLACK_BYTES = 3 << 30
"""Logits of one chunk, temporaries and the allocator's rounding. A GPU's chunks are larger."""
LOGIT_COPIES = 2
"""Of a chunk's logits: as they are, and normalised, which then become their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What measured peaks say of the model's parts, as factors of them."""

    state: float = 1.0
    activations: float = 1.0
    slack: float = 1.0
    head: float = 0.0
    """0: nothing is known of the head alone, and the slack counts its logits."""
    error: int = 0
    """Bytes by which a prediction may be too low: whoever must fit, fits with so much more."""


UNFITTED = MemoryFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes by what takes them, before any fit."""

    resident: int
    """The process and the base."""
    state: int
    activations: int
    slack: int
    head: int = 0
    """Logits of one chunk, where the worker has the head."""

    def total(self, fit: MemoryFit) -> int:
        fitted = fit.state * self.state + fit.activations * self.activations + fit.slack * self.slack
        return self.resident + int(fitted + fit.head * self.head)


ADVISED_SHARE = 0.1
"""A setting that decides over a smaller share of a job's bytes is not advised."""
SPARE = 1
"""Microbatches in flight beyond what 1F1B has, so that a late arrival finds its stage at work."""
WHOLE = one_device()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    shape: ModelShape
    """Of all of the base."""
    budget: int
    """Bytes that the run may take of each worker's device in all."""
    taken: int = 0
    """What the first worker's process holds before anything of the run is loaded."""
    fused: bool = False
    """Whether layers run as fused ops, which keep less and can recompute."""
    fit: MemoryFit = UNFITTED
    layout: Layout = WHOLE
    slack: int | None = None
    """Logits of one chunk, temporaries and the allocator's rounding; None: as is usual."""
    spare: int = SPARE
    first_only: int = 0
    """Bytes of `taken` that no other worker holds: the tokenizer and the rows are the first one's."""
    host_budget: int = 0
    """Bytes of the host's memory that the run may take, where the optimizer is offloaded."""

    # -- bytes -------------------------------------------------------------------------------------------

    def need(
        self,
        jobs: Iterable[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> Need:
        """Of the worker that needs most, with microbatches of so many tokens; so many of them, or all, go
        through the head."""
        return self._most(self.worker_needs(list(jobs), tokens, recompute, supervised))

    def worker_needs(
        self,
        jobs: Sequence[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> list[Need]:
        """Of each worker of a replica."""
        scored = tokens if supervised is None else supervised
        if self._keeps:
            kept = [int(tokens * self._kept_bytes(part, recompute, jobs)) for part in self._parts]
            return self._keeping(jobs, kept, scored)
        layer = layer_bytes(self.shape)
        workers = range(self.layout.workers)
        return [self._turning(self.layout.on(worker), jobs, tokens, scored, layer) for worker in workers]

    def holding(
        self, jobs: Sequence[JobShape], rows: Sequence[float], recompute: Recompute, supervised: float
    ) -> Need:
        """Of the worker of a pipeline that needs most, where each holds so many rows at a time, and of one
        microbatch so many go through the head."""
        held = [
            int(count * self._token_bytes(part, recompute, jobs))
            for part, count in zip(self._parts, rows, strict=True)
        ]
        return self._most(self._keeping(jobs, held, supervised))

    def head_bytes(self, supervised: float) -> int:
        """The logits of so many rows, or of one chunk where they are more."""
        rows = min(supervised, logit_rows("cuda" if self.fused else "cpu", self.shape.vocabulary))
        return int(LOGIT_COPIES * rows * 4 * self.shape.vocabulary)

    def _most(self, needs: Sequence[Need]) -> Need:
        return max(needs, key=lambda one: one.total(self.fit))

    @property
    def _keeps(self) -> bool:
        """Whether every worker has one stage, which stays and keeps what its forward made."""
        return self.layout.pipelined or (len(self.layout.stages) == 1 and self.layout.stages[0].resident)

    @property
    def _parts(self) -> list[ModelShape]:
        """What of the base each worker has."""
        held = self._held
        return [self.shape] if len(held) == 1 else [stage_shape(self.shape, one) for one in held]

    @property
    def _held(self) -> list[LayerRange]:
        """The layers of each stage."""
        stages, layers = self.layout.stages, self.shape.layers
        if len(stages) == 1:
            return [LayerRange(0, layers, layers)]
        return [LayerRange(one.start, one.stop, layers) for one in stages]

    def _keeping(self, jobs: Sequence[JobShape], activations: Sequence[int], supervised: float) -> list[Need]:
        """Of each worker, whose stage keeps so many bytes of activations."""
        parts = zip(self._held, self._parts, activations, strict=True)
        return [
            Need(
                resident=self._process(worker) + part.base_bytes + matrix_bytes(self.shape, self.fused),
                state=self._kept_state(jobs, held),
                activations=kept,
                slack=self._slack,
                head=self.head_bytes(supervised) if held.last else 0,
            )
            for worker, (held, part, kept) in enumerate(parts)
        ]

    def _kept_state(self, jobs: Sequence[JobShape], held: LayerRange) -> int:
        """Of an offloaded optimizer, what stays beside it, and what its Steps pass through."""
        parameters = sum(job.trainable_in(held) for job in jobs)
        if not self.layout.optimizer_offloaded:
            averaged = sum(job.averaged_in(held) for job in jobs)
            return self.bytes_per_parameter * parameters + self.master_bytes * averaged
        value = self.shape.bytes_per_value
        ring = optimizer_ring_bytes((job.trainable for job in jobs), value)
        return (self.bytes_per_parameter - optimizer_bytes(value)) * parameters + ring

    def _process(self, worker: int) -> int:
        """What a worker's process holds before anything of the run is loaded."""
        return self.taken if worker == 0 else self.taken - self.first_only

    def _turning(
        self, on: OnWorker, jobs: Sequence[JobShape], tokens: float, supervised: float, layer: int
    ) -> Need:
        """A worker whose stages take turns; adapters are taken to be spread evenly over the layers."""
        sizes = [on.stages[stage].count for stage in on.own]
        rows = padded_rows(sum(job.batch_tokens for job in jobs), self.fused)
        # Beside what its stages keep, as much as one makes may still be on its way to the next worker.
        inputs = on.held_inputs.rounds + (self.layout.workers > 1)
        whole = self._token_bytes(self.shape, NOTHING, jobs)
        passing = max(sizes) * math.ceil(int(tokens) * whole / self.shape.layers)
        return Need(
            resident=self._process(on.worker)
            + self._ends_bytes(on, layer)
            + present_layers(on) * layer
            + matrix_bytes(self.shape, self.fused),
            state=self._turning_state(on, jobs, sum(sizes)),
            activations=(inputs * rows + self._moving(on) * int(tokens)) * self._row_bytes + passing,
            slack=self._slack,
            head=self.head_bytes(supervised) if on.own[-1] == len(on.stages) - 1 else 0,
        )

    def _turning_state(self, on: OnWorker, jobs: Sequence[JobShape], layers: int) -> int:
        """Of adapters that travel, the copy and the gradient of the layers there, and what their Steps pass
        through; counted as when the cut was chosen, or jobs that it was chosen for would have to wait."""
        if not self.layout.travels:
            return math.ceil(self.state_bytes(jobs) * layers / self.shape.layers)
        value, largest = self.shape.bytes_per_value, max(on.stages[stage].count for stage in on.own)
        ring = ring_bytes(stage_parts(jobs, largest, self.shape.layers), value)
        in_a_layer = math.ceil(sum(job.trainable for job in jobs) / self.shape.layers)
        return present_layers(on) * in_a_layer * (value + max(4, value)) + ring

    def _moving(self, on: OnWorker) -> int:
        """Microbatches of rows that come, go, or are handed to captured passes."""
        if self.layout.workers > 1:
            return ON_THE_WAY
        return on.held_inputs.microbatches + (BUFFERED if self.fused else 0)

    def _ends_bytes(self, on: OnWorker, layer: int) -> int:
        """Embedding and head, where they are; norms and biases, which may be anywhere."""
        ends = max(0, self.shape.base_bytes - self.shape.layers * layer)
        if self.layout.workers == 1:
            return ends
        matrix = self.shape.hidden * self.shape.vocabulary * self.shape.bytes_per_value
        tied = ends < 2 * matrix
        beside = max(0, ends - (matrix if tied else 2 * matrix))
        first, last = on.worker == 0, on.own[-1] == len(on.stages) - 1
        return beside + matrix * (1 if first and last and tied else first + last)

    @property
    def _slack(self) -> int:
        usual = FUSED_SLACK_BYTES if self.fused else SLACK_BYTES
        return usual if self.slack is None else self.slack

    @property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.shape.bytes_per_value

    # -- activations -------------------------------------------------------------------------------------

    def bytes_per_token(self, recompute: Recompute = NOTHING, jobs: Sequence[JobShape] = ()) -> int:
        """What one more token in a microbatch adds, where it adds most, with these jobs aboard."""
        if self._keeps:
            return max(self._kept_bytes(part, recompute, jobs) for part in self._parts)
        largest = max(stage.count for stage in self.layout.stages)
        passing = self._token_bytes(self.shape, recompute, jobs) * largest // self.shape.layers
        return passing + self._moving(self.layout.on(0)) * self._row_bytes

    @property
    def pass_layers(self) -> int:
        """Layers whose activations `bytes_per_token` counts."""
        return max(part.layers for part in self._parts) if self._keeps else self.shape.layers

    def _kept_bytes(self, part: ModelShape, recompute: Recompute, jobs: Sequence[JobShape]) -> int:
        """Of a token of every microbatch in flight: as many as stages, on the first stage of a pipeline."""
        workers = self.layout.workers
        return self._token_bytes(part, recompute, jobs) * (workers + self.spare if workers > 1 else 1)

    def _token_bytes(self, part: ModelShape, recompute: Recompute, jobs: Sequence[JobShape]) -> int:
        """Of a token in the layers of `part`."""
        widths = sum(site.widths for site in part.sites)
        factor, extra = ACTIVATION_FACTOR, 0.0
        if self.fused and not part.mixes:
            factor, extra = OUTPUTS_FACTOR if recompute.outputs else FUSED_FACTOR, part.extra_values
            # Jobs that scale outputs mostly scale the same ones, which are kept once for all.
            extra += max((job.scaled for job in jobs), default=0) / self.shape.layers
        layers, again = part.layers, min(recompute.layers, part.layers)
        kept, one = layers - again, widths / layers
        values = kept * (factor * one + extra)
        if again:
            # Of each its input, and one of them is held whole at a time.
            values += again * part.hidden + RECOMPUTED_FACTOR * one + extra
        return int(values * part.bytes_per_value) + part.code_bytes

    # -- adapters ----------------------------------------------------------------------------------------

    @property
    def bytes_per_parameter(self) -> int:
        """Compute copy, fp32 master, gradient and two moments."""
        return self.shape.bytes_per_value + 4 * self.master_bytes

    @property
    def master_bytes(self) -> int:
        """Of one parameter's master weight, and of whatever has its type."""
        return max(4, self.shape.bytes_per_value)

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Wherever it is."""
        return sum(job.trainable * (self.bytes_per_parameter + job.means * self.master_bytes) for job in jobs)

    def host_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Of an offloaded optimizer, in the host's memory."""
        if not self.layout.optimizer_offloaded:
            return 0
        each = optimizer_bytes(self.shape.bytes_per_value)
        return sum(job.trainable * (each + job.means * self.master_bytes) for job in jobs)

    # -- what fits ---------------------------------------------------------------------------------------

    def peak_bytes(self, jobs: Sequence[JobShape], capacity: int, recompute: Recompute = NOTHING) -> int:
        """As predicted; what must fit is `error` more."""
        return self.need(jobs, capacity, recompute).total(self.fit)

    def recompute(self, jobs: Sequence[JobShape], most: int) -> Recompute:
        """The least that lets microbatches of `most` tokens fit; all there is if nothing does. Layers are
        recomputed, which costs their forward, only so that enough tokens fit: smaller microbatches cost
        less."""
        choices = self._choices()
        rooms = {choice: self._room(jobs, choice) for choice in choices}
        enough = min(most, max(ENOUGH_TOKENS, longest(jobs)))
        whole = (choice for choice in choices if not choice.layers and rooms[choice] >= most)
        less = (choice for choice in choices if choice != NOTHING and rooms[choice] >= enough)
        return next(whole, None) or next(less, choices[-1])

    def capacity(self, jobs: Sequence[JobShape], most: int, recompute: Recompute = NOTHING) -> int:
        """The largest token capacity that fits, at most `most`, never below the longest sample."""
        return max(min(most, self._room(jobs, recompute)), longest(jobs))

    def least_bytes(self, jobs: Sequence[JobShape]) -> int:
        """With microbatches of the longest sample, and everything recomputed that can be."""
        return self.peak_bytes(jobs, longest(jobs), self._choices()[-1]) + self.fit.error

    def why_not(self, jobs: Sequence[JobShape]) -> str | None:
        """A sentence that says why these jobs do not fit together, or None if they do."""
        if (host := self.host_bytes(jobs)) > self.host_budget:
            return (
                f"needs {gib(host)} of the host's memory for master weights and moments with {len(jobs) - 1} "
                f"other jobs aboard, but {gib(self.host_budget)} are available there"
            )
        need = self.least_bytes(jobs)
        if need <= self.budget:
            return None
        return (
            f"needs {gib(need)} with {len(jobs) - 1} other jobs aboard and its longest sample of "
            f"{longest(jobs)} tokens, but {gib(self.budget)} are available"
        )

    def advice(self, job: JobShape) -> str:
        """What could make room for a job that does not fit even alone: only settings that decide over a
        tenth or more of the bytes that settings decide over."""
        need = self.need([job], job.longest, self._choices()[-1])
        levers = {
            "data.max_length": self.fit.activations * need.activations + self.fit.head * need.head,
            "rank": self.fit.state * need.state,
            "the base's dtype": need.resident - self.taken,
        }
        least = ADVISED_SHARE * sum(levers.values())
        names = [name for name, size in levers.items() if size >= least]
        listed = " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        return f"lower {listed}, or give more memory"

    def _choices(self) -> list[Recompute]:
        """From nothing to everything; only fused layers can. Stages that take turns are recomputed as they
        are."""
        if not (self.fused and self._keeps) or self.shape.mixes:
            return [NOTHING]
        layers = (Recompute(True, count) for count in range(1, self.pass_layers + 1))
        return [NOTHING, Recompute(outputs=True), *layers]

    def _room(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        # However few rows are supervised, the head is given all of its chunk.
        head = int(self.fit.head * self.head_bytes(math.inf))
        free = self.budget - self.peak_bytes(jobs, 0, recompute) - self.fit.error - head
        return int(free / (self.fit.activations * self.bytes_per_token(recompute, jobs)))


def present_layers(on: OnWorker) -> int:
    """Layers that have a place on a worker's device: those that stay, and its slots."""
    sizes = [(on.stages[stage].count, on.stages[stage].resident) for stage in on.own]
    streamed = [size for size, stays in sizes if not stays]
    return sum(size for size, stays in sizes if stays) + min(on.slots, len(streamed)) * max(
        streamed, default=0
    )


def matrix_bytes(shape: ModelShape, fused: bool) -> int:
    """What quantised weights are dequantised into, for one product at a time; in fused layers that is one
    product for two sites that share their input."""
    return shape.matrix_bytes * (2 if fused else 1)


def longest(jobs: Iterable[JobShape]) -> int:
    return max((job.longest for job in jobs), default=0)


def gib(count: float) -> str:
    """In GiB; what would be next to nothing then, in MiB or bytes."""
    if 0 < count < SMALL_BYTES:
        return f"{count / 2**20:.2f} MiB" if count >= TINY_BYTES else f"{count:.0f} bytes"
    return f"{count / 2**30:.2f} GiB"
