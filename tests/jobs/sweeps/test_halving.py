"""Which trials continue from a rung, rest or leave, by the recorded values and never by order of arrival."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.jobs.sweeps.halving import (
    LossTrend,
    Rungs,
    TrialEnd,
    TrialWork,
    expected_saving,
    kept_trial_count,
    mean_weight_spans,
    ordinal_text,
    rung_counts,
    rung_steps,
)
from weftune.jobs.sweeps.spec import Halving, SweepSpec

STEPS = 200


def rungs_of(count, at=(0.1, 0.3), keep=0.34, mode="min", steps=STEPS):
    made = Rungs(SweepSpec(over={}, halving=Halving(at, keep), mode=mode))
    names = [f"t{number}" for number in range(count)]
    made.begin_first_rung(names)
    for name in names:
        made.add_trial(name, steps)
    return made


def decide(rungs):
    while pending := rungs.pending_decisions():
        for decision in pending:
            rungs.apply_decision(decision)


def test_a_trial_rests_at_a_rung_until_all_have_been_evaluated_there_and_the_best_go_on():
    rungs = rungs_of(4, keep=0.5)
    assert {rungs.step_limit(name) for name in rungs.trials} == {20}
    for name, value in (("t3", 1.0), ("t0", 4.0), ("t2", 2.0)):
        assert rungs.awaits_evaluation(name)
        rungs.record_metric(name, 20, value)
        assert not rungs.awaits_evaluation(name)
        assert rungs.pending_decisions() == []
        assert rungs.step_limit(name) == 20
    rungs.record_metric("t1", 20, 3.0)
    (decision,) = rungs.pending_decisions()
    assert (decision.step, decision.kept, decision.left) == (20, ("t3", "t2"), ("t1", "t0"))
    assert rungs.step_limit("t3") == 20, "nothing changes before it is adopted"
    rungs.apply_decision(decision)
    assert (rungs.step_limit("t3"), rungs.step_limit("t2")) == (60, 60)
    assert decision.reason("t1", 20) == "left the sweep at step 20: 3rd of 4, the best 2 continue"
    assert rungs.pending_decisions() == []
    for name, value in (("t2", 1.5), ("t3", 1.6)):
        rungs.record_metric(name, 60, value)
    decide(rungs)
    assert rungs.decisions[-1].reason("t3", 60) == "left the sweep at step 60: 2nd of 2, the best continues"
    assert rungs.step_limit("t2") == STEPS


def test_among_equals_the_first_of_the_file_goes_on_and_what_is_not_finite_is_worst():
    rungs = rungs_of(4, keep=0.5)
    for name, value in (("t3", 1.0), ("t2", 1.0), ("t1", 1.0), ("t0", math.nan)):
        rungs.record_metric(name, 20, value)
    decide(rungs)
    assert rungs.decisions[0].kept == ("t1", "t2")
    assert rungs.decisions[0].left == ("t3", "t0")


def test_with_mode_max_the_highest_go_on():
    rungs = rungs_of(2, keep=0.5, mode="max")
    rungs.record_metric("t0", 20, 0.4)
    rungs.record_metric("t1", 20, 0.5)
    decide(rungs)
    assert rungs.decisions[0].kept == ("t1",)


def test_whoever_failed_counts_among_those_who_began_the_rung_and_as_the_worst():
    rungs = rungs_of(6, keep=0.5)
    for name in ("t0", "t1"):
        rungs.end_trial(name, TrialEnd.FAILED, 7)
    for number in range(2, 6):
        rungs.record_metric(f"t{number}", 20, float(number))
    decide(rungs)
    assert rungs.decisions[0].kept == ("t2", "t3", "t4")
    assert rungs.decisions[0].left == ("t5",)
    assert rungs.decisions[0].reason("t5", 20) == "left the sweep at step 20: 4th of 6, the best 3 continue"
    rungs.end_trial("t2", TrialEnd.LEFT, 40)
    rungs.record_metric("t3", 60, 2.0)
    assert rungs.pending_decisions() == []
    rungs.record_metric("t4", 60, 3.0)
    decide(rungs)
    assert rungs.decisions[1].kept == ("t3", "t4")


def test_a_rung_that_nobody_reaches_alive_is_not_decided():
    rungs = rungs_of(2)
    for name in rungs.trials:
        rungs.end_trial(name, TrialEnd.FAILED, 3)
    assert rungs.pending_decisions() == []
    assert rungs.is_over()
    assert rungs.ranking({}) == []


def test_one_that_its_early_stop_ended_takes_nobodys_place_at_later_rungs_and_is_ranked_at_the_end():
    rungs = rungs_of(4, keep=0.5)
    rungs.end_trial("t0", TrialEnd.FINISHED, 12)
    for number in (1, 2, 3):
        rungs.record_metric(f"t{number}", 20, float(number))
    decide(rungs)
    assert rungs.decisions[0].kept == ("t1", "t2")
    for name, value in (("t1", 1.0), ("t2", 2.0)):
        rungs.record_metric(name, 60, value)
    decide(rungs)
    rungs.end_trial("t1", TrialEnd.FINISHED, STEPS)
    assert rungs.is_over()
    assert rungs.ranking({"t0": 0.5, "t1": 0.7}) == ["t0", "t1"]
    assert rungs.ranking({"t0": 0.5, "t1": 0.7}, {"t0": 0.5}) == ["t1", "t0"]
    assert rungs.ranking({"t0": 0.5, "t1": 0.7}, {"t0": 9.0, "t1": 8.0}) == ["t1", "t0"]


def test_what_became_of_a_trial_later_does_not_change_its_place_at_a_rung():
    """So decisions whose record is lost are made again, by the same values, as they were."""
    rungs = rungs_of(4, keep=0.5)
    for name, value in (("t0", 1.0), ("t1", 2.0), ("t2", 3.0), ("t3", 4.0)):
        rungs.record_metric(name, 20, value)
    decide(rungs)
    rungs.end_trial("t0", TrialEnd.FAILED, 33)
    rungs.record_metric("t1", 60, 2.0)
    decide(rungs)
    rungs.end_trial("t1", TrialEnd.FINISHED, STEPS)
    rebuilt = rungs_of(4, keep=0.5)
    for name, ended in rungs.ended_trials.items():
        rebuilt.end_trial(name, ended.kind, ended.step)
    for name, seen in rungs.values.items():
        for step, value in seen.items():
            rebuilt.record_metric(name, step, value)
    decide(rebuilt)
    assert [one.kept for one in rebuilt.decisions] == [one.kept for one in rungs.decisions]


def test_generations_are_decided_among_themselves():
    rungs = rungs_of(2, keep=0.5)
    rungs.begin_first_rung(["u0", "u1"])
    for name in ("u0", "u1"):
        rungs.add_trial(name, 100)
    for name, step, value in (("t0", 20, 1.0), ("t1", 20, 2.0), ("u0", 10, 9.0), ("u1", 10, 8.0)):
        rungs.record_metric(name, step, value)
    decide(rungs)
    assert [(one.generation, one.kept) for one in rungs.decisions] == [(0, ("t0",)), (1, ("u1",))]


def test_rungs_are_shares_of_a_trials_own_steps_and_before_its_last():
    assert rung_steps(Halving((0.3, 0.1), 0.5), 200) == (20, 60)
    assert rung_steps(Halving((0.1, 0.9), 0.5), 5) == (1, 4)
    assert rung_steps(Halving((0.5,), 0.5), 1) == (0,)
    assert rung_steps(None, 200) == ()


def test_the_quota_is_rounded_up_from_the_decimal_that_was_written():
    assert [kept_trial_count(0.33, n) for n in (24, 8, 3, 1)] == [8, 3, 1, 1]
    assert [kept_trial_count(0.1, n) for n in (10, 11)] == [1, 2]
    assert kept_trial_count(1.0, 7) == 7


def test_ordinals():
    assert [ordinal_text(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip


FATES = st.sampled_from(["goes on"] * 5 + ["fails", "leaves", "stops"])
MOVE = st.tuples(st.integers(0, 4), FATES)


@settings(max_examples=60, deadline=None)
@given(
    trials=st.lists(
        st.lists(st.tuples(st.integers(0, 4), FATES), min_size=3, max_size=3), min_size=1, max_size=9
    ),
    keep=st.sampled_from([0.2, 0.33, 0.5, 0.75]),
    seeds=st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
)
def test_decisions_are_the_same_in_whatever_order_values_arrive(trials, keep, seeds):
    assert play(trials, keep, seeds[0]) == play(trials, keep, seeds[1])


def play(trials, keep, seed):
    """A sweep whose trials have these values and fates between rungs, moved on in a random order."""
    rng = random.Random(seed)
    rungs = rungs_of(len(trials), keep=keep)
    at = dict.fromkeys(rungs.trials, 0)
    while movable := [
        name
        for name in at
        if name not in rungs.ended_trials
        and (rungs.awaits_evaluation(name) or rungs.step_limit(name) == STEPS)
    ]:
        name = rng.choice(movable)
        value, fate = trials[int(name[1:])][at[name]]
        at[name] += 1
        step, limit = rungs.step_limit(name) - 5, rungs.step_limit(name)
        if fate != "goes on":
            rungs.end_trial(
                name,
                {"fails": TrialEnd.FAILED, "leaves": TrialEnd.LEFT, "stops": TrialEnd.FINISHED}[fate],
                step,
            )
        elif limit == STEPS:
            rungs.end_trial(name, TrialEnd.FINISHED, STEPS)
        else:
            rungs.record_metric(name, limit, float(value))
        if rng.random() < 0.5 or not any(
            rungs.awaits_evaluation(name) for name in at if name not in rungs.ended_trials
        ):
            decide(rungs)
    decide(rungs)
    assert rungs.is_over()
    scores = {name: float(trials[int(name[1:])][2][0]) for name in at}
    return rungs.decisions, rungs.ended_trials, rungs.ranking(scores)


@pytest.mark.parametrize(("steps", "first"), [(100, 20), (1000, 100)])
def test_a_training_loss_that_does_not_fall_is_told_from_step_twenty_or_a_tenth_of_the_steps_on(steps, first):
    trend = LossTrend(steps)
    told = []
    for step in range(1, steps + 1):
        trend.add_loss(step, 2.0)
        if trend.leave_reason():
            told.append(step)
    assert told == list(range(first, steps)), "at the last step all is paid for"
    assert "its training loss does not fall (mean of the first 10 steps 2, of the last 2)" in trend_at(
        20, 2.0
    )


def trend_at(step, late):
    trend = LossTrend(100)
    for number in range(1, step + 1):
        trend.add_loss(number, 2.0 if number <= 10 else late)
    return trend.leave_reason()


def test_a_falling_loss_or_one_whose_first_steps_are_not_known_is_no_fault():
    assert trend_at(50, 1.999) is None
    trend = LossTrend(100)
    for step in range(5, 60):
        trend.add_loss(step, 3.0)
    assert trend.leave_reason() is None


@pytest.mark.parametrize(
    ("at", "steps", "spans"),
    [
        ((0.1, 0.3), 200, ((16, 20), (46, 60))),
        ((0.25, 0.3), 120, ((24, 30), (31, 36))),
        ((0.5,), 3, ((2, 2),)),
        ((0.2, 0.4), 1, ()),
    ],
    ids=["a quarter of the steps", "nothing from before the last rung", "one step", "before the first step"],
)
def test_a_rung_judges_the_last_quarter_of_the_steps(
    at: tuple[float, ...], steps: int, spans: tuple[tuple[int, int], ...]
) -> None:
    assert mean_weight_spans(Halving(at, 0.5), steps) == spans
    assert mean_weight_spans(Halving(at, 0.5, "last"), steps) == mean_weight_spans(None, steps) == ()


THIRDS = Halving((0.1, 0.3), 0.33)


def spec_of(trials: int, halving: Halving | None = THIRDS, search: str = "random") -> SweepSpec:
    return SweepSpec(over={"steps": (1, 2)}, search=search, trials=trials, halving=halving)  # type: ignore[arg-type]


def test_the_trials_of_each_rung_are_those_that_the_one_before_keeps() -> None:
    assert rung_counts(spec_of(24)) == (24, 8, 3)
    assert rung_counts(SweepSpec(over={"steps": (1, 2), "batch_size": (1, 2, 3)})) == (6,)


def test_every_generation_of_tpe_is_halved_by_itself() -> None:
    assert rung_counts(spec_of(24, search="tpe")) == (24, 8, 4)


def test_the_samples_of_the_rungs_are_set_against_those_of_the_grid() -> None:
    found = expected_saving(spec_of(24), [TrialWork(200, 16.0)] * 24)
    assert found.rungs == (24, 8, 3)
    assert found.full_work == 24 * 200 * 16
    assert found.expected_work == pytest.approx((24 * 20 + 8 * 40 + 3 * 140) * 16)
    assert found.expected_fraction == pytest.approx(1220 / 4800)


def test_some_trials_stand_for_all_and_their_mean_for_those_that_go_on() -> None:
    few = expected_saving(spec_of(24, search="tpe"), [TrialWork(100, 1.0), TrialWork(300, 1.0)])
    assert few.full_work == 24 * 200
    assert few.expected_work == pytest.approx(24 * 20 + 8 * 40 + 4 * 140)


def test_without_halving_nothing_is_saved() -> None:
    assert expected_saving(spec_of(4, None), [TrialWork(10, 1.0)] * 4).expected_fraction == 1
