"""What a streamed run needs of its device, on which only some stages of the base are at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import MemoryModel, Need
from weftune.plan.layout.need import layer_bytes
from weftune.plan.layout.ring import ring_bytes, stage_parts
from weftune.plan.program.layout import BUFFERED, Layout, padded_rows
from weftune.plan.program.recompute import NOTHING, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedMemory(MemoryModel):
    cut: Layout
    slack: int
    """Logits of one chunk, temporaries and the allocator's rounding."""

    @property
    def _present(self) -> int:
        """Layers that have a place on the device."""
        sizes = [(stage.stop - stage.start, stage.resident) for stage in self.cut.stages]
        streamed = max((size for size, stays in sizes if not stays), default=0)
        return sum(size for size, stays in sizes if stays) + self.cut.slots[0] * streamed

    def bytes_per_token(self, recompute: Recompute = NOTHING) -> int:
        """Of a microbatch, while the largest stage goes back, and offloaded inputs of another come; and of
        what captured passes read and write."""
        passing = MemoryModel.bytes_per_token(self, recompute) * self._largest // self.shape.layers
        held = self.cut.on(0).held_inputs.microbatches + (BUFFERED if self.fused else 0)
        return passing + held * self._row_bytes

    @property
    def _largest(self) -> int:
        """Layers of the largest stage."""
        return max(stage.stop - stage.start for stage in self.cut.stages)

    @property
    def _row_bytes(self) -> int:
        return self.shape.hidden * self.shape.bytes_per_value

    def state_bytes(self, jobs: Iterable[JobShape]) -> int:
        """Of adapters that travel, the copy and the gradient of the layers there, and what their Steps pass
        through; counted as when the cut was chosen, or jobs that it was chosen for would have to wait."""
        if not self.cut.travels:
            return MemoryModel.state_bytes(self, jobs)
        jobs, value = list(jobs), self.shape.bytes_per_value
        ring = ring_bytes(stage_parts(jobs, self._largest, self.shape.layers), value)
        in_a_layer = -(-sum(job.trainable for job in jobs) // self.shape.layers)
        return self._present * in_a_layer * (value + max(4, value)) + ring

    def need(self, jobs: Iterable[JobShape], tokens: float, recompute: Recompute = NOTHING) -> Need:
        jobs = list(jobs)
        layer = layer_bytes(self.shape)
        ends = max(0, self.shape.base_bytes - self.shape.layers * layer)
        rows = padded_rows(sum(job.batch_tokens for job in jobs), self.fused)
        inputs = self.cut.on(0).held_inputs.rounds * rows * self._row_bytes
        return Need(
            resident=self.taken + ends + self._present * layer,
            state=self.state_bytes(jobs),
            activations=int(tokens * self.bytes_per_token(recompute)) + inputs,
            slack=self.slack,
        )

    def _choices(self) -> list[Recompute]:
        """Every stage is made again as it is."""
        return [NOTHING]
