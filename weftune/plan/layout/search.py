"""Search for the fastest way to stream a base: its stages, which of them stay resident, and the slots.

A stage is consecutive layers. A resident stage stays on its device; the others are loaded into slots of
device memory. A candidate for these choices is called a draft. On one device, the search starts with stages
of equal size among which resident ones are spread, with the partition that `search_partition` finds for
Mobius's recurrence, and with Mobius's largest and smallest stages. Over several workers, it starts with
stages of equal size, as many of them resident as fit. The best drafts are then improved by small changes.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, permutations

from weftune.errors import PlanError
from weftune.plan.cost.estimate import LayerCost
from weftune.plan.layout.mobius_partition import largest_stages, search_partition, smallest_stages
from weftune.plan.layout.mobius_step import Host, StreamPartition
from weftune.plan.layout.need import LayoutDraft, StreamCase

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Numbers of layers per stage that are tried in the search for the stages of a streamed base."""
SLOTS = range(1, 5)
STARTS = 4
"""Number of the best candidate layouts that are improved by small changes. The best candidate of every kind,
such as every number of slots (places for streamed stages), is improved too."""
QUICK = 16
"""Maximum number of candidate layouts with which the search on one device starts."""
CHANGES = 2000
"""Maximum number of small changes that are tried in all starting candidates together, and again in the best
result. A time limit would make the plan depend on the clock."""
PREFIXES = 2000
"""Maximum number of prefixes (first stages of a partition) that the search for a partition by the Mobius
paper's time formula examines."""
HIDDEN = 0.005
"""Minimum fraction of a round (one global batch of every job) for which devices must wait before the
partition of the Mobius paper, which reduces waits, is tried."""
CLOSE = 1 - 1e-9
"""A time counts as shorter than another if their ratio is at most this number. Ratios closer to 1 are
attributed to rounding errors."""


@dataclass(frozen=True, slots=True)
class EvaluatedDraft:
    """A candidate layout of a streamed base, with its predicted time and the bytes by which it exceeds
    memory."""

    case: StreamCase
    draft: LayoutDraft
    excess_bytes: int
    """Bytes by which the layout exceeds the available memory."""
    seconds: float
    """Predicted seconds of a round (one global batch of every job), or infinity if the layout does not fit in
    memory."""

    @property
    def sort_key(self) -> tuple[int, float]:
        return self.excess_bytes, self.seconds

    def is_better_than(self, other: EvaluatedDraft) -> bool:
        """Return whether this layout is faster than `other` by more than a rounding error or, if one of the
        two does not fit in memory, whether this one exceeds memory by less."""
        if self.excess_bytes or other.excess_bytes:
            return self.excess_bytes < other.excess_bytes
        return self.seconds < other.seconds * CLOSE


def search_layouts(cases: Iterable[StreamCase]) -> EvaluatedDraft | None:
    """Return the fastest layout found for any of the streaming problems `cases`, with preference to earlier
    ones among equals. Return None if no layout fits in memory."""
    starts = _select_diverse([found for case in cases for found in _starting_drafts(case)])
    if not starts:
        return None
    tries = CHANGES // len(starts)
    best = _best_draft([_improve_draft(found, tries) for found in starts])
    if best.excess_bytes:
        return None
    if best.case.workers == 1 and best.case.waiting_fraction(best.draft) > HIDDEN:
        partitioned = [_evaluate_draft(best.case, draft) for draft in _partition_drafts(best.case)]
        best = _best_draft(
            [best, *(_improve_draft(found, tries) for found in partitioned if not found.excess_bytes)]
        )
    return _improve_draft(best, CHANGES)


def _best_draft(evaluated_drafts: Sequence[EvaluatedDraft]) -> EvaluatedDraft:
    """Return the best of the evaluated layouts, and the first among equally good ones."""
    least = min(evaluated_drafts, key=lambda one: one.sort_key)
    return next(one for one in evaluated_drafts if not least.is_better_than(one))


def _evaluate_draft(case: StreamCase, draft: LayoutDraft) -> EvaluatedDraft:
    excess = case.excess_bytes(draft)
    return EvaluatedDraft(case, draft, excess, math.inf if excess else case.fitting_seconds(draft))


