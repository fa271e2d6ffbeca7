"""Simulation of the jobs' batches in chunks (MuxTune 3.5): the gain from chunks in a pipeline.

Chunks of several jobs run side by side. A chunk reads the keys and values of the chunks before it, so
backwards run in the opposite order: on every stage all forwards of a unit's chunks, then all backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weftune.plan.cost.estimate import JobOutline, RowCounts
from weftune.plan.outlook.forecast import Forecast
from weftune.plan.program.prices import Prices
from weftune.plan.program.program import (
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
)
from weftune.plan.program.simulate import simulate
from weftune.plan.studies.chunk import ChunkPiece, align
from weftune.plan.studies.fit import ClusterCase, Placement
from weftune.plan.studies.forecast import forecast_of
from weftune.plan.studies.priced import stage_rates
from weftune.plan.studies.scheme import Groups
from weftune.plan.window.orders import Passes, Work, alternating_passes, assemble


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """The part of a sample that lies in one chunk."""

    job: str
    step: int
    placed: PlacedSample
    start: int
    """Number of the sample's tokens before it, whose keys and values it reads."""

    @property
    def squares(self) -> int:
        """Its part of the sample's squared length: each token attends to all tokens before it."""
        return self.placed.length * (2 * self.start + self.placed.length)


Chain = list[tuple[ChunkSlice, ...]]
"""Chunks that read one another and therefore run in order."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Chains that run side by side: their first chunks together, then their second chunks, and so on."""

    chunks: tuple[tuple[ChunkSlice, ...], ...]
    rows: tuple[int, ...]
    """Rows of each chunk, padding included."""


@dataclass(frozen=True, slots=True)
class Chunked:
    units: tuple[Unit, ...]
    program: Program
    prices: Prices


def chunked_forecast(
    jobs: Sequence[JobOutline], groups: Groups, size: int, ground: ClusterCase, layout: Placement
) -> Forecast:
    made = chunked(jobs, groups, size, ground, layout)
    timeline = simulate(made.program, made.prices, ground.cluster.priced())
    held = [stage.state_bytes for stage in layout.stages]
    count = len(made.program.microbatches)
    return forecast_of(f"chunks of {size}", timeline, jobs, layout, held, count)


def chunked(
    jobs: Sequence[JobOutline], groups: Groups, size: int, ground: ClusterCase, layout: Placement
) -> Chunked:
    """Return a program with 1F1B over units, each executed chunk by chunk."""
    assert layout.capacity % size == 0, "a microbatch holds whole chunks"
    units = list(_units(jobs, groups, size, layout.capacity))
    batches = _batches(units)
    wide = [_microbatch([one for chunk in unit.chunks for one in chunk]) for unit in units]
    lists = alternating_passes(Work(layout.capacity, tuple(wide), batches), len(layout.stages))
    narrow = [
        _microbatch(chunk, rows) for unit in units for chunk, rows in zip(unit.chunks, unit.rows, strict=True)
    ]
    work = Work(layout.capacity, tuple(narrow), batches)
    program = assemble(work, _expanded(lists, units), chunk=size)
    return Chunked(tuple(units), program, _prices(units, jobs, ground, layout))


def _units(jobs: Sequence[JobOutline], groups: Groups, size: int, capacity: int) -> Iterator[Unit]:
    """Yield units round by round, group by group: longest chains first, side by side while they fit."""
    by_name = {job.name: job for job in jobs}
    for step in range(1, max(len(job.batches) for job in jobs) + 1):
        for group in groups:
            chains = [
                chain
                for name in group
                if step <= len(by_name[name].batches)
                for chain in _chains(name, step, by_name[name].batches[step - 1], size, capacity)
            ]
            yield from _side_by_side(sorted(chains, key=len, reverse=True), size, capacity)


