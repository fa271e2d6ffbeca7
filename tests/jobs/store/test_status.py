"""The states of jobs, status.json, the lock of an output folder, and the command that resumes a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from weftune import Options
from weftune.core.files import UnknownFormat, json_text, temporary_path
from weftune.errors import OutputError
from weftune.jobs.spec.retry import read_changes
from weftune.jobs.store import status as status_module
from weftune.jobs.store.status import (
    LOCK,
    MOVES,
    PYTHON_COMMAND,
    STATUS,
    UNKNOWN_COMMAND,
    DamagedStatus,
    JobStatus,
    RunStatus,
    State,
    check_transition,
    from_json,
    job_from_json,
    lock_folder,
    read_status,
    requeue_jobs,
    resume_line,
    status_text,
    to_json,
    train_command,
    write_status,
)
from weftune.jobs.store.store import open_store


def walk_by_moves(wishes: list[State]) -> None:
    state = State.QUEUED
    for wish in wishes:
        if state.has_ended:
            with pytest.raises(ValueError, match=f"cannot go from {state} to {wish}"):
                check_transition(state, wish)
            continue
        try:
            new = check_transition(state, wish)
        except ValueError:
            assert (state, wish) in ILLEGAL
        else:
            assert (state, wish) not in ILLEGAL
            state = new


def test_no_walk_makes_an_illegal_move() -> None:
    settings(max_examples=500)(given(st.lists(st.sampled_from(State), max_size=20))(walk_by_moves))()


@pytest.mark.slow
def test_no_walk_of_2000_makes_an_illegal_move() -> None:
    settings(max_examples=2000)(given(st.lists(st.sampled_from(State), max_size=20))(walk_by_moves))()


ILLEGAL = {
    (State.QUEUED, State.QUEUED),
    (State.QUEUED, State.SUCCEEDED),
    (State.RUNNING, State.RUNNING),
    (State.PAUSED, State.PAUSED),
    (State.PAUSED, State.RUNNING),
    (State.PAUSED, State.SUCCEEDED),
    (State.PAUSED, State.FAILED),
}


def test_preemption_and_resumption_are_the_only_ways_back() -> None:
    back = {(old, new) for old, after in MOVES.items() for new in after if new is State.QUEUED}
    assert back == {(State.RUNNING, State.QUEUED), (State.PAUSED, State.QUEUED)}


NAMES = ("a", "b", "c")


class Walks(RuleBasedStateMachine):
    """A store through random moves, kills, resumptions and the user's words, beside what it should say."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp())
        self.output = self.folder / "out"
        self.store = open_store(self.output, resume=False)
        self.expected: dict[str, State] = {}
        for name in NAMES:
            self.store.add_job(name)
            self.expected[name] = State.QUEUED

    @rule(name=st.sampled_from(NAMES), wish=st.sampled_from(State))
    def move(self, name: str, wish: State) -> None:
        before = self.expected[name]
        if wish in MOVES[before]:
            self.store.move_job(name, wish, "a reason")
            self.expected[name] = wish
            return
        with pytest.raises(ValueError, match=f"cannot go from {before} to {wish}"):
            self.store.move_job(name, wish)

    @rule()
    def end_and_resume(self) -> None:
        self.store.write_status()
        self.store.close()
        assert json.loads((self.output / "status.json").read_text())["jobs"].keys() == set(NAMES)
        self.store = open_store(self.output, resume=True)
        for name, state in self.expected.items():
            self.expected[name] = state if state.has_ended else State.QUEUED

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.store.restart_job(name)
        self.expected[name] = State.QUEUED

    @rule(name=st.sampled_from(NAMES))
    def retry(self, name: str) -> None:
        self.store.retry_job(name, "retried from step 3")
        self.expected[name] = State.QUEUED

    @invariant()
    def every_job_is_where_it_should_be(self) -> None:
        assert {name: job.state for name, job in self.store.status.jobs.items()} == self.expected

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def walk(times: int) -> None:
    run_state_machine_as_test(Walks, settings=settings(max_examples=times, stateful_step_count=12))


def test_no_walk_of_a_store_over_kills_and_resumptions_loses_a_state() -> None:
    walk(60)


@pytest.mark.slow
def test_no_walk_of_2000_of_a_store_over_kills_and_resumptions_loses_a_state() -> None:
    walk(2000)


