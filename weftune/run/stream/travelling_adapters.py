"""Adapters that live in host memory. Weights are loaded with their stage, and gradients are evicted with it.

Optimizer steps (Steps) are made piece by piece: the parameters of a stage are updated before the first pass
over that stage in the next round (one global batch of every job).

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from weftune.ops.adamw import update
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.resident_adapters import ResidentAdapters
from weftune.run.stream.adapter_steps import ApplyUpdates, HostSteps
from weftune.run.stream.adapters import AdapterTransfers
from weftune.run.stream.weights import StreamedWeights
from weftune.run.training.state import Training
from weftune.run.training.steps import (
    BatchSums,
    Outcome,
    StepRequest,
    StepsUnderway,
    open_batch_sums,
    outcome_over_workers,
)


class TravellingAdapters:
    def __init__(
        self, adapted: AdaptedBase, weights: StreamedWeights, apply_updates: ApplyUpdates = update
    ) -> None:
        """Create the store for the adapters of `adapted`. `apply_updates` is the function that applies
        optimizer updates on the device."""
        self._adapted, self._resident = adapted, ResidentAdapters(adapted)
        self.roster = self._resident.roster
        base, self._weights, self._part = adapted.base, weights, weights.base.part
        self.transfers = AdapterTransfers(self._part, base.device, base.dtype)
        self.steps = HostSteps(base.device, apply_updates, self.transfers.device_weights)
        self.home = torch.device("cpu")
        self._unsent_stage: int | None = None
        """Stage of the last pass, if that pass was a backward whose gradients have not been sent to the host.
        None otherwise."""
        self._sent_event: torch.cuda.Event | None = None
        """CUDA event after which the last gradients of resident stages have been copied to the host. None
        once the compute stream has waited for the event."""
        self._steps_underway: StepsUnderway | None = None
        weights.set_callbacks(self._load_adapters, self.transfers.evict)

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            adapter = self.transfers.attach(training)
            self.steps.attach(training, adapter.parts)
            state = training.state
            self._adapted.banks.attach(
                training.adapter, training.layout, state.weights, state.gradient, *adapter.parameters()
            )
        self.roster.trainings[training.job] = training

    def detach(self, job: str) -> Training:
        self._finish_all_steps()
        training = self._resident.detach(job)
        self.transfers.detach(job)
        self.steps.detach(training)
        return training

    def kill(self, job: str) -> None:
        self._finish_all_steps()
        self._resident.kill(job)
        with self._adapted.on_stream():
            self.transfers.drop_gradients([job])
            self.transfers.copy_weights_in([job])

    def abandon(self) -> None:
        self._resident.abandon()
        self._unsent_stage = None
        self._wait_for_gradients()
        self.transfers.drop_gradients(self.roster.trainings)

    def use_weights(self, job: str, weights: Tensor) -> None:
        self._finish_all_steps()
        # Stages may still be loading, with the old weights.
        self.transfers.wait()
        self.roster.trainings[job].state.weights.copy_(weights)
        with self._adapted.on_stream():
            self.transfers.copy_weights_in([job])

    # -- passes ------------------------------------------------------------------------------------------

    def make_readable(self, stage: int, jobs: Collection[str], before_backward: bool) -> bool:
        """Finish the optimizer steps of `jobs` in the stage before a pass. Return whether the device may have
        to wait for the steps. `before_backward` is True if the pass is a backward."""
        if self._steps_underway is not None and not self._steps_underway.is_used:
            stepping = {request.training.job for request in self._steps_underway.requests}
            self._steps_underway.is_used = not stepping.isdisjoint(jobs)
        pairs = self.transfers.pairs(stage, jobs)
        pending = self.steps.pending_pairs(pairs)
        if waits := bool(pending or self.steps.started_pairs(pairs)):
            with self._count_waiting():
                self.steps.start(pending, self._weights.writable_events(stage))
                self.steps.wait_for_updates(self.steps.started_pairs(pairs))
        if before_backward and self._unsent_stage is not None and self._unsent_stage != stage:
            self._send_gradients(self._unsent_stage)
        self._unsent_stage = stage if before_backward else None
        return waits

    def _send_gradients(self, stage: int) -> None:
        """Copy the gradients of a stage to the host, concurrently with the passes of other stages. The
        stage's backward must be finished. A resident stage is never evicted, so without this copy the next
        optimizer step would have to wait for all of its gradients."""
        self.transfers.sum_squares(stage)
        if (lanes := self.steps.ring.lanes) is None:
            self.transfers.copy_gradients_out(stage)
            return
        lanes.copy_out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lanes.copy_out):
            self.transfers.copy_gradients_out(stage)
            self._sent_event = lanes.copy_out.record_event()

    def _wait_for_gradients(self) -> None:
        """Make the current CUDA stream wait for the last copy of gradients to the host, so that the gradients
        may be overwritten."""
        if self._sent_event is not None:
            torch.cuda.current_stream().wait_event(self._sent_event)
            self._sent_event = None

    def prepare_next_passes(self, stage: int, jobs: Collection[str]) -> None:
        """Start unfinished optimizer steps for a stage and for this worker's next stage while the device runs
        a pass over the stage. The steps of all jobs are started, those of `jobs` first. The next stage is
        skipped if it is not on the device yet."""
        everybody = dict.fromkeys((*jobs, *self.roster.trainings))
        at = self._part.own_stages.index(stage)
        for one in self._part.own_stages[at : at + 2]:
            pending = self.steps.pending_pairs(self.transfers.pairs(one, everybody))
            if pending and self.transfers.is_loaded(one):
                # If the host is not ahead, the device is idle meanwhile.
                with self._count_waiting():
                    self.steps.start(pending, self._weights.writable_events(one))

    def record_backward(self, stage: int, jobs: Collection[str]) -> None:
        self.transfers.record_backward(stage, jobs)

    def prepare_eviction(self, stage: int) -> None:
        self.transfers.sum_squares(stage)
        self._unsent_stage = None

    def _load_adapters(self, stage: int) -> None:
        """Load the adapters of a stage together with the stage. Weights that an optimizer step is still to
        update are left out."""
        self.steps.wait_for_stage(stage)
        self.transfers.load_weights(stage, self.steps.is_unfinished)

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        """Whether the outcomes of earlier optimizer steps must be read before further steps are requested.
        True if a pass has included a job of these steps; the steps are finished by then, so reading their
        outcomes does not block."""
        return self._steps_underway is not None and self._steps_underway.is_used

    def needs_step_outcome(self, stage: int) -> bool:
        """Return whether the outcomes of optimizer steps must be known before an evaluation runs over the
        stage. True for the last stage, where no loss may be computed for a job whose step failed."""
        return stage + 1 == len(self._part.stages)

    def step(self, requests: Sequence[StepRequest]) -> StepsUnderway:
        """Register optimizer steps. The parameters of each stage are updated just before the first pass that
        reads them, concurrently with a pass over the previous stage. Outcomes that have not been read yet are
        read together."""
        if self._steps_underway is None:
            self._steps_underway = StepsUnderway(self._adapted.base.device, self._finish_steps)
        jobs = [request.training.job for request in requests]
        with self._count_waiting():
            self._copy_gradients_out(jobs)
        run = self.steps.begin(requests, self.transfers.gradient_norms(jobs), self._weights.mark_step)
        self._steps_underway.runs.append(run)
        return self._steps_underway

    def sums(self, training: Training) -> BatchSums:
        self._copy_gradients_out([training.job])
        norm = float(self.transfers.gradient_norms([training.job]))
        loss, correct, *metrics = open_batch_sums([training])[0].tolist()
        return BatchSums(loss=loss, norm=norm, correct=correct, metrics=metrics)

    def make_step(self, request: StepRequest, sums: BatchSums) -> Outcome:
        norm_J = torch.tensor([sums.norm], dtype=torch.float64)
        run = self.steps.begin([request], norm_J, self._weights.mark_step)
        self._finish_all_steps()
        self.steps.read_outcomes(run)
        return outcome_over_workers(run.outcomes()[0], request, sums)

    def _copy_gradients_out(self, jobs: Sequence[str]) -> None:
        self._wait_for_gradients()
        self.transfers.copy_all_gradients_out(jobs)

    def _finish_steps(self) -> None:
        """Finish the requested optimizer steps, and start to copy their outcomes to the host."""
        if self.steps.all_pending_pairs():
            with self._count_waiting():
                self._finish_all_steps()
        else:
            # Made during the round's forward: the host reads the outcomes while the device runs the backward,
            # and is a backward ahead of it when the next round begins.
            self.steps.wait()
        if self._steps_underway is not None:
            for run in self._steps_underway.runs:
                self.steps.read_outcomes(run)
        self._steps_underway = None

    def _finish_all_steps(self) -> None:
        """Finish all registered optimizer steps, and wait until their state is on the host."""
        with self._adapted.on_stream():
            for stage, pairs in groupby(self.steps.all_pending_pairs(), key=itemgetter(1)):
                self.steps.start(list(pairs), self._weights.writable_events(stage))
        self.steps.wait()

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        """Return a context whose time counts as waiting time of the device, which has nothing else to
        compute, and as time of the optimizer steps."""
        with (
            self._steps_underway.count_time() if self._steps_underway is not None else nullcontext(),
            self._weights.count_waiting(),
        ):
            yield
