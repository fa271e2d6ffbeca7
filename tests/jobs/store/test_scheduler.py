from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.core.shapes import JobShape
from weftune.jobs.store.scheduler import admit_jobs
from weftune.plan.layout.seats import MAX_OVERTAKES

ROOM = 100


def shape(name: str, size: int, priority: int = 0, order: int = 0) -> JobShape:
    return JobShape(
        name=name, priority=priority, file_position=order, trainable_parameters=size, max_sample_tokens=1
    )


def fits(jobs: Sequence[JobShape]) -> str | None:
    need = sum(job.trainable_parameters for job in jobs)
    return None if need <= ROOM else f"{need} is over {ROOM}"


def test_priority_goes_before_the_order_of_the_file() -> None:
    waiting = [shape("a", 60, order=0), shape("b", 60, priority=1, order=1)]
    admission = admit_jobs(waiting, [], fits)
    assert admission.admitted_names == ("b",)
    assert admission.wait_reasons == {"a": "120 is over 100"}


def test_among_equals_the_earlier_in_the_file_goes_first() -> None:
    admission = admit_jobs([shape("b", 60, order=1), shape("a", 60, order=0)], [], fits)
    assert admission.admitted_names == ("a",)


def test_those_aboard_take_room() -> None:
    admission = admit_jobs([shape("a", 30)], [shape("x", 80)], fits)
    assert admission.admitted_names == ()
    assert admission.wait_reasons == {"a": "110 is over 100"}


def test_the_lowest_priority_aboard_gives_way_to_a_higher_one() -> None:
    attached_jobs = [shape("low", 40, 0, 0), shape("lowest", 40, -1, 1), shape("high", 20, 5, 2)]
    admission = admit_jobs([shape("urgent", 40, 9, 3)], attached_jobs, fits)
    assert admission.admitted_names == ("urgent",)
    assert admission.preempted_by == {"lowest": "urgent"}
    assert admission.wait_reasons == {}


def test_a_job_gives_way_to_the_newcomer_whose_priority_is_nearest_above_its_own() -> None:
    attached_jobs = [shape("low", 40, 0, 0)]
    waiting = [shape("most", 40, 9, 1), shape("more", 40, 5, 2), shape("equal", 20, 0, 3)]
    admission = admit_jobs(waiting, attached_jobs, fits)
    assert admission.admitted_names == ("most", "more", "equal")
    assert admission.preempted_by == {"low": "more"}


def test_equals_never_preempt_each_other() -> None:
    attached_jobs = [shape("late", 60, 1, order=9)]
    admission = admit_jobs([shape("early", 60, 1, order=0)], attached_jobs, fits)
    assert (admission.admitted_names, admission.preempted_by) == ((), {})


def test_nobody_is_sent_away_where_that_makes_no_room() -> None:
    attached_jobs = [shape("equal", 60, 9, 0), shape("low", 10, 0, 1)]
    admission = admit_jobs([shape("urgent", 60, 9, 2)], attached_jobs, fits)
    assert (admission.admitted_names, admission.preempted_by) == ((), {})
    assert admission.wait_reasons == {"urgent": "130 is over 100"}


def test_those_aboard_stay_although_they_are_said_not_to_fit_any_more() -> None:
    attached_jobs = [shape("a", 60, 0, 0), shape("b", 60, 0, 1)]
    admission = admit_jobs([shape("small", 1, 0, 2)], attached_jobs, fits)
    assert (admission.admitted_names, admission.preempted_by) == ((), {})


def test_a_small_job_overtakes_a_large_one_that_does_not_fit() -> None:
    waiting = [shape("large", 90, order=0), shape("small", 10, order=1), shape("other", 90, order=2)]
    admission = admit_jobs(waiting, [shape("x", 50)], fits)
    assert admission.admitted_names == ("small",)
    assert admission.wait_reasons == {
        "large": "150 is over 100",
        "other": "it waits behind large, which comes first",
    }
    assert admission.overtake_counts == {"large": 1, "other": 0}


def test_after_so_many_nobody_overtakes_it_any_more() -> None:
    waiting = [shape("large", 90, order=0), *(shape(f"small{n}", 1, order=n) for n in range(1, 21))]
    admission = admit_jobs(waiting, [shape("x", 50)], fits, {"large": 3})
    assert admission.admitted_names == tuple(f"small{n}" for n in range(1, MAX_OVERTAKES - 2))
    assert admission.overtake_counts["large"] == MAX_OVERTAKES
    assert admission.wait_reasons["small20"] == "it waits behind large, which no job may overtake any more"
    again = admit_jobs(waiting[6:], [shape("x", 50)], fits, admission.overtake_counts)
    assert len(again.admitted_names) == 15, "the large one is gone, and with it what it was owed"
    assert (
        admit_jobs(
            [waiting[0], *waiting[6:]], [shape("x", 50)], fits, admission.overtake_counts
        ).admitted_names
        == ()
    )


