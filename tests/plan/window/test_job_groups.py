"""Jobs whose optimizers are in host memory pass in two groups: Steps of one come while the other passes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.program.test_check import course
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Backward, Forward, Step
from weftune.plan.window.rounds import even_groups
from weftune.plan.window.window import plan_window

OFFLOADED = one_device_layout(4, offloads_optimizer=True)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), min_size=1, max_size=20))
def test_every_job_is_in_one_of_two_groups_that_differ_by_no_more_than_a_job(tokens):
    groups = even_groups(tokens, 2)
    assert len(groups) == min(2, len(tokens))
    assert all(groups)
    assert sorted(job for group in groups for job in group) == sorted(tokens)
    sums = [sum(tokens[job] for job in group) for group in groups]
    assert max(sums) - min(sums) <= max(tokens.values()) if len(groups) == 2 else True


def planned(layout, capacity=64):
    courses = [course(name, [lengths] * 3) for name, lengths in LENGTHS.items()]
    return plan_window(courses, layout, capacity)


LENGTHS = {"a": [20, 30, 7], "b": [40, 9], "c": [12, 12, 12, 12], "d": [60]}


def test_microbatches_hold_jobs_of_one_group_and_its_steps_follow_its_last_one():
    program = planned(OFFLOADED)
    groups = even_groups({name: 3 * sum(lengths) for name, lengths in LENGTHS.items()}, 2)
    turns: list[tuple[frozenset[str], set[str]]] = []
    for action in program.actions:
        if isinstance(action, Forward):
            (group,) = [one for one in groups if one & set(program.microbatches[action.microbatch].jobs)]
            if not turns or turns[-1][0] is not group:
                turns.append((group, set()))
            assert not turns[-1][1], "Steps are behind all passes of the group"
        elif isinstance(action, Step):
            turns[-1][1].add(action.job)
    assert [group for group, _ in turns] == groups * 3
    assert all(stepped == group for group, stepped in turns)


def test_with_the_optimizer_on_the_device_all_jobs_share_microbatches():
    program = planned(one_device_layout(4))
    assert len(program.microbatches) <= len(planned(OFFLOADED).microbatches)
    kinds = [type(action) for action in program.actions if isinstance(action, Backward | Step)]
    assert kinds.index(Step) < len(kinds) - 1 - kinds[::-1].index(Backward)


def test_a_single_job_is_planned_as_ever():
    one = [course("a", [[20, 30, 7], [8, 9]])]
    assert plan_window(one, OFFLOADED, 64) == plan_window(one, one_device_layout(4), 64)
