"""Adapters that stay on the device, with their master weights and moments, and are stepped there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from weftune.ops.triton.at_hand import kernels_run
from weftune.run.measure.timers import Stopwatch
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.training.roster import Roster
from weftune.run.training.state import Training
from weftune.run.training.steps import (
    Due,
    NoStep,
    Outcome,
    StepsBegun,
    StepsUnderway,
    Sums,
    batch_sums,
    begin_steps,
    close_batch,
    make_updates,
    take_steps,
)


class ResidentAdapters:
    def __init__(self, adapted: AdaptedBase, roster: Roster) -> None:
        self._adapted, self._roster = adapted, roster
        self.home = adapted.base.device
        """Device that keeps the training state of attached jobs."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            state = training.state
            self._adapted.banks.attach(training.adapter, training.layout, state.weights, state.gradient)
        self._roster.trainings[training.job] = training

    def detach(self, job: str) -> Training:
        with self._adapted.on_stream():
            self._adapted.banks.detach(job)
        self._roster.dead.discard(job)
        return self._roster.trainings.pop(job)

    def kill(self, job: str) -> None:
        """Skip the job's rows and actions from here on."""
        self._roster.dead.add(job)
        with self._adapted.on_stream():
            self._adapted.banks.zero(job)
            self._roster.trainings[job].forget_open_batch()

    def abandon(self) -> None:
        """Drop the open global batches."""
        self._roster.forget_open_batches()

    def show(self, job: str, weights: Tensor) -> None:
        """Make passes read these weights, until others are shown. Called between windows."""
        with self._adapted.on_stream():
            self._roster.trainings[job].state.weights.copy_(weights)

    # -- passes ------------------------------------------------------------------------------------------

    def use(self, stage: int, jobs: Collection[str], returning: bool) -> bool:
        """Make the weights of these jobs in that stage readable by the device, and return whether the device
        may have to wait for them. `returning` means for a backward."""
        return False

    def ask_ahead(self, stage: int, jobs: Collection[str]) -> None:
        """Prepare the data of the next passes, after a pass over the stage was launched."""

    def note_backward(self, stage: int, jobs: Collection[str]) -> None:
        """Note that gradients of these jobs were added to in that stage."""

    def leave(self, stage: int) -> None:
        """Prepare for the eviction of the stage."""

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        """Whether the outcome of Steps must be known before others are requested."""
        return True

    def needs_outcome_before(self, stage: int) -> bool:
        """Return whether the outcome must be known before an evaluation passes the stage."""
        return True

    def step(self, due: Sequence[Due]) -> StepsUnderway:
        """Request Steps; each is decided by the sums of its own batch. If kernels make the updates, the
        device works on them while the host continues with the next pass."""
        watch = Stopwatch(self.home)
        master = due[0].training.master
        by_kernels = kernels_run(master.device, master.dtype)
        begun = begin_steps(due) if by_kernels else _Taken(tuple(due), take_steps(due))
        watch.mark()
        return _Steps(begun, watch, made=not by_kernels)

    def sums(self, training: Training) -> Sums:
        """Return the sums of a job's open batch here; waits for the device."""
        return batch_sums([training])[0]

    def make(self, due: Due, sums: Sums) -> Outcome:
        """Make a Step from the batch's sums, on which all workers have agreed."""
        update = due.training.update(sums.norm)
        (reason,) = make_updates([update])
        return NoStep(reason) if reason else close_batch(due, sums, update.learning_rate)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Steps that were made on the host."""

    due: tuple[Due, ...]
    found: list[Outcome]

    def outcomes(self) -> list[Outcome]:
        return self.found


@dataclass(frozen=True, slots=True)
class _Steps:
    begun: StepsBegun | _Taken
    watch: Stopwatch
    made: bool

    @property
    def due(self) -> Sequence[Due]:
        return self.begun.due

    def outcomes(self) -> list[Outcome]:
        return self.begun.outcomes()

    def seconds(self) -> float:
        return sum(self.watch.laps())