def test_a_higher_priority_goes_before_one_that_nobody_may_overtake() -> None:
    waiting = [shape("large", 90, order=0), shape("urgent", 10, priority=1, order=1)]
    admission = admit_jobs(waiting, [shape("x", 50)], fits, {"large": MAX_OVERTAKES})
    assert admission.admitted_names == ("urgent",)
    assert admission.overtake_counts == {"large": MAX_OVERTAKES}


def test_a_job_too_large_to_run_alone_blocks_nobody() -> None:
    admission = admit_jobs([shape("huge", 101, priority=9), shape("a", 10, order=1)], [], fits)
    assert admission.admitted_names == ("a",)
    assert admission.misfit_reasons == {"huge": "101 is over 100"}
    assert admission.wait_reasons == {}


@pytest.mark.parametrize(
    "more", ["trainable_parameters", "max_sample_tokens", "batch_tokens", "mean_weight_count"]
)
def test_a_job_that_takes_more_of_one_thing_only_is_looked_at_by_itself(more: str) -> None:
    """A smaller job that fits does not vouch for a larger one, nor does a larger one that does not fit stop a
    smaller one."""

    def full(jobs: Sequence[JobShape]) -> str | None:
        need = sum(getattr(job, more) for job in jobs)
        return None if need <= ROOM else f"{need} is over {ROOM}"

    small, large = (replace(shape(f"job{need}", 0, order=need), **{more: need}) for need in (ROOM, ROOM + 1))
    assert admit_jobs([small, large], [], full).misfit_reasons == {large.name: "101 is over 100"}
    smaller = replace(small, name="smaller", file_position=ROOM + 2, **{more: 1})
    attached_jobs = [replace(shape("x", 0), **{more: ROOM - 1})]
    assert admit_jobs([small, smaller], attached_jobs, full).admitted_names == ("smaller",)


WAITING = st.lists(st.tuples(st.integers(1, 120), st.integers(-1, 1), st.integers(0, 8)), max_size=8)
ABOARD = st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1)), max_size=4)


def test_a_job_that_waits_for_another_is_not_in_the_queue() -> None:
    late = replace(shape("late", 10, priority=9), source_job="first")
    admission = admit_jobs([late, shape("first", 60, order=1), shape("next", 40, order=2)], [], fits)
    assert admission.admitted_names == ("first", "next")
    assert admission.wait_reasons == {"late": "waits for first"}
    assert admission.overtake_counts == {}


@dataclass
class Places:
    """Who sits where, by the rule as it reads: each in turn."""

    seated: list[JobShape] = field(default_factory=list)
    unseated: list[JobShape] = field(default_factory=list)
    overtaken: dict[str, int] = field(default_factory=dict)


def one_by_one(
    waiting: Sequence[JobShape], attached_jobs: Sequence[JobShape], before: Mapping[str, int]
) -> Places:
    present, places = [job.name for job in attached_jobs], Places()
    possible = [job for job in waiting if fits([job]) is None]
    for job in sorted(
        [*possible, *attached_jobs],
        key=lambda job: (-job.priority, job.name not in present, job.file_position),
    ):
        waits = job.name not in present
        held = waits and any(count >= MAX_OVERTAKES for count in places.overtaken.values())
        comes = [one for one in places.seated if one.name not in present]
        if held or ((waits or comes) and fits([*places.seated, job]) is not None):
            places.unseated.append(job)
            places.overtaken[job.name] = before.get(job.name, 0)
            continue
        places.seated.append(job)
        for name in places.overtaken if waits else ():
            places.overtaken[name] += 1
    return places


def made(
    waiting: Sequence[tuple[int, int, int]], attached_jobs: Sequence[tuple[int, int]]
) -> tuple[list[JobShape], list[JobShape], dict[str, int]]:
    jobs = [shape(f"w{n}", size, priority, 2 * n) for n, (size, priority, _) in enumerate(waiting)]
    present = [shape(f"a{n}", size, priority, 2 * n + 1) for n, (size, priority) in enumerate(attached_jobs)]
    return jobs, present, {f"w{n}": count for n, (_, _, count) in enumerate(waiting)}


@given(WAITING, ABOARD)
def test_seats_are_given_as_one_by_one(
    waiting: list[tuple[int, int, int]], attached_jobs: list[tuple[int, int]]
) -> None:
    jobs, present, before = made(waiting, attached_jobs)
    admission, places = admit_jobs(jobs, present, fits, before), one_by_one(jobs, present, before)
    names = [job.name for job in present]
    assert admission.admitted_names == tuple(job.name for job in places.seated if job.name not in names)
    assert list(admission.preempted_by) == [job.name for job in places.unseated if job.name in names]
    assert admission.overtake_counts == places.overtaken


