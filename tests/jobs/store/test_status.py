"""What status.json may say: whatever Weftune did not write is known for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftune.core.files import UnknownFormat, json_text
from weftune.jobs.store import status as status_module
from weftune.jobs.store.states import State
from weftune.jobs.store.status import JobStatus, RunStatus, from_json, job_from_json, status_text, to_json

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
