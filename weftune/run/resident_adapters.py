"""Adapters that stay on the device with their master weights and moments, and are updated there."""

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
        """Create the store for the adapters of `adapted`. `shards` sums gradients over the workers that
        divide every layer. None if layers are not divided."""
        self._adapted, self._shards, self.roster = adapted, shards, Roster()
        self.home = adapted.base.device
        """Device that keeps the training state of attached jobs."""

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
        """Mark a job as failed: its rows and actions are skipped from now on."""
        self.roster.failed_jobs.add(job)
        with self._adapted.on_stream():
            self._adapted.banks.attached[job].weights.zero_()
            self.roster.trainings[job].drop_open_batch()
            if self._shards is not None:
                self._shards.drop_gradient(job)

    def abandon(self) -> None:
        """Drop the sums and gradients of unfinished global batches."""
        self.roster.drop_open_batches()
        if self._shards is not None:
            for job in self.roster.trainings:
                self._shards.drop_gradient(job)

    def use_weights(self, job: str, weights: Tensor) -> None:
        """Make passes read `weights` as the job's weights until the next call. Called between windows."""
        with self._adapted.on_stream():
            if self._shards is not None:
                self._shards.update_weights(job, weights)
            else:
                self.roster.trainings[job].state.weights.copy_(weights)

    # -- passes ------------------------------------------------------------------------------------------

    def make_readable(self, stage: int, jobs: Collection[str], before_backward: bool) -> bool:
        """Make the weights of `jobs` in a stage readable by the device before a pass. Return whether the
        device may have to wait for them. `before_backward` is True if the pass is a backward."""
        return False

    def prepare_next_passes(self, stage: int, jobs: Collection[str]) -> None:
        """Start work for the next passes, such as optimizer steps, while the device runs a pass of `jobs`
        over the stage."""

    def record_backward(self, stage: int, jobs: Collection[str]) -> None:
        """Record that a backward over the stage has added to the gradients of these jobs."""

    def prepare_eviction(self, stage: int) -> None:
        """Prepare for the eviction of a stage from the device."""

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        """Whether the outcomes of optimizer steps must be known before further steps are requested."""
        return True

    def needs_step_outcome(self, stage: int) -> bool:
        """Return whether outcomes of optimizer steps must be known before an evaluation of the stage."""
        return True

    def step(self, requests: Sequence[StepRequest]) -> StepsUnderway:
        """Request optimizer steps. A job's step is made only if loss and gradient of its batch are finite. If
        kernels make the updates, the host continues with the next pass meanwhile."""
        underway = StepsUnderway(self.home)
        with underway.count_time():
            run = begin_steps(requests)
        underway.runs.append(run)
        underway.is_done = run.factor_J is None
        return underway

    def sums(self, training: Training) -> BatchSums:
        """Return this worker's sums over a job's open global batch. Waits for the device."""
        return batch_sums(training)

    def make_step(self, request: StepRequest, sums: BatchSums) -> Outcome:
        """Make an optimizer step from the batch's sums over all workers, and return its outcome."""
        outcome = make_step_from_sums(request, sums)
        if self._shards is not None:
            self._shards.update_weights(request.training.job, request.training.state.weights)
        return outcome
