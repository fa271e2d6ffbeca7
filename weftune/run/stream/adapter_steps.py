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

JobStage = tuple[str, int]
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

    kept_range: StagePart
    computed_range: StagePart
    """Range of `kept_range`, extended to multiples of ALIGNMENT: the extension is computed but not kept."""

    @property
    def kept_offsets(self) -> StagePart:
        """Kept range, relative to the start of the whole."""
        return StagePart(
            self.kept_range.start - self.computed_range.start,
            self.kept_range.stop - self.computed_range.start,
        )


def split_part(part: StagePart, size: int) -> Iterator[Piece]:
    """Yield the pieces of a part of a vector with this many parameters."""
    first = part.start - part.start % ALIGNMENT
    for at in range(first, part.stop if part.size else first, PIECE):
        kept_range = StagePart(max(at, part.start), min(at + PIECE, part.stop))
        yield Piece(kept_range, StagePart(at, min(round_up(kept_range.stop), size)))


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class _PendingPart:
    """The unfinished pieces of a job's Step in one stage; the job has index `job_index` in its run."""

    run: StepRun
    job_index: int
    start: int
    """First parameter of the stage."""
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class _BufferedPiece:
    """A piece and its position in a buffer."""

    pair: JobStage
    part: _PendingPart
    piece: Piece
    offset: int

    @property
    def update(self) -> Update:
        """Update of the job, with the state that is on the host."""
        return self.part.run.updates[self.part.job_index]

    @property
    def stop(self) -> int:
        return self.offset + self.piece.computed_range.size