def _starting_drafts(case: StreamCase) -> list[EvaluatedDraft]:
    """Return the candidate layouts with which the search starts. With several workers, some may not fit in
    memory."""
    if case.workers == 1:
        return _fastest_starting_drafts(case)
    return [_evaluate_draft(case, draft) for draft in filled_drafts(case)]


def fits_any(case: StreamCase) -> bool:
    """Return whether any of the layouts with which the search starts fits in memory. Layouts that need little
    memory are tried first."""
    drafts = chain(least_memory_drafts(case), even_drafts(case), mobius_drafts(case))
    return any(map(case.fits, drafts))


def _fastest_starting_drafts(case: StreamCase) -> list[EvaluatedDraft]:
    """Return the fastest candidate layouts with which to start the search on one device, at most `QUICK`.
    Candidates whose compute time alone is too long are not evaluated."""
    drafts = dict.fromkeys((*even_drafts(case), *least_memory_drafts(case), *mobius_drafts(case)))
    fitting = [draft for draft in drafts if case.fits(draft)]
    least = {sizes: case.compute_seconds(sizes) for sizes in {draft.layer_counts for draft in fitting}}
    best: list[EvaluatedDraft] = []
    for draft in sorted(fitting, key=lambda draft: least[draft.layer_counts]):
        if len(best) == QUICK and least[draft.layer_counts] >= best[-1].seconds:
            break
        insort(best, _evaluate_draft(case, draft), key=lambda one: one.seconds)
        del best[QUICK:]
    return best


def _select_diverse(evaluated_drafts: Sequence[EvaluatedDraft]) -> list[EvaluatedDraft]:
    """Return the best `STARTS` candidate layouts and the best one of every kind (see `_draft_kind`), in their
    original order."""
    ranked = sorted(range(len(evaluated_drafts)), key=lambda number: evaluated_drafts[number].sort_key)
    firsts: dict[object, int] = {}
    for number in ranked:
        firsts.setdefault(_draft_kind(evaluated_drafts[number]), number)
    return [evaluated_drafts[number] for number in sorted({*ranked[:STARTS], *firsts.values()})]


def _draft_kind(evaluated: EvaluatedDraft) -> object:
    """Return a key that is equal for candidate layouts of the same kind. On one device, such layouts have the
    same capacity, number of slots (places for streamed stages) and choice of what is in host memory; over
    several workers, they have the same number of stages."""
    case, draft = evaluated.case, evaluated.draft
    return (
        (case.capacity, case.adapters_travel, draft.slot_counts)
        if case.workers == 1
        else len(draft.layer_counts)
    )


# -- starting points ------------------------------------------------------------------------------------


def even_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with stages of equal size (the last one may differ). As many stages as fit are
    resident, spread evenly among the streamed ones."""
    count = case.shape.layers
    for last in (one for one in SIZES if one < count):
        for size in SIZES:
            inner = _even_sizes(count - last, math.ceil((count - last) / size))
            for slots in SLOTS[: len(inner) + 1]:
                yield from _spread_residents(case, (*inner, last), slots)
    yield from _spread_residents(case, (count,), 1)


def least_memory_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with stages of equal size, all of which are streamed through one slot (place in
    device memory) per device. Such layouts need the least memory."""
    for count in _stage_counts(case):
        yield _streamed_draft(_even_sizes(case.shape.layers, count), 1, case.workers)


def _stage_counts(case: StreamCase) -> list[int]:
    """Return the numbers of stages that the search tries. With several workers, each number rounded up to a
    multiple of the number of workers is tried as well."""
    layers, workers = case.shape.layers, case.workers
    counts = dict.fromkeys([workers] if workers > 1 else [])
    for size in SIZES:
        count = max(workers, math.ceil(layers / size))
        whole = math.ceil(count / workers) * workers
        counts |= dict.fromkeys(one for one in (whole, count) if one <= layers)
    return list(counts)


def _streamed_draft(sizes: Sequence[int], slots: int, workers: int) -> LayoutDraft:
    """Return a candidate layout with stages of these sizes, all streamed through `slots` slots (places in
    device memory) on each worker."""
    return LayoutDraft(tuple(sizes), (False,) * len(sizes), (slots,) * workers)


