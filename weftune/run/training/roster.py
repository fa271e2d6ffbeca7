"""Who is aboard an executor, and who of them is dead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weftune.core.batch import Segment
from weftune.run.training.state import Training


class Roster:
    """All parts of an executor know the same one."""

    def __init__(self) -> None:
        self.trainings: dict[str, Training] = {}
        self.dead: set[str] = set()
        """Jobs whose rows and actions are skipped from here on; the Program stands for the others."""

    def sizes(self) -> dict[str, int]:
        """Job → adapter parameters here."""
        return {job: training.layout.size for job, training in self.trainings.items()}

    def inside_a_step(self) -> bool:
        """Whether a global batch is open."""
        return any(training.open is not None for training in self.trainings.values())

    def collect(self, segments: Sequence[Segment], losses: Sequence[Tensor], hits: Sequence[Tensor]) -> None:
        """Add what a microbatch came to to each job's open global batch; that of the dead is dropped."""
        for segment, loss, hit in zip(segments, losses, hits, strict=True):
            if segment.job not in self.dead:
                self.trainings[segment.job].collect(segment, loss, hit)

    def forget_open_batches(self) -> None:
        """As if none of their microbatches had run."""
        for training in self.trainings.values():
            training.forget_open_batch()
