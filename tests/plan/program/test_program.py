"""A Program as a value: one list per device, and what is left of it when a job is dead."""

from dataclasses import replace

import pytest

from tests.plan.works import work
from weftune.plan.program.check import check
from weftune.plan.program.program import Forward, Load, Save, Step
from weftune.plan.window.orders import one_forward_one_backward


def test_only_a_program_of_one_device_has_a_single_order():
    assert Step("job0", 1) in one_forward_one_backward(work(1, 1, 2), 1).actions
    with pytest.raises(AssertionError, match="2 devices"):
        _ = one_forward_one_backward(work(1, 1, 2), 2).actions


def test_a_pass_is_counted_once_however_many_stages_it_crosses():
    program = one_forward_one_backward(work(jobs=2, steps=2, microbatches=3), 4)
    assert [action for action, _ in program.forward_passes()] == [Forward(number) for number in range(12)]


def test_without_a_dead_job_a_pipeline_is_still_legal_and_keeps_its_loads():
    program = one_forward_one_backward(work(jobs=3, steps=2, microbatches=2), 3)
    left = program.without("job1")
    check(left)
    assert left.jobs == {"job0", "job2"}
    gone = sum(len(actions) for actions in program.devices) - sum(len(actions) for actions in left.devices)
    # Four microbatches: a pass either way on three stages, two hops either way with both ends; two Steps,
    # each with its Reduce.
    assert gone == 4 * (6 + 8) + 2 * 2 * 3
    streamed = type(left)(left.capacity, left.microbatches, left.batches, ((Load(0),), (), ()), (0, 1, 2))
    assert streamed.without("job0").devices[0] == (Load(0),)


def test_without_the_saves_of_a_job_all_else_stands_on_every_device():
    plain = one_forward_one_backward(work(jobs=2, steps=2, microbatches=2), 3)
    saves = (Save("job0", 2), Save("job1", 2))
    program = replace(plain, devices=tuple((*actions, *saves) for actions in plain.devices))
    left = program.without_saves(frozenset({"job0"}))
    assert left == replace(plain, devices=tuple((*actions, saves[1]) for actions in plain.devices))
    assert program.without_saves(frozenset()) == program


def test_a_batch_is_found_among_thousands_without_looking_at_the_others():
    program = one_forward_one_backward(work(jobs=3, steps=2, microbatches=1), 1)
    compared = []

    class Watched(str):
        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    batches = tuple(replace(batch, job=Watched(batch.job)) for batch in program.batches)
    program = replace(program, batches=batches)
    assert program.batch("job2", 2) is batches[-1]
    assert len(compared) <= 2


def test_several_dead_jobs_are_taken_out_at_once_as_one_after_another():
    program = one_forward_one_backward(work(jobs=4, steps=2, microbatches=2), 2)
    assert program.without("job0", "job2") == program.without("job0").without("job2")