@given(WAITING, ABOARD)
def test_every_job_gets_one_answer_and_nobody_waits_behind_a_lower_priority(
    waiting: list[tuple[int, int, int]], attached_jobs: list[tuple[int, int]]
) -> None:
    jobs, present, before = made(waiting, attached_jobs)
    admission = admit_jobs(jobs, present, fits, before)
    answers = [*admission.admitted_names, *admission.wait_reasons, *admission.misfit_reasons]
    assert sorted(answers) == sorted(job.name for job in jobs)
    by_name = {job.name: job for job in (*jobs, *present)}
    together = [job for job in present if job.name not in admission.preempted_by]
    together += [by_name[name] for name in admission.admitted_names]
    if fits(present) is None or admission.admitted_names:
        assert fits(together) is None
    for name, other in admission.preempted_by.items():
        assert by_name[other].priority > by_name[name].priority
        assert other in admission.admitted_names
        newcomers = [by_name[one] for one in admission.admitted_names]
        higher = [job for job in together if job.priority >= by_name[name].priority]
        assert fits([*higher, by_name[name]]) is not None, "there was room for it beside those before it"
        assert newcomers
    held = "which no job may overtake any more"
    for name, reason in admission.wait_reasons.items():
        job = by_name[name]
        above = [one for one in together if one.priority >= job.priority]
        assert held in reason or fits([*above, job]) is not None, f"{name} waits behind a lower priority"
    if not present and len(jobs) > len(admission.misfit_reasons):
        assert admission.admitted_names


def test_every_large_job_comes_aboard_however_many_small_ones_come() -> None:
    """A stream of small jobs that each stay for three boundaries, and a large one of the same priority."""
    large, attached_jobs, overtaken = shape("large", 100, order=0), {}, {}
    waiting = {"large": large}
    for boundary in range(1, 40):
        attached_jobs = {name: left - 1 for name, left in attached_jobs.items() if left > 1}
        waiting |= {f"s{boundary}": shape(f"s{boundary}", 20, order=boundary)}
        if boundary == 1:
            del waiting["large"]
        elif boundary == 2:
            waiting["large"] = large
        sizes = [shape(name, 20 if name != "large" else 100, order=0) for name in attached_jobs]
        decision = admit_jobs(list(waiting.values()), sizes, fits, overtaken)
        overtaken = decision.overtake_counts
        for name in decision.admitted_names:
            del waiting[name]
            attached_jobs[name] = 3
        if "large" in attached_jobs:
            break
    assert 1 + MAX_OVERTAKES <= boundary <= 1 + MAX_OVERTAKES + 4


class Counting:
    def __init__(self, most: int) -> None:
        self.most, self.looks = most, 0

    def __call__(self, jobs: Sequence[JobShape]) -> str | None:
        self.looks += 1
        return None if len(jobs) <= self.most else "no room"


def test_many_jobs_are_not_counted_again_for_each_of_them() -> None:
    counting = Counting(700)
    admission = admit_jobs([shape(f"job{n}", 1, order=n) for n in range(4096)], [], counting)
    assert len(admission.admitted_names) == 700
    assert admission.wait_reasons["job700"] == "no room"
    assert admission.wait_reasons["job4095"] == "it waits behind job700, which comes first"
    assert counting.looks <= 20


def test_many_jobs_give_way_without_being_counted_again_for_each_of_them() -> None:
    counting = Counting(700)
    attached_jobs = [shape(f"job{n}", 1, order=n) for n in range(700)]
    urgent = [shape(f"urgent{n}", 1, 9, order=n) for n in range(700, 1000)]
    admission = admit_jobs(urgent, attached_jobs, counting)
    assert (len(admission.admitted_names), len(admission.preempted_by)) == (300, 300)
    assert list(admission.preempted_by) == [f"job{n}" for n in range(400, 700)]
    assert counting.looks <= 20
    counting.looks = 0
    full = admit_jobs([shape(f"job{n}", 1, order=n) for n in range(1000, 5000)], attached_jobs, counting)
    assert (full.admitted_names, full.preempted_by) == ((), {})
    assert counting.looks <= 20


def test_jobs_of_many_sizes_are_looked_at_only_where_they_are_smaller_than_one_that_did_not_fit() -> None:
    looks = 0

    def counting(jobs: Sequence[JobShape]) -> str | None:
        nonlocal looks
        looks += len(jobs) > 1
        return fits(jobs)

    sizes = [20 + (n * 37) % 41 for n in range(1000)]
    admit_jobs([shape(f"w{n}", size, order=n) for n, size in enumerate(sizes)], [shape("x", 81)], counting)
    assert looks <= 40
