"""Stores of shares: each knows all of its own jobs, and gathering them can be broken off and repeated."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

import weftune.jobs.store.shares
from tests.faults import Disk
from weftune.errors import OutputError
from weftune.jobs.store.shares import (
    SHARES,
    combine_statuses,
    create_shares,
    delete_shares,
    merge_shares,
    share_folder,
)
from weftune.jobs.store.status import RunStatus, State, lock_folder, to_json
from weftune.jobs.store.store import Store, open_share, open_store
from weftune.plan.layout.split import DeviceShare
from weftune.report.read import read_run

SHARED = [DeviceShare(("a", "c"), 3.0), DeviceShare(("b",), 2.0)]


def line(job: str, step: int) -> dict[str, object]:
    return {"job": job, "step": step, "loss": 1.0 / step, "tokens": 10, "time": float(step)}


def metrics(folder: Path) -> list[tuple[str, int]]:
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(one["job"], one["step"]) for one in found]


def windows(folder: Path) -> list[float]:
    return [json.loads(text)["time"] for text in (folder / "windows.jsonl").read_text().splitlines()]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """One job has ended, the others are at step 1; 10 seconds of training that alone would have been 16."""
    with open_store(tmp_path, resume=False) as store:
        for name in ("old", "a", "b", "c"):
            store.add_job(name)
            store.move_job(name, State.RUNNING)
            store.append_metrics(line(name, 1))
            store.advance_job(name, 1, 3, 10)
        store.move_job("old", State.SUCCEEDED)
        store.append_window({"seconds": 10.0, "time": 0.5})
        store.set_description("demo", "cpu", "float32")
        store.record_totals(10.0, 16.0, 700)
        store.write_status()
        create_shares(tmp_path, store.status, SHARED)
    return tmp_path


def work(output: Path) -> None:
    """What the processes of both shares would record."""
    for number, share in enumerate(SHARED):
        with open_share(output, number) as store:
            assert metrics(store.records) == [(name, 1) for name in share.jobs]
            for name in share.jobs:
                store.move_job(name, State.RUNNING)
                for step in (2, 3):
                    store.append_metrics(line(name, step))
                store.advance_job(name, 3, 3, 30)
            if number == 1:
                store.move_job("b", State.SUCCEEDED)
            store.append_window({"seconds": 2.0 + number, "time": 1.5 + number})
            store.set_description("demo", f"cuda:{number}", "bfloat16")
            store.note("all shares say so")
            store.add_note(share.jobs[0], "two rows were cut")
            # As the journal does: seconds since the run began, and beside them those of one after another.
            store.record_totals(12.0 + number, 16.0 + 5.0, 900 + number)
            store.write_status()
        (share_folder(output, number) / "learned.json").write_text(json.dumps({"windows": 3 - number}))


def assert_gathered(store: Store) -> None:
    status = store.status
    assert list(status.jobs) == ["old", "a", "b", "c"]
    assert [job.state for job in status.jobs.values()] == [
        State.SUCCEEDED,
        State.QUEUED,
        State.SUCCEEDED,
        State.QUEUED,
    ]
    assert [job.step for job in status.jobs.values()] == [1, 3, 3, 3]
    assert status.jobs["a"].notes == ("two rows were cut",)
    assert (status.seconds, status.solo_seconds, status.peak_bytes) == (13.0, 16.0 + 5.0 + 5.0, 901)
    assert (status.device, status.dtype, status.notes) == (
        "cuda:0, cuda:1",
        "bfloat16",
        ("all shares say so",),
    )
    for name, steps in (("old", [1]), ("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [1, 2, 3])):
        assert [step for job, step in metrics(store.output) if job == name] == steps
    assert windows(store.output) == [0.5, 1.5, 2.5]
    assert json.loads((store.output / "learned.json").read_text()) == {"windows": 3}
    assert json.loads((store.output / "shares.json").read_text())["shares"] == [
        {"jobs": ["a", "c"], "predicted_seconds": 3.0, "seconds": 2.0},
        {"jobs": ["b"], "predicted_seconds": 2.0, "seconds": 3.0},
    ]


def test_what_shares_recorded_is_in_the_one_store_when_it_is_opened_again(output: Path) -> None:
    work(output)
    with open_store(output, resume=True) as store:
        assert_gathered(store)
        assert not (output / SHARES).exists()
    assert json.loads((output / "status.json").read_text()) == json.loads(json.dumps(to_json(store.status)))


@pytest.mark.parametrize("times", [1, 2])
def test_gathering_that_was_broken_off_at_its_very_end_is_repeated_without_doubling(
    output: Path, tmp_path_factory: pytest.TempPathFactory, times: int
) -> None:
    work(output)
    copy = tmp_path_factory.mktemp("copy") / "shares"
    shutil.copytree(output / SHARES, copy)
    for _ in range(times):
        open_store(output, resume=True).close()
        shutil.copytree(copy, output / SHARES)
    with open_store(output, resume=True) as store:
        assert_gathered(store)


def test_gathering_that_was_broken_off_before_the_status_was_written_is_repeated(output: Path) -> None:
    work(output)
    with open_store(output.parent / "aside", resume=False) as aside:
        merge_shares(output, aside.status)
    with open_store(output, resume=True) as store:
        assert_gathered(store)


def test_a_report_shows_shares_at_work_beside_what_came_before(output: Path) -> None:
    work(output)
    run = read_run(output)
    assert {job.name: len(job.losses) for job in run.jobs} == {"old": 1, "a": 3, "b": 3, "c": 3}
    assert {job.name: job.state for job in run.jobs} == {
        "old": "succeeded",
        "a": "running",
        "b": "succeeded",
        "c": "running",
    }
    assert (run.seconds, run.solo_seconds, run.device) == (13.0, 26.0, "cuda:0, cuda:1")
    assert run.notes == ("all shares say so",)
    assert len(run.windows) == 3
    assert (output / SHARES).exists()


def test_a_share_whose_status_a_disk_has_damaged_does_not_spoil_the_report_but_is_a_sentence(
    output: Path,
) -> None:
    work(output)
    (share_folder(output, 0) / "status.json").write_text("{")
    assert {job.name for job in read_run(output).jobs} == {"old", "a", "b", "c"}
    with pytest.raises(OutputError, match=r"status.json cannot be used"):
        open_store(output, resume=True)
    assert metrics(share_folder(output, 0))


def test_a_share_that_cannot_be_read_is_not_left_locked(output: Path) -> None:
    (share_folder(output, 0) / "status.json").write_text("{")
    for _ in range(2):
        with pytest.raises(OutputError, match=r"status.json cannot be used"):
            open_share(output, 0)


def test_a_share_that_is_still_written_to_is_not_gathered(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weftune.jobs.store.shares, "EXIT_SECONDS", 0.1)
    with (
        open_share(output, 1),
        pytest.raises(OutputError, match=f"another weftune train is writing to {output};"),
    ):
        open_store(output, resume=True)
    with pytest.raises(OutputError, match=r"not empty; continue it with weftune train jobs\.yaml --resume"):
        open_store(output, resume=False)
    open_store(output, resume=True).close()


def test_shares_appear_all_at_once_or_not_at_all(output: Path) -> None:
    delete_shares(output)
    (output / f"{SHARES}.new" / "0").mkdir(parents=True)
    with open_store(output, resume=True) as store:
        assert store.job("a").step == 1
        create_shares(output, store.status, SHARED)
    assert sorted(path.name for path in (output / SHARES).iterdir()) == ["0", "1"]
    assert not (output / f"{SHARES}.new").exists()


def test_what_was_learned_before_is_what_every_share_begins_with(output: Path) -> None:
    delete_shares(output)
    (output / "learned.json").write_text('{"windows": 7}')
    with open_store(output, resume=True) as store:
        create_shares(output, store.status, SHARED)
    for number in (0, 1):
        assert (share_folder(output, number) / "learned.json").read_text() == '{"windows": 7}'


def test_shares_are_on_the_disk_before_anybody_trains(output: Path) -> None:
    delete_shares(output)
    with open_store(output, resume=True) as store, Disk(output).watched() as disk:
        create_shares(output, store.status, SHARED)
    named = disk.calls.index(("replace", f"{SHARES}.new"))
    assert ("fsync", ".") in disk.calls[named:]


def test_what_is_left_of_shares_that_were_half_removed_is_removed(output: Path) -> None:
    old = output / f"{SHARES}.old"
    (old / "0").mkdir(parents=True)
    (old / "0" / "status.json").write_text("{}")
    delete_shares(output)
    assert not old.exists()
    assert not (output / SHARES).exists()
    delete_shares(output)


@pytest.mark.parametrize(
    "dealt",
    [
        None,
        "{",
        "{}",
        '{"before": 3, "shares": 4}',
        '{"before": {"seconds": 10.0}, "shares": [3, 4]}',
        '{"before": {"seconds": "x", "solo_seconds": 16.0}, "shares": [{}]}',
    ],
)
def test_without_the_record_of_the_division_the_totals_are_those_of_the_run_so_far(
    output: Path, dealt: str | None
) -> None:
    work(output)
    (output / "shares.json").unlink()
    if dealt is not None:
        (output / "shares.json").write_text(dealt)
    with open_store(output, resume=True) as store:
        assert (store.status.seconds, store.status.solo_seconds) == (13.0, 26.0)
        assert [job.step for job in store.status.jobs.values()] == [1, 3, 3, 3]
    left = output / "shares.json"
    assert (left.read_text() if left.exists() else None) == dealt


def test_the_record_of_the_division_says_who_trains_together_and_what_came_before(output: Path) -> None:
    assert json.loads((output / "shares.json").read_text()) == {
        "before": {"seconds": 10.0, "solo_seconds": 16.0},
        "shares": [
            {"jobs": ["a", "c"], "predicted_seconds": 3.0},
            {"jobs": ["b"], "predicted_seconds": 2.0},
        ],
    }


@pytest.mark.parametrize("damaged", ["{", "{}", "3", '{"windows": "x"}'])
def test_of_what_shares_have_learned_any_that_can_be_read_is_better_than_one_that_cannot(
    output: Path, damaged: str
) -> None:
    work(output)
    (share_folder(output, 0) / "learned.json").write_text(damaged)
    (share_folder(output, 1) / "learned.json").write_text('{"windows": 0}')
    open_store(output, resume=True).close()
    assert (output / "learned.json").read_text() == '{"windows": 0}'


def test_a_share_that_is_about_to_be_left_is_waited_for_without_haste(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(output)
    tries = []

    def counted(folder: Path, named: Path) -> int:
        tries.append(folder)
        return lock_folder(folder, named)

    monkeypatch.setattr(weftune.jobs.store.shares, "lock_folder", counted)
    share = open_share(output, 1)
    leaving = threading.Timer(0.2, share.close)
    leaving.start()
    with open_store(output, resume=True) as store:
        assert_gathered(store)
    leaving.join()
    assert 3 <= len(tries) <= 10


def test_totals_that_nobody_has_measured_are_left_out(output: Path) -> None:
    whole = RunStatus(device="cpu", dtype="float32", updated=5.0, seconds=1.0)
    assert combine_statuses(output, whole, []) is whole
    shares = [RunStatus(seconds=12.0, updated=4.0), RunStatus(seconds=11.0, updated=7.0)]
    both = combine_statuses(output, whole, shares)
    assert (both.device, both.dtype, both.updated) == ("cpu", "float32", 7.0)
    assert (both.seconds, both.solo_seconds, both.peak_bytes) == (12.0, 16.0, None)
    one = combine_statuses(output, whole, [*shares, RunStatus(solo_seconds=18.0, peak_bytes=3)])
    assert (one.solo_seconds, one.peak_bytes) == (18.0, 3)
