"""Adapters whose master weights and moments live in host memory. The weights that passes read, and the
gradients to which passes add, stay on the device.

For an optimizer step (Step), master weights and moments are copied to the device in pieces. There the kernel
that also updates resident adapters updates them and writes the new weights that passes read. Then the pieces
are copied back (`adapter_steps.py`).

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from weftune.base.host.pinned import host_vectors
from weftune.ops.adamw import AdamState, gradient_norms, update
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.resident_adapters import ResidentAdapters
from weftune.run.stream.adapter_steps import ApplyUpdates, HostSteps, JobStage, StagePart
from weftune.run.training.state import Training
from weftune.run.training.steps import BatchSums, Outcome, StepRequest, StepsUnderway, outcome_over_workers

STAGE = 0
"""Index of the only stage, since the whole base stays on one device."""


class OffloadedOptimizer:
    def __init__(self, adapted: AdaptedBase, apply_updates: ApplyUpdates = update) -> None:
        """Create the store for the adapters of `adapted`. `apply_updates` is the function that applies
        optimizer updates on the device."""
        self._adapted, self._resident = adapted, ResidentAdapters(adapted)
        self.roster = self._resident.roster
        self.device, self.home = adapted.base.device, torch.device("cpu")
        self.steps = HostSteps(self.device, apply_updates)
        self._steps_underway: StepsUnderway | None = None

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            training.state = _offload_state(training.state, self.device)
            self.steps.attach(training, {STAGE: StagePart(0, training.layout.size)})
        self._resident.attach(training)

    def detach(self, job: str) -> Training:
        self._finish_all_steps()
        training = self._resident.detach(job)
        self.steps.detach(training)
        return training

    def kill(self, job: str) -> None:
        self._finish_all_steps()
        self._resident.kill(job)

    def abandon(self) -> None:
        self._finish_all_steps()
        self._resident.abandon()

    def use_weights(self, job: str, weights: Tensor) -> None:
        self._finish_all_steps()
        self._resident.use_weights(job, weights)

    # -- passes ------------------------------------------------------------------------------------------

    def make_readable(self, stage: int, jobs: Collection[str], before_backward: bool) -> bool:
        """Finish the optimizer steps of `jobs` before a pass of these jobs. Return whether the device may
        have to wait for the steps."""
        if self._steps_underway is None:
            return False
        pairs: list[JobStage] = [(job, STAGE) for job in jobs]
        pending = self.steps.pending_pairs(pairs)
        if not (pending or self.steps.started_pairs(pairs)):
            return False
        with self._steps_underway.count_time():
            self.steps.start(pending)
            self.steps.wait_for_updates(self.steps.started_pairs(pairs))
        return True

    def prepare_next_passes(self, stage: int, jobs: Collection[str]) -> None:
        """Start all requested optimizer steps that have not been started, concurrently with the pass launched
        last."""
        if self._steps_underway is not None:
            self.steps.start(self.steps.all_pending_pairs())

    def record_backward(self, stage: int, jobs: Collection[str]) -> None:
        """Do nothing, because gradients stay on the device and need not be copied."""

    def prepare_eviction(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays")

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        return True

    def needs_step_outcome(self, stage: int) -> bool:
        return True

    def sums(self, training: Training) -> BatchSums:
        return self._resident.sums(training)

    def step(self, requests: Sequence[StepRequest]) -> StepsUnderway:
        """Register optimizer steps. Steps of jobs in the next pass are made just before that pass, and all
        others during it."""
        return self._begin_steps(requests, gradient_norms([request.training.state for request in requests]))

    def make_step(self, request: StepRequest, sums: BatchSums) -> Outcome:
        underway = self._begin_steps([request], torch.tensor([sums.norm], dtype=torch.float64))
        return outcome_over_workers(underway.outcomes()[0], request, sums)

    def _begin_steps(self, requests: Sequence[StepRequest], norm_J: Tensor) -> StepsUnderway:
        assert self._steps_underway is None, "the outcomes of earlier Steps are not known"
        self._steps_underway = StepsUnderway(self.device, self._finish_steps)
        self._steps_underway.runs.append(self.steps.begin(requests, norm_J))
        return self._steps_underway

    def _finish_steps(self) -> None:
        """Finish the requested optimizer steps, and start to copy their outcomes to the host."""
        if (underway := self._steps_underway) is not None:
            with underway.count_time():
                self._finish_all_steps()
            self.steps.read_outcomes(underway.runs[0])
            self._steps_underway = None

    def _finish_all_steps(self) -> None:
        """Finish all registered optimizer steps, and wait until all optimizer state is on the host."""
        with self._adapted.on_stream():
            self.steps.start(self.steps.all_pending_pairs())
        self.steps.wait()


def _offload_state(state: AdamState, device: torch.device) -> AdamState:
    """Return a copy of the state, with master weights and moments in page-locked host memory, and the rest on
    the device."""
    optimizer = (state.master, state.exp_avg, state.exp_avg_sq)
    home = host_vectors([(len(vector), vector.dtype) for vector in optimizer], device)
    master, exp_avg, exp_avg_sq = (to.copy_(vector) for to, vector in zip(home, optimizer, strict=True))
    return AdamState(
        master,
        exp_avg,
        exp_avg_sq,
        # No job is attached in the middle of a batch.
        gradient=torch.zeros_like(state.gradient, device=device),
        weights=state.weights.to(device, copy=True),
    )
