"""Memory that a run will need on each device, predicted for every layout before anything is loaded.

peak = process + base + state of the adapter of every running job + activations of one microbatch + logits of
one chunk + slack. A layer keeps activations for its backward in proportion to the widths of its sites
(adapted linears). Logits count only on the worker with the head. If several stages take turns on a device,
the device keeps the inputs of all stages and the activations of the largest one, since forwards are
recomputed. Every prediction is logged with the measured peak, and `memory_fit.py` fits the model to both.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from weftune.core.shapes import (
    JobShape,
    LayerRange,
    ModelShape,
    SiteShape,
    layer_number,
    logit_rows,
)
from weftune.plan.cost.estimate import stage_shape
from weftune.plan.cost.ring import optimizer_bytes, optimizer_ring_bytes
from weftune.plan.cost.streamed_memory import (
    ON_THE_WAY,
    StreamedMemory,
    attention_backward_bytes,
    matrix_bytes,
    offloaded_token_bytes,
    shard_copy_bytes,
    state_bytes,
    tile_bytes,
    token_bytes,
)
from weftune.plan.program.layout import BUFFERED, Layout, WorkerLayout, one_device_layout
from weftune.plan.program.program import NOTHING, Recompute

ENOUGH_TOKENS = 2048
"""Tokens per microbatch that keep a device busy. If memory does not suffice for microbatches of this size,
layers are recomputed in the backward; microbatches do not become smaller."""

TILE_ROWS, SMALL_TILE_ROWS = 8192, 1024
"""Numbers of rows in a tile, the part of a microbatch that a layer computes at a time: the usual number,
which keeps a device busy, and the smallest one, for short memory. Samples of more than `TILE_ROWS` rows
always run in tiles, since capturing their passes as CUDA graphs would need their memory twice."""

SMALL_BYTES, TINY_BYTES = 50 << 20, 50 << 10
SLACK_BYTES = 256 << 20
FUSED_SLACK_BYTES = 9 << 28
"""Slack: bytes for temporaries, rounding by the allocator, and the logits of one chunk of rows. Chunks are
larger on a GPU."""
TILED_SLACK_BYTES = 512 << 20
"""Slack bytes (for temporaries and rounding) of passes in which layers compute a tile of rows at a time. Such
passes need less slack, since they are not captured as CUDA graphs and have freed their logits in the
backward."""
LOGIT_COPIES = 2
"""Number of tensors of the size of the logits of one chunk of rows: the logits, and their softmax, which is
later overwritten by the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Correction factors for each part of the predicted memory, fitted to measured peaks."""

    state: float = 1.0
    activations: float = 1.0
    slack: float = 1.0
    head: float = 0.0
    """Factor for the logits; 0 if the logits were not measured separately and are covered by the slack."""
    error: int = 0
    """Bytes by which predictions may be too low. These bytes are added when it is decided whether jobs
    fit."""


UNFITTED = MemoryFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Predicted memory of one device in bytes, divided by what the bytes are used for, before correction
    factors are applied."""

    resident_bytes: int
    """Bytes of the process and of the base's weights."""
    state_bytes: int
    activation_bytes: int
    slack_bytes: int
    logit_bytes: int = 0
    """Bytes of the logits of one chunk of rows; 0 if the worker does not have the head."""

    def total_bytes(self, fit: MemoryFit) -> int:
        fitted = (
            fit.state * self.state_bytes
            + fit.activations * self.activation_bytes
            + fit.slack * self.slack_bytes
        )
        return self.resident_bytes + int(fitted + fit.head * self.logit_bytes)


ADVISED_SHARE = 0.1
"""Minimum fraction of a job's memory that a setting must account for before the user is advised to lower the
setting."""
SPARE = 1
"""Number of spare microbatches: microbatches in flight in a pipeline in addition to those of the 1F1B
schedule. Spare microbatches keep a stage busy if an input is late. Admission and the token capacity leave
memory for them."""
MAX_SPARE = 4
"""Maximum number of spare microbatches (in flight in a pipeline in addition to those of the 1F1B schedule) if
memory has room for them."""
WHOLE = one_device_layout()