def test_three_states_are_ends() -> None:
    assert [state for state in State if state.has_ended] == [State.SUCCEEDED, State.FAILED, State.CANCELLED]


PATH = Path("status.json")
WHOLE = RunStatus(
    base="demo",
    device="cpu",
    dtype="float32",
    started=1.5,
    updated=2.5,
    seconds=3.5,
    solo_seconds=4.5,
    peak_bytes=5,
    notes=("one",),
    jobs={
        "a": JobStatus(state=State.FAILED, reason="no rows", step=1, steps=2, trained_tokens=3, notes=("x",))
    },
)


def written(status: RunStatus = WHOLE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(to_json(status)))
    return found


def unsigned(**keys: Any) -> dict[str, Any]:
    """As it was before there were checksums, with some keys changed."""
    return {key: value for key, value in {**written(), **keys}.items() if key != "checksum"}


def test_a_status_reads_back_as_itself_with_a_checksum_or_without() -> None:
    assert from_json(written(), PATH) == WHOLE
    assert from_json(unsigned(), PATH) == WHOLE


def test_a_job_that_has_not_begun_has_done_nothing_and_neither_has_its_run() -> None:
    job, run = JobStatus(), RunStatus()
    assert (job.state, job.step, job.steps, job.trained_tokens, job.best_step) == (
        State.QUEUED,
        0,
        0,
        0,
        None,
    )
    assert (run.started, run.updated, run.seconds, run.solo_seconds, run.peak_bytes) == (0, 0, 0, None, None)


def test_a_value_that_changed_after_it_was_written_does_not_match_the_checksum() -> None:
    with pytest.raises(ValueError, match="it does not match its checksum"):
        from_json({**written(), "seconds": 9.5}, PATH)
    with pytest.raises(ValueError, match="it does not match its checksum"):
        from_json({**written(), "checksum": "00000000"}, PATH)


def test_a_checksum_has_eight_digits_whatever_its_value() -> None:
    found = {len(to_json(RunStatus(started=float(number)))["checksum"]) for number in range(100)}
    assert found == {8}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([], "it is no status"),
        (unsigned(jobs=None), "it is no status"),
        (unsigned(jobs=[]), "it is no status"),
        (unsigned(jobs={"a": 3}), "a job in it is no mapping"),
        (unsigned(jobs={"a": {"state": "asleep"}}), "asleep"),
        (unsigned(jobs={"a": {}}), "None"),
        (unsigned(jobs={"a": {"state": "queued", "step": "many"}}), "step"),
        (unsigned(seconds="long"), "seconds"),
    ],
)
def test_what_is_no_status_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_json(value, PATH)


def test_a_later_format_is_told_from_damage() -> None:
    with pytest.raises(UnknownFormat, match="has the format 2"):
        from_json(unsigned(format=2), PATH)


def test_keys_that_this_version_does_not_know_are_passed_over() -> None:
    assert from_json(unsigned(colour="red"), PATH) == WHOLE
    assert job_from_json({"state": "paused", "mood": "bad"}) == JobStatus(state=State.PAUSED)


LOSSES = st.none() | st.floats().map(lambda loss: loss + 0.0)
"""Without −0, which equals 0 and is written as it."""
TEXTS = st.text(max_size=5)
JOB = st.builds(
    JobStatus,
    state=st.sampled_from(State),
    reason=TEXTS,
    step=st.integers(0, 9),
    eval_loss=LOSSES,
    notes=st.lists(TEXTS, max_size=2).map(tuple),
)


@given(st.dictionaries(TEXTS, JOB, max_size=4), st.lists(TEXTS, max_size=2), LOSSES)
def test_the_text_of_a_status_is_that_of_its_values(
    jobs: dict[str, JobStatus], notes: list[str], solo_seconds: float | None
) -> None:
    status = RunStatus(jobs=jobs, notes=tuple(notes), solo_seconds=solo_seconds, updated=1.5)
    assert status_text(status) == json_text(to_json(status), indent=2) + "\n"


def test_only_jobs_that_changed_are_written_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {f"job{number}": JobStatus(step=number, steps=77_777) for number in range(50)}
    status_text(RunStatus(jobs=jobs))
    written: list[Any] = []

    def counted(value: Any, indent: int | None = None) -> str:
        written.append(value)
        return json_text(value, indent)

    monkeypatch.setattr(status_module, "json_text", counted)
    status_text(RunStatus(jobs={**jobs, "job7": JobStatus(step=99, steps=77_777)}))
    assert written.count(99) == written.count(77_777) == 1


