"""The search for a cut that several workers stream fastest: the stages, which of them stay, how many slots.

It sets out from even stages, with as many of each worker's stages resident as fit; the best of these are then
changed bit by bit. What does not fit may be changed until it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, permutations

from weftune.plan.layout.search import CLOSE, SIZES, SLOTS
from weftune.plan.layout.worker_need import WorkersCase
from weftune.plan.program.layout import Layout, StageLayers

CHANGES = 2000
"""How many changes all descents may try, and the last one again: not seconds, since a plan must not depend on
the clock."""
STARTS = 4
"""So many of the best cuts are changed bit by bit, and the best of every number of stages."""


@dataclass(frozen=True, slots=True)
class FoundLayout:
    case: WorkersCase
    cut: Layout
    excess: int
    """Bytes that it needs and that are not there."""
    seconds: float

    def better_than(self, other: FoundLayout) -> bool:
        """Not by rounding."""
        if self.excess or other.excess:
            return self.excess < other.excess
        return self.seconds < other.seconds * CLOSE


def search(cases: Iterable[WorkersCase]) -> FoundLayout | None:
    """The fastest cut of all cases, of equals that of the first case; None if none fits."""
    starts = _various([_judged(case, cut) for case in cases for cut in even_cuts(case)])
    tries = CHANGES // len(starts)
    best = _best([_descend(one, tries) for one in starts])
    return None if best.excess else _descend(best, CHANGES)


def _judged(case: WorkersCase, cut: Layout) -> FoundLayout:
    return FoundLayout(case, cut, case.excess(cut), case.seconds(cut))


def _best(found: Sequence[FoundLayout]) -> FoundLayout:
    """Of equals the first."""
    best = found[0]
    for one in found:
        if one.better_than(best):
            best = one
    return best


def _various(found: Sequence[FoundLayout]) -> list[FoundLayout]:
    """The best few, and the best of every number of stages, in the order of the cases."""
    ranked = sorted(range(len(found)), key=lambda number: (found[number].excess, found[number].seconds))
    firsts: dict[int, int] = {}
    for number in ranked:
        firsts.setdefault(len(found[number].cut.stages), number)
    return [found[number] for number in sorted({*ranked[:STARTS], *firsts.values()})]


# -- where the search sets out ---------------------------------------------------------------------------


def workers_cut(sizes: Sequence[int], resident: Sequence[bool], slots: int, workers: int) -> Layout:
    """No worker has more slots than stages that come and go."""
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    stages = tuple(
        StageLayers(start, stop, stays) for (start, stop), stays in zip(pairwise(ends), resident, strict=True)
    )
    moving = [sum(not stays for stays in resident[worker::workers]) for worker in range(workers)]
    return Layout(stages, tuple(min(slots, count) for count in moving))


def even_cuts(case: WorkersCase) -> Iterator[Layout]:
    for count in stage_counts(case):
        for slots in SLOTS:
            if slots <= math.ceil(count / case.workers):
                yield _filled(case, even_sizes(case.one.shape.layers, count), slots)


def stage_counts(case: WorkersCase) -> list[int]:
    """Numbers of stages; also such that every worker has as many, where layers suffice for that."""
    layers, workers = case.one.shape.layers, case.workers
    counts: dict[int, None] = {workers: None}
    for size in SIZES:
        count = max(workers, math.ceil(layers / size))
        whole = math.ceil(count / workers) * workers
        counts |= dict.fromkeys(one for one in (whole, count) if one <= layers)
    return list(counts)


def even_sizes(layers: int, stages: int) -> list[int]:
    ends = (round(layers * number / stages) for number in range(stages + 1))
    return [stop - start for start, stop in pairwise(ends)]


def _filled(case: WorkersCase, sizes: Sequence[int], slots: int) -> Layout:
    """On each worker as many of the slots as fit, then as many residents, spread among its stages."""
    cut = workers_cut(sizes, [False] * len(sizes), slots, case.workers)
    for worker in range(case.workers):
        own = range(worker, len(sizes), case.workers)
        fewer = (_with_slots(cut, worker, count) for count in range(cut.slots[worker], 0, -1))
        cut = next((one for one in fewer if _fits(case, one, worker)), _with_slots(cut, worker, 1))
        for count in range(1, len(own) + 1):
            stay = {stage for place, stage in enumerate(own) if place * count % len(own) < count}
            more = _with_residents(cut, worker, stay)
            if not _fits(case, more, worker):
                break
            cut = more
    return cut


def _fits(case: WorkersCase, cut: Layout, worker: int) -> bool:
    return case.worker_bytes(cut.on(worker)) <= case.one.device.budget


def _with_slots(cut: Layout, worker: int, count: int) -> Layout:
    return replace(cut, slots=(*cut.slots[:worker], count, *cut.slots[worker + 1 :]))


def _with_residents(cut: Layout, worker: int, stay: set[int]) -> Layout:
    """Of the worker's stages these; it has a slot as long as something comes, and none too many."""
    stages = tuple(
        replace(held, resident=stage in stay) if stage % cut.workers == worker else held
        for stage, held in enumerate(cut.stages)
    )
    moving = sum(not held.resident for held in stages[worker :: cut.workers])
    slots = (*cut.slots[:worker], min(max(1, cut.slots[worker]), moving), *cut.slots[worker + 1 :])
    return replace(cut, stages=stages, slots=slots)


# -- the descent -----------------------------------------------------------------------------------------


def _descend(found: FoundLayout, tries: int) -> FoundLayout:
    """Take the first change that helps until none does."""
    best = found
    better: FoundLayout | None = best
    while better:
        best, better = better, None
        changes = chain(_other_residents(best.cut), _other_sizes(best))
        for cut in islice(changes, max(0, tries)):
            tries -= 1
            changed = _judged(best.case, cut)
            if changed.better_than(best):
                better = changed
                break
    return best


def _other_sizes(found: FoundLayout) -> Iterator[Layout]:
    """A boundary moved, dropped or added, or a layer handed to a stage further off; who stays is then decided
    anew."""
    sizes = [stage.stop - stage.start for stage in found.cut.stages]
    slots = max(1, *found.cut.slots)
    for number, (one, other) in enumerate(pairwise(sizes)):
        before, after = sizes[:number], sizes[number + 2 :]
        changed = [[one + 1, other - 1], [one - 1, other + 1], [one + other]]
        for between in changed:
            if min(between) > 0 and len(sizes) - 2 + len(between) >= found.cut.workers:
                yield _filled(found.case, [*before, *between, *after], slots)
    for number, size in enumerate(sizes):
        for part in range(1, size):
            yield _filled(found.case, [*sizes[:number], part, size - part, *sizes[number + 1 :]], slots)
    for giver, taker in permutations(range(len(sizes)), 2):
        if sizes[giver] > 1 and abs(giver - taker) > 1:
            changes = {giver: sizes[giver] - 1, taker: sizes[taker] + 1}
            yield _filled(found.case, [changes.get(at, size) for at, size in enumerate(sizes)], slots)


def _other_residents(cut: Layout) -> Iterator[Layout]:
    """One stage more or less stays, or another of its worker instead; a worker has a slot more or less."""
    for worker in range(cut.workers):
        own = cut.on(worker)
        stay = set(own.own) - set(own.streamed)
        for stage in own.own:
            yield _with_residents(cut, worker, stay ^ {stage})
        for stage in stay:
            for other in own.streamed:
                yield _with_residents(cut, worker, stay ^ {stage, other})
        for count in (own.slots - 1, own.slots + 1):
            if 1 <= count <= len(own.streamed):
                yield _with_slots(cut, worker, count)