class HostSteps:
    """The Steps of all attached jobs."""

    def __init__(
        self,
        device: torch.device,
        apply_updates: Make = update,
        device_weights: Callable[[str, int], Tensor | None] | None = None,
    ) -> None:
        """`apply_updates` applies the updates. `device_weights` returns the device's memory for a job's
        weights of a stage, to which new weights are copied too; None if gradients and weights stay on the
        device."""
        self._device, self._apply_updates, self._device_weights = device, apply_updates, device_weights
        self.ring = PieceRing(device)
        self._parts: dict[str, Mapping[int, StagePart]] = {}
        """Maps each job to its part of the flat vector in each stage."""
        self._stage_sizes: Counter[int] = Counter()
        """Maps each stage to the total size of all jobs' pieces."""
        self._pending: dict[JobStage, _PendingPart] = {}
        self._started: dict[JobStage, torch.cuda.Event] = {}
        """Maps a job and stage to the event of its last started update, until a pass has waited for it."""
        self._returned: dict[int, torch.cuda.Event] = {}
        """Maps each stage to an event that is done when its last piece is back on the host."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training, parts: Mapping[int, StagePart]) -> None:
        """Register a job, and allocate buffers for its pieces beside those of the others."""
        self._parts[training.job] = parts
        self._stage_sizes.update(_piece_sizes(parts, training.layout.size))
        capacity = min(PIECE, max(self._stage_sizes.values(), default=0))
        if self.ring.buffers and capacity <= self.ring.capacity:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dtypes = [vector.dtype for vector in training.state.vectors]
        sizes = [capacity] * 5 if self._device_weights is not None else [capacity, capacity, capacity, 0, 0]
        self.ring.replace_buffers(
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
            self.ring.lanes.update.wait_stream(torch.cuda.current_stream())
        for job_index, request in enumerate(requests):
            training = request.training
            for stage, part in self._parts[training.job].items():
                if found := list(split_part(part, training.layout.size)):
                    self._pending[training.job, stage] = _PendingPart(run, job_index, part.start, found)
        return run

    def is_unfinished(self, job: str, stage: int) -> bool:
        """Return whether the job's weights of that stage are still to be updated."""
        return (job, stage) in self._pending

    def pending_pairs(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return the pairs whose Steps have pieces that were not started."""
        return [pair for pair in pairs if pair in self._pending]

    def all_pending_pairs(self) -> list[JobStage]:
        return sorted(self._pending, key=lambda pair: (pair[1], pair[0]))

    def started_pairs(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return the pairs whose updates were started and that no pass has waited for yet."""
        return [pair for pair in pairs if pair in self._started]

    def start(self, pairs: Iterable[JobStage], writable: Events = ()) -> None:
        """Start these updates concurrently with other work of the device. New weights are copied to the host
        and, once `writable`, to the device's memory for them. Readers wait with `wait_for_updates`."""
        if writable:
            with self.ring.updating():
                _wait_for_events(writable)
        for buffered in self._assign_buffers(pairs):
            if accepted := [one for one in buffered if not one.part.run.is_refused(one.part.job_index)]:
                self._apply(accepted)
            for one in buffered:
                one.part.pieces.pop(0)
                if not one.part.pieces:
                    del self._pending[one.pair]

    def wait_for_updates(self, pairs: Iterable[JobStage]) -> None:
        """Make the current stream wait for the started updates of these pairs."""
        for event in dict.fromkeys(self._started.pop(pair) for pair in pairs):
            torch.cuda.current_stream().wait_event(event)

    def read_outcomes(self, run: StepRun) -> None:
        """Start reading the outcomes of Steps that have all been started."""
        assert not any(part.run is run for part in self._pending.values()), "a Step is not all made"
        with self.ring.updating():
            # Not on the stream of the passes: those of the next round may already be queued there.
            none = torch.ones(1, dtype=torch.bool, device=run.sums_JS.device)
            run.read(torch.stack([torch.cat([none, *found]).all() for found in run.finite]))

    def wait(self) -> None:
        """Wait until everything that was started is finished and on the host."""
        for returned in self._returned.values():
            returned.synchronize()
        self._started.clear()

    def wait_for_stage(self, stage: int) -> None:
        """Make the current stream wait until the stage's updates are on the host."""
        if (returned := self._returned.get(stage)) is not None:
            torch.cuda.current_stream().wait_event(returned)

    # -- pieces ------------------------------------------------------------------------------------------

    def _assign_buffers(self, pairs: Iterable[JobStage]) -> Iterator[list[_BufferedPiece]]:
        """Yield the pieces of all pairs, buffer by buffer."""
        buffered: list[_BufferedPiece] = []
        for pair in pairs:
            part = self._pending[pair]
            # Not the list itself: a piece is removed from it when it is updated.
            for piece in tuple(part.pieces):
                offset = round_up(buffered[-1].stop) if buffered else 0
                if offset + piece.computed_range.size > self.ring.capacity:
                    yield buffered
                    buffered, offset = [], 0
                buffered.append(_BufferedPiece(pair, part, piece, offset))
        if buffered:
            yield buffered

    def _apply(self, buffered: Sequence[_BufferedPiece]) -> None:
        buffer = self.ring.next_buffer()
        on_host = [one.update.state.within(*one.piece.computed_range) for one in buffered]
        on_device = [buffer.state.within(one.offset, one.stop) for one in buffered]
        if self._device_weights is None:
            on_device = [
                replace(state, gradient=kept.gradient, weights=kept.weights)
                for state, kept in zip(on_device, on_host, strict=True)
            ]
        with self.ring.copying_in(buffer):
            for run in dict.fromkeys(one.part.run for one in buffered):
                _wait_for_events(run.arrived)
            _copy_all(self._copied_in(on_device), self._copied_in(on_host))
        with self.ring.updating():
            self._update(buffer, buffered, on_device)
        with self.ring.copying_out(buffer):
            if self._device_weights is not None:
                on_host = [one.update.state.within(*one.piece.kept_range) for one in buffered]
                on_device = [
                    state.within(*one.piece.kept_offsets)
                    for one, state in zip(buffered, on_device, strict=True)
                ]
            _copy_all(self._copied_out(on_host), self._copied_out(on_device))
        if buffer.free is not None:
            self._returned |= dict.fromkeys((one.pair[1] for one in buffered), buffer.free)

    def _update(
        self, buffer: Buffer, buffered: Sequence[_BufferedPiece], on_device: Sequence[AdamState]
    ) -> None:
        """Update the pieces in the buffer, and the weights that passes read."""
        factors = [
            one.part.run.factor_J[one.part.job_index] for one in buffered if one.part.run.factor_J is not None
        ]
        factor_J = torch.stack(factors) if factors else None
        if factor_J is not None and self._device_weights is not None:
            # If the device refuses a step, the weights of the buffer's previous jobs would be copied back
            # otherwise.
            buffer.state.weights[: buffered[-1].stop].copy_(buffer.state.master[: buffered[-1].stop])
        updates = [
            one.update.on(state, one.piece.computed_range.start)
            for one, state in zip(buffered, on_device, strict=True)
        ]
        finite_J = self._apply_updates(updates, factor_J)
        targets, weights = [], []
        for one, state, finite in zip(buffered, on_device, finite_J.split(1), strict=True):
            one.part.run.finite[one.part.job_index].append(finite)
            if self._device_weights is not None and (target := self._device_weights(*one.pair)) is not None:
                first = one.piece.kept_range.start - one.part.start
                targets.append(target[first : first + one.piece.kept_range.size])
                weights.append(state.weights[slice(*one.piece.kept_offsets)])
        if targets:
            _copy_all(targets, weights)
        if self.ring.lanes is not None:
            self._started |= dict.fromkeys(
                (one.pair for one in buffered), self.ring.lanes.update.record_event()
            )

    def _copied_in(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return the vectors that are copied to the device. New weights are computed there."""
        count = 3 if self._device_weights is None else 4
        return [vector for state in states for vector in state.vectors[:count]]

    def _copied_out(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return the optimizer state vectors to copy back to the host. Gradients are not copied: they are no
        longer needed."""
        moved = [vector for state in states for vector in state.vectors[:3]]
        return moved if self._device_weights is None else [*moved, *(state.weights for state in states)]


def _piece_sizes(parts: Mapping[int, StagePart], size: int) -> dict[int, int]:
    """Return a map from each stage to the aligned size of a job's pieces there."""
    return {
        stage: sum(round_up(piece.computed_range.size) for piece in split_part(part, size))
        for stage, part in parts.items()
    }


def _wait_for_events(events: Events) -> None:
    for event in events:
        torch.cuda.current_stream().wait_event(event)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
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

    copy_in: torch.cuda.Stream
    """Copies to the device."""
    update: torch.cuda.Stream
    """Updates of pieces that have arrived."""
    copy_out: torch.cuda.Stream
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
    def capacity(self) -> int:
        """Number of parameters that a buffer holds."""
        return len(self.buffers[0].state.master) if self.buffers else 0

    def replace_buffers(self, new: Callable[[], AdamState]) -> None:
        """Replace the buffers by new ones; they must not be in use."""
        self.buffers = []
        self.buffers = [Buffer(new()) for _ in range(PIECES)]

    def next_buffer(self) -> Buffer:
        buffer = self.buffers[self._turn]
        self._turn = (self._turn + 1) % PIECES
        return buffer

    @contextmanager
    def copying_in(self, buffer: Buffer) -> Iterator[None]:
        """Run on the incoming stream, once the buffer is free; later updates wait for it."""
        if self.lanes is None:
            yield
            return
        with torch.cuda.stream(self.lanes.copy_in):
            if buffer.free is not None:
                self.lanes.copy_in.wait_event(buffer.free)
            yield
        self.lanes.update.wait_stream(self.lanes.copy_in)

    def updating(self) -> AbstractContextManager[object]:
        """Run on the stream of updates."""
        return nullcontext() if self.lanes is None else torch.cuda.stream(self.lanes.update)

    @contextmanager
    def copying_out(self, buffer: Buffer) -> Iterator[None]:
        """Run on the outgoing stream; the buffer is free afterwards."""
        if self.lanes is None:
            yield
            return
        self.lanes.copy_out.wait_stream(self.lanes.update)
        with torch.cuda.stream(self.lanes.copy_out):
            yield
            buffer.free = self.lanes.copy_out.record_event()
