"""Steps whose state lives in host memory: it is copied to the device in pieces, updated there and copied back
concurrently with passes, which wait for the Steps of their own jobs and stages and for nothing that was
started later.

Adapters that travel with their stage are in host memory with their gradients and weights. If only the
optimizer is offloaded, master weights and moments are, and the device keeps gradients and weights. Pieces of
several jobs are updated together: launched one by one, they would take more of the host's time than of the
device's.

Only the device writes a job's state between `begin` and the end of its last piece.

Shapes: J jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weftune.ops.adamw import AdamState, Update, update
from weftune.plan.cost.ring import PIECE, PIECES
from weftune.run.training.state import Training
from weftune.run.training.steps import StepRequest, StepRun, close_batches

ALIGNMENT = 64
"""Alignment of pieces, in parameters. Torch's fused AdamW rounds the remainder at a vector's end differently:
split at multiples of the processor's vector width, pieces get the same bits as the whole."""

Pair = tuple[str, int]
"""A job, and a stage in which it has parameters."""
Events = tuple[torch.cuda.Event, ...]
"""Events that must all be done."""
Make = Callable[[Sequence[Update], Tensor | None], Tensor]
"""A function that applies updates with factors on the device, and returns which weights are finite [J]."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The parameters `start` to `stop` of an adapter's flat vector, which are those of one stage."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        """Iterate over start and stop, for unpacking."""
        return iter((self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters of a part that are updated together."""

    inside: StagePart
    whole: StagePart
    """Range of `inside`, extended to multiples of ALIGNMENT: the extension is computed but not kept."""

    @property
    def kept(self) -> StagePart:
        """Kept range, relative to the start of the whole."""
        return StagePart(self.inside.start - self.whole.start, self.inside.stop - self.whole.start)


def pieces(part: StagePart, size: int) -> Iterator[Piece]:
    """Yield the pieces of a part of a vector with this many parameters."""
    first = part.start - part.start % ALIGNMENT
    for at in range(first, part.stop if part.size else first, PIECE):
        inside = StagePart(max(at, part.start), min(at + PIECE, part.stop))
        yield Piece(inside, StagePart(at, min(aligned(inside.stop), size)))


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class _PendingPart:
    """The unfinished pieces of a job's Step in one stage; the job has index `number` in its run."""

    run: StepRun
    number: int
    start: int
    """First parameter of the stage."""
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class _SeatedPiece:
    """A piece and its position in a buffer."""

    pair: Pair
    part: _PendingPart
    piece: Piece
    at: int

    @property
    def update(self) -> Update:
        """Update of the job, with the state that is on the host."""
        return self.part.run.updates[self.part.number]

    @property
    def stop(self) -> int:
        return self.at + self.piece.whole.size


