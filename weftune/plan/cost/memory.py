"""What a run needs of the device's memory, before anything is loaded.

peak = process + base + state of every adapter aboard + activations of one microbatch + slack. The bytes of
activation per token come from the sites: what a layer keeps for its backward is proportional to the widths of
its linears. Every prediction is logged beside the measured peak, and `memory_fit.py` learns from both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weftune.core.shapes import JobShape, ModelShape
from weftune.plan.program.recompute import NOTHING, Recompute

ACTIVATION_FACTOR = 1.5
"""Values kept per token over the summed widths of the sites: measured 1.1 to 1.4 on the families we test."""
FUSED_FACTOR = 0.92
OUTPUTS_FACTOR = 0.64
"""The same for fused layers: 0.83 to 0.85 by counting, and 0.55 to 0.57 if outputs of norms and activations
are made again; the rest is for what a backward holds for a moment."""

ON_THE_WAY = 4
"""Full microbatches' activations or gradients that a stage of the template may hold to be sent or used."""

SMALL_BYTES, TINY_BYTES = 50 << 20, 50 << 10
SLACK_BYTES = 256 << 20
FUSED_SLACK_BYTES = 3 << 30
"""Logits of one chunk, temporaries and the allocator's rounding. A GPU's chunks are larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What measured peaks say of the model's parts, as factors of them."""

    state: float = 1.0
    activations: float = 1.0
    slack: float = 1.0
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

    def total(self, fit: MemoryFit) -> int:
        fitted = fit.state * self.state + fit.activations * self.activations + fit.slack * self.slack
        return self.resident + int(fitted)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    shape: ModelShape
    budget: int
    """Bytes that the run may take in all."""
    taken: int = 0
    """What the process holds before anything of the run is loaded."""

    fused: bool = False
    """Whether layers run as fused ops, which keep less and can recompute."""
    fit: MemoryFit = UNFITTED

    in_flight: int = 1
    """Microbatches that hold activations at once: as many as stages, on the first stage of a pipeline."""

    def bytes_per_token(self, recompute: Recompute = NOTHING) -> int:
        widths = sum(site.in_features + site.out_features for site in self.shape.sites)
        factor = ACTIVATION_FACTOR
        if self.fused:
            factor = OUTPUTS_FACTOR if recompute.outputs else FUSED_FACTOR
        layers = self.shape.layers
        # Of layers made again, one is held whole at a time, and of each its input.
        whole = min(layers, layers - recompute.layers + (1 if recompute.layers else 0))
        values = factor * widths * whole / layers + recompute.layers * self.shape.hidden
        return int(values * self.shape.bytes_per_value) * self.in_flight

    @property
    def bytes_per_parameter(self) -> int:
        """Compute copy, fp32 master, gradient and two moments."""
        return self.shape.bytes_per_value + 4 * max(4, self.shape.bytes_per_value)

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        return sum(job.trainable for job in jobs) * self.bytes_per_parameter

    def need(self, jobs: Iterable[JobShape], tokens: float, recompute: Recompute = NOTHING) -> Need:
        """With microbatches of so many tokens."""
        return Need(
            resident=self.taken + self.shape.base_bytes,
            state=self.state_bytes(jobs),
            activations=int(tokens * self.bytes_per_token(recompute)),
            slack=FUSED_SLACK_BYTES if self.fused else SLACK_BYTES,
        )

    def peak_bytes(self, jobs: Sequence[JobShape], capacity: int, recompute: Recompute = NOTHING) -> int:
        """As predicted; what must fit is `error` more."""
        return self.need(jobs, capacity, recompute).total(self.fit)

    def recompute(self, jobs: Sequence[JobShape], most: int) -> Recompute:
        """The least that lets microbatches of `most` tokens fit; all there is if nothing does."""
        choices = self._choices()
        fits = (choice for choice in choices if self._room(jobs, choice) >= most)
        return next(fits, choices[-1])

    def capacity(self, jobs: Sequence[JobShape], most: int, recompute: Recompute = NOTHING) -> int:
        """The largest token capacity that fits, at most `most`, never below the longest sample."""
        return max(min(most, self._room(jobs, recompute)), longest(jobs))

    def least_bytes(self, jobs: Sequence[JobShape]) -> int:
        """With microbatches of the longest sample, and everything made again that can be."""
        return self.peak_bytes(jobs, longest(jobs), self._choices()[-1]) + self.fit.error

    def why_not(self, jobs: Sequence[JobShape]) -> str | None:
        """A sentence that says why these jobs do not fit together, or None if they do."""
        need = self.least_bytes(jobs)
        if need <= self.budget:
            return None
        return (
            f"needs {gib(need)} with {len(jobs) - 1} other jobs aboard and its longest sample of "
            f"{longest(jobs)} tokens, but {gib(self.budget)} are available"
        )

    def _choices(self) -> list[Recompute]:
        """From nothing to everything; only fused layers can."""
        if not self.fused:
            return [NOTHING]
        layers = (Recompute(True, count) for count in range(1, self.shape.layers + 1))
        return [NOTHING, Recompute(outputs=True), *layers]

    def _room(self, jobs: Sequence[JobShape], recompute: Recompute) -> int:
        free = self.budget - self.peak_bytes(jobs, 0, recompute) - self.fit.error
        return int(free / (self.fit.activations * self.bytes_per_token(recompute)))


def longest(jobs: Iterable[JobShape]) -> int:
    return max((job.longest for job in jobs), default=0)


def gib(count: float) -> str:
    """In GiB; what would be next to nothing then, in MiB or bytes."""
    if 0 < count < SMALL_BYTES:
        return f"{count / 2**20:.2f} MiB" if count >= TINY_BYTES else f"{count:.0f} bytes"
    return f"{count / 2**30:.2f} GiB"
