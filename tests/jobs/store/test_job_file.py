"""job.yaml: read as it was written, or known to be damaged; a status rebuilt from the jobs' folders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from weftune.errors import OutputError
from weftune.jobs.store import job_file
from weftune.jobs.store.job_file import (
    CHECKPOINTS,
    JOB_FILE,
    DamagedJobFile,
    read_job_file,
    status_from_folder,
    write_job_file,
)
from weftune.jobs.store.status import JobStatus, State
from weftune.jobs.store.store import open_store

VALUES = {
    "format": 1,
    "job": {"name": "a", "learning_rate": 0.01, "data": {"path": "rows.jsonl"}},
    "steps": 8,
    "base": {"model": "demo"},
}


def flipped(content: bytes, rng: random.Random) -> bytes:
    place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def test_what_was_written_is_read_back_and_is_plain_yaml(tmp_path: Path) -> None:
    assert read_job_file(tmp_path) is None
    write_job_file(tmp_path, VALUES)
    found = read_job_file(tmp_path)
    assert found is not None
    assert (found.values, found.is_copy) == (VALUES, False)
    assert yaml.safe_load((tmp_path / JOB_FILE).read_text()) == VALUES


def test_whatever_bit_flips_the_values_are_those_that_were_written(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    path = tmp_path / JOB_FILE
    whole, rng = path.read_bytes(), random.Random(3)
    copies = 0
    for _ in range(100):
        path.write_bytes(flipped(whole, rng))
        found = read_job_file(tmp_path)
        assert found is not None
        assert found.values == VALUES
        copies += found.is_copy
    assert copies >= 90, "the others fell into the mark before the checksum"


def test_with_its_copy_damaged_too_it_is_a_sentence(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    for folder in (tmp_path, tmp_path / CHECKPOINTS):
        (folder / JOB_FILE).write_bytes(b"job: [\xff")
    with pytest.raises(DamagedJobFile, match=rf"{tmp_path}/job.yaml cannot be used \(it is no YAML"):
        read_job_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a: [1\n", "it is no YAML: while parsing a flow sequence"),
        ("- 1\n", "it is no job file"),
        ("a: 1\n", "it is no job file"),
        ("job: {}\nbase: demo\n", "it is no job file"),
        ("format: 1\njob: {}\nbase: {}\n", "it has lost its checksum"),
        ("job: {}\nbase: {}\n# crc32: 00000000\n", "it does not match its checksum"),
    ],
)
def test_what_no_weftune_has_written_is_told_in_one_line(
    tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / JOB_FILE).write_text(content)
    with pytest.raises(DamagedJobFile) as told:
        read_job_file(tmp_path)
    assert str(told.value) == f"{tmp_path / JOB_FILE} cannot be used ({complaint})"


def test_a_job_file_can_be_read_by_people_who_write_other_letters(tmp_path: Path) -> None:
    values = {"job": {"name": "a", "data": "überzahl.jsonl"}, "base": {}, "also": {}}
    write_job_file(tmp_path / "not" / "there" / "yet", values)
    text = (tmp_path / "not" / "there" / "yet" / JOB_FILE).read_text(encoding="utf-8")
    assert text.startswith("job:\n  name: a\n  data: überzahl.jsonl\nbase: {}\nalso: {}\n# crc32: ")


def test_a_job_file_that_is_gone_is_read_from_its_copy(tmp_path: Path) -> None:
    write_job_file(tmp_path, VALUES)
    (tmp_path / JOB_FILE).unlink()
    found = read_job_file(tmp_path)
    assert found is not None
    assert (found.values, found.is_copy) == (VALUES, True)


def test_a_later_format_is_refused_and_a_file_from_before_formats_is_read(tmp_path: Path) -> None:
    write_job_file(tmp_path, {**VALUES, "format": 7})
    with pytest.raises(OutputError, match=r"job.yaml has the format 7, and .* formats up to 1:"):
        read_job_file(tmp_path)
    before = {key: value for key, value in VALUES.items() if key != "format"}
    (tmp_path / JOB_FILE).write_text(yaml.safe_dump(before))
    found = read_job_file(tmp_path)
    assert found is not None
    assert found.values == before


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """`done` has succeeded, `half` is on its way, `broken` has failed."""
    folder = tmp_path / "out"
    with open_store(folder, resume=False) as store:
        store.set_description("demo", "cpu", "float32")
        for name, last in (("done", 6), ("half", 4), ("broken", 2)):
            store.add_job(name)
            store.move_job(name, State.RUNNING)
            write_job_file(folder / name, {"job": {"name": name}, "base": {"model": "demo"}, "steps": 6})
            (folder / name / CHECKPOINTS / "step-00000002").mkdir()
            for step in range(1, last + 1):
                store.append_metrics({"job": name, "step": step, "loss": 1.0, "tokens": 10})
            store.advance_job(name, last, 6, 10 * last)
        store.append_metrics({"job": "done", "step": 6, "eval_loss": 0.5})
        store.append_metrics({"job": "done", "step": 0, "base_loss": 1.5})
        store.evaluate_job("done", 0.5, 6, 0.5)
        store.score_base("done", 1.5)
        store.append_window({"seconds": 2.5})
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / "done" / name).write_text("{}")
        store.move_job("done", State.SUCCEEDED)
        store.move_job("broken", State.FAILED, "its loss is nan")
        store.record_totals(2.5, None, None)
        store.write_status()
    for path in (folder / "done" / CHECKPOINTS).rglob("*"):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / "done" / CHECKPOINTS).rmdir()
    return folder


def test_whole_jobs_come_back_from_their_folders(output: Path) -> None:
    with open_store(output, resume=True) as store:
        want = dict(store.status.jobs)
    (output / "status.json").write_text("{")
    with open_store(output, resume=True) as store:
        assert "status.json was damaged (" in store.rebuild_note
        assert "done has succeeded" in store.rebuild_note
        assert "half resumes from its last checkpoint" in store.rebuild_note
        assert store.job("done") == want["done"]
        assert store.job("half") == want["half"]
        assert store.job("broken").state is State.QUEUED, "what failed is not known any more, so it goes on"
        assert store.status.seconds == 2.5
        store.write_status()
    assert json.loads((output / "status.json").read_text())["jobs"].keys() == {"broken", "done", "half"}


def test_a_status_that_is_gone_is_rebuilt_too(output: Path) -> None:
    (output / "status.json").unlink()
    with open_store(output, resume=True) as store:
        assert store.job("done").state is State.SUCCEEDED


def test_whatever_bit_of_the_status_flips_no_job_is_lost(output: Path) -> None:
    path = output / "status.json"
    whole = path.read_bytes()
    rng = random.Random(11)
    rebuilt = 0
    for _ in range(100):
        place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with open_store(output, resume=True) as store:
            jobs = store.status.jobs
            assert jobs["done"].state is State.SUCCEEDED
            assert jobs["half"].state is State.QUEUED
            assert jobs["broken"].state in (State.FAILED, State.QUEUED)
            assert (jobs["done"].step, jobs["half"].step) == (6, 4)
            rebuilt += bool(store.rebuild_note)
    assert rebuilt >= 95, "the others were harmless: a space for a tab, the name of the checksum"


def test_a_job_that_the_status_has_forgotten_is_known_by_its_folder(output: Path) -> None:
    plain = json.loads((output / "status.json").read_text())
    del plain["jobs"]["done"], plain["checksum"]
    (output / "status.json").write_text(json.dumps(plain))
    with open_store(output, resume=True) as store:
        store.add_job("done")
        assert store.job("done").state is State.SUCCEEDED


def test_who_failed_or_was_cancelled_is_still_told_by_a_status_that_can_be_read_in_part(output: Path) -> None:
    plain = json.loads((output / "status.json").read_text())
    plain["jobs"]["half"]["state"] = "cancelled"
    plain["jobs"]["done"] |= {"state": "running", "step": 99}
    (output / "status.json").write_text(json.dumps(plain))
    with open_store(output, resume=True) as store:
        assert "status.json was damaged (it does not match its checksum)" in store.rebuild_note
        assert "broken is failed" in store.rebuild_note
        assert (store.job("broken").state, store.job("broken").reason) == (State.FAILED, "its loss is nan")
        assert (store.job("half").state, store.job("half").step) == (State.CANCELLED, 4)
        assert (store.job("done").state, store.job("done").step) == (State.SUCCEEDED, 6), "by its folder"


def test_of_a_damaged_status_the_jobs_that_can_be_read_are_used(output: Path) -> None:
    plain = json.loads((output / "status.json").read_text())
    plain["jobs"] = {"done": {"state": "asleep"}, "half": 3, **plain["jobs"], "more": 4}
    plain["jobs"]["done"] = {"state": "asleep"}
    (output / "status.json").write_text(json.dumps(plain))
    with open_store(output, resume=True) as store:
        assert {name: job.state for name, job in store.status.jobs.items()} == {
            "broken": State.FAILED,
            "done": State.SUCCEEDED,
            "half": State.QUEUED,
        }


JOB_VALUES = {"job": {"name": "a"}, "base": {"model": "demo"}, "steps": 6}


def test_a_job_that_has_left_nothing_but_its_file_has_not_begun(tmp_path: Path) -> None:
    assert status_from_folder(tmp_path / "a") == JobStatus()
    write_job_file(tmp_path / "a", JOB_VALUES)
    assert status_from_folder(tmp_path / "a") == JobStatus(steps=6)


def test_a_job_whose_file_is_damaged_does_not_know_its_steps(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / JOB_FILE).write_text("[")
    assert status_from_folder(tmp_path / "a") == JobStatus()


def test_a_job_is_finished_once_its_adapter_is_there_and_its_checkpoints_are_gone(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    assert status_from_folder(folder).state is State.QUEUED, "no checkpoints, but no adapter either"
    (folder / "adapter_config.json").touch()
    assert status_from_folder(folder).state is State.QUEUED
    (folder / "adapter_model.safetensors").touch()
    assert status_from_folder(folder).state is State.SUCCEEDED
    (folder / CHECKPOINTS).mkdir()
    assert status_from_folder(folder).state is State.QUEUED


def test_lines_count_by_their_numbers_alone(tmp_path: Path) -> None:
    lines = [
        {"job": "a", "step": 1, "loss": 2.0, "tokens": 7},
        {"job": "a", "step": "two", "loss": 2.0, "tokens": None},
        {"job": "a", "step": 3, "loss": 2.0},
        {"job": "b", "step": 9, "loss": 2.0, "tokens": 100},
        {"job": "a", "step": 1, "eval_loss": 0.25},
        {"job": "a", "step": 2, "eval_loss": None},
        {"job": "a", "step": 3, "eval_loss": 0.5},
        {"job": "a", "step": 4, "tokens": 50},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    want = JobStatus(step=3, trained_tokens=7, eval_loss=0.5, best_step=1, best_loss=0.25)
    assert status_from_folder(tmp_path / "a") == want
    write_job_file(tmp_path / "a", {"job": {"keep": "best"}, "base": {}, "steps": 3})
    assert status_from_folder(tmp_path / "a").eval_loss == 0.25, "the adapter that is kept is the best one"
    (tmp_path / "a" / JOB_FILE).write_text("job: {}\nbase: {}\nsteps: many\n")
    assert status_from_folder(tmp_path / "a").steps == 0


def test_a_run_of_which_no_job_had_begun_says_so(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    with open_store(tmp_path, resume=True) as store:
        assert store.rebuild_note.endswith("rebuilt from the folders of the jobs: no job had begun.")
        assert store.status.seconds == 0.0
        assert store.status.jobs == {}


def test_the_metrics_are_read_once_for_all_jobs(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = job_file.filtered_lines

    def counted(path: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> bytes:
        read.append(path.name)
        return real(path, wanted)

    monkeypatch.setattr(job_file, "filtered_lines", counted)
    (output / "status.json").unlink()
    with open_store(output, resume=True) as store:
        assert (store.job("done").step, store.job("half").step) == (6, 4)
    assert read.count("metrics.jsonl") == 1
