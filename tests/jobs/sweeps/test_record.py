"""sweep.json: read as it was written, refused with a sentence where it is damaged or newer; ranking."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.report.sweep_example import STEPS, sweep_record
from weftune.core.files import UnknownFormat
from weftune.jobs.sweeps.halving import Decision
from weftune.jobs.sweeps.record import (
    DamagedSweep,
    SampleCount,
    SweepRecord,
    TrialRecord,
    base_sentence,
    expected_steps_left,
    leading_trials,
    number_text,
    proposed_trials,
    rank_trials,
    read_record,
    rung_rows,
    rung_sentence,
    shorten_keys,
    state_counts,
    swept_keys,
    trained_fraction,
    winners,
    write_record,
)

RECORD = SweepRecord(
    name="sql",
    search="random",
    metric="eval_loss",
    mode="min",
    keep=2,
    at=(0.1,),
    share=0.5,
    judge="mean",
    steps=200,
    rungs=(20, 200),
    trials=(
        TrialRecord(
            name="sql-r8", values={"adapter": {"rank": 8}, "betas": [0.9, 0.9]}, at_rungs={"20": 1.93}
        ),
        TrialRecord(name="sql-r16", values={"adapter": {"rank": 16}}, state="left", reason="why", left_at=20),
    ),
    decisions=(Decision(0, 0, 20, ("sql-r8",), ("sql-r16",), 2),),
    best=("sql-r8",),
    samples=SampleCount(220, 400),
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    assert read_record(tmp_path / "sql") is None
    write_record(tmp_path / "sql", RECORD)
    assert read_record(tmp_path / "sql") == RECORD
    written = json.loads((tmp_path / "sql" / "sweep.json").read_text())
    assert written["format"] == 1
    assert written["trials"][0]["values"] == {"adapter": {"rank": 8}, "betas": [0.9, 0.9]}
    assert written["decisions"][0]["kept"] == ["sql-r8"]


def test_a_record_from_before_says_nothing_of_what_rungs_judge(tmp_path):
    write_record(tmp_path, RECORD)
    older = json.loads((tmp_path / "sweep.json").read_text())
    del older["judge"], older["checksum"]
    (tmp_path / "sweep.json").write_text(json.dumps(older))
    assert read_record(tmp_path) == replace(RECORD, judge=None)


def test_a_value_that_is_not_finite_is_null(tmp_path):
    trial = replace(RECORD.trials[0], at_rungs={"20": float("nan")})
    write_record(tmp_path, replace(RECORD, trials=(trial,)))
    found = read_record(tmp_path)
    assert found is not None
    assert found.trials[0].at_rungs == {"20": None}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[: len(text) // 2], "cannot be used"),
        (lambda text: text.replace("1.93", "1.73"), "does not match its checksum"),
        (lambda text: "[]", "it is no record of a sweep"),
        (lambda text: '{"format": 1}', "it is no record of a sweep"),
    ],
)
def test_a_damaged_record_is_refused_with_a_sentence(tmp_path, damage, complaint):
    write_record(tmp_path, RECORD)
    path = tmp_path / "sweep.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DamagedSweep, match=complaint):
        read_record(tmp_path)


def test_a_record_of_a_later_format_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text('{"format": 7, "name": "sql"}')
    with pytest.raises(UnknownFormat, match="has the format 7"):
        read_record(tmp_path)


def test_trials_that_were_proposed_are_found_in_the_records_of_a_runs_own_sweeps(tmp_path):
    later = [TrialRecord(name=f"sql-r{rank}", values={}, generation=1) for rank in (3, 5)]
    write_record(tmp_path / "sql", replace(RECORD, trials=(*RECORD.trials, *later)))
    write_record(tmp_path / "other", replace(RECORD, name="other", trials=tuple(later)))
    assert proposed_trials(tmp_path, ["sql"]) == ["sql-r3", "sql-r5"]
    (tmp_path / "sql" / "sweep.json").write_text("{")
    assert proposed_trials(tmp_path, ["sql"]) == []
    assert proposed_trials(tmp_path / "nowhere", ["sql"]) == []


def test_trials_are_ranked_by_how_they_ended_then_how_far_they_came_then_what_they_reached() -> None:
    order = rank_trials(sweep_record())
    assert [trial.state for trial in order] == ["finished"] * 3 + ["left"] * 20 + ["failed"]
    assert [trial.left_at for trial in order[3:23]] == [60] * 5 + [20] * 15
    for group in (order[:3], order[3:8], order[8:23]):
        scores = [trial.score for trial in group]
        assert scores == sorted(scores)


def test_a_finished_trial_with_a_warning_stands_behind_the_others() -> None:
    record = replace(sweep_record(), best=())
    first = rank_trials(record)[0]
    warned = replace(first, warning="the adapter has collapsed")
    trials = tuple(warned if trial is first else trial for trial in record.trials)
    assert rank_trials(replace(record, trials=trials))[2] == warned


def test_a_sweep_whose_best_trial_has_a_warning_says_that_none_improved_on_the_base() -> None:
    record = sweep_record()
    assert base_sentence(record) == ""
    trials = tuple(replace(trial, warning="it is above the base") for trial in record.trials)
    assert base_sentence(replace(record, trials=trials)) == (
        "No trial improved on the base: the lowest validation loss is kept (it is above the base)."
    )
    assert base_sentence(replace(record, trials=trials, best=())) == ""


def test_where_more_is_better_the_highest_comes_first() -> None:
    record = replace(sweep_record(), mode="max", metric="eval_mean_token_accuracy", best=())
    scores = [trial.score for trial in rank_trials(record)[:3]]
    assert scores == sorted(scores, reverse=True)


def test_leaders_have_neither_left_nor_failed() -> None:
    assert leading_trials(sweep_record(until=0), 3) == []
    assert [trial.state for trial in leading_trials(sweep_record(until=60), 5)] == ["running"] * 3
    assert [trial.name for trial in winners(sweep_record())] == list(sweep_record().best)


def test_the_rungs_tell_who_came_who_went_on_and_where_the_cut_lies() -> None:
    first, second, last = rung_rows(sweep_record())
    assert (first.started_count, first.kept_count, first.lost_count) == (24, 8, 1)
    assert (second.started_count, second.kept_count, second.lost_count) == (8, 3, 0)
    assert first.worst_kept_score is not None
    assert first.best_dropped_score is not None
    assert first.worst_kept_score < first.best_dropped_score
    assert (last.step, last.started_count, last.evaluated_count, last.is_last) == (STEPS, 3, 3, True)
    assert rung_sentence(first) == "step 20: 8 of 24 went on"
    assert rung_sentence(last) == "step 200: 3 of 3 ended"


def test_a_rung_that_is_not_decided_tells_how_many_have_been_evaluated() -> None:
    record = sweep_record(failed=None)
    trials = [
        replace(trial, state="resting", left_at=None)
        if at < 14
        else replace(trial, state="running", left_at=None, at_rungs={})
        for at, trial in enumerate(record.trials)
    ]
    (row,) = rung_rows(replace(record, trials=tuple(trials), decisions=(), best=()))
    assert rung_sentence(row) == "step 20: 14 of 24 evaluated"


def test_a_sweep_without_halving_has_no_rungs() -> None:
    assert rung_rows(replace(sweep_record(), rungs=(STEPS,), decisions=())) == []


def test_every_generation_has_its_own_rungs() -> None:
    record = sweep_record()
    later = [replace(trial, name=f"{trial.name}-b", generation=1) for trial in sweep_record(until=0).trials]
    rows = rung_rows(replace(record, trials=(*record.trials, *later)))
    assert [(row.generation, row.step) for row in rows] == [(0, 20), (0, 60), (0, 200), (1, 20)]


def test_mappings_and_dotted_keys_are_the_same_and_what_all_share_is_left_out() -> None:
    record = SweepRecord(
        name="a", search="grid", metric="eval_loss", mode="min", keep=1,
        trials=(
            TrialRecord(name="one", values={"adapter": {"rank": 8, "alpha": 16}, "warmup": 0.1}),
            TrialRecord(name="two", values={"adapter.rank": 64, "adapter": {"alpha": 16}, "warmup": 0.1}),
        ),
    )  # fmt: skip
    assert swept_keys(record) == ("adapter.rank",)
    assert shorten_keys(("adapter.rank", "learning_rate")) == {
        "adapter.rank": "rank",
        "learning_rate": "learning_rate",
    }
    assert shorten_keys(("a.rank", "b.rank")) == {"a.rank": "a.rank", "b.rank": "b.rank"}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3.14159e-4, "3.14e-4"),
        (0.05, "0.05"),
        (0.006, "0.006"),
        (64.0, "64"),
        (1e-4, "1e-4"),
        (0.0, "0"),
        (0.0125, "0.0125"),
        (1e6, "1e6"),
        (1500.0, "1500"),
    ],
)
def test_numbers_have_few_letters(number: float, text: str) -> None:
    assert number_text(number) == text


def test_states_are_counted_and_the_share_is_of_all_trials_to_their_end() -> None:
    assert state_counts(sweep_record()) == {"finished": 3, "left": 20, "failed": 1}
    steps = 3 * 200 + 5 * 60 + 15 * 20 + 4
    assert trained_fraction(sweep_record()) == pytest.approx(steps / (24 * 200))


def test_the_steps_that_are_left_reckon_with_those_who_will_leave() -> None:
    record = sweep_record(until=0, failed=None)
    assert expected_steps_left(record, {}) == 24 * 20 + 8 * 40 + 3 * 140
    halfway = {trial.name: 10 for trial in record.trials}
    assert expected_steps_left(record, halfway) == 24 * 10 + 8 * 40 + 3 * 140
    assert expected_steps_left(sweep_record(), {}) == 0