def _even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    ends = (round(layers * number / stages) for number in range(stages + 1))
    return tuple(stop - start for start, stop in pairwise(ends))


def _spread_residents(case: StreamCase, sizes: tuple[int, ...], slots: int) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with as many resident stages as fit, spread evenly. The last stage, which may
    be larger than a slot (the place of a streamed stage) if it is resident, is streamed in some candidates
    and resident in others."""
    for ending in ((), (True,)):
        others = len(sizes) - len(ending)
        most = others
        for phase in sorted({0, others // 2}):
            draft = LayoutDraft(sizes, (*_resident_flags(others, most, phase), *ending), (slots,))
            while most and (excess := case.device_bytes(draft) - case.device.budget_bytes) > 0:
                # No stage takes more than the largest: at least this many cannot stay.
                most = max(0, most - math.ceil(excess / (max(sizes) * case.memory.loaded_layer_bytes)))
                draft = LayoutDraft(sizes, (*_resident_flags(others, most, phase), *ending), (slots,))
            yield draft
            most = min(others, most + 1)


def _resident_flags(stages: int, resident_count: int, phase: int) -> tuple[bool, ...]:
    """Return, for each stage, whether it is resident. The `resident_count` resident stages are spread evenly,
    and `phase` shifts their positions."""
    return tuple((number * resident_count + phase) % stages < resident_count for number in range(stages))


def mobius_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with two partitions of the Mobius paper: the largest stages that fit, and
    stages of one layer."""
    yield from largest_drafts(case)
    yield from smallest_drafts(case)


def largest_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    with suppress(PlanError):
        yield from _partition_to_drafts(largest_stages(_layer_costs(case), _make_host(case)))


def smallest_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    with suppress(PlanError):
        yield from _partition_to_drafts(smallest_stages(_layer_costs(case), _make_host(case)))


