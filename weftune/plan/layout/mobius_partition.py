"""Partition of layers into stages streamed from host memory: the layers of each stage, and the stages that
stay.

The search is branch and bound over prefixes, layer by layer, from the best result of a local search. It is
exact as long as no level holds more prefixes than the budget allows, which is the case up to eleven layers.
Beyond that, the most promising prefixes are kept, and the result carries a bound that no partition can beat.
The amount to prefetch is not searched: more is never slower under the recurrence, so each prefetch takes the
least of its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from weftune.errors import PlanError
from weftune.plan.cost.layers import LayerCost, StageCost, stage_cost
from weftune.plan.cost.memory import gib
from weftune.plan.layout.mobius_bound import Bounds, Prefix
from weftune.plan.layout.mobius_step import Host, StreamPartition, free_bytes, stages_seconds
from weftune.plan.program.layout import StageLayers

PREFIXES = 200_000
"""Number of prefixes that a search may examine: no time limit, since a plan must not depend on the clock."""
STARTS = 6
"""Number of partitions that the local search starts from."""
CHANGES = 2_000
"""Number of changes that one descent may try."""
CLOSE = 1 - 1e-9
"""Factor that a time must fall below to count as better: smaller gains are rounding errors."""


@dataclass(frozen=True, slots=True)
class StreamedPartition:
    """A partition, its step time, and a lower bound on the step time of any partition."""

    partition: StreamPartition
    seconds: float
    bound: float

    @property
    def proved(self) -> bool:
        return self.bound >= self.seconds


@dataclass(frozen=True, slots=True)
class _StageDraft:
    """A partition during the search: layer boundaries, and a resident bit for each stage."""

    cuts: tuple[int, ...]
    resident: tuple[bool, ...]

    def partition(self) -> StreamPartition:
        bounds = zip(pairwise(self.cuts), self.resident, strict=True)
        return StreamPartition(tuple(StageLayers(start, stop, stays) for (start, stop), stays in bounds))


class _Problem:
    def __init__(self, layers: Sequence[LayerCost], host: Host, microbatches: int) -> None:
        self.layers = layers
        self.host = host
        self.microbatches = microbatches
        self._stages: dict[tuple[int, int], StageCost] = {}

    def stage(self, start: int, stop: int) -> StageCost:
        if (start, stop) not in self._stages:
            self._stages[start, stop] = stage_cost(self.layers, start, stop)
        return self._stages[start, stop]

    def stages(self, draft: _StageDraft) -> list[StageCost]:
        return [self.stage(start, stop) for start, stop in pairwise(draft.cuts)]

    def seconds(self, draft: _StageDraft) -> float:
        return stages_seconds(self.stages(draft), draft.resident, self.host, self.microbatches)

    def excess(self, draft: _StageDraft) -> int:
        """Return the bytes missing on the GPU that lacks most; at most 0 if everything fits."""
        return -min(free_bytes(self.stages(draft), draft.resident, self.host))


def stream(
    layers: Sequence[LayerCost],
    host: Host,
    microbatches: int,
    prefixes: int = PREFIXES,
    starts: int = STARTS,
) -> StreamedPartition:
    """Return the fastest partition found, never slower than `largest_stages` and `smallest_stages`. The local
    search descends from `starts` partitions."""
    problem = _Problem(layers, host, microbatches)
    best = _locally_best(problem, starts)
    return _branch_and_bound(problem, best, prefixes)


def largest_stages(layers: Sequence[LayerCost], host: Host) -> StreamPartition:
    """Return a partition with as many layers per stage as memory holds (Mobius's maximum-stage partition)."""
    return _largest(_Problem(layers, host, 1)).partition()


def smallest_stages(layers: Sequence[LayerCost], host: Host) -> StreamPartition:
    """Return a partition with one layer per stage (Mobius's minimum-stage partition)."""
    problem = _Problem(layers, host, 1)
    draft = _streamed(tuple(range(len(layers) + 1)))
    if problem.excess(draft) > 0:
        raise PlanError(_why_not(problem))
    return draft.partition()


def _streamed(cuts: tuple[int, ...]) -> _StageDraft:
    return _StageDraft(cuts, (False,) * (len(cuts) - 1))


def _largest(problem: _Problem) -> _StageDraft:
    """Fill stages up to a limit, which is lowered until adapter state fits beside them."""
    limit = problem.host.memory_bytes
    while True:
        cuts = [0]
        for layer in range(len(problem.layers)):
            stage = problem.stage(cuts[-1], layer + 1)
            if stage.weight_bytes + stage.kept_bytes > limit:
                if layer == cuts[-1]:
                    raise PlanError(_why_not(problem))
                cuts.append(layer)
        draft = _streamed((*cuts, len(problem.layers)))
        excess = problem.excess(draft)
        if excess <= 0:
            return draft
        limit -= excess


def _why_not(problem: _Problem) -> str:
    smallest = _streamed(tuple(range(len(problem.layers) + 1)))
    rooms = free_bytes(problem.stages(smallest), smallest.resident, problem.host)
    tight = min(range(len(rooms)), key=rooms.__getitem__)
    need = problem.host.memory_bytes - rooms[tight]
    layer = problem.layers[tight]
    own = layer.weight_bytes + layer.kept_bytes
    return (
        f"layer {tight} ({layer.kind}) needs {gib(own)} and {gib(need - own)} of adapter state and "
        f"inputs beside it, "
        f"but a GPU has {gib(problem.host.memory_bytes)}"
    )


def _locally_best(problem: _Problem, starts: int) -> _StageDraft | None:
    """Return the best result of a few descents. None if none of them fits."""
    ranked = sorted(_starts(problem), key=problem.seconds)
    descents = [_descend(problem, draft) for draft in ranked[:starts]]
    best = min(descents, key=problem.seconds, default=None)
    return best if best and problem.seconds(best) < math.inf else None


def _starts(problem: _Problem) -> Iterator[_StageDraft]:
    """Yield even partitions with every number of stages, and Mobius's two plain partitions."""
    count = len(problem.layers)
    for stages in range(1, count + 1):
        cuts = tuple(round(count * number / stages) for number in range(stages + 1))
        yield _streamed(cuts)
        yield _filled(problem, cuts)
    try:
        yield _largest(problem)
    except PlanError:
        return


def _filled(problem: _Problem, cuts: tuple[int, ...]) -> _StageDraft:
    """Make as many stages resident as fit, from the first on."""
    draft = _streamed(cuts)
    for number in range(len(draft.resident)):
        longer = _toggled(draft, number)
        if problem.excess(longer) <= 0:
            draft = longer
    return draft


def _descend(problem: _Problem, draft: _StageDraft) -> _StageDraft:
    """Take the first change that helps, until none does."""
    seconds, tried = problem.seconds(draft), 0
    better: _StageDraft | None = draft
    while better:
        draft, better = better, None
        for change in islice(_changes(draft, problem.host.gpus), CHANGES - tried):
            tried += 1
            changed = problem.seconds(change)
            if changed < seconds * CLOSE:
                better, seconds = change, changed
                break
    return draft


def _changes(draft: _StageDraft, gpus: int) -> Iterator[_StageDraft]:
    """Yield drafts with one boundary moved, removed or added, one resident bit flipped, or a bit passed to
    another stage."""
    cuts, resident = draft.cuts, draft.resident
    for number in range(1, len(cuts) - 1):
        for cut in (cuts[number] - 1, cuts[number] + 1):
            if cuts[number - 1] < cut < cuts[number + 1]:
                yield _StageDraft((*cuts[:number], cut, *cuts[number + 1 :]), resident)
    for number in range(len(resident)):
        yield _toggled(draft, number)
    for number in range(len(resident)):
        for other in range(number + 1, min(number + gpus + 1, len(resident))):
            if resident[number] != resident[other]:
                yield _toggled(_toggled(draft, number), other)
    for number in range(1, len(cuts) - 1):
        yield _StageDraft(
            (*cuts[:number], *cuts[number + 1 :]), (*resident[: number - 1], *resident[number:])
        )
    for number, (start, stop) in enumerate(pairwise(cuts)):
        if stop - start > 1:
            middle = (start + stop) // 2
            both = (*resident[:number], resident[number], *resident[number:])
            yield _StageDraft((*cuts[: number + 1], middle, *cuts[number + 1 :]), both)


def _toggled(draft: _StageDraft, number: int) -> _StageDraft:
    resident = draft.resident
    return _StageDraft(draft.cuts, (*resident[:number], not resident[number], *resident[number + 1 :]))


def _branch_and_bound(problem: _Problem, best: _StageDraft | None, prefixes: int) -> StreamedPartition:
    bounds = Bounds(problem.layers, problem.host, problem.microbatches)
    count = len(problem.layers)
    seconds = problem.seconds(best) if best else math.inf
    levels: list[list[Prefix]] = [[bounds.nothing()], *([] for _ in range(count))]
    dropped = math.inf
    for level in range(count):
        # Two children for every layer that the next stage may end at, here and on later levels.
        width = prefixes // ((count - level) * (count - level + 1))
        promising = sorted((p for p in levels[level] if p.seconds < seconds * CLOSE), key=lambda p: p.seconds)
        levels[level] = []
        dropped = min([dropped, *(p.seconds for p in promising[width:])])
        for prefix in promising[:width]:
            prefixes -= 2 * (count - level)
            for child in _children(problem, bounds, prefix):
                if child.seconds >= seconds * CLOSE:
                    continue
                if child.layers < count:
                    levels[child.layers].append(child)
                    continue
                draft = _StageDraft(child.cuts, child.resident)
                exact = problem.seconds(draft)
                if exact < seconds * CLOSE:
                    best, seconds = draft, exact
    if best is None:
        raise PlanError(_why_not(problem))
    return StreamedPartition(best.partition(), seconds, min(dropped, seconds))


def _children(problem: _Problem, bounds: Bounds, prefix: Prefix) -> Iterator[Prefix]:
    for stop in range(prefix.layers + 1, len(problem.layers) + 1):
        stage = problem.stage(prefix.layers, stop)
        streamed = bounds.extend(prefix, stage, resident=False)
        if streamed is None:
            return
        yield streamed
        kept = bounds.extend(prefix, stage, resident=True)
        if kept:
            yield kept
