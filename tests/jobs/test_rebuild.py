"""status.json damaged: it is rebuilt from what the jobs have left in their folders."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from weftune.jobs.job_file import CHECKPOINTS, write_job_file
from weftune.jobs.states import State
from weftune.jobs.store import open_store


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """`done` has succeeded, `half` is on its way, `broken` has failed."""
    folder = tmp_path / "out"
    with open_store(folder, resume=False) as store:
        store.describe("demo", "cpu", "float32")
        for name, last in (("done", 6), ("half", 4), ("broken", 2)):
            store.add_job(name)
            store.move_job(name, State.RUNNING)
            write_job_file(folder / name, {"job": {"name": name}, "base": {"model": "demo"}, "steps": 6})
            (folder / name / CHECKPOINTS / "step-00000002").mkdir()
            for step in range(1, last + 1):
                store.append_metrics({"job": name, "step": step, "loss": 1.0, "tokens": 10})
            store.advance_job(name, last, 6, 10 * last)
        store.append_metrics({"job": "done", "step": 6, "eval_loss": 0.5})
        store.best_job("done", 6, 0.5)
        store.append_window({"seconds": 2.5})
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / "done" / name).write_text("{}")
        store.move_job("done", State.SUCCEEDED)
        store.move_job("broken", State.FAILED, "its loss is nan")
        store.measure(2.5, None, None)
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
        assert "status.json was damaged (" in store.rebuilt
        assert "done has succeeded" in store.rebuilt
        assert "half goes on from its last checkpoint" in store.rebuilt
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
            rebuilt += bool(store.rebuilt)
    assert rebuilt >= 95, "the others were harmless: a space for a tab, the name of the checksum"


def test_a_job_that_the_status_has_forgotten_is_known_by_its_folder(output: Path) -> None:
    plain = json.loads((output / "status.json").read_text())
    del plain["jobs"]["done"], plain["checksum"]
    (output / "status.json").write_text(json.dumps(plain))
    with open_store(output, resume=True) as store:
        store.add_job("done")
        assert store.job("done").state is State.SUCCEEDED
