"""Adapters that live in host memory. Weights are loaded with their stage, gradients are evicted with it, and
Steps are made piece by piece before the passes that need them.

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from weftune.ops.adamw import update
from weftune.run.measure.timers import Stopwatch
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.stream.adapter_steps import Make, TravellingSteps, TravellingStepsBegun
from weftune.run.stream.adapters import AdapterPlaces
from weftune.run.stream.weights import StreamedWeights
from weftune.run.training.roster import Roster
from weftune.run.training.state import Training
from weftune.run.training.steps import Due, NoStep, Outcome, StepsUnderway, Sums, open_sums


class TravellingAdapters:
    def __init__(
        self, adapted: AdaptedBase, roster: Roster, weights: StreamedWeights, make: Make = update
    ) -> None:
        """`make` applies the updates."""
        self._adapted, self._roster, self._weights = adapted, roster, weights
        base = adapted.base
        self._part = weights.base.part
        self.travel = AdapterPlaces(self._part, base.device, base.dtype)
        self.steps = TravellingSteps(self.travel, make)
        self.home = torch.device("cpu")
        self._returning: int | None = None
        """Stage of the latest backward of a round, while it is in its place."""
        self._underway: _Travelling | None = None
        weights.accompany(self._come, self._go)

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            traveller = self.travel.board(training)
            self.steps.fit(training.job)
            state = training.state
            self._adapted.banks.attach(
                training.adapter, training.layout, state.weights, state.gradient, *traveller.parameters()
            )
        self._roster.trainings[training.job] = training

    def detach(self, job: str) -> Training:
        self._make_all()
        with self._adapted.on_stream():
            self._adapted.banks.detach(job)
        self._roster.dead.discard(job)
        training = self._roster.trainings.pop(job)
        self.travel.leave(job)
        return training

    def kill(self, job: str) -> None:
        self._make_all()
        self._roster.dead.add(job)
        with self._adapted.on_stream():
            self._adapted.banks.zero(job)
            self._roster.trainings[job].forget_open_batch()
            self.travel.forget([job])
            self.travel.bring_weights([job])

    def abandon(self) -> None:
        self._roster.forget_open_batches()
        self._returning = None
        self.steps.wait_sent()
        self.travel.forget(self._roster.trainings)

    def show(self, job: str, weights: Tensor) -> None:
        self._make_all()
        # Stages may still be loading, with the old weights.
        self.travel.wait()
        self._roster.trainings[job].state.weights.copy_(weights)
        with self._adapted.on_stream():
            self.travel.bring_weights([job])

    # -- passes ------------------------------------------------------------------------------------------

    def use(self, stage: int, jobs: Collection[str], returning: bool) -> bool:
        """Make unfinished Steps of these jobs in the stage first."""
        if self._underway is not None:
            self._underway.begun.used |= not self._underway.begun.jobs.isdisjoint(jobs)
        left = self.steps.left(stage, jobs)
        if waits := bool(left or self.steps.asked(stage, jobs)):
            with self._waiting():
                self.steps.ask(left, self._weights.writable(stage))
                self.steps.use(self.steps.asked(stage, jobs))
        if returning:
            self._return(stage)
        else:
            self._returning = None
        return waits

    def _return(self, stage: int) -> None:
        """Note that the backward of a round has reached this stage. The stage after it is finished: if it is
        resident, so that no Evict sends its gradients, they are copied now; otherwise the Step would wait for
        all of them."""
        if self._returning is not None and self._returning != stage:
            self.steps.send(self._returning)
        self._returning = stage

    def ask_ahead(self, stage: int, jobs: Collection[str]) -> None:
        """Start unfinished Steps of this worker's stage and its next one while this one computes: those of
        all jobs, since no pass has read there since, with these jobs first. The next stage is skipped if it
        is not in its place yet."""
        everybody = dict.fromkeys((*jobs, *self._roster.trainings))
        at = self._part.own.index(stage)
        for one in self._part.own[at : at + 2]:
            left = self.steps.left(one, everybody)
            if left and self.travel.there(one):
                # If the host is not ahead, the device is idle meanwhile.
                with self._waiting():
                    self.steps.ask(left, self._weights.writable(one))

    def note_backward(self, stage: int, jobs: Collection[str]) -> None:
        self.travel.note_backward(stage, jobs)

    def leave(self, stage: int) -> None:
        self.travel.measure(stage)
        self._returning = None

    def _come(self, stage: int) -> None:
        """Load the adapters of a stage that is being loaded."""
        self.steps.wait_here(stage)
        self.travel.come(stage, self.steps.unfinished)

    def _go(self, stage: int) -> None:
        self.travel.go(stage)

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        """Whether outcomes must be known first: only if one of the jobs has been in a pass since, by which
        time they are known."""
        return self._underway is not None and self._underway.begun.used

    def needs_outcome_before(self, stage: int) -> bool:
        """Return whether outcomes must be known: only at the last stage, since a job whose Step failed has no
        loss."""
        return stage + 1 == len(self._part.stages)

    def step(self, due: Sequence[Due]) -> StepsUnderway:
        """Register Steps. Those that a pass of the next round needs are made just before it, concurrently
        with the previous stage. Outcomes that have not been read yet are read together."""
        if self._underway is None:
            self._underway = _Travelling(self, TravellingStepsBegun(self.steps))
        jobs = [one.training.job for one in due]
        with self._waiting():
            self._take_gradients(jobs)
        self.steps.begin(self._underway.begun, due, self.travel.gradient_norms(jobs), self._weights.gone)
        return self._underway

    def sums(self, training: Training) -> Sums:
        self._take_gradients([training.job])
        norm = float(self.travel.gradient_norms([training.job]))
        loss, correct = open_sums([training])[0].tolist()
        return Sums(loss=loss, norm=norm, correct=correct)

    def make(self, due: Due, sums: Sums) -> Outcome:
        begun = TravellingStepsBegun(self.steps)
        self.steps.begin(begun, [due], torch.tensor([sums.norm], dtype=torch.float64), self._weights.gone)
        self._make_all()
        (outcome,) = begun.outcomes()
        if isinstance(outcome, NoStep):
            return outcome
        return replace(outcome, loss=sums.loss, token_accuracy=sums.correct / due.supervised)

    def _take_gradients(self, jobs: Sequence[str]) -> None:
        self.steps.wait_sent()
        self.travel.take_gradients(jobs)

    def finish(self) -> None:
        """Finish the requested Steps."""
        if self.steps.all_left():
            with self._waiting():
                self._make_all()
        else:
            # Made during the round's forward: the host reads the outcomes while the device runs the backward,
            # and is a backward ahead of it when the next round begins.
            self.steps.wait()
        self._underway = None

    def _make_all(self) -> None:
        """Finish all Steps; afterwards everything is on the host."""
        with self._adapted.on_stream():
            for stage, pairs in groupby(self.steps.all_left(), key=itemgetter(1)):
                self.steps.ask(list(pairs), self._weights.writable(stage))
        self.steps.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time in the context as waiting: compute has nothing else to do meanwhile."""
        watch = Stopwatch(self._adapted.base.device)
        with self._weights.waiting():
            yield
        watch.mark()
        if self._underway is not None:
            self._underway.waits.append(watch)


@dataclass(slots=True)
class _Travelling:
    """Steps whose outcomes are read together."""

    adapters: TravellingAdapters
    begun: TravellingStepsBegun
    waits: list[Stopwatch] = field(default_factory=list)
    """Times that compute waited for these Steps."""

    @property
    def due(self) -> Sequence[Due]:
        return self.begun.due

    @property
    def made(self) -> bool:
        return False

    def outcomes(self) -> list[Outcome]:
        self.adapters.finish()
        return self.begun.outcomes()

    def seconds(self) -> float:
        return sum(lap for watch in self.waits for lap in watch.laps())
