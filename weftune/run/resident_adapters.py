"""Adapters that stay on the device, with their master weights and moments, and are stepped there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from weftune.run.passes.adapted import AdaptedBase
from weftune.run.training.state import Roster, Training
from weftune.run.training.steps import (
    Outcome,
    StepRequest,
    StepsUnderway,
    Sums,
    batch_sums,
    begin_steps,
    make_agreed_step,
)


class ResidentAdapters:
    def __init__(self, adapted: AdaptedBase) -> None:
        self._adapted, self.roster = adapted, Roster()
        self.home = adapted.base.device
        """Device that keeps the training state of attached jobs."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            state = training.state
            self._adapted.banks.attach(training.adapter, training.layout, state.weights, state.gradient)
        self.roster.trainings[training.job] = training

    def detach(self, job: str) -> Training:
        with self._adapted.on_stream():
            self._adapted.banks.detach(job)
        self.roster.dead.discard(job)
        return self.roster.trainings.pop(job)

    def kill(self, job: str) -> None:
        """Skip the job's rows and actions from here on."""
        self.roster.dead.add(job)
        with self._adapted.on_stream():
            self._adapted.banks.attached[job].weights.zero_()
            self.roster.trainings[job].forget_open_batch()

    def abandon(self) -> None:
        """Drop the open global batches."""
        self.roster.forget_open_batches()

    def show(self, job: str, weights: Tensor) -> None:
        """Make passes read these weights, until others are shown. Called between windows."""
        with self._adapted.on_stream():
            self.roster.trainings[job].state.weights.copy_(weights)

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

    def step(self, requests: Sequence[StepRequest]) -> StepsUnderway:
        """Request Steps; each is decided by the sums of its own batch. If kernels make the updates, the
        device works on them while the host continues with the next pass."""
        underway = StepsUnderway(self.home)
        with underway.timed():
            run = begin_steps(requests)
        underway.runs.append(run)
        underway.is_done = run.factor_J is None
        return underway

    def sums(self, training: Training) -> Sums:
        """Return the sums of a job's open batch here; waits for the device."""
        return batch_sums(training)

    def make(self, request: StepRequest, sums: Sums) -> Outcome:
        """Make a Step from the batch's sums, on which all workers have agreed."""
        return make_agreed_step(request, sums)