def _partition_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with the partition that is fastest by the Mobius paper's time formula. If the
    slots (places for streamed stages) leave too little memory for the resident stages of this partition, some
    of these are streamed."""
    with suppress(PlanError):
        microbatches = math.ceil(case.round_tokens / case.capacity)
        found = search_partition(
            _layer_costs(case), _make_host(case), microbatches, PREFIXES, starts=1
        ).partition
        for draft in _partition_to_drafts(found):
            yield _stream_stages_until_fit(case, draft)


def _partition_to_drafts(partition: StreamPartition) -> Iterator[LayoutDraft]:
    sizes = tuple(stop - start for start, stop in pairwise(partition.cuts))
    for slots in SLOTS:
        yield LayoutDraft(sizes, partition.resident_stages, (slots,))


def _stream_stages_until_fit(case: StreamCase, draft: LayoutDraft) -> LayoutDraft:
    """Return the layout with so few resident stages that it fits on the device. As long as it does not fit,
    the middle one of the resident stages becomes streamed."""
    while case.device_bytes(draft) > case.device.budget_bytes and any(draft.resident_stages):
        stay = [number for number, stays in enumerate(draft.resident_stages) if stays]
        draft = _toggle_resident(draft, stay[len(stay) // 2])
    return draft


def _layer_costs(case: StreamCase) -> list[LayerCost]:
    microbatches = math.ceil(case.round_tokens / case.capacity)
    once = case.layer_seconds / microbatches
    kept = case.memory.kept_bytes + _ring_bytes_per_layer(case)
    layer = LayerCost(
        "layer",
        once,
        (1.0 + case.device.backward_ratio) * once,
        case.memory.loaded_layer_bytes,
        kept_bytes=kept,
    )
    return [layer] * case.shape.layers


def _make_host(case: StreamCase) -> Host:
    ring = case.memory.ring_bytes(1) - _ring_bytes_per_layer(case)
    memory, device = case.memory, case.device
    state = 0 if case.adapters_travel else memory.state_bytes
    fixed = (
        device.process_bytes
        + device.slack_bytes
        + memory.weight_bytes(0, 0, 1)
        + state
        + memory.transfer_bytes
    )
    room = max(0, device.budget_bytes - fixed - ring)
    return Host(1, room, case.link_bandwidth, memory.stage_input_bytes)


def _ring_bytes_per_layer(case: StreamCase) -> int:
    """Return the maximum bytes that one more layer in a stage adds to the buffers for optimizer steps."""
    return case.memory.ring_bytes(2) - case.memory.ring_bytes(1)


# -- starting points over several workers ------------------------------------------------------------------


def filled_drafts(case: StreamCase) -> Iterator[LayoutDraft]:
    """Yield candidate layouts over several workers, with stages of equal size. On each worker, as many stages
    as fit are resident."""
    for count in _stage_counts(case):
        for slots in SLOTS:
            if slots <= math.ceil(count / case.workers):
                yield _fill_worker_slots(case, _even_sizes(case.shape.layers, count), slots)


def _fill_worker_slots(case: StreamCase, sizes: Sequence[int], slots: int) -> LayoutDraft:
    """Return a candidate layout in which each worker has as many slots (places for streamed stages) as fit,
    at most `slots`, and then as many resident stages as fit, spread evenly among its stages."""
    draft = _streamed_draft(sizes, slots, case.workers)
    for worker in range(case.workers):
        own = range(worker, len(sizes), case.workers)
        most = min(slots, len(own))
        fewer = (_set_slot_count(draft, worker, count) for count in range(most, 0, -1))
        draft = next(
            (one for one in fewer if _fits_on_worker(case, one, worker)), _set_slot_count(draft, worker, 1)
        )
        for count in range(1, len(own) + 1):
            stay = {stage: place * count % len(own) < count for place, stage in enumerate(own)}
            more = replace(
                draft, resident_stages=tuple(stay.get(*one) for one in enumerate(draft.resident_stages))
            )
            if not _fits_on_worker(case, more, worker):
                break
            draft = more
    return draft


def _fits_on_worker(case: StreamCase, draft: LayoutDraft, worker: int) -> bool:
    return all(
        one.worker_bytes(draft, worker) <= case.device.budget_bytes for one in (case, *case.later_cases)
    )


# -- the descent -----------------------------------------------------------------------------------------


def _improve_draft(evaluated: EvaluatedDraft, max_tries: int) -> EvaluatedDraft:
    """Return a locally optimal layout. The first change that saves time, or frees memory without costing
    time, is applied, repeatedly, until no change helps or `max_tries` changes have been tried."""
    case, best = evaluated.case, evaluated
    room = case.device_bytes(best.draft)
    better: EvaluatedDraft | None = best
    while better:
        best, better = better, None
        for change in islice(_neighbouring_drafts(best), max(0, max_tries)):
            max_tries -= 1
            changed = _evaluate_draft(case, change)
            frees = not best.is_better_than(changed) and case.device_bytes(change) < room
            if changed.is_better_than(best) or frees:
                better, room = changed, case.device_bytes(change)
                break
    return best


def _neighbouring_drafts(evaluated: EvaluatedDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts that differ a little from the given one, the most promising kinds of changes
    first."""
    draft = evaluated.draft
    yield from _drafts_with_other_residents(draft)
    if evaluated.case.workers == 1:
        yield from _drafts_with_other_boundaries(draft)
        yield from _drafts_trading_slots(draft)
        yield from _drafts_with_other_orders(draft)
    else:
        yield from _drafts_with_other_sizes(evaluated)


