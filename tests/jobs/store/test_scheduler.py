from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weftune.core.shapes import JobShape
from weftune.jobs.store.scheduler import admit

ROOM = 100


def shape(name: str, size: int, priority: int = 0, order: int = 0) -> JobShape:
    return JobShape(name=name, priority=priority, order=order, trainable=size, longest=1)


def fits(jobs: Sequence[JobShape]) -> str | None:
    need = sum(job.trainable for job in jobs)
    return None if need <= ROOM else f"{need} is over {ROOM}"


def test_priority_goes_before_the_order_of_the_file() -> None:
    waiting = [shape("a", 60, order=0), shape("b", 60, priority=1, order=1)]
    admission = admit(waiting, [], fits)
    assert admission.admitted == ("b",)
    assert admission.waiting == {"a": "120 is over 100"}


def test_among_equals_the_earlier_in_the_file_goes_first() -> None:
    admission = admit([shape("b", 60, order=1), shape("a", 60, order=0)], [], fits)
    assert admission.admitted == ("a",)


def test_those_aboard_take_room() -> None:
    admission = admit([shape("a", 30)], [shape("x", 80)], fits)
    assert admission.admitted == ()
    assert admission.waiting == {"a": "110 is over 100"}


def test_a_small_job_does_not_overtake_a_large_one() -> None:
    waiting = [shape("large", 90, order=0), shape("small", 10, order=1)]
    admission = admit(waiting, [shape("x", 50)], fits)
    assert admission.admitted == ()
    assert admission.waiting["small"] == "it waits behind large, which comes first"


def test_a_job_too_large_to_run_alone_blocks_nobody() -> None:
    admission = admit([shape("huge", 101, priority=9), shape("a", 10, order=1)], [], fits)
    assert admission.admitted == ("a",)
    assert admission.too_large == {"huge": "101 is over 100"}
    assert admission.waiting == {}


SIZES = st.lists(st.tuples(st.integers(1, 120), st.integers(-1, 1)), max_size=8)


@given(SIZES, st.lists(st.integers(1, 40), max_size=2))
def test_every_job_gets_one_answer_and_those_aboard_always_fit(
    waiting: list[tuple[int, int]], aboard: list[int]
) -> None:
    jobs = [shape(f"w{n}", size, priority, n) for n, (size, priority) in enumerate(waiting)]
    present = [shape(f"a{n}", size) for n, size in enumerate(aboard)]
    admission = admit(jobs, present, fits)
    answers = [*admission.admitted, *admission.waiting, *admission.too_large]
    assert sorted(answers) == sorted(job.name for job in jobs)
    assert fits([*present, *(job for job in jobs if job.name in admission.admitted)]) is None
    possible = [
        job for job in sorted(jobs, key=lambda job: (-job.priority, job.order)) if job.trainable <= ROOM
    ]
    assert admission.admitted == tuple(job.name for job in possible[: len(admission.admitted)])
    if not present and possible:
        assert admission.admitted


def test_many_jobs_are_not_counted_again_for_each_of_them() -> None:
    looked: list[int] = []

    def counting(jobs: Sequence[JobShape]) -> str | None:
        looked.append(len(jobs))
        return None if len(jobs) <= 700 else "no room"

    admission = admit([shape(f"job{n}", 1, order=n) for n in range(4096)], [], counting)
    assert len(admission.admitted) == 700
    assert admission.waiting["job700"] == "no room"
    assert admission.waiting["job4095"] == "it waits behind job700, which comes first"
    assert len(looked) <= 20


def _one_by_one(waiting: Sequence[JobShape], aboard: Sequence[JobShape]) -> tuple[str, ...]:
    """The rule as it reads: each in turn, until one does not fit."""
    together, admitted = list(aboard), []
    for job in sorted(waiting, key=lambda job: (-job.priority, job.order)):
        if fits([job]) is not None:
            continue
        if fits([*together, job]) is not None:
            break
        together.append(job)
        admitted.append(job.name)
    return tuple(admitted)


@given(SIZES, st.lists(st.integers(1, 60), max_size=3))
def test_as_many_are_admitted_as_one_by_one(waiting: list[tuple[int, int]], aboard: list[int]) -> None:
    jobs = [shape(f"w{n}", size, priority, n) for n, (size, priority) in enumerate(waiting)]
    present = [shape(f"a{n}", size) for n, size in enumerate(aboard)]
    assert admit(jobs, present, fits).admitted == _one_by_one(jobs, present)
