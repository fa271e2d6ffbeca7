from __future__ import annotations

import io
import re
import time
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from weftune.report.read import JobRecord
from weftune.report.terminal import LiveView, Pace


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


def terminal_console(height: int = 30) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=120, height=height, color_system="standard", _environ={}
    )
    return console, file


def last_frame(file: io.StringIO) -> str:
    """The text of the last redraw, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return text[text.rindex("job ") :]


def follow(view: LiveView, clock: Clock, row: JobRecord, steps: int, tokens: int) -> JobRecord:
    """The job runs `steps` steps, one a second."""
    for _ in range(steps):
        clock.now += 1
        row = replace(
            row, state="running", step=row.step + 1, trained_tokens=row.trained_tokens + tokens, loss=2.0
        )
        view.update(row)
    return row


def test_without_a_terminal_there_is_a_line_every_tenth_of_a_run() -> None:
    console, file = plain_console()
    clock, row = Clock(), JobRecord(name="a", steps=200)
    with LiveView(console, [row], clock) as view:
        follow(view, clock, row, steps=200, tokens=100)
    lines = file.getvalue().splitlines()
    assert [line.split()[3] for line in lines] == ["1/200", *(f"{step}/200" for step in range(20, 201, 20))]
    assert lines[1] == "a  running  step 20/200  loss 2.0000  100 tokens/s  3:00 left"


def test_what_a_resumed_job_had_done_before_is_no_speed() -> None:
    console, file = plain_console()
    clock = Clock()
    with LiveView(console, [], clock) as view:
        row = JobRecord(name="a", step=100, steps=200, trained_tokens=10_000)
        view.update(row)
        assert file.getvalue() == "", "it has not moved yet"
        follow(view, clock, row, steps=20, tokens=100)
        assert view._overall.tokens_per_second == pytest.approx(100, rel=0.1)
    assert file.getvalue().splitlines()[0].startswith("a  running  step 101/200")


def test_without_a_terminal_many_jobs_are_told_of_together_and_by_name_only_if_they_stop() -> None:
    console, file = plain_console()
    clock, rows = Clock(), [JobRecord(name=f"job-{at}", steps=10) for at in range(100)]
    with LiveView(console, rows, clock) as view:
        for step in range(1, 11):
            clock.now += 2
            for row in rows:
                view.update(replace(row, state="running", step=step, trained_tokens=32 * step))
        view.update(replace(rows[7], state="failed", step=10, trained_tokens=320, reason="its loss is nan"))
    told = file.getvalue().splitlines()
    assert len(told) == 3
    assert told[0].startswith("1 queued · 99 running") or told[0].startswith("100 running")
    assert told[0].endswith("left")
    assert told[2] == "job-7  failed  step 10/10  its loss is nan"


def test_without_a_terminal_evaluations_and_changes_of_state_are_told() -> None:
    console, file = plain_console()
    row = JobRecord(name="a", state="running", step=3, steps=100)
    with LiveView(console, [row], Clock()) as view:
        view.update(replace(row, step=4))
        view.update(replace(row, step=4, eval_loss=1.5))
        view.update(replace(row, step=5, eval_loss=1.5))
        view.update(replace(row, step=5, eval_loss=1.5, state="failed", reason="the loss was not finite"))
    assert file.getvalue().splitlines() == [
        "a  running  step 4/100  validation 1.5000",
        "a  failed  step 5/100  validation 1.5000  the loss was not finite",
    ]


def test_without_a_terminal_no_control_character_and_no_markup_gets_through() -> None:
    console, file = plain_console()
    with LiveView(console, [], Clock()) as view:
        view.update(
            JobRecord(name="\x1b[31m[red]x[/red]", state="running", steps=3, reason="\r\x07" + "long " * 40)
        )
        view.note("[bold]a note[/bold]\x1b[2J")
    first, second = file.getvalue().splitlines()
    assert "[red]x[/red]" in first
    assert second == "[bold]a note[/bold] [2J"
    assert (first + second).isprintable()


def test_the_live_table_shows_progress_pace_and_time_left() -> None:
    console, file = terminal_console()
    clock, row = Clock(), JobRecord(name="a", steps=100)
    with LiveView(console, [row, JobRecord(name="b", steps=50, reason="waits for memory")], clock) as view:
        follow(view, clock, row, steps=40, tokens=1500)
    frame = last_frame(file)
    assert re.search(r"a +running +━+.* 40/100 +2\.0000 +– +1,500 +1:00", frame)
    assert re.search(r"b +queued", frame)
    assert "b: waits for memory" in frame
    assert "1 queued · 1 running · 1,500 tokens/s · 0:40 elapsed · 1:50 left" in frame


def test_states_are_coloured() -> None:
    console, file = terminal_console()
    with LiveView(console, [JobRecord(name="a", steps=1)], Clock()) as view:
        view.update(JobRecord(name="a", steps=1, state="failed"))
        view.update(JobRecord(name="b", steps=1, state="succeeded"))
    assert "\x1b[1;31mfailed" in file.getvalue()
    assert "\x1b[32msucceeded" in file.getvalue()


def test_a_state_that_is_not_known_is_counted_too() -> None:
    console, file = terminal_console()
    with LiveView(console, [JobRecord(name="a", steps=1)], Clock()) as view:
        view.update(JobRecord(name="a", steps=1, state="paused"))
        view.update(JobRecord(name="b", steps=1, state="dreaming"))
    assert "1 paused · 1 dreaming" in last_frame(file)


def test_a_job_that_joins_later_gets_a_row() -> None:
    console, file = terminal_console()
    with LiveView(console, [JobRecord(name="a", steps=1)], Clock()) as view:
        view.update(JobRecord(name="late", steps=9, state="running"))
    assert "late" in last_frame(file)


def test_more_jobs_than_lines_show_the_running_ones_and_count_the_rest() -> None:
    console, file = terminal_console(height=16)
    jobs = [JobRecord(name=f"job-{index:02}", steps=9) for index in range(40)]
    with LiveView(console, jobs, Clock()) as view:
        view.update(JobRecord(name="job-37", steps=9, state="running"))
    frame = last_frame(file)
    assert "job-37" in frame
    assert "… and 32 jobs more" in frame
    assert "39 queued · 1 running" in frame
    assert len(frame.rstrip().splitlines()) <= 16


def test_a_note_stands_above_the_live_table() -> None:
    console, file = terminal_console()
    with LiveView(console, [JobRecord(name="a", steps=1)], Clock()) as view:
        view.note("The capacity was halved.")
    assert file.getvalue().index("The capacity was halved.") < file.getvalue().rindex("queued")


def test_a_burst_of_reports_is_not_taken_for_speed() -> None:
    pace = Pace()
    for window in range(5):
        for step in range(10):
            done = 10 * window + step
            pace.add(20.0 * window + 0.001 * step, done, 100 * done)
    assert pace.tokens_per_second == pytest.approx(1000 / 20, rel=1e-3)


def test_a_pace_follows_what_happened_last() -> None:
    pace = Pace()
    for second in range(300):
        pace.add(float(second), second, 10 * second if second < 200 else 2000 + 50 * (second - 200))
    assert pace.tokens_per_second == pytest.approx(50)
    assert pace.remaining_seconds(30) == pytest.approx(30)


def test_nothing_is_promised_before_the_second_moment() -> None:
    pace = Pace()
    pace.add(1.0, 1, 10)
    assert pace.tokens_per_second is None
    assert pace.remaining_seconds(5) is None


def test_the_clock_of_the_table_runs_while_nothing_happens() -> None:
    console, file = terminal_console()
    clock = Clock()
    with LiveView(console, [JobRecord(name="a", state="running", steps=10)], clock):
        clock.now = 3661.0
        for _ in range(100):
            if "1:01:01 elapsed" in file.getvalue():
                break
            time.sleep(0.05)
        else:
            raise AssertionError(file.getvalue())


def test_however_many_jobs_change_the_table_is_drawn_once_in_a_while() -> None:
    console, _ = terminal_console()
    drawn: list[None] = []
    with LiveView(console, [], Clock()) as view:
        assert view._live is not None
        real = view._live.refresh
        view._live.refresh = lambda: (drawn.append(None), real())[1]  # type: ignore[method-assign]
        for number in range(200):
            view.update(JobRecord(name=f"job{number}", state="running", steps=1))
            view.update(JobRecord(name=f"job{number}", state="succeeded", step=1, steps=1, trained_tokens=3))
        assert len(drawn) <= 2
        assert (view._steps, view._tokens) == (200, 600)


def test_a_frame_that_takes_long_to_draw_is_drawn_less_often() -> None:
    console, _ = terminal_console()
    clock = Clock()
    drawn: list[float] = []
    with LiveView(console, [JobRecord(name="a", state="running", steps=1000)], clock) as view:

        def slow() -> None:
            drawn.append(clock.now)
            clock.now += 0.2

        assert view._live is not None
        view._live.refresh = slow  # type: ignore[method-assign]
        for step in range(1, 101):
            clock.now += 0.1
            view.update(JobRecord(name="a", state="running", step=step, steps=1000))
        view._live.refresh = lambda: None  # type: ignore[method-assign]
    assert 2 <= len(drawn) <= 4
