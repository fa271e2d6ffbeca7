"""What the search for a stream starts from, and which small changes it tries."""

from dataclasses import replace

import pytest

from tests.cases import slow_but
from tests.plan.stream_cases import NEVER, base, gpu, job
from weftune.plan.layout.need import LayoutDraft, StreamCase
from weftune.plan.layout.search import EvaluatedDraft, _neighbouring_drafts, filled_drafts, largest_drafts

S, R = False, True
"""A stage that is streamed, and one that is resident."""


def case(workers=1, travels=False, layers=6, budget=NEVER):
    jobs = (job("a", 6000), job("b", 3000))
    return StreamCase(base(layers), jobs, gpu(budget), 100, 40, adapters_travel=travels, workers=workers)


def changes(found_case, draft):
    return list(_neighbouring_drafts(EvaluatedDraft(found_case, draft, 0, 1.0)))


# -- starting points ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", slow_but([1, 2, 3], [3]))
def test_the_largest_stages_take_the_memory_to_the_byte(size):
    """What Steps of adapters that travel pass through is counted once, and once more for each layer."""
    roomy = case(travels=True)
    even = LayoutDraft((size,) * (6 // size), (S,) * (6 // size), (1,))
    need = roomy.device_bytes(even)
    assert next(largest_drafts(case(travels=True, budget=need))).layer_counts == even.layer_counts
    for fewer in largest_drafts(case(travels=True, budget=need - 1)):
        assert max(fewer.layer_counts) < size


@pytest.mark.parametrize("workers", [2, 3])
def test_where_memory_suffices_every_stage_of_every_worker_stays(workers):
    drafts = list(filled_drafts(case(workers)))
    assert {len(draft.layer_counts) for draft in drafts} >= {workers, 6}
    assert all(all(draft.resident_stages) for draft in drafts)


def test_no_worker_has_more_slots_than_stages_and_no_start_is_tried_twice():
    drafts = list(filled_drafts(case(2)))
    assert len(set(drafts)) == len(drafts)
    for draft in drafts:
        assert max(draft.slot_counts) <= -(-len(draft.layer_counts) // 2)


def test_a_worker_with_less_room_has_fewer_residents():
    roomy = case(2)
    half = LayoutDraft((1,) * 6, (R, R, S, S, S, S), (1, 1))
    tight = case(2, budget=roomy.device_bytes(half))
    (start, *_) = (draft for draft in filled_drafts(tight) if len(draft.layer_counts) == 6)
    assert start.slot_counts == (1, 1)
    assert [sum(start.resident_stages[worker::2]) for worker in (0, 1)] == [1, 1]


# -- changes --------------------------------------------------------------------------------------------


def test_every_change_keeps_all_layers_and_no_stage_is_empty():
    for workers, slots in ((1, (2,)), (2, (1, 2))):
        draft = LayoutDraft((1, 2, 3), (S, R, S), slots)
        for change in changes(case(workers), draft):
            assert sum(change.layer_counts) == 6
            assert min(change.layer_counts) >= 1
            assert len(change.layer_counts) == len(change.resident_stages) >= workers
            assert len(change.slot_counts) == workers
            assert change != draft


def test_on_one_device_every_small_change_of_a_draft_is_tried():
    found = changes(case(layers=3), LayoutDraft((1, 2), (S, R), (2,)))
    assert set(found) == {
        # another resident, or a slot more or fewer
        LayoutDraft((1, 2), (R, R), (2,)),
        LayoutDraft((1, 2), (S, S), (2,)),
        LayoutDraft((1, 2), (R, S), (2,)),
        LayoutDraft((1, 2), (S, R), (1,)),
        LayoutDraft((1, 2), (S, R), (3,)),
        # a boundary moved, removed or added
        LayoutDraft((2, 1), (S, R), (2,)),
        LayoutDraft((3,), (S,), (2,)),
        LayoutDraft((3,), (R,), (2,)),
        LayoutDraft((1, 1, 1), (S, R, R), (2,)),
        LayoutDraft((1, 1, 1), (S, R, S), (2,)),
        LayoutDraft((1, 1, 1), (S, S, R), (2,)),
        # a resident in place of a slot, or the reverse
        LayoutDraft((1, 2), (R, R), (1,)),
        LayoutDraft((1, 2), (S, S), (3,)),
        LayoutDraft((3,), (R,), (1,)),
        # another order
        LayoutDraft((2, 1), (R, S), (2,)),
    }


def test_over_workers_every_small_change_of_the_sizes_is_tried_with_residents_chosen_anew():
    found_case = case(2, layers=7)
    draft = LayoutDraft((1, 2, 4), (R, R, R), (1, 1))
    sizes = {change.layer_counts for change in changes(found_case, draft)} - {draft.layer_counts}
    moved = {(2, 1, 4), (1, 3, 3), (1, 1, 5), (2, 2, 3)}
    merged = {(3, 4), (1, 6)}
    split = {(1, 1, 1, 4), (1, 2, 1, 3), (1, 2, 2, 2), (1, 2, 3, 1)}
    assert sizes == moved | merged | split
    tight = replace(
        found_case, device=replace(found_case.device, budget_bytes=found_case.device_bytes(draft))
    )
    assert {sum(one.resident_stages) < len(one.resident_stages) for one in changes(tight, draft)} == {
        True,
        False,
    }


def test_there_are_never_fewer_stages_than_workers():
    assert all(
        len(change.layer_counts) == 2
        for change in changes(case(2, layers=2), LayoutDraft((1, 1), (S, S), (1, 1)))
    )


def test_slots_stay_within_those_that_are_tried():
    for slots, others in ((1, {1, 2}), (4, {3, 4})):
        found = changes(case(), LayoutDraft((3, 3), (S, S), (slots,)))
        assert {change.slot_counts[0] for change in found} == others
