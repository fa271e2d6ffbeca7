"""The jobs attached to an executor, and which of them are dead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from weftune.core.batch import Segment
from weftune.run.training.state import Training


class Roster:
    """The attached jobs; all parts of an executor share one roster."""

    def __init__(self) -> None:
        self.trainings: dict[str, Training] = {}
        self.dead: set[str] = set()
        """Jobs whose rows and actions are skipped from here on; the Program still holds for the others."""

    def sizes(self) -> dict[str, int]:
        """Return a map from each job to its number of adapter parameters here."""
        return {job: training.layout.size for job, training in self.trainings.items()}

    def met(self, jobs: Iterable[str]) -> dict[str, int]:
        """Return a map from each of these jobs to the number of its adapter parameters here that a row
        passes."""
        return {job: self.trainings[job].layout.met for job in jobs}

    def inside_a_step(self) -> bool:
        """Return whether a global batch is open."""
        return any(training.open is not None for training in self.trainings.values())

    def collect(
        self, segments: Sequence[Segment], losses: Sequence[Tensor], correct: Sequence[Tensor]
    ) -> None:
        """Add a microbatch's losses and correct predictions to each job's open global batch, except for dead
        jobs."""
        for segment, loss, count in zip(segments, losses, correct, strict=True):
            if segment.job not in self.dead:
                self.trainings[segment.job].collect(segment, loss, count)

    def forget_open_batches(self) -> None:
        """Drop the open global batches, as if none of their microbatches had run."""
        for training in self.trainings.values():
            training.forget_open_batch()
