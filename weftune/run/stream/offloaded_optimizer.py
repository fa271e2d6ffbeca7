"""Adapters whose master weights and moments live in host memory, while the weights that passes read and the
gradients that they add to stay on the device.

For a Step, master weights and moments are copied to the device in pieces, updated there by the kernel of
resident adapters, which also writes the new weights that passes read, and copied back: on separate streams,
concurrently with passes of jobs whose Steps are finished. A pass waits for the Steps of its own jobs only.

Only the device writes a job's state between a Step and its outcome.

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weftune.base.host.pinned import host_vectors
from weftune.ops.adamw import AdamState, Update, gradient_norms, update
from weftune.ops.triton.at_hand import kernels_run
from weftune.plan.cost.ring import PIECE
from weftune.run.measure.timers import Stopwatch
from weftune.run.parts import AdapterState
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.stream.adapter_steps import Make, aligned, pieces
from weftune.run.stream.adapters import StagePart
from weftune.run.stream.buffers import PieceRing, copy
from weftune.run.training.roster import Roster
from weftune.run.training.state import Training
from weftune.run.training.steps import (
    Due,
    NoStep,
    Outcome,
    StepsBegun,
    StepsUnderway,
    Sums,
    factors,
    open_sums,
    open_tokens,
)


class OffloadedOptimizer:
    def __init__(
        self, resident: AdapterState, adapted: AdaptedBase, roster: Roster, make: Make = update
    ) -> None:
        """`resident` manages the state that stays on the device; `make` applies the updates."""
        self._resident = resident
        self._adapted, self._roster, self._make_update = adapted, roster, make
        self.device = adapted.base.device
        self.home = torch.device("cpu")
        self.ring = PieceRing(self.device)
        self._underway: _OffloadedSteps | None = None

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training) -> None:
        with self._adapted.on_stream():
            training.state = _divided(training.state, self.device)
            self._fit(training)
        self._resident.attach(training)

    def _fit(self, training: Training) -> None:
        """Allocate buffers for the pieces of a newly attached job, beside those of the others."""
        if self.ring.room == PIECE:
            return
        sizes = (one.layout.size for one in (*self._roster.trainings.values(), training))
        wanted = min(PIECE, sum(map(aligned, sizes)))
        if self.ring.buffers and wanted <= self.ring.room:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dtype = training.master.dtype

        def new() -> AdamState:
            here = [torch.empty(wanted, dtype=dtype, device=self.device) for _ in range(3)]
            none = here[0][:0]
            return AdamState(here[0], here[1], here[2], gradient=none, weights=none)

        self.ring.refill(new)

    def detach(self, job: str) -> Training:
        self._finish()
        return self._resident.detach(job)

    def kill(self, job: str) -> None:
        self._finish()
        self._resident.kill(job)

    def abandon(self) -> None:
        self._finish()
        self._resident.abandon()

    def show(self, job: str, weights: Tensor) -> None:
        self._finish()
        self._resident.show(job, weights)

    # -- passes ------------------------------------------------------------------------------------------

    def use(self, stage: int, jobs: Collection[str], returning: bool) -> bool:
        """Make unfinished Steps of these jobs first."""
        steps = self._underway
        if steps is None or (steps.left.keys().isdisjoint(jobs) and steps.there.keys().isdisjoint(jobs)):
            return False
        with steps.waiting(self.device):
            self._ask(steps, jobs)
            for there in dict.fromkeys(steps.there.pop(job) for job in jobs if job in steps.there):
                torch.cuda.current_stream().wait_event(there)
        return True

    def ask_ahead(self, stage: int, jobs: Collection[str]) -> None:
        """Start the Steps of all other jobs concurrently with the pass that was just launched."""
        if self._underway is not None:
            self._ask(self._underway, list(self._underway.left))

    def note_backward(self, stage: int, jobs: Collection[str]) -> None:
        """Do nothing: gradients stay where they are."""

    def leave(self, stage: int) -> None:
        raise AssertionError(f"stage {stage} stays")

    # -- Steps -------------------------------------------------------------------------------------------

    @property
    def needs_previous_outcome(self) -> bool:
        return True

    def needs_outcome_before(self, stage: int) -> bool:
        return True

    def step(self, due: Sequence[Due]) -> StepsUnderway:
        """Register Steps. Those that a pass needs are made just before it, the others concurrently with
        it."""
        return self._begin(due, gradient_norms([one.training.state for one in due]))

    def sums(self, training: Training) -> Sums:
        return self._resident.sums(training)

    def make(self, due: Due, sums: Sums) -> Outcome:
        norm_J = torch.tensor([sums.norm], dtype=torch.float64)
        (outcome,) = self._begin([due], norm_J.to(self.device)).outcomes()
        if isinstance(outcome, NoStep):
            return outcome
        return replace(outcome, loss=sums.loss, token_accuracy=sums.correct / due.supervised)

    def _begin(self, due: Sequence[Due], norm_J: Tensor) -> _OffloadedSteps:
        """Close the open batches and register their Steps, with gradients of these norms."""
        assert self._underway is None, "the outcomes of earlier Steps are not known"
        trainings = [one.training for one in due]
        tokens = tuple(map(open_tokens, trainings))
        sums_J2 = open_sums(trainings)
        updates = tuple(training.update() for training in trainings)
        factor_J = factors(trainings, sums_J2, norm_J)
        by_kernels = kernels_run(self.device, trainings[0].master.dtype)
        if not by_kernels:
            known = zip(updates, factor_J.tolist(), strict=True)
            updates = tuple(replace(one, factor=factor) for one, factor in known)
        self._underway = _OffloadedSteps(
            adapters=self,
            due=tuple(due),
            updates=updates,
            tokens=tokens,
            sums_J3=torch.cat([sums_J2, norm_J[:, None]], dim=1),
            factor_J=factor_J.float() if by_kernels else None,
        )
        for training in trainings:
            training.open = None
        if self.ring.lanes is not None:
            # Updates must wait for the passes that computed the gradients; incoming copies need not.
            self.ring.lanes.make.wait_stream(torch.cuda.current_stream())
        return self._underway

    def _finish(self) -> None:
        """Make all remaining Steps; afterwards everything is on the host."""
        if (steps := self._underway) is None:
            return
        with self._adapted.on_stream():
            self._ask(steps, list(steps.left))
        if steps.home is not None:
            steps.home.synchronize()

    def outcomes(self, steps: _OffloadedSteps) -> list[Outcome]:
        if self._underway is steps:
            with steps.waiting(self.device):
                self._finish()
            self._underway = None
        with self.ring.making():
            # Not on the stream of the passes: others may already be queued there.
            none = torch.ones(1, dtype=torch.bool, device=steps.sums_J3.device)
            finite_J = torch.stack([torch.cat([none, *found]).all() for found in steps.finite])
            begun = StepsBegun.of(steps.due, steps.updates, steps.tokens, steps.sums_J3, finite_J)
        return begun.outcomes()

    # -- pieces ------------------------------------------------------------------------------------------

    def _ask(self, steps: _OffloadedSteps, jobs: Iterable[str]) -> None:
        """Start the remaining updates of these jobs, concurrently with other work of the device."""
        for seated in self._seated(steps, jobs):
            if made := [one for one in seated if not steps.refused(one.number)]:
                self._make(steps, made)
            for one in seated:
                steps.left[one.job].pop(0)
                if not steps.left[one.job]:
                    del steps.left[one.job]

    def _seated(self, steps: _OffloadedSteps, jobs: Iterable[str]) -> Iterator[list[_SeatedPart]]:
        """Yield the remaining pieces of these jobs, buffer by buffer."""
        seated: list[_SeatedPart] = []
        for job in jobs:
            # Not the list itself: a piece is removed from it when it is updated.
            for part in tuple(steps.left.get(job, ())):
                at = aligned(seated[-1].stop) if seated else 0
                if at + part.size > self.ring.room:
                    yield seated
                    seated, at = [], 0
                seated.append(_SeatedPart(job, steps.numbers[job], part, at))
        if seated:
            yield seated

    def _make(self, steps: _OffloadedSteps, seated: Sequence[_SeatedPart]) -> None:
        buffer = self.ring.next()
        home = [steps.updates[one.number].state.within(*one.part) for one in seated]
        here = [
            replace(buffer.state.within(one.at, one.stop), gradient=state.gradient, weights=state.weights)
            for one, state in zip(seated, home, strict=True)
        ]
        with self.ring.coming(buffer):
            _copy(here, home)
        with self.ring.making():
            self._update(steps, seated, here)
        with self.ring.leaving(buffer):
            _copy(home, here)
        steps.home = buffer.free

    def _update(
        self, steps: _OffloadedSteps, seated: Sequence[_SeatedPart], here: Sequence[AdamState]
    ) -> None:
        """Update the pieces in the buffer, and the weights that passes read."""
        updates = [
            steps.updates[one.number].on(state, one.part.start)
            for one, state in zip(seated, here, strict=True)
        ]
        factor_J = None
        if steps.factor_J is not None:
            factor_J = torch.stack([steps.factor_J[one.number] for one in seated])
        finite_J = self._make_update(updates, factor_J)
        for one, finite in zip(seated, finite_J.split(1), strict=True):
            steps.finite[one.number].append(finite)
        if self.ring.lanes is not None:
            made = self.ring.lanes.make.record_event()
            steps.there |= dict.fromkeys((one.job for one in seated), made)


@dataclass(frozen=True, slots=True)
class _SeatedPart:
    """A piece of a job's Step and its place in a buffer."""

    job: str
    number: int
    """Index of the job among those that step together."""
    part: StagePart
    at: int

    @property
    def stop(self) -> int:
        return self.at + self.part.size


