"""What a run that is streamed over several ranks needs of the device of the rank that needs most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.plan.cost.memory import ON_THE_WAY, MemoryModel, Need
from weftune.plan.layout.need import StreamCase, StreamDevice
from weftune.plan.layout.worker_need import RanksCase
from weftune.plan.program.layout import Layout
from weftune.plan.program.recompute import NOTHING, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMemory(MemoryModel):
    cut: Layout
    device: StreamDevice
    """Of every rank."""

    def bytes_per_token(self, recompute: Recompute = NOTHING) -> int:
        """Of a microbatch, while the largest stage goes back and others are on their way."""
        largest = max(stage.stop - stage.start for stage in self.cut.stages)
        passing = MemoryModel.bytes_per_token(self, recompute) * largest // self.shape.layers
        return passing + ON_THE_WAY * self.shape.hidden * self.shape.bytes_per_value

    def need(self, jobs: Iterable[JobShape], tokens: float, recompute: Recompute = NOTHING) -> Need:
        """Counted as when the cut was chosen."""
        jobs = tuple(jobs)
        rows = sum(job.batch_tokens for job in jobs)
        device = replace(self.device, taken=self.taken, fused=self.fused)
        one = StreamCase(self.shape, jobs, device, rows, int(tokens), travels=False)
        return RanksCase(one, self.cut.workers).need(self.cut)

    def _choices(self) -> list[Recompute]:
        """Every stage is made again as it is."""
        return [NOTHING]
