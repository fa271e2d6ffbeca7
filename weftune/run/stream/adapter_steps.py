"""Optimizer steps (Steps) whose state lives in host memory: it is copied to the device in pieces, updated
there and copied back, concurrently with passes. A pass waits only for the Steps of its own jobs and stages.

If adapters travel (are loaded to the device with their stage), their gradients and weights are in host
memory, too. If only the optimizer is offloaded, master weights and moments are in host memory, and the device
keeps gradients and weights. Pieces of several jobs are updated together: launched one by one, they would take
more of the host's time than of the device's.

Between `HostSteps.begin` and the end of a job's last piece, only the device writes the job's state.

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
"""Number of parameters of which the start and end of every piece of a flat vector are multiples. Torch's
fused AdamW rounds the remainder at a vector's end differently, so only pieces that end at multiples of the
processor's vector width get the same bits as the whole vector."""

JobStage = tuple[str, int]
"""A job, and the index of a stage in which it has parameters."""
Events = tuple[torch.cuda.Event, ...]
"""CUDA events that must all be done before some work may begin."""
ApplyUpdates = Callable[[Sequence[Update], Tensor | None], Tensor]
"""A function that applies optimizer updates on the device, with optional clipping factors, and returns
whether each job's new weights are finite [J]."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The range of an adapter's flat vector, from `start` to `stop` − 1, that holds the parameters of one
    stage."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over start and stop, so that a `StagePart` can be unpacked like a tuple."""
        return iter((self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive parameters of a job in one stage, which an optimizer step updates together."""

    kept_range: StagePart
    computed_range: StagePart
    """Range of parameters that is updated on the device: `kept_range`, extended to multiples of ALIGNMENT.
    Results outside `kept_range` are dropped."""

    @property
    def kept_offsets(self) -> StagePart:
        """The range `kept_range`, counted from the start of `computed_range`."""
        return StagePart(
            self.kept_range.start - self.computed_range.start,
            self.kept_range.stop - self.computed_range.start,
        )


def split_part(part: StagePart, size: int) -> Iterator[Piece]:
    """Divide a part of an adapter's flat vector into pieces that are updated one after another, and yield the
    pieces. `size` is the number of parameters of the whole vector."""
    first = part.start - part.start % ALIGNMENT
    for at in range(first, part.stop if part.size else first, PIECE):
        kept_range = StagePart(max(at, part.start), min(at + PIECE, part.stop))
        yield Piece(kept_range, StagePart(at, min(round_up(kept_range.stop), size)))


def round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class _PendingPart:
    """The unfinished pieces (consecutive parameters) of a job's optimizer step in one stage. `job_index` is
    the index of the job in `run`."""

    run: StepRun
    job_index: int
    start: int
    """Index of the stage's first parameter in the job's flat vector."""
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class _BufferedPiece:
    """A piece (consecutive parameters of one job and stage), and its offset in a device buffer that holds
    pieces of several jobs."""

    pair: JobStage
    part: _PendingPart
    piece: Piece
    offset: int

    @property
    def update(self) -> Update:
        """The optimizer update of the whole job to which these parameters belong, with its state in host
        memory."""
        return self.part.run.updates[self.part.job_index]

    @property
    def stop(self) -> int:
        return self.offset + self.piece.computed_range.size


class HostSteps:
    """The part of an executor that makes the optimizer steps of all attached jobs on the device, a range of
    parameters at a time. Between the steps, master weights and moments are in host memory."""

    def __init__(
        self,
        device: torch.device,
        apply_updates: ApplyUpdates = update,
        device_weights: Callable[[str, int], Tensor | None] | None = None,
    ) -> None:
        """Initialise the steps of a device, with no job attached. `apply_updates` is the function that
        applies updates on the device. `device_weights` returns the device memory for a job's weights of a
        stage, to which new weights are also copied; None if gradients and weights stay on the device."""
        self._device, self._apply_updates, self._device_weights = device, apply_updates, device_weights
        self.ring = PieceRing(device)
        self._parts: dict[str, Mapping[int, StagePart]] = {}
        """Maps each job to a map from each stage to the range of the job's flat vector that holds the stage's
        parameters."""
        self._stage_sizes: Counter[int] = Counter()
        """Maps each stage to its total number of parameters over all attached jobs, including the parameters
        that alignment adds."""
        self._pending_parts: dict[JobStage, _PendingPart] = {}
        self._start_events: dict[JobStage, torch.cuda.Event] = {}
        """Maps (job, stage) to a CUDA event after the last update that was started there. The entry is
        removed when a pass has waited for the event."""
        self._return_events: dict[int, torch.cuda.Event] = {}
        """Maps each stage to a CUDA event after which the last updated parameters of the stage have been
        copied back to the host."""

    # -- jobs --------------------------------------------------------------------------------------------

    def attach(self, training: Training, parts: Mapping[int, StagePart]) -> None:
        """Register a job, and enlarge the device's buffers for optimizer steps if they are too small for the
        job's parameters."""
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
        find_arrivals: Callable[[], Events] | None = None,
    ) -> StepRun:
        """Close the complete global batches of these requests, and register their optimizer steps. `norm_J`
        are the norms of their gradients. `find_arrivals` returns events after which the gradients, and
        everything else launched until the call, are on the host. If it is None, gradients stay on the device,
        and updates wait for the passes that computed them."""
        run = close_batches(requests, norm_J, self._device)
        if find_arrivals is not None:
            run.arrival_events = find_arrivals()
        elif self.ring.lanes is not None:
            self.ring.lanes.update.wait_stream(torch.cuda.current_stream())
        for job_index, request in enumerate(requests):
            training = request.training
            for stage, part in self._parts[training.job].items():
                if found := list(split_part(part, training.layout.size)):
                    self._pending_parts[training.job, stage] = _PendingPart(run, job_index, part.start, found)
        return run

    def is_unfinished(self, job: str, stage: int) -> bool:
        """Return whether the last requested optimizer step of the job still has to update the weights of this
        stage."""
        return (job, stage) in self._pending_parts

    def pending_pairs(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return the pairs (job, stage) among `pairs` for which an optimizer step has been requested and not
        completely started."""
        return [pair for pair in pairs if pair in self._pending_parts]

    def all_pending_pairs(self) -> list[JobStage]:
        return sorted(self._pending_parts, key=lambda pair: (pair[1], pair[0]))

    def started_pairs(self, pairs: Iterable[JobStage]) -> list[JobStage]:
        """Return the pairs (job, stage) among `pairs` whose updates have been started and that no pass has
        waited for yet."""
        return [pair for pair in pairs if pair in self._start_events]

    def start(self, pairs: Iterable[JobStage], writable_events: Events = ()) -> None:
        """Start the updates of the pairs (job, stage) concurrently with other work of the device. New weights
        are copied to the host and, once the events in `writable_events` are done, also to the device memory
        that passes read. A pass that reads them must first call `wait_for_updates`."""
        if writable_events:
            with self.ring.on_update_stream():
                _wait_for_events(writable_events)
        for buffered_pieces in self._assign_buffers(pairs):
            if accepted := [
                one for one in buffered_pieces if not one.part.run.is_refused(one.part.job_index)
            ]:
                self._apply(accepted)
            for one in buffered_pieces:
                one.part.pieces.pop(0)
                if not one.part.pieces:
                    del self._pending_parts[one.pair]

    def wait_for_updates(self, pairs: Iterable[JobStage]) -> None:
        """Make the current CUDA stream wait for the updates of the pairs (job, stage) that have been
        started."""
        for event in dict.fromkeys(self._start_events.pop(pair) for pair in pairs):
            torch.cuda.current_stream().wait_event(event)

    def read_outcomes(self, run: StepRun) -> None:
        """Start to copy the outcomes of optimizer steps to the host. All updates of these steps must have
        been started."""
        assert not any(part.run is run for part in self._pending_parts.values()), "a Step is not all made"
        with self.ring.on_update_stream():
            # Not on the stream of the passes: those of the next round may already be queued there.
            none = torch.ones(1, dtype=torch.bool, device=run.sums_JS.device)
            run.read(torch.stack([torch.cat([none, *found]).all() for found in run.finite_flags]))

    def wait(self) -> None:
        """Block until all started updates are finished and their state is on the host."""
        for returned in self._return_events.values():
            returned.synchronize()
        self._start_events.clear()

    def wait_for_stage(self, stage: int) -> None:
        """Make the current CUDA stream wait until the updates of a stage have been copied to the host."""
        if (returned := self._return_events.get(stage)) is not None:
            torch.cuda.current_stream().wait_event(returned)

    # -- pieces ------------------------------------------------------------------------------------------

    def _assign_buffers(self, pairs: Iterable[JobStage]) -> Iterator[list[_BufferedPiece]]:
        """Divide the pieces (consecutive parameters) that are to be updated for the pairs (job, stage) into
        lists, and yield the lists. The pieces of one list fit into one buffer on the device."""
        buffered_pieces: list[_BufferedPiece] = []
        for pair in pairs:
            part = self._pending_parts[pair]
            # Not the list itself: a piece is removed from it when it is updated.
            for piece in tuple(part.pieces):
                offset = round_up(buffered_pieces[-1].stop) if buffered_pieces else 0
                if offset + piece.computed_range.size > self.ring.capacity:
                    yield buffered_pieces
                    buffered_pieces, offset = [], 0
                buffered_pieces.append(_BufferedPiece(pair, part, piece, offset))
        if buffered_pieces:
            yield buffered_pieces

    def _apply(self, buffered_pieces: Sequence[_BufferedPiece]) -> None:
        buffer = self.ring.next_buffer()
        on_host = [one.update.state.slice_state(*one.piece.computed_range) for one in buffered_pieces]
        on_device = [buffer.state.slice_state(one.offset, one.stop) for one in buffered_pieces]
        if self._device_weights is None:
            on_device = [
                replace(state, gradient=kept.gradient, weights=kept.weights)
                for state, kept in zip(on_device, on_host, strict=True)
            ]
        with self.ring.on_copy_in_stream(buffer):
            for run in dict.fromkeys(one.part.run for one in buffered_pieces):
                _wait_for_events(run.arrival_events)
            _copy_all(self._vectors_to_device(on_device), self._vectors_to_device(on_host))
        with self.ring.on_update_stream():
            self._update(buffer, buffered_pieces, on_device)
        with self.ring.on_copy_out_stream(buffer):
            if self._device_weights is not None:
                on_host = [one.update.state.slice_state(*one.piece.kept_range) for one in buffered_pieces]
                on_device = [
                    state.slice_state(*one.piece.kept_offsets)
                    for one, state in zip(buffered_pieces, on_device, strict=True)
                ]
            _copy_all(self._vectors_to_host(on_host), self._vectors_to_host(on_device))
        if buffer.free_event is not None:
            self._return_events |= dict.fromkeys((one.pair[1] for one in buffered_pieces), buffer.free_event)

    def _update(
        self, buffer: Buffer, buffered_pieces: Sequence[_BufferedPiece], device_states: Sequence[AdamState]
    ) -> None:
        """Apply the optimizer steps of the pieces (consecutive parameters of jobs) in the buffer, and copy
        new weights to the memory that passes read. `device_states` contains the optimizer state of each piece
        on the device."""
        factors = [
            one.part.run.factor_J[one.part.job_index]
            for one in buffered_pieces
            if one.part.run.factor_J is not None
        ]
        factor_J = torch.stack(factors) if factors else None
        if factor_J is not None and self._device_weights is not None:
            # If the device refuses a step, the weights of the buffer's previous jobs would be copied back
            # otherwise.
            buffer.state.weights[: buffered_pieces[-1].stop].copy_(
                buffer.state.master[: buffered_pieces[-1].stop]
            )
        updates = [
            one.update.for_state(state, one.piece.computed_range.start)
            for one, state in zip(buffered_pieces, device_states, strict=True)
        ]
        finite_J = self._apply_updates(updates, factor_J)
        targets, weights = [], []
        for one, state, finite in zip(buffered_pieces, device_states, finite_J.split(1), strict=True):
            one.part.run.finite_flags[one.part.job_index].append(finite)
            if self._device_weights is not None and (target := self._device_weights(*one.pair)) is not None:
                first = one.piece.kept_range.start - one.part.start
                targets.append(target[first : first + one.piece.kept_range.size])
                weights.append(state.weights[slice(*one.piece.kept_offsets)])
        if targets:
            _copy_all(targets, weights)
        if self.ring.lanes is not None:
            self._start_events |= dict.fromkeys(
                (one.pair for one in buffered_pieces), self.ring.lanes.update.record_event()
            )

    def _vectors_to_device(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return the vectors of each state that are copied to the device. These are all except the new
        weights, which are computed there, and except gradients that are already there."""
        count = 3 if self._device_weights is None else 4
        return [vector for state in states for vector in state.vectors[:count]]

    def _vectors_to_host(self, states: Sequence[AdamState]) -> list[Tensor]:
        """Return, for each job's optimizer state, the vectors that are copied back to the host. Gradients are
        omitted, since they are no longer needed, and so are weights that stay on the device."""
        moved = [vector for state in states for vector in state.vectors[:3]]
        return moved if self._device_weights is None else [*moved, *(state.weights for state in states)]


def _piece_sizes(parts: Mapping[int, StagePart], size: int) -> dict[int, int]:
    """Return a dict from each stage to the number of parameters in a job's pieces there, including the
    parameters that alignment adds. `size` is the number of all parameters of the job."""
    return {
        stage: sum(round_up(piece.computed_range.size) for piece in split_part(part, size))
        for stage, part in parts.items()
    }


def _wait_for_events(events: Events) -> None:
    for event in events:
        torch.cuda.current_stream().wait_event(event)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy all sources to their targets with one call. For small copies, separate calls from Python take
    longer than the transfers."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


@dataclass(slots=True, eq=False)
class Buffer:
    """Device memory in which pieces (consecutive parameters of jobs) are updated by optimizer steps."""

    state: AdamState
    free_event: torch.cuda.Event | None = None
    """CUDA event after which the last content of the buffer has been copied back to the host. None before the
    first use."""


@dataclass(frozen=True, slots=True)
class PieceLanes:
    """Three CUDA streams beside the compute stream, for copies and updates of the pieces (consecutive
    parameters) of optimizer steps.

    Updates have a separate stream, since an update waits while a matrix product occupies every
    multiprocessor, and the next copies must not wait for the update.
    """

    copy_in: torch.cuda.Stream
    """CUDA stream of copies from host to device."""
    update: torch.cuda.Stream
    """CUDA stream of optimizer updates, whose parameters and moments have arrived on the device."""
    copy_out: torch.cuda.Stream
    """CUDA stream of copies from device to host."""


class PieceRing:
    """Device buffers for pieces (consecutive parameters) of optimizer steps, used in rotation: while one
    buffer is updated, another is filled, and a third is copied back to the host."""

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

    def replace_buffers(self, allocate: Callable[[], AdamState]) -> None:
        """Replace the buffers by new ones. `allocate` allocates the state of one buffer. The old buffers must
        not be in use."""
        self.buffers = []
        self.buffers = [Buffer(allocate()) for _ in range(PIECES)]

    def next_buffer(self) -> Buffer:
        buffer = self.buffers[self._turn]
        self._turn = (self._turn + 1) % PIECES
        return buffer

    @contextmanager
    def on_copy_in_stream(self, buffer: Buffer) -> Iterator[None]:
        """Return a context in which work is launched on the stream of copies to the device, after the buffer
        is free. Updates that are launched later wait for these copies."""
        if self.lanes is None:
            yield
            return
        with torch.cuda.stream(self.lanes.copy_in):
            if buffer.free_event is not None:
                self.lanes.copy_in.wait_event(buffer.free_event)
            yield
        self.lanes.update.wait_stream(self.lanes.copy_in)

    def on_update_stream(self) -> AbstractContextManager[object]:
        """Return a context in which work is launched on the stream of updates, if there is a GPU."""
        return nullcontext() if self.lanes is None else torch.cuda.stream(self.lanes.update)

    @contextmanager
    def on_copy_out_stream(self, buffer: Buffer) -> Iterator[None]:
        """Return a context in which work is launched on the stream of copies to the host, after the updates
        launched so far. The buffer is free after these copies."""
        if self.lanes is None:
            yield
            return
        self.lanes.copy_out.wait_stream(self.lanes.update)
        with torch.cuda.stream(self.lanes.copy_out):
            yield
            buffer.free_event = self.lanes.copy_out.record_event()