class HostSteps:
    """The Steps of all attached jobs."""

    def __init__(
        self,
        device: torch.device,
        make: Make = update,
        room: Callable[[str, int], Tensor | None] | None = None,
    ) -> None:
        """`make` applies the updates. `room` returns the device's memory for a job's weights of a stage, to
        which new weights are copied too; None if gradients and weights stay on the device."""
        self._device, self._make_update, self._room = device, make, room
        self.ring = PieceRing(device)
        self._parts: dict[str, Mapping[int, StagePart]] = {}
        """Maps each job to its part of the flat vector in each stage."""
        self._stage_sizes: Counter[int] = Counter()
        """Maps each stage to the total size of all jobs' pieces."""
        self._pending: dict[Pair, _PendingPart] = {}
        self._started: dict[Pair, torch.cuda.Event] = {}
        """Maps a job and stage to the event of its last started update, until a pass has waited for it."""
        self._home: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when its last piece is back on the host."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training, parts: Mapping[int, StagePart]) -> None:
        """Register a job, and allocate buffers for its pieces beside those of the others."""
        self._parts[training.job] = parts
        self._stage_sizes.update(_piece_sizes(parts, training.layout.size))
        room = min(PIECE, max(self._stage_sizes.values(), default=0))
        if self.ring.buffers and room <= self.ring.room:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dtypes = [vector.dtype for vector in training.state.vectors]
        sizes = [room] * 5 if self._room is not None else [room, room, room, 0, 0]
        self.ring.refill(
            lambda: AdamState(
                *(
                    torch.zeros(size, dtype=dtype, device=self._device)
                    for size, dtype in zip(sizes, dtypes, strict=True)
                )
            )
        )

    def detach(self, training: Training) -> None:
        self._stage_sizes.subtract(_piece_sizes(self._parts.pop(training.job), training.layout.size))

    # -- Steps -------------------------------------------------------------------------------------------

    def begin(
        self,
        requests: Sequence[StepRequest],
        norm_J: Tensor,
        arrived: Callable[[], Events] | None = None,
    ) -> StepRun:
        """Close the open batches and register their Steps, with gradients of these norms. The events of
        `arrived` are done when the gradients, and everything else launched until it is called, are on the
        host. None means that they stay on the device, and updates wait for the passes that computed them."""
        run = close_batches(requests, norm_J, self._device)
        if arrived is not None:
            run.arrived = arrived()
        elif self.ring.lanes is not None:
            self.ring.lanes.make.wait_stream(torch.cuda.current_stream())
        for number, request in enumerate(requests):
            training = request.training
            for stage, part in self._parts[training.job].items():
                if found := list(pieces(part, training.layout.size)):
                    self._pending[training.job, stage] = _PendingPart(run, number, part.start, found)
        return run

    def unfinished(self, job: str, stage: int) -> bool:
        """Return whether the job's weights of that stage are still to be updated."""
        return (job, stage) in self._pending

    def pending(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return the pairs whose Steps have pieces that were not started."""
        return [pair for pair in pairs if pair in self._pending]

    def all_pending(self) -> list[Pair]:
        return sorted(self._pending, key=lambda pair: (pair[1], pair[0]))

    def started(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return the pairs whose updates were started and that no pass has waited for yet."""
        return [pair for pair in pairs if pair in self._started]

    def start(self, pairs: Iterable[Pair], writable: Events = ()) -> None:
        """Start these updates concurrently with other work of the device. New weights are copied to the host
        and, once `writable`, to the device's memory for them. Readers wait with `use`."""
        if writable:
            with self.ring.making():
                _wait_for(writable)
        for seated in self._seated(pairs):
            if accepted := [one for one in seated if not one.part.run.is_refused(one.part.number)]:
                self._make(accepted)
            for one in seated:
                one.part.pieces.pop(0)
                if not one.part.pieces:
                    del self._pending[one.pair]

    def use(self, pairs: Iterable[Pair]) -> None:
        """Make the current stream wait for the started updates of these pairs."""
        for event in dict.fromkeys(self._started.pop(pair) for pair in pairs):
            torch.cuda.current_stream().wait_event(event)

    def read(self, run: StepRun) -> None:
        """Start reading the outcomes of Steps that have all been started."""
        assert not any(part.run is run for part in self._pending.values()), "a Step is not all made"
        with self.ring.making():
            # Not on the stream of the passes: those of the next round may already be queued there.
            none = torch.ones(1, dtype=torch.bool, device=run.sums_J3.device)
            run.read(torch.stack([torch.cat([none, *found]).all() for found in run.finite]))

    def wait(self) -> None:
        """Wait until everything that was started is finished and on the host."""
        for home in self._home.values():
            home.synchronize()
        self._started.clear()

    def wait_here(self, stage: int) -> None:
        """Make the current stream wait until the stage's updates are on the host."""
        if (home := self._home.get(stage)) is not None:
            torch.cuda.current_stream().wait_event(home)

    # -- pieces ------------------------------------------------------------------------------------------

    def _seated(self, pairs: Iterable[Pair]) -> Iterator[list[_SeatedPiece]]:
        """Yield the pieces of all pairs, buffer by buffer."""
        seated: list[_SeatedPiece] = []
        for pair in pairs:
            part = self._pending[pair]
            # Not the list itself: a piece is removed from it when it is updated.
            for piece in tuple(part.pieces):
                at = aligned(seated[-1].stop) if seated else 0
                if at + piece.whole.size > self.ring.room:
                    yield seated
                    seated, at = [], 0
                seated.append(_SeatedPiece(pair, part, piece, at))
        if seated:
            yield seated

    def _make(self, seated: Sequence[_SeatedPiece]) -> None:
        buffer = self.ring.next()
        home = [one.update.state.within(*one.piece.whole) for one in seated]
        here = [buffer.state.within(one.at, one.stop) for one in seated]
        if self._room is None:
            here = [
                replace(state, gradient=kept.gradient, weights=kept.weights)
                for state, kept in zip(here, home, strict=True)
            ]
        with self.ring.coming(buffer):
            for run in dict.fromkeys(one.part.run for one in seated):
                _wait_for(run.arrived)
            _copy(self._incoming(here), self._incoming(home))
        with self.ring.making():
            self._update(buffer, seated, here)
        with self.ring.leaving(buffer):
            if self._room is not None:
                home = [one.update.state.within(*one.piece.inside) for one in seated]
                here = [state.within(*one.piece.kept) for one, state in zip(seated, here, strict=True)]
            _copy(self._outgoing(home), self._outgoing(here))
        if buffer.free is not None:
            self._home |= dict.fromkeys((one.pair[1] for one in seated), buffer.free)

    def _update(self, buffer: Buffer, seated: Sequence[_SeatedPiece], here: Sequence[AdamState]) -> None:
        """Update the pieces in the buffer, and the weights that passes read."""
        known = [
            one.part.run.factor_J[one.part.number] for one in seated if one.part.run.factor_J is not None
        ]
        factor_J = torch.stack(known) if known else None
        if factor_J is not None and self._room is not None:
            # If the device refuses a step, the weights of the buffer's previous jobs would be copied back
            # otherwise.
            buffer.state.weights[: seated[-1].stop].copy_(buffer.state.master[: seated[-1].stop])
        updates = [
            one.update.on(state, one.piece.whole.start) for one, state in zip(seated, here, strict=True)
        ]
        finite_J = self._make_update(updates, factor_J)
        rooms, weights = [], []
        for one, state, finite in zip(seated, here, finite_J.split(1), strict=True):
            one.part.run.finite[one.part.number].append(finite)
            if self._room is not None and (room := self._room(*one.pair)) is not None:
                at = one.piece.inside.start - one.part.start
                rooms.append(room[at : at + one.piece.inside.size])
                weights.append(state.weights[slice(*one.piece.kept)])
        if rooms:
            _copy(rooms, weights)
        if self.ring.lanes is not None:
            self._started |= dict.fromkeys((one.pair for one in seated), self.ring.lanes.make.record_event())

    def _incoming(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return the vectors that are copied to the device. New weights are computed there."""
        count = 3 if self._room is None else 4
        return [vector for state in states for vector in state.vectors[:count]]

    def _outgoing(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return the vectors that are copied back. The gradient is no longer needed."""
        moved = [vector for state in states for vector in state.vectors[:3]]
        return moved if self._room is None else [*moved, *(state.weights for state in states)]


def _piece_sizes(parts: Mapping[int, StagePart], size: int) -> dict[int, int]:
    """Return a map from each stage to the aligned size of a job's pieces there."""
    return {
        stage: sum(aligned(piece.whole.size) for piece in pieces(part, size)) for stage, part in parts.items()
    }


def _wait_for(events: Events) -> None:
    for event in events:
        torch.cuda.current_stream().wait_event(event)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all at once: one by one, Python takes longer to launch small copies than the link to make them."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


@dataclass(slots=True, eq=False)
class Buffer:
    """Pieces of Steps on the device."""

    state: AdamState
    free: torch.cuda.Event | None = None
    """Event that is done when its last content is back on the host."""


@dataclass(frozen=True, slots=True)
class PieceLanes:
    """Streams of a GPU beside the compute stream.

    Updates have a separate stream: a matrix product occupies every multiprocessor, so an update waits for its
    end, and the next copies must not wait with it.
    """

    up: torch.cuda.Stream
    """Copies to the device."""
    make: torch.cuda.Stream
    """Updates of pieces that have arrived."""
    down: torch.cuda.Stream
    """Copies back to the host."""


class PieceRing:
    """Buffers used in rotation: while one is updated, another is filled and a third is copied back."""

    def __init__(self, device: torch.device) -> None:
        self.buffers: list[Buffer] = []
        self.lanes: PieceLanes | None = None
        if device.type == "cuda":
            # Incoming pieces are needed sooner than stages that were requested before them.
            up, make = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
            self.lanes = PieceLanes(up, make, torch.cuda.Stream(device))
        self._turn = 0

    @property
    def room(self) -> int:
        """Number of parameters that a buffer holds."""
        return len(self.buffers[0].state.master) if self.buffers else 0

    def refill(self, new: Callable[[], AdamState]) -> None:
        """Replace the buffers by new ones; they must not be in use."""
        self.buffers = []
        self.buffers = [Buffer(new()) for _ in range(PIECES)]

    def next(self) -> Buffer:
        buffer = self.buffers[self._turn]
        self._turn = (self._turn + 1) % PIECES
        return buffer

    @contextmanager
    def coming(self, buffer: Buffer) -> Iterator[None]:
        """Run on the incoming stream, once the buffer is free; later updates wait for it."""
        if self.lanes is None:
            yield
            return
        with torch.cuda.stream(self.lanes.up):
            if buffer.free is not None:
                self.lanes.up.wait_event(buffer.free)
            yield
        self.lanes.make.wait_stream(self.lanes.up)

    def making(self) -> AbstractContextManager[object]:
        """Run on the stream of updates."""
        return nullcontext() if self.lanes is None else torch.cuda.stream(self.lanes.make)

    @contextmanager
    def leaving(self, buffer: Buffer) -> Iterator[None]:
        """Run on the outgoing stream; the buffer is free afterwards."""
        if self.lanes is None:
            yield
            return
        self.lanes.down.wait_stream(self.lanes.make)
        with torch.cuda.stream(self.lanes.down):
            yield
            buffer.free = self.lanes.down.record_event()