def _side_by_side(chains: Sequence[Chain], size: int, capacity: int) -> Iterator[Unit]:
    together: list[Chain] = []
    for chain in chains:
        if together and size * sum(map(len, [*together, chain])) > capacity:
            yield _unit(together, size)
            together = []
        together.append(chain)
    if together:
        yield _unit(together, size)


def _unit(chains: Sequence[Chain], size: int) -> Unit:
    places = range(max(map(len, chains)))
    present = [[chain[place] for chain in chains if place < len(chain)] for place in places]
    return Unit(
        tuple(tuple(one for chunk in chunks for one in chunk) for chunks in present),
        tuple(size * len(chunks) for chunks in present),
    )


def _chains(job: str, step: int, lengths: Sequence[int], size: int, capacity: int) -> Iterator[Chain]:
    """Yield a job's samples as chains of packs, each no longer than its longest sample needs, so that chains
    stay short."""
    if not lengths:
        return
    offsets = [0, *accumulate(lengths)]
    room = min(capacity, -(-max(lengths) // size) * size)
    chain: Chain = []
    for chunk in align(lengths, room, size).chunks:
        if chain and not chunk.reads:
            yield chain
            chain = []
        chain.append(tuple(_slice(job, step, piece, offsets) for piece in chunk.pieces))
    if chain:
        yield chain


def _slice(job: str, step: int, piece: ChunkPiece, offsets: Sequence[int]) -> ChunkSlice:
    placed = PlacedSample(piece.sample, piece.stop - piece.start, offsets[piece.sample] + piece.start)
    return ChunkSlice(job, step, placed, piece.start)


def _batches(units: Sequence[Unit]) -> tuple[GlobalBatch, ...]:
    """Return the trained slices of every batch, in the order of its tokens."""
    held: dict[tuple[str, int], list[PlacedSample]] = {}
    for unit in units:
        for chunk in unit.chunks:
            for one in chunk:
                held.setdefault((one.job, one.step), []).append(one.placed)
    return tuple(
        GlobalBatch(
            job,
            step,
            tuple(sorted(placed, key=lambda one: one.offset)),
            sum(one.length for one in placed),
        )
        for (job, step), placed in held.items()
    )


def _microbatch(slices: Sequence[ChunkSlice], rows: int = 0) -> MicrobatchPlan:
    held: dict[tuple[str, int], list[PlacedSample]] = {}
    for one in slices:
        held.setdefault((one.job, one.step), []).append(one.placed)
    segments = (
        SegmentPlan(job, step, tuple(sorted(placed, key=lambda one: one.offset)))
        for (job, step), placed in held.items()
    )
    return MicrobatchPlan(tuple(segments), rows)


def _expanded(lists: Passes, units: Sequence[Unit]) -> Passes:
    starts = [0, *accumulate(len(unit.chunks) for unit in units)]
    expanded: Passes = [[] for _ in lists]
    for here, actions in zip(expanded, lists, strict=True):
        for action in actions:
            assert isinstance(action, Forward | Backward)
            numbers = range(starts[action.microbatch], starts[action.microbatch + 1])
            if isinstance(action, Forward):
                here += [Forward(number, action.stage) for number in numbers]
            else:
                here += [Backward(number, action.stage) for number in reversed(numbers)]
    return expanded


def _prices(
    units: Sequence[Unit], jobs: Sequence[JobOutline], ground: ClusterCase, layout: Placement
) -> Prices:
    rates = [
        stage_rates(cut, jobs, ground, speed)
        for cut, speed in zip(layout.stages, ground.speeds, strict=False)
    ]
    passes = []
    for unit in units:
        for chunk, rows in zip(unit.chunks, unit.rows, strict=True):
            by_job: dict[str, int] = {}
            for one in chunk:
                by_job[one.job] = by_job.get(one.job, 0) + one.placed.length
            held = RowCounts(rows, sum(one.squares for one in chunk), by_job)
            passes.append(tuple(rate.price(held) for rate in rates))
    return Prices(tuple(passes), weight_bytes=tuple(stage.weight_bytes for stage in layout.stages))