def test_a_lock_is_for_one_and_free_again_once_it_is_closed(tmp_path: Path) -> None:
    handle = lock_folder(tmp_path, tmp_path)
    os.set_inheritable(handle, False)
    with pytest.raises(OutputError, match="another weftune train is writing to the-output; wait for it"):
        lock_folder(tmp_path, Path("the-output"))
    os.close(handle)
    os.close(lock_folder(tmp_path, tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_a_lock_that_is_refused_leaves_no_file_open(tmp_path: Path) -> None:
    handle = lock_folder(tmp_path, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OutputError):
            lock_folder(tmp_path, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(handle)


def test_whoever_may_write_to_the_folder_by_the_umask_may_take_its_lock(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(lock_folder(tmp_path, tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o666


def test_a_status_that_cannot_be_read_is_told_with_what_is_wrong_with_itself(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text("[]")
    temporary_path(tmp_path / STATUS).write_text("{")
    with pytest.raises(
        DamagedStatus, match=r"status.json cannot be used \(it is no status\); put back"
    ) as told:
        read_status(tmp_path)
    assert told.value.damage_text == "it is no status"


def test_of_a_complaint_of_many_lines_the_first_is_told(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text('{"jobs": {}, "seconds": "many", "base": 3}')
    with pytest.raises(DamagedStatus) as told:
        read_status(tmp_path)
    assert told.value.damage_text == "2 validation errors for RunStatus"


def test_a_status_of_a_later_weftune_is_not_passed_over_for_an_older_draft(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus())
    (tmp_path / STATUS).rename(temporary_path(tmp_path / STATUS))
    (tmp_path / STATUS).write_text('{"format": 99, "jobs": {}}')
    with pytest.raises(UnknownFormat, match="has the format 99"):
        read_status(tmp_path)


def test_a_status_is_written_for_eyes_too(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus(base="demo", jobs={"a": JobStatus()}))
    text = (tmp_path / STATUS).read_text()
    assert text.startswith('{\n  "format": 1,\n  "base": "demo",\n')
    assert text.endswith("}\n")
    assert read_status(tmp_path) == RunStatus(base="demo", jobs={"a": JobStatus()})


def test_jobs_that_were_stopped_wait_again_and_those_that_ended_do_not() -> None:
    jobs = {state.value: JobStatus(state=state, reason="so", step=3) for state in State}
    again = requeue_jobs(RunStatus(jobs=jobs)).jobs
    waiting = JobStatus(state=State.QUEUED, step=3)
    assert again == {**jobs, "running": waiting, "paused": waiting}
    only = requeue_jobs(RunStatus(jobs=jobs), (State.RUNNING,)).jobs
    assert only == {**jobs, "running": waiting}


def test_the_command_of_a_python_run_from_a_file_names_the_file_and_what_it_was_called_with() -> None:
    assert train_command("jobs.yaml", None) == "weftune train jobs.yaml --resume"
    line = train_command("my jobs.yaml", "an output", 9)
    assert line == "weftune train 'my jobs.yaml' --output 'an output' --max-steps 9 --resume"


def test_jobs_and_settings_are_added_to_the_command_as_the_shell_reads_them() -> None:
    line = resume_line(
        "weftune train j.yaml --resume", retry=["a b"], changes={"betas": [0.9, 0.95], "clip": None}
    )
    words = shlex.split(line)
    assert words[:6] == ["weftune", "train", "j.yaml", "--resume", "--retry", "a b"]
    assert words[6::2] == ["--set", "--set"]
    assert read_changes(words[7::2]) == {"betas": [0.9, 0.95], "clip": None}
    assert resume_line(None, restart=["a"]) == f"{UNKNOWN_COMMAND} --restart a"


def test_without_a_jobs_file_the_line_is_the_argument_that_python_takes() -> None:
    line = resume_line(PYTHON_COMMAND, retry=["a"], changes={"clip": 0.5})
    made = eval(line.removeprefix("options=weftune."), {"Options": Options})
    assert made == Options(resume=True, retry=("a",), changes={"clip": 0.5})
