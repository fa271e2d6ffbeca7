from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import Disk, largest_file
from weftune.errors import OutputError
from weftune.jobs.store.status import JobStatus, State
from weftune.jobs.store.store import open_store, refuse_output


def status_of(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_recorded_is_read_back_on_resume(tmp_path: Path) -> None:
    with open_store(tmp_path / "out", resume=False) as store:
        store.set_description("demo", "cpu", "float32")
        store.add_job("a")
        store.add_job("b")
        store.move_job("a", State.RUNNING)
        store.advance_job("a", step=3, steps=10, trained_tokens=99)
        store.evaluate_job("a", eval_loss=1.7, best_step=2, best_loss=1.5, score=0.5)
        store.score_base("a", 2.5)
        store.warn_job("a", "it has collapsed")
        store.add_note("a", "two rows were cut")
        store.explain_job("b", "it waits behind a, which comes first")
        store.note("the base was converted")
        store.record_totals(seconds=2.5, solo_seconds=5.0, peak_bytes=1000)
        store.write_status()
        written = store.status
    assert status_of(tmp_path / "out")["jobs"]["a"] == {
        "state": "running", "reason": "", "step": 3, "steps": 10, "trained_tokens": 99, "eval_loss": 1.7,
        "best_step": 2, "best_loss": 1.5, "score": 0.5, "base_loss": 2.5, "base_score": None,
        "warning": "it has collapsed", "notes": ["two rows were cut"],
    }  # fmt: skip
    whole = status_of(tmp_path / "out")
    assert list(whole) == [
        "format", "base", "device", "dtype", "started", "updated", "seconds", "solo_seconds", "peak_bytes",
        "command", "notes", "jobs", "checksum",
    ]  # fmt: skip
    with open_store(tmp_path / "out", resume=True) as store:
        assert store.job("a").state is State.QUEUED
        assert store.job("a").step == 3
        assert store.job("b") == written.jobs["b"]
        assert store.status.notes == ("the base was converted",)
        assert (store.status.started, store.status.seconds) == (written.started, 2.5)
        store.add_job("a")
        assert store.job("a").step == 3


def test_a_folder_that_holds_something_is_refused_without_resume(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="is not empty; it holds other things than a run"):
        open_store(tmp_path, resume=False)
    with pytest.raises(OutputError, match=r"holds no status.json, so there is nothing to resume"):
        open_store(tmp_path, resume=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    with pytest.raises(OutputError, match="is a file"):
        open_store(tmp_path / "thesis.txt", resume=False)


def test_an_output_that_nothing_was_written_to_can_be_taken_again(tmp_path: Path) -> None:
    open_store(tmp_path, resume=False).close()
    (tmp_path / ".status.json.new").write_text('{"version"')
    open_store(tmp_path, resume=True).close()
    open_store(tmp_path, resume=False).close()


def test_two_trainers_never_share_an_output(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False):
        with pytest.raises(OutputError, match="another weftune train is writing to"):
            open_store(tmp_path, resume=True)
    open_store(tmp_path, resume=True).close()


def test_a_refused_output_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(OutputError, match="is not empty"):
        open_store(tmp_path, resume=False)
    (tmp_path / "x").unlink()
    open_store(tmp_path, resume=False).close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 3'),
        lambda text: text.replace('"queued"', '"asleep"'),
        lambda text: text.replace('"step": 0', '"step": "many"'),
        lambda text: text.replace('"step": 0', '"step": 4'),
        lambda text: text.replace('"jobs": {', '"jobs": {"b": 3, '),
    ],
)
def test_in_the_place_of_a_damaged_status_its_successor_is_used_if_whole(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.write_status()
    status = tmp_path / "status.json"
    whole = status.read_text()
    status.write_text(damage(whole))
    assert status.read_text() != whole
    (tmp_path / ".status.json.new").write_text(whole)
    with open_store(tmp_path, resume=True) as store:
        assert store.job("a") == JobStatus()
        assert store.rebuild_note == ""


def test_a_status_of_a_later_format_is_refused_and_one_from_before_formats_is_read(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.advance_job("a", 3, 9, 30)
        store.write_status()
    status = tmp_path / "status.json"
    plain = {key: value for key, value in json.loads(status.read_text()).items() if key != "checksum"}
    status.write_text(json.dumps({**plain, "format": 2}))
    with pytest.raises(
        OutputError, match=r"status.json has the format 2, and this Weftune knows formats up to 1"
    ):
        open_store(tmp_path, resume=True)
    assert json.loads(status.read_text())["format"] == 2
    del plain["format"]
    status.write_text(json.dumps({"version": 1, **plain}))
    with open_store(tmp_path, resume=True) as store:
        assert store.job("a").step == 3


def test_an_output_that_is_not_there_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no folder .*out, so there is nothing to resume"):
        open_store(tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()


def test_a_status_is_on_disk_within_two_seconds_though_nobody_asks_again(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.write_status()
        for step in range(1, 200):
            store.append_metrics({"job": "a", "step": step})
            store.advance_job("a", step, 1000, step)
            store.write_status_soon()
        assert status_of(tmp_path)["jobs"]["a"]["step"] < 199, "not at every step"
        deadline = time.monotonic() + 2
        while status_of(tmp_path)["jobs"]["a"]["step"] < 199:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_files_have_the_mode_of_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with open_store(tmp_path / "out", resume=False) as store:
            store.add_job("a")
            store.append_metrics({"job": "a", "step": 1})
            store.write_status()
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys((".lock", "metrics.jsonl", "status.json"), "0o640")


def test_rewinding_drops_what_lies_beyond_the_cursor_and_a_torn_line(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        for step in range(4):
            for job in "abc":
                store.append_metrics({"job": job, "step": step, "loss": 1.0})
        store.append_window({"window": 0})
        store.write_status()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"job": "c", "step": 4, "lo')
    with (tmp_path / "windows.jsonl").open("a") as file:
        file.write('{"wind')
    with open_store(tmp_path, resume=True) as store:
        store.drop_later_metrics({"a": 1, "b": -1})
        store.append_metrics({"job": "a", "step": 2, "loss": 0.5})
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["job"] == "a"] == [0, 1, 2]
    assert [line["step"] for line in lines if line["job"] == "b"] == []
    assert [line["step"] for line in lines if line["job"] == "c"] == [0, 1, 2, 3]
    assert lines_of(tmp_path / "windows.jsonl") == [{"window": 0}]


def test_a_restarted_job_forgets_what_it_did(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        for name in "ab":
            store.add_job(name)
            store.append_metrics({"job": name, "step": 1, "loss": 1.0})
            store.move_job(name, State.FAILED, "no rows")
        assert store.job("a").reason == "no rows"
        store.restart_job("a")
        assert store.job("a") == JobStatus()
        assert store.job("b").state is State.FAILED
    assert [line["job"] for line in lines_of(tmp_path / "metrics.jsonl")] == ["b"]


def test_what_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.append_metrics({"job": "a", "loss": float("nan"), "grad_norm": float("inf"), "tokens": 3})
        store.add_job("a")
        store.evaluate_job("a", eval_loss=float("inf"), best_step=0, best_loss=float("inf"))
        store.write_status()
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"job": "a", "loss": None, "grad_norm": None, "tokens": 3}
    ]
    assert status_of(tmp_path)["jobs"]["a"]["eval_loss"] is None
    open_store(tmp_path, resume=True).close()


def test_an_illegal_move_is_a_bug(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        with pytest.raises(ValueError, match="cannot go from queued to succeeded"):
            store.move_job("a", State.SUCCEEDED)


def test_lines_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        with largest_file(300):
            for step in range(3):
                store.append_metrics({"job": "a", "step": step, "text": "x" * 50})
            for step in range(3, 6):
                with pytest.raises(OutputError, match=r"cannot write .*metrics.jsonl: File too large"):
                    store.append_metrics({"job": "a", "step": step, "text": "x" * 50})
            assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [0, 1, 2], (
                "no half line"
            )
        store.write_status()
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == list(range(6))


def test_a_status_that_cannot_be_written_leaves_the_one_before_and_no_draft(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.write_status()
        before = (tmp_path / "status.json").read_bytes()
        store.add_note("a", "n" * 1000)
        with (
            largest_file(800),
            pytest.raises(OutputError, match=r"cannot write .*status.json: File too large"),
        ):
            store.write_status()
        assert (tmp_path / "status.json").read_bytes() == before
        assert not (tmp_path / ".status.json.new").exists()
        store.write_status()
        assert status_of(tmp_path)["jobs"]["a"]["notes"] == ["n" * 1000]


def test_a_killed_trainer_leaves_a_status_that_resumes(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from weftune.jobs.store.status import State
from weftune.jobs.store.store import open_store
with open_store(Path({str(tmp_path)!r}), resume=True) as store:
    store.add_job("a")
    store.move_job("a", State.RUNNING)
    for step in range(store.job("a").step + 1, 10**9):
        store.append_metrics({{"job": "a", "step": step, "pad": "x" * 500}})
        store.advance_job("a", step, 10**9, step * 10)
        store.write_status()
        print(step, flush=True)
"""
    for round_number in range(5):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.003 * round_number)
        os.kill(child.pid, signal.SIGKILL)
        said = [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        with open_store(tmp_path, resume=True) as store:
            job = store.job("a")
            assert job.state is State.QUEUED
            assert job.step >= max(said, default=0)
            assert job.trained_tokens == job.step * 10
            store.drop_later_metrics({"a": job.step})
            store.write_status()
        steps = [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")]
        assert steps == list(range(1, job.step + 1))


def test_what_would_be_refused_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    refuse_output(tmp_path / "new" / "out", resume=False)
    refuse_output(tmp_path / "new" / "out", resume=True)
    refuse_output(tmp_path, resume=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").write_text("")
    for path in (tmp_path / "x", tmp_path / "x" / "out"):
        with pytest.raises(OutputError, match=f"{tmp_path / 'x'} is a file; choose another --output"):
            refuse_output(path, resume=False)
    with pytest.raises(OutputError, match="is not empty; it holds other things than a run"):
        refuse_output(tmp_path, resume=False)


def test_a_run_is_refused_in_advance_only_where_it_is_not_resumed_or_still_written(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.write_status()
        with pytest.raises(OutputError, match="another weftune train is writing to"):
            refuse_output(tmp_path, resume=True)
    before = (tmp_path / "status.json").read_bytes()
    refuse_output(tmp_path, resume=True)
    with pytest.raises(OutputError, match=r"not empty; continue it with weftune train jobs\.yaml --resume"):
        refuse_output(tmp_path, resume=False)
    assert (tmp_path / "status.json").read_bytes() == before
    open_store(tmp_path, resume=True).close()


def test_a_folder_that_may_not_be_written_to_is_refused_in_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    with pytest.raises(OutputError, match=f"cannot write to {tmp_path}; choose another --output"):
        refuse_output(tmp_path / "out", resume=False)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to .*out: Not a directory; choose another --output"):
        open_store(tmp_path / "x" / "out", resume=False)
    open_store(tmp_path / "a" / "b" / "out", resume=False).close()


def test_a_store_that_was_closed_can_be_closed_again_and_closes_nothing_else(tmp_path: Path) -> None:
    with open_store(tmp_path / "out", resume=False) as store:
        store.append_metrics({"job": "a", "step": 1})
        store.append_window({"seconds": 1.0})
        store.write_status()
        store.close()
        others = [os.open(tmp_path, os.O_RDONLY) for _ in range(4)]
    for handle in others:
        os.close(handle)
    open_store(tmp_path / "out", resume=True).close()


def test_notes_are_kept_once_each(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        for sentence in ("one", "two", "one"):
            store.note(sentence)
            store.add_note("a", sentence)
        assert store.status.notes == ("one", "two")
        assert store.job("a").notes == ("one", "two")


def test_a_job_left_out_of_a_run_is_paused_with_the_reason_and_keeps_what_it_did(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.pause_job("a", "it was left out")
        assert store.job("a") == JobStatus(state=State.PAUSED, reason="it was left out")
        store.add_job("b")
        store.advance_job("b", 3, 9, 30)
        store.pause_job("b", "it was left out")
        assert (store.job("b").state, store.job("b").step) == (State.PAUSED, 3)


def test_a_job_that_is_tried_again_waits_without_its_old_reason_and_keeps_what_it_did(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.advance_job("a", 3, 9, 30)
        store.move_job("a", State.FAILED, "its loss is nan")
        store.retry_job("a", "retried from step 3")
        assert store.job("a") == JobStatus(step=3, steps=9, trained_tokens=30, notes=("retried from step 3",))


def test_a_job_that_waits_says_why_until_it_runs(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.explain_job("a", "it waits behind b, which comes first")
        assert store.job("a") == JobStatus(reason="it waits behind b, which comes first")
        store.move_job("a", State.RUNNING)
        assert store.job("a").reason == ""
        with pytest.raises(AssertionError):
            store.explain_job("a", "it runs")


def test_evaluations_are_rewound_to_the_last_that_was_made(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        for step in range(4):
            store.append_metrics({"job": "a", "step": step, "loss": 1.0})
            store.append_metrics({"job": "a", "step": step, "eval_loss": 1.0})
        store.append_metrics({"job": "a", "text": "no step"})
        store.append_metrics({"step": 9})
        store.drop_later_metrics({"a": 2}, {"a": 1})
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 1]
    assert lines[-2:] == [{"job": "a", "text": "no step"}, {"step": 9}]


def test_a_status_never_speaks_of_lines_that_are_not_on_the_disk(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.append_metrics({"job": "a", "step": 1})
        store.append_window({"seconds": 1.0})
        with Disk(tmp_path).watched() as disk:
            store.write_status()
    named = disk.calls.index(("replace", ".status.json.new"))
    for name in ("metrics.jsonl", "windows.jsonl"):
        assert ("fsync", name) in disk.calls[:named]


def test_the_state_of_a_job_is_written_even_where_its_lines_cannot_be(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        with largest_file(2000):
            with pytest.raises(OutputError):
                store.append_metrics({"text": "x" * 2000})
            with pytest.raises(OutputError):
                store.append_window({"text": "x" * 2000})
            store.move_job("a", State.FAILED, "its loss is nan")
            with pytest.raises(OutputError, match=r"metrics\.jsonl"):
                store.write_status()
        assert status_of(tmp_path)["jobs"]["a"]["state"] == "failed"


def late_writes() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if isinstance(one, threading.Timer)]


def test_a_late_write_does_not_come_after_another_or_the_end(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.write_status()
        store.write_status_soon()
        store.write_status_soon()
        (first,) = late_writes()
        assert first.daemon, "a process may end before it"
        store.write_status()
        first.join(0.5)
        assert late_writes() == [], "it has been written meanwhile"
        store.write_status_soon()
        (second,) = late_writes()
    second.join(0.5)
    assert late_writes() == []


def test_no_step_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    real = os.fsync

    def slow(handle: int) -> None:
        begun.set()
        assert may_end.wait(30)
        real(handle)

    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        store.append_metrics({"job": "a", "step": 1})
        monkeypatch.setattr("weftune.core.files.os.fsync", slow)
        store.write_status_soon()
        assert begun.wait(30), "the first is begun at once"
        store.append_metrics({"job": "a", "step": 2})
        store.advance_job("a", 2, 9, 2)
        store.write_status_soon()
        assert not (tmp_path / "status.json").exists()
        may_end.set()
        store.write_status()
    assert status_of(tmp_path)["jobs"]["a"]["step"] == 2
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_next_one_tells_what_went_wrong_with_a_late_write(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        with largest_file(0):
            store.write_status_soon()
            for one in late_writes():
                one.join(30)
        with pytest.raises(OutputError, match=r"status\.json"):
            store.write_status_soon()
        store.write_status_soon()


def test_each_status_says_when_it_was_written_and_when_its_run_began(tmp_path: Path) -> None:
    before = time.time()
    with open_store(tmp_path, resume=False) as store:
        store.write_status()
        first = status_of(tmp_path)
        store.write_status()
    second = status_of(tmp_path)
    assert before <= first["started"] <= first["updated"] <= second["updated"] <= time.time()
    assert second["started"] == first["started"]


def test_what_changes_while_a_status_is_written_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        real = time.time

        def changed() -> float:
            # As the trainer's thread may, while a timer writes what is late.
            store.advance_job("a", 7, 9, 70)
            return real()

        monkeypatch.setattr("weftune.jobs.store.store.time.time", changed)
        store.write_status()
        assert store.job("a").step == 7


def test_a_change_of_one_job_does_not_copy_all_of_them(tmp_path: Path) -> None:
    with open_store(tmp_path, resume=False) as store:
        store.add_job("a")
        before = store.status
        store.advance_job("a", 1, 2, 3)
        assert before.jobs["a"].step == 0, "a status that was given out stays as it is"
        assert store.job("a").step == 1
        assert "a" in store
        assert "b" not in store