@dataclass(frozen=True)
class MemoryModel:
    """The formula for the memory of a run in a given layout. The results decide which jobs are admitted, how
    many tokens microbatches have, and what is recomputed in the backward."""

    shape: ModelShape
    """Shape of the whole base."""
    budget_bytes: int
    """Total bytes that the run may use on each worker's device."""
    process_bytes: int = 0
    """Bytes that the first worker's process holds before anything of the run is loaded."""
    uses_fused_ops: bool = False
    """Whether layers run as fused ops, which keep fewer activations and support recomputation."""
    fit: MemoryFit = UNFITTED
    layout: Layout = WHOLE
    fixed_slack_bytes: int | None = None
    """Slack bytes: for temporaries, rounding by the allocator, and the logits of one chunk of rows. None
    selects the default."""
    spare_microbatches: int = SPARE
    """Number of microbatches in flight in a pipeline in addition to those of the 1F1B schedule."""
    first_only_bytes: int = 0
    """Bytes of process memory that only the first worker needs, for the tokenizer and the data."""
    host_budget_bytes: int = 0
    """Bytes of host memory that the run may use for an offloaded optimizer and for offloaded activations."""
    decoder_bytes: int = 0
    """Device bytes reserved for text generation between training passes: for cached keys and values, and for
    adapters that do not train."""

    # -- bytes -------------------------------------------------------------------------------------------

    def predict_need(
        self,
        jobs: Iterable[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> MemoryNeed:
        """Return the predicted bytes of the worker that needs the most memory. Microbatches have `tokens`
        tokens, of which `supervised` (None means all) go through the head."""
        return self._largest_need(self.worker_needs(list(jobs), tokens, recompute, supervised))

    def worker_needs(
        self,
        jobs: Sequence[JobShape],
        tokens: float,
        recompute: Recompute = NOTHING,
        supervised: float | None = None,
    ) -> list[MemoryNeed]:
        """Return the predicted bytes of each worker of a replica, for microbatches of `tokens` tokens, of
        which `supervised` (None means all) go through the head."""
        scored = tokens if supervised is None else supervised
        if self._keeps_activations:
            kept = [
                int(tokens * self._kept_bytes(part, recompute, jobs))
                + self._tile_bytes(part, tokens, recompute, jobs)
                for part in self._part_shapes
            ]
            return self._needs_with_activations(jobs, kept, scored, recompute)
        layout, rounds = self.layout, sum(job.batch_tokens for job in jobs)
        memory = StreamedMemory(
            self.shape,
            tuple(jobs),
            self.uses_fused_ops,
            rounds,
            int(tokens),
            layout.adapters_travel,
            layout.offloads_inputs,
            layout.workers,
        )
        return [
            self._streamed_worker_need(layout.for_worker(worker), memory, scored)
            for worker in range(layout.workers)
        ]

    def need_for_rows(
        self, jobs: Sequence[JobShape], rows: Sequence[float], recompute: Recompute, supervised: float
    ) -> MemoryNeed:
        """Return the predicted bytes of the pipeline worker that needs the most memory. Worker i keeps the
        activations of `rows[i]` rows at a time, and `supervised` rows of a microbatch go through the head."""
        activation_bytes = [
            int(count * token_bytes(part, self.shape.layers, self.uses_fused_ops, recompute, jobs))
            + self._tile_bytes(part, count, recompute, jobs)
            for part, count in zip(self._part_shapes, rows, strict=True)
        ]
        return self._largest_need(self._needs_with_activations(jobs, activation_bytes, supervised, recompute))

    def key_value_fractions(self, jobs: Sequence[JobShape], recompute: Recompute) -> list[float]:
        """Return, for each worker of a pipeline, the fraction of a row's activation bytes that the keys and
        values of attention take."""
        layers, fused = self.shape.layers, self.uses_fused_ops
        return [
            decoder_row_bytes(part) / token_bytes(part, layers, fused, recompute, jobs)
            for part in self._part_shapes
        ]

    @property
    def gradient_byte_ratio(self) -> float:
        """Bytes per value of an accumulated gradient, divided by the bytes per value of an activation."""
        return self.master_bytes / self.shape.bytes_per_value

    def logit_bytes(self, supervised: float) -> int:
        """Return the maximum bytes of logits at any time. Logits are computed for `supervised` rows, one
        chunk of rows at a time."""
        rows = min(supervised, logit_rows("cuda" if self.uses_fused_ops else "cpu", self.shape.vocabulary))
        return int(LOGIT_COPIES * rows * 4 * self.shape.vocabulary)

    def _largest_need(self, needs: Sequence[MemoryNeed]) -> MemoryNeed:
        return max(needs, key=lambda one: one.total_bytes(self.fit))

    @property
    def _keeps_activations(self) -> bool:
        """Whether every worker has one resident stage, so that activations are kept for the backward instead
        of recomputed."""
        return self.layout.is_pipeline or (len(self.layout.stages) == 1 and self.layout.stages[0].is_resident)

    @cached_property
    def _part_shapes(self) -> list[ModelShape]:
        """Shape of the part of the base that each worker holds."""
        ranges = self._stage_ranges
        return [self.shape] if len(ranges) == 1 else [stage_shape(self.shape, one) for one in ranges]

    @cached_property
    def _stage_ranges(self) -> list[LayerRange]:
        """Range of layers of each stage."""
        stages, layers = self.layout.stages, self.shape.layers
        if len(stages) == 1:
            return [LayerRange(0, layers, layers)]
        return [LayerRange(one.start, one.stop, layers) for one in stages]

    def _needs_with_activations(
        self, jobs: Sequence[JobShape], activations: Sequence[int], supervised: float, recompute: Recompute
    ) -> list[MemoryNeed]:
        """Return the predicted bytes of each worker, given the activation bytes that its stage keeps."""
        states = self._resident_states(jobs)
        parts = zip(self._stage_ranges, self._part_shapes, states, activations, strict=True)
        return [
            MemoryNeed(
                resident_bytes=self._worker_process_bytes(worker)
                + part.base_bytes
                + matrix_bytes(self.shape, self.uses_fused_ops)
                + self.decoder_bytes,
                state_bytes=state,
                activation_bytes=kept,
                slack_bytes=min(self.slack_bytes, TILED_SLACK_BYTES)
                if recompute.tile_rows
                else self.slack_bytes,
                logit_bytes=self.logit_bytes(supervised) if layers.is_last else 0,
            )
            for worker, (layers, part, state, kept) in enumerate(parts)
        ]

    def _resident_states(self, jobs: Sequence[JobShape]) -> list[int]:
        """Return the device bytes of adapter state in each stage. The latest result is cached, since a search
        asks for the same jobs repeatedly."""
        known_jobs, states = self.__dict__.get("_last_states", ((), []))
        if known_jobs != (asked := tuple(jobs)) or not states:
            states = [self._resident_state_bytes(jobs, layers) for layers in self._stage_ranges]
            self.__dict__["_last_states"] = asked, states
        return states

    def _resident_state_bytes(self, jobs: Sequence[JobShape], layer_range: LayerRange) -> int:
        """Return the device bytes of adapter state in the given layers. If the optimizer is offloaded to the
        host, these bytes include the buffers for optimizer steps, but not master weights and moments."""
        parameters = sum(job.parameters_in_layers(layer_range) for job in jobs)
        if not self.layout.offloads_optimizer:
            averaged = sum(job.averaged_values_in_layers(layer_range) for job in jobs)
            return self.bytes_per_parameter * parameters + self.master_bytes * averaged
        value = self.shape.bytes_per_value
        ring = optimizer_ring_bytes((job.trainable_parameters for job in jobs), value)
        return (self.bytes_per_parameter - optimizer_bytes(value)) * parameters + ring

    def _worker_process_bytes(self, worker: int) -> int:
        """Return the bytes that a worker's process holds before anything of the run is loaded."""
        return self.process_bytes if worker == 0 else self.process_bytes - self.first_only_bytes

    def _streamed_worker_need(
        self, worker_layout: WorkerLayout, memory: StreamedMemory, supervised: float
    ) -> MemoryNeed:
        """Return the predicted bytes of a worker whose stages take turns on its device. Bytes are counted as
        in the search for the stages, so that every job for which the search reserved memory is admitted."""
        own = [worker_layout.stages[stage] for stage in worker_layout.own_stages]
        sizes, resident = [stage.layer_count for stage in own], [stage.is_resident for stage in own]
        weights, state, activations = memory.bytes_by_use(
            sizes, resident, worker_layout.slot_count, worker_layout.worker, len(worker_layout.stages)
        )
        return MemoryNeed(
            resident_bytes=self._worker_process_bytes(worker_layout.worker) + weights,
            state_bytes=state,
            activation_bytes=activations,
            slack_bytes=self.slack_bytes,
            logit_bytes=self.logit_bytes(supervised)
            if worker_layout.own_stages[-1] == len(worker_layout.stages) - 1
            else 0,
        )

    @property
    def slack_bytes(self) -> int:
        usual = FUSED_SLACK_BYTES if self.uses_fused_ops else SLACK_BYTES
        return usual if self.fixed_slack_bytes is None else self.fixed_slack_bytes

    # -- activations -------------------------------------------------------------------------------------

    def bytes_per_token(self, recompute: Recompute = NOTHING, jobs: Sequence[JobShape] = ()) -> int:
        """Return the device bytes that one more token per microbatch needs, on the worker where the token
        needs the most bytes."""
        if self._keeps_activations:
            return max(self._kept_bytes(part, recompute, jobs) for part in self._part_shapes)
        largest = max(stage.layer_count for stage in self.layout.stages)
        layers, on = self.shape.layers, self.layout.for_worker(0)
        passing = token_bytes(self.shape, layers, self.uses_fused_ops, recompute, jobs) * largest // layers
        moving = ON_THE_WAY
        if self.layout.workers == 1:
            moving = on.extra_microbatches_on_device + (BUFFERED if self.uses_fused_ops else 0)
        return passing + moving * self.shape.hidden * self.shape.bytes_per_value

    @property
    def pass_layers(self) -> int:
        """Number of layers of the worker that holds the most layers, with which activation bytes per token
        are computed."""
        return (
            max(part.layers for part in self._part_shapes) if self._keeps_activations else self.shape.layers
        )

    def _kept_bytes(self, part: ModelShape, recompute: Recompute, jobs: Sequence[JobShape]) -> int:
        """Return the activation bytes of all microbatches in flight, per token of one microbatch. In a
        pipeline, one microbatch per stage is in flight, plus `spare_microbatches`. Without a pipeline, two
        microbatches are in flight if they overlap, which requires that nothing is recomputed."""
        workers = self.layout.workers
        each = token_bytes(part, self.shape.layers, self.uses_fused_ops, recompute, jobs)
        if self.layout.overlaps and recompute == NOTHING:
            return 2 * each
        return each * (workers + self.spare_microbatches if workers > 1 else 1)

    # -- adapters ----------------------------------------------------------------------------------------

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes per adapter parameter: compute copy, fp32 master weight, gradient and two moments. If layers
        are divided into shards, each shard also has a compute copy and a gradient of its part of the
        parameters."""
        return self.shape.bytes_per_value + 4 * self.master_bytes + shard_copy_bytes(self.shape)

    @property
    def master_bytes(self) -> int:
        """Bytes of the fp32 master weight of one adapter parameter."""
        return max(4, self.shape.bytes_per_value)

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Return the bytes of adapter state (parameters, gradients and optimizer state), in device and host
        memory together."""
        return state_bytes(jobs, self.shape.bytes_per_value)

    def host_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Return the host bytes of an optimizer that is offloaded, or 0 if the optimizer is not offloaded."""
        if not self.layout.offloads_optimizer:
            return 0
        each = optimizer_bytes(self.shape.bytes_per_value)
        return sum(
            job.trainable_parameters * (each + job.mean_weight_count * self.master_bytes) for job in jobs
        )

    # -- what fits ---------------------------------------------------------------------------------------

    def peak_bytes(self, jobs: Sequence[JobShape], capacity: int, recompute: Recompute = NOTHING) -> int:
        """Return the predicted peak of device memory in bytes, without the margin that is added when it is
        decided whether jobs fit."""
        return self.predict_need(jobs, capacity, recompute).total_bytes(self.fit)

    def choose_recompute(self, jobs: Sequence[JobShape], max_tokens: int) -> Recompute:
        """Return which activations to recompute in the backward, as few as possible, so that microbatches of
        `max_tokens` tokens fit.

        Whole layers are recomputed only if microbatches would otherwise be smaller than `ENOUGH_TOKENS` or
        the longest sample, since smaller microbatches cost less than recomputation. If no choice has room for
        such microbatches, return the choice that recomputes the most or, if the longest sample does not fit
        with that choice, the choice that needs the least memory.
        """
        choices = self._recompute_choices(max_sample_tokens(jobs))
        room = cache(partial(self._max_fitting_tokens, jobs))
        whole_rows = max(max_tokens, max_sample_tokens(jobs))
        least_rows = max(max_sample_tokens(jobs), min(max_tokens, ENOUGH_TOKENS))
        whole = (choice for choice in choices if not choice.recomputed_layers and room(choice) >= whole_rows)
        less = (choice for choice in choices if choice != NOTHING and room(choice) >= least_rows)
        if (found := next(whole, None) or next(less, None)) is not None:
            return found
        return (
            choices[-1]
            if room(choices[-1]) >= max_sample_tokens(jobs)
            else self._least_memory_recompute(jobs)
        )

    def choose_capacity(
        self, jobs: Sequence[JobShape], max_tokens: int, recompute: Recompute = NOTHING
    ) -> int:
        """Return the token capacity of microbatches: the largest number that fits in memory, at most
        `max_tokens` and at least the length of the longest sample."""
        return max(min(max_tokens, self._max_fitting_tokens(jobs, recompute)), max_sample_tokens(jobs))

    def choose_spare(self, jobs: Sequence[JobShape], capacity: int, recompute: Recompute = NOTHING) -> int:
        """Return how many microbatches of `capacity` tokens memory allows in flight in addition to those of
        the 1F1B schedule, at most `MAX_SPARE`."""
        fitting = (
            spare
            for spare in range(MAX_SPARE, self.spare_microbatches, -1)
            if replace(self, spare_microbatches=spare)._max_fitting_tokens(jobs, recompute) >= capacity
        )
        return next(fitting, self.spare_microbatches)

    def least_bytes(self, jobs: Sequence[JobShape]) -> int:
        """Return the smallest number of device bytes with which the jobs can run, if every microbatch has one
        sample and as much as possible is recomputed."""
        return (
            self.peak_bytes(jobs, max_sample_tokens(jobs), self._least_memory_recompute(jobs))
            + self.fit.error
        )

    def _least_memory_recompute(self, jobs: Sequence[JobShape]) -> Recompute:
        """Return the recomputation choice that needs the least device memory for the longest sample, among
        the choices for which host memory suffices."""
        rows = max_sample_tokens(jobs)
        possible = [one for one in self._recompute_choices(rows) if self._max_host_tokens(jobs, one) >= rows]
        return min(possible, key=lambda one: self.peak_bytes(jobs, rows, one))

    def misfit_reason(self, jobs: Sequence[JobShape]) -> str | None:
        """Return a sentence that says why the jobs do not fit together, or None if they fit."""
        if (host := self.host_bytes(jobs)) > self.host_budget_bytes:
            return (
                f"needs {format_bytes(host)} of the host's memory for master weights and moments with "
                f"{len(jobs) - 1} "
                f"other jobs running, but {format_bytes(self.host_budget_bytes)} are available there"
            )
        need = self.least_bytes(jobs)
        if need <= self.budget_bytes:
            return None
        sentence = (
            f"needs {format_bytes(need)} with {len(jobs) - 1} other jobs running and its longest sample of "
            f"{max_sample_tokens(jobs)} tokens, but {format_bytes(self.budget_bytes)} are available"
        )
        room = self._max_fitting_tokens(jobs, self._least_memory_recompute(jobs)) if len(jobs) == 1 else 0
        return f"{sentence}; samples of up to {room} tokens fit" if room > 0 else sentence

    def advice(self, job: JobShape) -> str:
        """Return advice for a job that does not fit even alone, as a clause that names the settings to lower.
        Only settings that account for a considerable part of the job's memory are named."""
        need = self.predict_need([job], job.max_sample_tokens, self._least_memory_recompute([job]))
        levers = {
            "data.max_length": self.fit.activations * need.activation_bytes
            + self.fit.head * need.logit_bytes,
            "rank": self.fit.state * need.state_bytes,
            "the base's dtype": need.resident_bytes - self.process_bytes - self.decoder_bytes,
            "eval.generate": self.decoder_bytes,
        }
        least = ADVISED_SHARE * sum(levers.values())
        names = [name for name, size in levers.items() if size >= least]
        listed = " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        return f"lower {listed}, or give more memory"

    def _recompute_choices(self, rows: int) -> list[Recompute]:
        """Return the recomputation choices for samples of `rows` rows, the fastest first. Only fused layers
        can recompute a part of their activations. Stages that take turns on a device always recompute all
        their activations."""
        if not (self.uses_fused_ops and self._keeps_activations):
            return [NOTHING]
        tiled = self._tiled_choices()
        if rows > TILE_ROWS:
            return tiled
        untiled = [NOTHING]
        if not self.shape.routes_to_experts:
            layers = (Recompute(True, count) for count in range(1, self.pass_layers + 1))
            untiled += [Recompute(recomputes_outputs=True), *layers]
        if rows > 2 * SMALL_TILE_ROWS:
            untiled += [choice for choice in tiled if choice.recomputed_layers == self.pass_layers]
        return untiled

    def _tiled_choices(self) -> list[Recompute]:
        """Return the recomputation choices in which layers are computed in tiles (some rows at a time), the
        fastest first. Attention is recomputed only if its output fits neither on the device nor in host
        memory."""
        layers = self.pass_layers
        everything = Recompute(True, layers, TILE_ROWS, keeps_attention=True)
        counts = range(layers if self.shape.routes_to_experts else 0, layers)
        choices = [replace(everything, recomputed_layers=count) for count in counts]
        # Several workers have several microbatches in flight, whose tensors stay on the device.
        offloaded = range(1, layers + 1) if self.layout.workers == 1 and self.host_budget_bytes else ()
        choices += [everything, *(replace(everything, offloaded_layers=count) for count in offloaded)]
        without = replace(everything, keeps_attention=False)
        choices += [without, *(replace(without, offloaded_layers=count) for count in offloaded)]
        return [*choices, replace(choices[-1], tile_rows=SMALL_TILE_ROWS)]

    def _max_fitting_tokens(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        """Return the number of tokens of the largest microbatch that fits in device and host memory."""
        # The head is given a full chunk, however few rows are supervised.
        head = int(self.fit.head * self.logit_bytes(math.inf))
        free = self.budget_bytes - self.peak_bytes(jobs, 0, recompute) - self.fit.error - head
        each = self.fit.activations * self.bytes_per_token(recompute, jobs)
        fits = int(free / each)
        if recompute.tile_rows:
            tile, rest = max(
                (tile_bytes(part, recompute, jobs), attention_backward_bytes(part))
                for part in self._part_shapes
            )
            fits = min(fits, int((free - self.fit.activations * tile) / (each - self.fit.activations * rest)))
        return min(fits, self._max_host_tokens(jobs, recompute))

    def _tile_bytes(
        self, part: ModelShape, tokens: float, recompute: Recompute, jobs: Sequence[JobShape]
    ) -> int:
        """Return the bytes that a tile (the rows that a layer computes at a time) needs beyond the memory
        that the backward of attention has freed by then. Return 0 if passes do not run in tiles."""
        if not (tokens and recompute.tile_rows):
            return 0
        return max(0, tile_bytes(part, recompute, jobs) - int(tokens * attention_backward_bytes(part)))

    def _max_host_tokens(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        """Return the number of tokens of the largest microbatch whose offloaded tensors fit in host
        memory."""
        if not recompute.offloaded_layers:
            return sys.maxsize
        return (self.host_budget_bytes - self.host_bytes(jobs)) // offloaded_token_bytes(
            self.shape, recompute
        )


def decoder_row_bytes(shape: ModelShape) -> int:
    """Return an upper bound on the bytes of the cached keys and values of one token in all layers."""
    by_layer: dict[int, list[SiteShape]] = {}
    for site in shape.sites:
        if (layer := layer_number(site.name)) is not None:
            by_layer.setdefault(layer, []).append(site)
    widths = (_key_value_width(sites, shape) for sites in by_layer.values())
    return shape.bytes_per_value * sum(widths)


def _key_value_width(sites: Sequence[SiteShape], shape: ModelShape) -> int:
    """Return the number of values in the keys and values of one token in a layer. Layers whose query, key and
    value projections are one linear are counted as if they had as many keys and values as queries."""
    widths = {site.name.rpartition(".")[2]: site.out_features for site in sites}
    if {"k_proj", "v_proj"} <= widths.keys():
        return widths["k_proj"] + widths["v_proj"]
    return 2 * max(shape.attention_width, shape.hidden)


def answers_bytes(shape: ModelShape, jobs: Iterable[JobShape]) -> int:
    """Return the bytes of cached keys and values that the answers to evaluation prompts need. The result is
    the maximum over the jobs, since a job generates all its answers at once and jobs take turns."""
    return decoder_row_bytes(shape) * max((job.answer_positions for job in jobs), default=0)


def max_sample_tokens(jobs: Iterable[JobShape]) -> int:
    return max((job.max_sample_tokens for job in jobs), default=0)


def format_bytes(byte_count: float) -> str:
    """Format a byte count in GiB, or in MiB or bytes if it is small."""
    if 0 < byte_count < SMALL_BYTES:
        return f"{byte_count / 2**20:.2f} MiB" if byte_count >= TINY_BYTES else f"{byte_count:.0f} bytes"
    return f"{byte_count / 2**30:.2f} GiB"
