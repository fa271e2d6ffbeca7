"""What many jobs cost beside their arithmetic, in counts that a busy machine does not change."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests import bench
from weftune import JobSpec
from weftune.data import prepare
from weftune.data.encode import Encoder
from weftune.jobs.store import status as status_module
from weftune.jobs.store.status import State
from weftune.jobs.store.store import Store
from weftune.plan.layout.choose import WINDOW_ROUNDS
from weftune.plan.program.handover import Unfinished
from weftune.plan.program.program import NOTHING, GlobalBatch, PlacedSample
from weftune.plan.window.pace import WindowPace
from weftune.plan.window.rounds import JobWindow
from weftune.report import read
from weftune.run.parts import NOTHING_TO_DO
from weftune.trainer import results, windows
from weftune.trainer.windows import PlannedWindow, WindowAhead

FEW, MANY = 3, 12


class Counted:
    """Counts the calls of functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.calls: Counter[str] = Counter()

    def watch(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **keys: Any) -> Any:
            self.calls[name] += 1
            return real(*args, **keys)

        self._patch.setattr(owner, name, counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def train(output: Path, count: int, steps: int = 1) -> None:
    """So many jobs of so many steps on the same rows."""
    given = bench.rows(bench.samples(6))
    jobs = [JobSpec(name=f"job{n}", data=given, seed=n, steps=steps, batch_size=1) for n in range(count)]
    results = bench.train(bench.base(), output, jobs)
    assert [result.state for result in results.values()] == [State.SUCCEEDED] * count


def test_a_tokenizer_and_data_that_jobs_share_are_looked_at_once(tmp_path: Path, counted: Counted) -> None:
    counted.watch(Encoder, "__init__")
    counted.watch(prepare, "build_store")
    train(tmp_path / "out", MANY)
    assert counted.calls == {"__init__": 1, "build_store": 1}


def test_the_status_is_not_written_for_every_job(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftune.jobs.store.store.STATUS_SECONDS", 3600.0)
    counted.watch(Store, "write_status")
    train(tmp_path / "few", FEW)
    few = counted.calls.pop("write_status")
    train(tmp_path / "many", MANY)
    assert counted.calls["write_status"] == few
    states = json.loads((tmp_path / "many" / "status.json").read_text())["jobs"]
    assert {job["state"] for job in states.values()} == {"succeeded"}


def test_each_job_file_is_read_once_for_the_report_and_the_results(tmp_path: Path, counted: Counted) -> None:
    counted.watch(read, "_read_job_file")
    train(tmp_path / "out", MANY)
    assert counted.calls == {"_read_job_file": MANY}


def test_checkpoints_are_deleted_only_when_the_success_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict[str, str]] = []
    replace_file, rmtree = status_module.replace_file, shutil.rmtree

    def watched(path: Path, content: bytes) -> None:
        replace_file(path, content)
        if path.name == "status.json":
            written.append({name: job["state"] for name, job in json.loads(content)["jobs"].items()})

    def deleted(path: Path, *given: Any, **named: Any) -> None:
        if Path(path).name == "checkpoints":
            said.append(written[-1][path.parent.name])
            gone.append(path.parent.name)
        rmtree(path, *given, **named)

    gone: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(status_module, "replace_file", watched)
    monkeypatch.setattr(shutil, "rmtree", deleted)
    train(tmp_path / "out", FEW)
    assert sorted(gone) == [f"job{n}" for n in range(FEW)]
    assert set(said) == {"succeeded"}


def test_a_window_is_planned_while_the_one_before_it_runs_though_the_pace_was_learned_meanwhile(
    tmp_path: Path, counted: Counted
) -> None:
    counted.watch(windows, "plan_window")
    train(tmp_path / "out", FEW, steps=3 * WINDOW_ROUNDS)
    # The first, and one behind each.
    assert counted.calls == {"plan_window": 1 + 3}


def test_a_pace_that_asks_for_other_rounds_asks_for_another_plan() -> None:
    batches = tuple(GlobalBatch("a", step, (PlacedSample(0, 100, 0),), 100) for step in range(1, 5))
    course = JobWindow("a", 0, batches, (), frozenset(), frozenset())
    planned: Future[PlannedWindow] = Future()
    planned.set_result(PlannedWindow(NOTHING_TO_DO, [course], rounds=4))
    pace = WindowPace()
    ahead = WindowAhead({"a": 0}, 1024, NOTHING, pace, Unfinished(), planned)
    soon, late = WindowPace(row_seconds=0.02), WindowPace(row_seconds=0.04)
    assert ahead.is_valid_for({"a": 0}, 1024, NOTHING, pace, Unfinished())
    assert ahead.is_valid_for({"a": 0}, 1024, NOTHING, soon, Unfinished())
    assert not ahead.is_valid_for({"a": 0}, 1024, NOTHING, late, Unfinished())
    assert not ahead.is_valid_for({"a": 0}, 512, NOTHING, pace, Unfinished())
    assert not ahead.is_valid_for({"a": 1}, 1024, NOTHING, pace, Unfinished())


def test_job_files_are_written_while_other_jobs_are_made_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[str] = set()
    write = results.write_job_file

    def noted(folder: Path, values: dict[str, Any]) -> None:
        writers.add(threading.current_thread().name)
        write(folder, values)

    monkeypatch.setattr(results, "write_job_file", noted)
    train(tmp_path / "out", FEW)
    assert threading.current_thread().name not in writers
    assert len(list((tmp_path / "out").glob("job*/job.yaml"))) == FEW
