"""Windows of a pipeline that hand over: legal over every seam, every sample once, and without a drain."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan_handover import Setting, idle_share
from tests.plan.program.test_check import course
from weftune.plan.cost.time import Line
from weftune.plan.program.check import check
from weftune.plan.program.handover import FINISHED, join_windows, unfinished_work
from weftune.plan.program.prices import PricedCluster
from weftune.plan.program.program import Backward, Forward, IllegalProgram, Recv, Save, Step
from weftune.plan.program.simulate import simulate
from weftune.plan.window.pace import StagePace, pace_prices
from weftune.plan.window.pipeline import PipelineRules, plan_pipeline

PACE = StagePace(Line(0.0, 1.0), Line(0.0, 2.0))
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def rules(stages, capacity=40, spare=1, replicas=1):
    return PipelineRules(capacity, (PACE,) * stages, spare_microbatches=spare, replicas=replicas)


def windows_of(jobs, step, rounds):
    """The next rounds of jobs whose batches are lists of lengths, after the step of each."""
    return [
        course(name, batches[step[name] : step[name] + rounds], step[name], save_at=range(99))
        for name, batches in jobs.items()
    ]


def chain(jobs, rules, rounds):
    """Plan windows until every batch has been planned and nothing is unfinished."""
    programs, left, step = [], FINISHED, dict.fromkeys(jobs, 0)
    while left.batches or any(step[name] < len(batches) for name, batches in jobs.items()):
        program = plan_pipeline(windows_of(jobs, step, rounds), rules, left, hands_over=True)
        step |= {batch.job: batch.step for batch in program.batches}
        left = unfinished_work(program)
        programs.append(program)
    return programs


def peak_in_flight(program, device):
    """The most microbatches between their forward and their backward on a device."""
    held = most = 0
    for action in program.devices[device]:
        held += isinstance(action, Forward) - isinstance(action, Backward)
        most = max(most, held)
    return most


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.lists(lengths, min_size=1, max_size=5), min_size=1, max_size=5),
    room=st.integers(0, 60),
    stages=st.integers(1, 4),
    rounds=st.integers(1, 3),
    spare=st.integers(0, 2),
    replicas=st.integers(1, 3),
)
def test_a_chain_of_windows_is_one_legal_program(jobs, room, stages, rounds, spare, replicas):
    jobs = {str(number): batches for number, batches in enumerate(jobs)}
    programs = chain(jobs, rules(stages, 40 + room, spare, replicas), rounds)
    joined = join_windows(programs)
    check(joined, dict.fromkeys(jobs, 0))
    planned = {(job, step) for job, batches in jobs.items() for step in range(1, len(batches) + 1)}
    for actions in joined.devices:
        made = [(action.job, action.step) for action in actions if isinstance(action, Step)]
        assert sorted(made) == sorted(planned)
    for actions in joined.devices[:stages]:
        made = [(action.job, action.step) for action in actions if isinstance(action, Step)]
        assert [(a.job, a.step) for a in actions if isinstance(a, Save)] == made
    for device in range(stages * replicas):
        assert peak_in_flight(joined, device) <= stages - device % stages + spare


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(st.lists(lengths, min_size=2, max_size=4), min_size=1, max_size=4),
    stages=st.integers(2, 4),
    rounds=st.integers(1, 2),
    replicas=st.integers(1, 2),
)
def test_the_simulator_carries_what_is_in_flight_over_a_seam(jobs, stages, rounds, replicas):
    """Window by window it counts the same passes as in one program, and the same memory at a seam."""
    jobs = {str(number): batches for number, batches in enumerate(jobs)}
    programs = chain(jobs, rules(stages, replicas=replicas), rounds)
    busy, end = 0.0, (0,) * stages * replicas
    for program in programs:
        prices = pace_prices(program.microbatches, (PACE,) * stages)
        timeline = simulate(program, prices, PricedCluster(stages * replicas))
        assert tuple(levels[0].bytes for levels in timeline.memory) == end
        end = tuple(levels[-1].bytes for levels in timeline.memory)
        busy += sum(timeline.busy_fractions()) * timeline.makespan
    assert end == (0,) * stages * replicas
    rows = sum(sum(map(sum, batches)) for batches in jobs.values())
    assert busy == pytest.approx(stages * rows * 3)


JOBS = {str(number): [[20, 20], [15, 25], [30, 10]] for number in range(4)}


def test_a_window_that_evaluates_scores_or_has_no_batch_of_its_own_drains():
    first = plan_pipeline(windows_of(JOBS, dict.fromkeys(JOBS, 0), 1), rules(3), FINISHED, hands_over=True)
    left = unfinished_work(first)
    assert left.batches
    assert any(one.arrival(3) for one in left.progress)
    evaluating = [
        replace(one, evaluation=one.batches[0].samples, evaluation_steps=frozenset({2}))
        for one in windows_of(JOBS, dict.fromkeys(JOBS, 1), 2)
    ]
    assert unfinished_work(plan_pipeline(evaluating, rules(3), left, hands_over=True)) == FINISHED
    empty = windows_of(JOBS, dict.fromkeys(JOBS, 1), 0)
    finishing = plan_pipeline(empty, rules(3), left, hands_over=True)
    assert unfinished_work(finishing) == FINISHED
    assert {(one.job, one.step) for one in finishing.batches} == {(one.job, one.step) for one in left.batches}
    scoring = [replace(one, scored_samples=one.batches[0].samples) for one in windows_of(JOBS, left.steps, 1)]
    check(join_windows([first, plan_pipeline(scoring, rules(3), left, hands_over=False)]))


@pytest.mark.parametrize("how", ["a forward again", "a receive again", "without a receive", "another Step"])
def test_the_checker_refuses_a_seam_at_which_devices_disagree(how):
    first = plan_pipeline(windows_of(JOBS, dict.fromkeys(JOBS, 0), 1), rules(3), FINISHED, hands_over=True)
    left = unfinished_work(first)
    second = plan_pipeline(windows_of(JOBS, left.steps, 1), rules(3), left, hands_over=True)
    lists = [list(actions) for actions in second.devices]
    match how:
        case "a forward again":
            number = next(n for n, one in enumerate(left.progress) if one.is_in_flight(1, 3))
            lists[1].insert(0, Forward(number, 1))
        case "a receive again":
            number, arrival = next(
                (n, one.arrival(3)) for n, one in enumerate(left.progress) if one.arrival(3)
            )
            stage, payload = arrival
            lists[stage].insert(0, Recv(number, stage, payload, stage + (1 if payload == "gradient" else -1)))
        case "without a receive":
            lists[1] = [one for one in lists[1] if not isinstance(one, Recv)]
        case "another Step":
            lists[2].remove(next(one for one in lists[2] if isinstance(one, Step)))
    with pytest.raises(IllegalProgram):
        check(replace(second, devices=tuple(map(tuple, lists))))


@pytest.mark.slow
def test_windows_that_hand_over_wait_less_than_windows_that_drain():
    setting = Setting(stages=4, jobs=4, rounds_in_all=8)
    assert idle_share(setting, rounds=2, hands_over=True) < 0.8 * idle_share(
        setting, rounds=2, hands_over=False
    )
