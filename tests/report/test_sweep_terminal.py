"""A sweep in the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.report.sweep_example import JOB_STATES, sweep_record, write_sweep
from tests.report.test_terminal import Clock, last_frame, plain_console, terminal_console
from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.ending import final_table
from weftune.report.read import JobRecord, read_run
from weftune.report.terminal import LiveView


def rows(record: SweepRecord) -> list[JobRecord]:
    return [
        JobRecord(name=trial.name, state=JOB_STATES[trial.state], step=trial.left_at or 0, steps=200)
        for trial in record.trials
    ]


def frame(record: SweepRecord, height: int, others: Sequence[JobRecord] = ()) -> list[str]:
    console, file = terminal_console(height)
    with LiveView(console, [*rows(record), *others], Clock()) as view:
        view.sweep(record)
    text = last_frame(file)
    whole = file.getvalue()
    assert record.name in whole
    return [*sweep_head(whole), *text.splitlines()]


def sweep_head(text: str) -> list[str]:
    """The lines about the sweep, which stand above the table."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    at = plain.rindex("sql: ")
    return plain[at : plain.index("job ", at)].splitlines()


def test_seats_rungs_and_leaders_stand_above_the_table() -> None:
    lines = [line.rstrip() for line in frame(sweep_record(until=20), height=30)]
    assert lines[0].strip() == "sql: 24 trials, 8 running · 15 dropped · 1 failed"
    assert lines[1].strip() == "step 20: 8 of 24 went on · step 60: 0 of 8 evaluated"
    assert lines[2].split()[:4] == ["1.", "sql-r64-lr4.09e-4", "1.9986", "2."]


def test_a_trial_that_has_come_aboard_since_the_sweep_was_recorded_has_a_seat() -> None:
    record = sweep_record(3, failed=None, until=0)
    console, file = terminal_console(30)
    with LiveView(console, rows(record), Clock()) as view:
        view.sweep(record)
        view.update(replace(rows(record)[0], state="running"))
    assert sweep_head(file.getvalue())[0].strip() == "sql: 3 trials, 1 running · 2 waiting"


def test_more_trials_than_lines_show_leaders_and_those_aboard_and_sum_up_the_rest() -> None:
    lines = frame(sweep_record(64, until=60), height=24)
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "… and 56 trials more" in text
    assert text.count(" running ") == 8 + 2, "and once in the lines about the sweep and about all"
    assert "55 dropped" in text


def test_a_trial_is_shown_in_the_words_of_its_sweep() -> None:
    record = sweep_record(6, failed=None, until=20)
    resting = replace(record.trials[0], state="resting", reason="waits for the others at step 20")
    text = "\n".join(frame(replace(record, trials=(resting, *record.trials[1:])), height=40))
    assert "1 resting" in text
    assert "cancelled" not in text
    assert "waits for the others" not in text, "the rung says so once for all"


def test_other_jobs_are_shown_as_ever() -> None:
    other = JobRecord(name="other", steps=50, state="running")
    text = "\n".join(frame(sweep_record(64, until=60), height=24, others=[other]))
    assert "other" in text
    assert "… and 56 jobs more" in text


def test_the_time_that_is_left_reckons_with_those_who_will_leave() -> None:
    record = sweep_record(until=0, failed=None)
    console, file = terminal_console()
    clock = Clock()
    with LiveView(console, rows(record), clock) as view:
        view.sweep(record)
        clock.now = 10.0
        view.update(
            JobRecord(name=record.trials[0].name, state="running", step=10, steps=200, trained_tokens=100)
        )
    # 24 × 20 + 8 × 40 + 3 × 140 steps, of which ten are done, one a second.
    assert "20:10 left" in last_frame(file)


def test_without_a_terminal_rungs_and_failures_are_told_and_no_trials_steps() -> None:
    console, file = plain_console()
    begun, decided = sweep_record(until=0, failed=None), sweep_record(until=20)
    with LiveView(console, rows(begun), Clock()) as view:
        view.sweep(begun)
        for row in rows(begun):
            view.update(replace(row, state="running", step=20))
        view.sweep(decided)
        view.sweep(replace(decided, samples=replace(decided.samples, trained=1)))
        for row in rows(decided):
            view.update(row)
    told = file.getvalue().splitlines()
    assert len(told) == 3
    assert told[0].startswith("sql: 24 trials, 24 waiting")
    assert "step 20: 8 of 24 went on" in told[1]
    assert told[2].startswith("sql-r16-lr2.45e-3  failed")


@pytest.mark.parametrize("width", [80, 140])
def test_the_run_ends_with_the_best_trials_and_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.chdir(tmp_path)
    run = read_run(write_sweep(tmp_path / "output"))
    file = io.StringIO()
    Console(file=file, width=width).print(final_table(run, width))
    text = file.getvalue()
    lines = text.splitlines()
    assert text.startswith("sql: 24 trials, 3 finished, 20 dropped, 1 failed; 25 % of the samples")
    best = ["1.", "sql-r64-lr4.09e-4", "64", "0.013", "4.09e-4", "1.2667"]
    assert any(line.split()[:6] == best for line in lines)
    assert sum("output/sql/best/sql-r" in line for line in lines) == 3
    assert "sql-r16-lr2.45e-3 failed: the loss was not finite at step 4" in text
    assert "cancelled" not in text


def test_a_sweep_that_was_interrupted_ends_with_its_leaders_and_how_to_go_on(tmp_path: Path) -> None:
    run = read_run(write_sweep(tmp_path, sweep_record(until=20)))
    file = io.StringIO()
    Console(file=file, width=200).print(final_table(run, 200))
    assert "Resume the sweep with weftune train jobs.yaml --resume" in file.getvalue()
    assert " sql-r64-lr4.09e-4 " in file.getvalue()
    assert str(tmp_path) not in file.getvalue(), "their folders hold no adapters yet"