def _drafts_with_other_residents(draft: LayoutDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with one resident stage more or less, with one slot (place for a streamed
    stage) more or less, or with a resident stage exchanged for a streamed stage of the same worker."""
    stages, workers = range(len(draft.resident_stages)), len(draft.slot_counts)
    for number in stages:
        yield _toggle_resident(draft, number)
    for worker, count in enumerate(draft.slot_counts):
        for slots in (count - 1, count + 1):
            if slots in SLOTS:
                yield _set_slot_count(draft, worker, slots)
    for number in stages:
        for other in stages[number + workers :: workers]:
            if draft.resident_stages[number] != draft.resident_stages[other]:
                yield _toggle_resident(_toggle_resident(draft, number), other)


def _drafts_with_other_boundaries(draft: LayoutDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with one boundary between stages moved, removed or added."""
    pairs = range(len(draft.layer_counts) - 1)
    for number in pairs:
        one, other = draft.layer_counts[number : number + 2]
        stay = draft.resident_stages[number : number + 2]
        if other > 1:
            yield _replace_stages(draft, number, 2, (one + 1, other - 1), stay)
        if one > 1:
            yield _replace_stages(draft, number, 2, (one - 1, other + 1), stay)
    for number in pairs:
        for stays in set(draft.resident_stages[number : number + 2]):
            yield _replace_stages(draft, number, 2, (sum(draft.layer_counts[number : number + 2]),), (stays,))
    for number, (size, stays) in enumerate(zip(draft.layer_counts, draft.resident_stages, strict=True)):
        for part in range(1, size):
            for both in {(stays, stays), (True, False), (False, True)}:
                yield _replace_stages(draft, number, 1, (part, size - part), both)


def _drafts_trading_slots(draft: LayoutDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts in which one slot (place for a streamed stage) is removed to make one more
    stage resident, or added by making a resident stage streamed. In others, a slot is removed to merge two
    stages into a resident one."""
    for number, stays in enumerate(draft.resident_stages):
        slots = draft.slot_counts[0] + (1 if stays else -1)
        if slots in SLOTS:
            yield _set_slot_count(_toggle_resident(draft, number), 0, slots)
    if (fewer := draft.slot_counts[0] - 1) in SLOTS:
        for number in range(len(draft.layer_counts) - 1):
            both = sum(draft.layer_counts[number : number + 2])
            yield _set_slot_count(_replace_stages(draft, number, 2, (both,), (True,)), 0, fewer)


def _drafts_with_other_orders(draft: LayoutDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts with one stage moved to another position."""
    for taken, (size, stays) in enumerate(zip(draft.layer_counts, draft.resident_stages, strict=True)):
        rest = _replace_stages(draft, taken, 1, (), ())
        for place in range(len(draft.layer_counts)):
            if place != taken:
                yield _replace_stages(rest, place, 0, (size,), (stays,))


def _drafts_with_other_sizes(evaluated: EvaluatedDraft) -> Iterator[LayoutDraft]:
    """Yield candidate layouts over several workers with a boundary between stages moved, removed or added, or
    with one layer moved to a distant stage. Resident stages are chosen anew, since stages may have moved to
    other workers."""
    case, sizes, slots = evaluated.case, evaluated.draft.layer_counts, max(evaluated.draft.slot_counts)
    for number, (one, other) in enumerate(pairwise(sizes)):
        before, after = sizes[:number], sizes[number + 2 :]
        for between in ((one + 1, other - 1), (one - 1, other + 1), (one + other,)):
            if min(between) > 0 and len(sizes) - 2 + len(between) >= case.workers:
                yield _fill_worker_slots(case, (*before, *between, *after), slots)
    for number, size in enumerate(sizes):
        for part in range(1, size):
            yield _fill_worker_slots(case, (*sizes[:number], part, size - part, *sizes[number + 1 :]), slots)
    for giver, taker in permutations(range(len(sizes)), 2):
        if sizes[giver] > 1 and abs(giver - taker) > 1:
            changes = {giver: sizes[giver] - 1, taker: sizes[taker] + 1}
            yield _fill_worker_slots(case, [changes.get(at, size) for at, size in enumerate(sizes)], slots)


def _replace_stages(
    draft: LayoutDraft,
    number: int,
    removed_stages: int,
    sizes: tuple[int, ...],
    resident_stages: tuple[bool, ...],
) -> LayoutDraft:
    """Return the layout with `removed_stages` consecutive stages, from stage `number` on, replaced by stages
    of these sizes."""
    after = number + removed_stages
    return LayoutDraft(
        (*draft.layer_counts[:number], *sizes, *draft.layer_counts[after:]),
        (*draft.resident_stages[:number], *resident_stages, *draft.resident_stages[after:]),
        draft.slot_counts,
    )


def _toggle_resident(draft: LayoutDraft, number: int) -> LayoutDraft:
    resident = draft.resident_stages
    return replace(draft, resident_stages=(*resident[:number], not resident[number], *resident[number + 1 :]))


def _set_slot_count(draft: LayoutDraft, worker: int, count: int) -> LayoutDraft:
    return replace(draft, slot_counts=(*draft.slot_counts[:worker], count, *draft.slot_counts[worker + 1 :]))