@dataclass(slots=True, eq=False)
class _OffloadedSteps:
    """Steps that were requested together."""

    adapters: OffloadedOptimizer
    due: tuple[Due, ...]
    updates: tuple[Update, ...]
    """Updates with the state of the whole job."""
    tokens: tuple[int, ...]
    sums_J3: Tensor
    """Loss, correct predictions and norm."""
    factor_J: Tensor | None
    """Factors on the device if kernels make the updates. None if each update has its own."""
    numbers: dict[str, int] = field(init=False)
    left: dict[str, list[StagePart]] = field(init=False)
    """Maps each job to its parameters that are not updated yet."""
    finite: tuple[list[Tensor], ...] = field(init=False)
    """Whether the weights of each job's pieces are finite."""
    there: dict[str, torch.cuda.Event] = field(default_factory=dict)
    """Maps each job to the event of its last requested update; removed once a pass has waited for it."""
    home: torch.cuda.Event | None = None
    """Event that is done when all requested updates are back on the host."""
    waits: list[Stopwatch] = field(default_factory=list)
    """Times that compute waited for these Steps."""

    def __post_init__(self) -> None:
        layouts = {one.training.job: one.training.layout for one in self.due}
        self.numbers = {job: number for number, job in enumerate(layouts)}
        parts = {job: StagePart(0, layout.size) for job, layout in layouts.items()}
        self.left = {
            job: [piece.inside for piece in pieces(part, part.size)]
            for job, part in parts.items()
            if part.size
        }
        self.finite = tuple([] for _ in self.due)

    @property
    def made(self) -> bool:
        return False

    def refused(self, number: int) -> bool:
        """Return whether the host already knows that a Step is refused; otherwise the device decides."""
        return self.factor_J is None and self.updates[number].factor < 0.0

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time in the context as waiting: compute has nothing else to do meanwhile."""
        watch = Stopwatch(device)
        yield
        watch.mark()
        self.waits.append(watch)

    def outcomes(self) -> list[Outcome]:
        return self.adapters.outcomes(self)

    def seconds(self) -> float:
        return sum(lap for watch in self.waits for lap in watch.laps())


def _divided(state: AdamState, device: torch.device) -> AdamState:
    """Return a copy with master weights and moments in page-locked host memory, the rest on the device."""
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


def _copy(targets: Sequence[AdamState], sources: Sequence[AdamState]) -> None:
    """Copy master weights and moments."""
    copy([one for state in targets for one in _moved(state)], [one for s in sources for one in _moved(s)])


def _moved(state: AdamState) -> tuple[Tensor, ...]:
    return state.master, state.exp_avg, state.exp_avg_sq
