"""What a run needs of the device's memory, before anything is loaded.

peak = process + base + state of every adapter aboard + activations of one microbatch + slack. The bytes of
activation per token come from the sites: what a layer keeps for its backward is proportional to the widths of
its linears. Every prediction is logged beside the measured peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.shapes import JobShape, ModelShape

ACTIVATION_FACTOR = 1.5
"""Values kept per token over the summed widths of the sites: measured 1.1 to 1.4 on the families we test."""

SLACK_BYTES = 256 << 20
"""Logits of one chunk, temporaries and the allocator's rounding."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    shape: ModelShape
    budget: int
    """Bytes that the run may take in all."""
    taken: int = 0
    """What the process holds before anything of the run is loaded."""

    @property
    def bytes_per_token(self) -> int:
        widths = sum(site.in_features + site.out_features for site in self.shape.sites)
        return int(ACTIVATION_FACTOR * widths * self.shape.bytes_per_value)

    @property
    def bytes_per_parameter(self) -> int:
        """Compute copy and its gradient, fp32 master, accumulated gradient and two moments."""
        master = max(4, self.shape.bytes_per_value)
        return 2 * self.shape.bytes_per_value + 4 * master

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        return sum(job.trainable for job in jobs) * self.bytes_per_parameter

    def peak_bytes(self, jobs: Sequence[JobShape], capacity: int) -> int:
        resident = self.taken + self.shape.base_bytes + SLACK_BYTES + self.state_bytes(jobs)
        return resident + capacity * self.bytes_per_token

    def capacity(self, jobs: Sequence[JobShape], most: int) -> int:
        """The largest token capacity that fits, at most `most`, never below the longest sample."""
        free = self.budget - self.peak_bytes(jobs, 0)
        return max(min(most, free // self.bytes_per_token), longest(jobs))

    def why_not(self, jobs: Sequence[JobShape]) -> str | None:
        """A sentence that says why these jobs do not fit together, or None if they do."""
        need = self.peak_bytes(jobs, longest(jobs))
        if need <= self.budget:
            return None
        return (
            f"needs {gib(need)} with {len(jobs) - 1} other jobs aboard and its longest sample of "
            f"{longest(jobs)} tokens, but {gib(self.budget)} are available"
        )


def longest(jobs: Iterable[JobShape]) -> int:
    return max((job.longest for job in jobs), default=0)


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
