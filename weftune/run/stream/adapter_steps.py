"""Steps of adapters that live in host memory. Gradient, master weights and moments are copied to the device
in pieces, updated there and copied back; those of a stage before its first pass in the next round.

Steps of a stage are requested ahead of its passes, which wait for them and for nothing that was requested
later. Pieces of several jobs are updated together: launched one by one, they would take more of the host's
time than of the device's.

Only the device writes a job's state between `begin` and the end of its last piece.

Shapes: J jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weftune.ops.adamw import AdamState, Update, update
from weftune.ops.triton.at_hand import kernels_run
from weftune.plan.cost.ring import PIECE
from weftune.run.stream.adapters import OUTSIDE, AdapterPlaces, Pair, StagePart
from weftune.run.stream.buffers import Buffer, PieceRing, bring, copy, give_back
from weftune.run.stream.weights import JointEvent
from weftune.run.training.steps import Due, Outcome, StepsBegun, factors, open_sums, open_tokens

ALIGNMENT = 64
"""Alignment of pieces, in parameters. Torch's fused AdamW rounds the remainder at a vector's end differently:
split at multiples of the processor's vector width, pieces get the same bits as the whole."""

Make = Callable[[Sequence[Update], Tensor | None], Tensor]
"""A function that applies updates with factors that are on the device, and returns whether each job's weights
are finite, bool [J]."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters of a part that are updated together."""

    inside: StagePart
    whole: StagePart
    """Range of `inside`, extended to multiples of ALIGNMENT: the extension is computed but not kept."""

    @property
    def kept(self) -> StagePart:
        """Kept range, relative to the start of the whole."""
        first = self.whole.start
        return StagePart(self.inside.start - first, self.inside.stop - first)


@dataclass(frozen=True, slots=True, eq=False)
class _StepRun:
    """Steps that were begun together."""

    due: tuple[Due, ...]
    updates: tuple[Update, ...]
    tokens: tuple[int, ...]
    sums_J3: Tensor
    """Loss, correct predictions and norm."""
    factor_J: Tensor | None
    """Factors on the device if kernels make the updates. None if each update has its own."""
    gone: JointEvent
    """Event that is done when all gradients are on the host."""
    finite: tuple[list[Tensor], ...]
    """Whether the weights of each job's pieces are finite."""


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """The unfinished part of a job's Step in one stage."""

    run: _StepRun
    number: int
    """Index of the job in the run."""
    part: StagePart
    pieces: list[Piece]

    @property
    def factor(self) -> Tensor | None:
        """Factor on the device, or None."""
        return None if self.run.factor_J is None else self.run.factor_J[self.number]

    @property
    def refused(self) -> bool:
        """Whether the host already knows that the Step is refused; otherwise the device decides."""
        return self.run.factor_J is None and self.run.updates[self.number].factor < 0.0


@dataclass(frozen=True, slots=True)
class _Seated:
    """A piece and its place in a buffer."""

    pair: Pair
    left: _Left
    piece: Piece
    at: int

    @property
    def update(self) -> Update:
        """Update of this piece, with the state that is on the host."""
        return self.left.run.updates[self.left.number]

    @property
    def stop(self) -> int:
        return self.at + self.piece.whole.size


