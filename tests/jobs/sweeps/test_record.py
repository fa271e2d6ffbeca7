"""sweep.json: read as it was written, refused with a sentence where it is damaged or newer."""

import json
from dataclasses import replace

import pytest

from weftune.core.files import UnknownFormat
from weftune.jobs.sweeps.record import (
    DamagedSweep,
    SampleCount,
    SweepRecord,
    TrialRecord,
    proposed_trials,
    read_record,
    write_record,
)
from weftune.jobs.sweeps.rungs import Decision

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
