"""Chunks (MuxTune, section 3.5): a job's packed samples are cut into chunks of one size for a pipeline.

A sample that is longer than a chunk continues in the next ones, which read the keys and values of its earlier
chunks. Therefore chunks of one sample run in order and their backwards in the opposite order: on every stage
all forwards of a unit's chunks, then all backwards. Chunks of several jobs run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from weftune.plan.cost.estimate import JobOutline, RowCounts
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.pack.instance import pack
from weftune.plan.program.program import (
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
)
from weftune.plan.studies.placement import Placement
from weftune.plan.studies.scheme import Groups, price_rows, simulate_program
from weftune.plan.window.orders import Passes, Work, alternating_passes, assemble

FLOOR = 64
"""Smallest chunk size: smaller chunks leave a device idle, and read earlier keys and values too often."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Tokens `start` to `stop` of one sample, which lie in one chunk."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    number: int
    pieces: tuple[ChunkPiece, ...]
    read_chunks: tuple[int, ...]
    """Numbers of the chunks whose keys and values this chunk reads, which are the earlier chunks of its first
    sample."""

    @property
    def tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def chunk_size(lengths: Iterable[int], floor: int = FLOOR) -> int:
    """Return the greatest power of two that divides every length, but at least `floor`."""
    common = gcd(*lengths)
    return max(floor, common & -common)


def cut_into_chunks(lengths: Sequence[int], capacity: int, size: int) -> tuple[Chunk, ...]:
    """Return packs of at most `capacity` tokens cut into chunks of `size`, in a valid order."""
    chunks: list[Chunk] = []
    for samples in pack(lengths, capacity):
        for pieces in _cut(samples, lengths, size):
            # The samples of a pack are contiguous, so only the first piece of a chunk can be a continuation.
            earlier = -(-pieces[0].start // size)
            number = len(chunks)
            chunks.append(Chunk(number, pieces, tuple(range(number - earlier, number))))
    return tuple(chunks)


def _cut(samples: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[tuple[ChunkPiece, ...]]:
    """Yield the pieces of each chunk of a pack; only the last chunk may be short."""
    pieces: list[ChunkPiece] = []
    room = size
    for sample in samples:
        start = 0
        while start < lengths[sample]:
            stop = min(start + room, lengths[sample])
            pieces.append(ChunkPiece(sample, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(pieces)
                pieces, room = [], size
    if pieces:
        yield tuple(pieces)


# -- simulation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """The part of a sample that lies in one chunk."""

    job: str
    step: int
    placed: PlacedSample
    start: int
    """Number of tokens of the sample before this slice, whose keys and values the slice reads."""

    @property
    def squares(self) -> int:
        """The slice's part of the sample's squared length: each token attends to all tokens before it."""
        return self.placed.length * (2 * self.start + self.placed.length)


Chain = list[tuple[ChunkSlice, ...]]
"""Chunks that read one another and therefore run in order."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Chains that run side by side: their first chunks together, then their second chunks, and so on."""

    chunks: tuple[tuple[ChunkSlice, ...], ...]
    rows: tuple[int, ...]
    """Rows of each chunk, padding included."""


def chunked_forecast(jobs: Sequence[JobOutline], groups: Groups, size: int, placement: Placement) -> Forecast:
    units = chunk_units(jobs, groups, size, placement.capacity)
    counts = []
    for unit in units:
        for chunk, rows in zip(unit.chunks, unit.rows, strict=True):
            by_job: dict[str, int] = {}
            for one in chunk:
                by_job[one.job] = by_job.get(one.job, 0) + one.placed.length
            counts.append(RowCounts(rows, sum(one.squares for one in chunk), by_job))
    program, prices = chunked_program(units, size, placement), price_rows(counts, jobs, placement)
    return simulate_program(f"chunks of {size}", program, prices, jobs, placement).forecast


def chunk_units(jobs: Sequence[JobOutline], groups: Groups, size: int, capacity: int) -> list[Unit]:
    """Return the units by round and group. The longest chains are first; chains share a unit if they fit."""
    assert capacity % size == 0, "a microbatch holds whole chunks"
    by_name = {job.name: job for job in jobs}
    units: list[Unit] = []
    for step in range(1, max(len(job.batches) for job in jobs) + 1):
        for group in groups:
            chains = [
                chain
                for name in group
                if step <= len(by_name[name].batches)
                for chain in _chains(name, step, by_name[name].batches[step - 1], size, capacity)
            ]
            together: list[Chain] = []
            for chain in sorted(chains, key=len, reverse=True):
                if together and size * sum(map(len, [*together, chain])) > capacity:
                    units.append(_unit(together, size))
                    together = []
                together.append(chain)
            if together:
                units.append(_unit(together, size))
    return units


def _unit(chains: Sequence[Chain], size: int) -> Unit:
    numbers = range(max(map(len, chains)))
    present = [[chain[number] for chain in chains if number < len(chain)] for number in numbers]
    return Unit(
        tuple(tuple(one for chunk in chunks for one in chunk) for chunks in present),
        tuple(size * len(chunks) for chunks in present),
    )


def _chains(job: str, step: int, lengths: Sequence[int], size: int, capacity: int) -> Iterator[Chain]:
    """Yield a job's samples as chains of chunks, none longer than the longest sample needs."""
    if not lengths:
        return
    offsets = [0, *accumulate(lengths)]
    room = min(capacity, -(-max(lengths) // size) * size)
    chain: Chain = []
    for chunk in cut_into_chunks(lengths, room, size):
        if chain and not chunk.read_chunks:
            yield chain
            chain = []
        slices = []
        for piece in chunk.pieces:
            placed = PlacedSample(piece.sample, piece.stop - piece.start, offsets[piece.sample] + piece.start)
            slices.append(ChunkSlice(job, step, placed, piece.start))
        chain.append(tuple(slices))
    if chain:
        yield chain


def chunked_program(units: Sequence[Unit], size: int, placement: Placement) -> Program:
    """Return a program with 1F1B over units, each executed chunk by chunk."""
    slices = [one for unit in units for chunk in unit.chunks for one in chunk]
    batches = tuple(
        GlobalBatch(segment.job, segment.step, segment.samples, segment.tokens)
        for segment in _microbatch(slices).segments
    )
    wide = [_microbatch([one for chunk in unit.chunks for one in chunk]) for unit in units]
    work = Work(placement.capacity, tuple(wide), batches)
    starts = [0, *accumulate(len(unit.chunks) for unit in units)]
    expanded: Passes = []
    for actions in alternating_passes(work, len(placement.stages)):
        here: list[Forward | Backward] = []
        for action in actions:
            assert isinstance(action, Forward | Backward)
            numbers = range(starts[action.microbatch], starts[action.microbatch + 1])
            if isinstance(action, Forward):
                here += [Forward(number, action.stage) for number in numbers]
            else:
                here += [Backward(number, action.stage) for number in reversed(numbers)]
        expanded.append([*here])
    narrow = [
        _microbatch(chunk, rows) for unit in units for chunk, rows in zip(unit.chunks, unit.rows, strict=True)
    ]
    return assemble(Work(placement.capacity, tuple(narrow), batches), expanded, chunk=size)


def _microbatch(slices: Sequence[ChunkSlice], rows: int = 0) -> MicrobatchPlan:
    held: dict[tuple[str, int], list[PlacedSample]] = {}
    for one in slices:
        held.setdefault((one.job, one.step), []).append(one.placed)
    segments = (
        SegmentPlan(job, step, tuple(sorted(placed, key=lambda one: one.offset)))
        for (job, step), placed in held.items()
    )
    return MicrobatchPlan(tuple(segments), rows)