@dataclass(slots=True)
class TravellingStepsBegun:
    """Steps whose outcomes are read together."""

    steps: TravellingSteps
    runs: list[_StepRun] = field(default_factory=list)
    used: bool = False
    """Whether one of the jobs has been in a pass since."""

    @property
    def due(self) -> list[Due]:
        return [one for run in self.runs for one in run.due]

    @property
    def jobs(self) -> set[str]:
        return {one.training.job for one in self.due}

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes; all Steps must have been made."""
        return [outcome for run in self.runs for outcome in self.steps.outcomes(run)]


class TravellingSteps:
    def __init__(self, travel: AdapterPlaces, make: Make = update) -> None:
        self.travel, self._make_update = travel, make
        self._left: dict[Pair, _Left] = {}
        self.ring = PieceRing(travel.device)
        self._there: dict[Pair, torch.cuda.Event] = {}
        """Maps a job and stage to the event of its last requested update; removed once a pass has waited for
        it."""
        self._sent: torch.cuda.Event | None = None
        """Event that is done when the last gradients have been copied to the host. None once the compute
        stream has waited for it."""
        self._home: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when its last piece is back on the host."""

    def fit(self, job: str) -> None:
        """Allocate buffers for the pieces of a newly attached job, beside those of the others."""
        wanted = min(PIECE, max(self._stage_sizes(), default=0))
        if self.ring.buffers and wanted <= self.ring.room:
            return
        self.travel.wait()
        vectors, device = self.travel.travellers[job].training.state.vectors, self.travel.device
        self.ring.refill(
            lambda: AdamState(*(torch.zeros(wanted, dtype=one.dtype, device=device) for one in vectors))
        )

    def _stage_sizes(self) -> Iterable[int]:
        """Return the total size of all jobs' pieces of each stage."""
        sizes: Counter[int] = Counter()
        for traveller in self.travel.travellers.values():
            for stage, part in traveller.by_stage.items():
                for piece in pieces(part, traveller.training.layout.size):
                    sizes[stage] += aligned(piece.whole.size)
        return sizes.values()

    # -- asked for ---------------------------------------------------------------------------------------

    def send(self, stage: int) -> None:
        """Copy gradients of a resident stage to the host, concurrently with the passes of other stages."""
        self.travel.measure(stage)
        if (lanes := self.ring.lanes) is None:
            self.travel.send(stage)
            return
        lanes.down.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lanes.down):
            self.travel.send(stage)
            self._sent = lanes.down.record_event()

    def wait_sent(self) -> None:
        """Make the current stream wait until the gradients' tensors may be overwritten."""
        if self._sent is not None:
            torch.cuda.current_stream().wait_event(self._sent)
            self._sent = None

    def begin(
        self, begun: TravellingStepsBegun, due: Sequence[Due], norm_J: Tensor, gone: Callable[[], JointEvent]
    ) -> None:
        """Close the open batches and register their Steps, with gradients of these norms. The gradients have
        been sent to the host; `gone` is done when they, and everything else requested until then, have
        arrived."""
        trainings = [one.training for one in due]
        tokens = tuple(open_tokens(training) for training in trainings)
        sums_J2 = open_sums(trainings)
        norm_J = norm_J.to(sums_J2.device)
        updates = tuple(training.update() for training in trainings)
        factor_J = factors(trainings, sums_J2, norm_J)
        by_kernels = kernels_run(self.travel.device, trainings[0].master.dtype)
        if not by_kernels:
            known = zip(updates, factor_J.tolist(), strict=True)
            updates = tuple(replace(one, factor=factor) for one, factor in known)
        run = _StepRun(
            due=tuple(due),
            updates=updates,
            tokens=tokens,
            sums_J3=torch.cat([sums_J2, norm_J[:, None]], dim=1),
            factor_J=factor_J.float() if by_kernels else None,
            gone=gone(),
            finite=tuple([] for _ in due),
        )
        begun.runs.append(run)
        for number, training in enumerate(trainings):
            training.open = None
            for stage, part in self.travel.travellers[training.job].by_stage.items():
                if found := list(pieces(part, training.layout.size)):
                    self._left[training.job, stage] = _Left(run, number, part, found)

    def unfinished(self, job: str, stage: int) -> bool:
        """Return whether the job's weights of that stage are still to be updated."""
        return (job, stage) in self._left

    def left(self, stage: int, jobs: Iterable[str]) -> list[Pair]:
        """Return the unfinished Steps of these jobs that a pass over the stage depends on."""
        return [pair for pair in self._pairs(stage, jobs) if pair in self._left]

    def _pairs(self, stage: int, jobs: Iterable[str]) -> list[Pair]:
        """Return the parts that passes of these jobs over the stage read; at the first and last stage also
        those outside all layers."""
        last = len(self.travel.part.stages) - 1
        stages = (stage, OUTSIDE) if stage in (0, last) else (stage,)
        return [(job, one) for job in jobs for one in stages]

    def all_left(self) -> list[Pair]:
        return sorted(self._left, key=lambda pair: (pair[1], pair[0]))

    # -- made --------------------------------------------------------------------------------------------

    def ask(self, pairs: Iterable[Pair], writable: JointEvent) -> None:
        """Start these updates concurrently with other work of the device. New weights are copied to the host
        and, once `writable`, to the places of their stages. Readers wait with `use`."""
        with self.ring.making():
            _wait_for(writable)
        for seated in self._seated(pairs):
            self._make([one for one in seated if not one.left.refused])
            for one in seated:
                one.left.pieces.pop(0)
                if not one.left.pieces:
                    del self._left[one.pair]

    def asked(self, stage: int, jobs: Iterable[str]) -> list[Pair]:
        """Return updates that were started and that no pass of these jobs over the stage has waited for
        yet."""
        return [pair for pair in self._pairs(stage, jobs) if pair in self._there]

    def use(self, pairs: Iterable[Pair]) -> None:
        """Make the current stream wait for the started updates of these pairs."""
        for there in dict.fromkeys(self._there.pop(pair) for pair in pairs):
            torch.cuda.current_stream().wait_event(there)

    def outcomes(self, run: _StepRun) -> list[Outcome]:
        assert not any(left.run is run for left in self._left.values()), "a Step is not all made"
        with self.ring.making():
            # Not on the stream of the passes: those of the next round may already be queued there.
            none = torch.ones(1, dtype=torch.bool, device=run.sums_J3.device)
            finite_J = torch.stack([torch.cat([none, *found]).all() for found in run.finite])
            begun = StepsBegun.of(run.due, run.updates, run.tokens, run.sums_J3, finite_J)
        return begun.outcomes()

    def wait(self) -> None:
        """Wait until everything that was started is finished and on the host."""
        for home in self._home.values():
            home.synchronize()
        self._there.clear()

    def wait_here(self, stage: int) -> None:
        """Make the current stream wait until the stage's updates are on the host."""
        if (home := self._home.get(stage)) is not None:
            torch.cuda.current_stream().wait_event(home)

    def _seated(self, pairs: Iterable[Pair]) -> Iterator[list[_Seated]]:
        """Yield the pieces of all pairs, buffer by buffer."""
        room = self.ring.room
        seated: list[_Seated] = []
        for pair in pairs:
            left = self._left[pair]
            # Not the list itself: a piece is removed from it when it is updated.
            for piece in tuple(left.pieces):
                at = aligned(seated[-1].stop) if seated else 0
                if at + piece.whole.size > room:
                    yield seated
                    seated, at = [], 0
                seated.append(_Seated(pair, left, piece, at))
        if seated:
            yield seated

    def _make(self, seated: Sequence[_Seated]) -> None:
        if not seated:
            return
        buffer = self.ring.next()
        here = [buffer.state.within(one.at, one.stop) for one in seated]
        with self.ring.coming(buffer):
            for run in dict.fromkeys(one.left.run for one in seated):
                _wait_for(run.gone)
            bring([one.update.state.within(*one.piece.whole) for one in seated], here)
        with self.ring.making():
            self._update(buffer, seated, here)
        made = [state.within(*one.piece.kept) for one, state in zip(seated, here, strict=True)]
        with self.ring.leaving(buffer):
            give_back(made, [one.update.state.within(*one.piece.inside) for one in seated])
        if buffer.free is not None:
            self._home |= dict.fromkeys((one.pair[1] for one in seated), buffer.free)

    def _update(self, buffer: Buffer, seated: Sequence[_Seated], here: Sequence[AdamState]) -> None:
        """Update the pieces in the buffer; new weights are also copied to the places of their stages."""
        factor_J = _factors(seated)
        if factor_J is not None:
            # If the device refuses a step, the weights of the buffer's previous jobs would be copied back
            # otherwise.
            buffer.state.weights[: seated[-1].stop].copy_(buffer.state.master[: seated[-1].stop])
        updates = [
            one.update.on(state, one.piece.whole.start) for one, state in zip(seated, here, strict=True)
        ]
        finite_J = self._make_update(updates, factor_J)
        rooms, weights = [], []
        for one, state, finite in zip(seated, here, finite_J.split(1), strict=True):
            one.left.run.finite[one.left.number].append(finite)
            if (room := self.travel.room(*one.pair)) is not None:
                at = one.piece.inside.start - one.left.part.start
                rooms.append(room[at : at + one.piece.inside.size])
                weights.append(state.weights[slice(*one.piece.kept)])
        if rooms:
            copy(rooms, weights)
        if self.ring.lanes is not None:
            self._there |= dict.fromkeys((one.pair for one in seated), self.ring.lanes.make.record_event())


def _wait_for(gone: JointEvent) -> None:
    for event in gone.events:
        torch.cuda.current_stream().wait_event(event)


def pieces(part: StagePart, size: int) -> Iterator[Piece]:
    """Yield the pieces of a part of a vector with this many parameters."""
    first = part.start - part.start % ALIGNMENT
    for at in range(first, part.stop if part.size else first, PIECE):
        inside = StagePart(max(at, part.start), min(at + PIECE, part.stop))
        stop = min(-(-inside.stop // ALIGNMENT) * ALIGNMENT, size)
        yield Piece(inside, StagePart(at, stop))


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _factors(seated: Sequence[_Seated]) -> Tensor | None:
    """Return the factors of the pieces' jobs on the device, or None if there are none."""
    found = [one.left.factor for one in seated]
    known = [factor for factor in found if factor is not None]
    return torch.stack(known) if known else None
