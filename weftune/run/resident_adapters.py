"""Adapters that stay on the device together with their master weights and moments, and whose optimizer steps
are made there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from weftune.run.passes.adapted import AdaptedBase
from weftune.run.shards import Shards
from weftune.run.training.state import Roster, Training
from weftune.run.training.steps import (
    BatchSums,
    Outcome,
    StepRequest,
    StepsUnderway,
    batch_sums,
    begin_steps,
    make_step_from_sums,
)


class ResidentAdapters:
    def __init__(self, adapted: AdaptedBase, shards: Shards | None = None) -> None:
        """Create the store for the adapters of `adapted`. `shards` sums gradients over the workers among
        which every layer is divided; None if layers are not divided."""
        self._adapted, self._shards, self.roster = adapted, shards, Roster()
        self.home = adapted.base.device
        """Device on which the training state of attached jobs (master weights and moments) is kept."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            layout, weights, gradient = training.layout, training.state.weights, training.gradient
            if self._shards is not None:
                part = self._shards.attach(training)
                layout, weights, gradient = part.layout, part.weights, part.gradient
            self._adapted.banks.attach(training.adapter, layout, weights, gradient)
        self.roster.trainings[training.job] = training

    def detach(self, job: str) -> Training:
        with self._adapted.on_stream():
            self._adapted.banks.detach(job)
        if self._shards is not None:
            self._shards.detach(job)
        self.roster.failed_jobs.discard(job)
        return self.roster.trainings.pop(job)

    def kill(self, job: str) -> None:
        """Mark a job as failed: its rows and its actions in the Program are skipped from now on."""
        self.roster.failed_jobs.add(job)
        with self._adapted.on_stream():
            self._adapted.banks.attached[job].weights.zero_()
            self.roster.trainings[job].drop_open_batch()
            if self._shards is not None:
                self._shards.drop_gradient(job)

    def abandon(self) -> None:
        """Drop the sums and gradients of unfinished global batches of all jobs."""
        self.roster.drop_open_batches()
        if self._shards is not None:
            for job in self.roster.trainings:
                self._shards.drop_gradient(job)

    def use_weights(self, job: str, weights: Tensor) -> None:
        """Make passes read `weights` as the job's weights until the next call. Called between two
        Programs."""
        with self._adapted.on_stream():
            if self._shards is not None:
                self._shards.update_weights(job, weights)
            else:
                self.roster.trainings[job].state.weights.copy_(weights)

    # -- passes ------------------------------------------------------------------------------------------

    def make_readable(self, stage: int, jobs: Collection[str], before_backward: bool) -> bool:
        """Make the weights of `jobs` in a stage readable by the device before a pass. Return whether the
        device may have to wait for these weights. `before_backward` is True if the pass is a backward."""
        return False

    def prepare_next_passes(self, stage: int, jobs: Collection[str]) -> None:
        """Start work that the next passes need, such as optimizer steps, while the device runs a pass of
        `jobs` over the stage. Resident adapters need none."""

    def record_backward(self, stage: int, jobs: Collection[str]) -> None:
        """Record that a backward over the stage has added to the gradients of these jobs. Resident adapters
        need no record."""

    def prepare_eviction(self, stage: int) -> None:
        """Prepare the adapters for the eviction of a stage's weights from the device. Resident adapters need
        no preparation."""

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        """Whether the outcomes (success or failure) of optimizer steps must be known before further steps are
        requested."""
        return True

    def needs_step_outcome(self, stage: int) -> bool:
        """Return whether the outcomes (success or failure) of optimizer steps must be known before an
        evaluation runs over the stage."""
        return True

    def step(self, requests: Sequence[StepRequest]) -> StepsUnderway:
        """Request optimizer steps. A job's step is made only if loss and gradient of its global batch are
        finite. If kernels make the updates, the host does not wait for the steps."""
        underway = StepsUnderway(self.home)
        with underway.count_time():
            run = begin_steps(requests)
        underway.runs.append(run)
        underway.is_done = run.factor_J is None
        return underway

    def sums(self, training: Training) -> BatchSums:
        """Return this worker's sums (loss, gradient norm, correct predictions, metrics) over a job's global
        batch whose step is still to be made. Waits for the device."""
        return batch_sums(training)

    def make_step(self, request: StepRequest, sums: BatchSums) -> Outcome:
        """Make a job's optimizer step from the sums of its global batch over all workers, and return the
        step's outcome."""
        outcome = make_step_from_sums(request, sums)
        if self._shards is not None:
            self._shards.update_weights(request.training.job, request.training.state.weights)
        return outcome
