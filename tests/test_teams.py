"""Shares of the jobs that several workers train each: every job gets what one process gives it, and a lost
worker restarts its own share only."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import weftune.launch.split
from tests.launch.mains import exact_main, exact_share
from tests.launches import Launch, Shares, dealt, deep_folder, fresh, share_metrics
from tests.outputs import FOUR_JOBS, assert_same_results, states, status
from weftune import Options

EXPLODING = {"name": "exploding", "steps": 6, "learning_rate": 1e200, "clip": None, "save_every": 1}
JOBS = [EXPLODING, *({**job, "steps": 60} if job["name"] == "long" else job for job in FOUR_JOBS)]
"""One job is longer than two windows: a pipeline obeys Ctrl-C at the end of a window."""
CALM_JOBS = [job for job in JOBS if job["name"] != "stops"]
"""On the model of the tests with shards, the other job multiplies a rounding by thousands in a few steps."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("teams"), JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 1
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """As `place`, for a model whose layers can be divided."""
    folder = deep_folder(tmp_path_factory.mktemp("sharded"), CALM_JOBS, family="llama")
    assert Launch(folder, "undisturbed", 1, runs=exact_main).wait() == 1
    return folder


def assert_equal(output, undisturbed):
    assert states(output)["exploding"] == "failed"
    assert_same_results(output, undisturbed)
    assert not (output / ".shares").exists()


@pytest.mark.slow
def test_two_shares_of_two_stages_equal_one_process_beside_a_job_that_explodes(place, capfd):
    output = place / fresh(place, "out")
    assert Shares(place, "out", 2, pipeline="2").wait() == 1
    assert_equal(output, place / "undisturbed")
    assert f"5 jobs on {place / 'model'}, in 2 shares of 2 stages" in capfd.readouterr().out
    assert len(dealt(output)) == 2
    logs = {f"share-{share}-worker-{worker}.log" for share in range(2) for worker in range(2)}
    assert {path.name for path in (output / "ranks").iterdir()} == {"pids", *logs}


@pytest.mark.slow
def test_two_shares_of_two_shards_equal_one_process_beside_a_job_that_explodes(sharded, monkeypatch):
    monkeypatch.setattr(weftune.launch.split, "run_share", exact_share)
    output = sharded / fresh(sharded, "out")
    assert Shares(sharded, "out", 2, shards="2").wait() == 1
    assert_equal(output, sharded / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [{"gpus": 2, "pipeline": 2}, {"pipeline": 2}, {"gpus": 2}, {"gpus": 1}])
def test_from_python_the_results_are_those_of_one_process(place, numbers):
    output = place / fresh(place, "python")
    shown = Shown()
    settings = Options(device="cpu")
    results = weftune.train(place / "jobs.yaml", output=output, options=settings, view=shown, **numbers)
    assert_equal(output, place / "undisturbed")
    assert {name: result.state for name, result in results.items()} == states(output)
    assert results["best"].metrics["step"] == 12
    assert {row.name for row in shown.rows} == set(results)
    assert sum(note.startswith("Wall time") for note in shown.notes) == 1
    words = [word for key, number in numbers.items() for word in (f"--{key}", str(number))]
    line = shlex.join(["weftune", "train", str(place / "jobs.yaml"), "--output", str(output), *words])
    assert status(output)["command"] == f"{line} --resume"
    again = weftune.train(
        place / "jobs.yaml", output=output, resume=True, options=settings, progress=False, **numbers
    )
    assert again == results, "nothing is left to do"


class Shown:
    def __init__(self) -> None:
        self.rows, self.notes = [], []

    def update(self, row) -> None:
        self.rows.append(row)

    def note(self, text) -> None:
        self.notes.append(text)


SCRIPT = """
import weftune

def train():
    jobs = [{"name": "a", "steps": 2, "data": [{"text": "w7 w8 w9"}] * 8}]
    job = weftune.train({"base": "model", "jobs": jobs}, output="by-script", pipeline=2, progress=False)["a"]
    print(job.state, flush=True)

"""
GUARD = 'if __name__ == "__main__":\n    '


@pytest.mark.slow
def test_a_script_without_a_guard_gets_a_sentence_and_a_guarded_one_trains(place):
    (place / "script.py").write_text(f"{SCRIPT}train()\n")
    run = partial(subprocess.run, [sys.executable, "script.py"], cwd=place, capture_output=True, text=True)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    told = run(env=environment)
    assert told.returncode == 1
    assert "weftune.errors.UserError: weftune.train starts processes that import the script" in told.stderr
    assert told.stderr.count("Traceback") == 1
    assert not (place / "by-script" / "a").exists()
    (place / "script.py").write_text(f"{SCRIPT}{GUARD}train()\n")
    told = run(env=environment)
    assert (told.returncode, told.stdout) == (0, "succeeded\n"), told.stderr


@pytest.mark.slow
@pytest.mark.parametrize("worker", [2, 3])
def test_a_worker_that_is_killed_restarts_its_own_share_only(place, worker, capfd):
    output = place / fresh(place, "killed")
    run = Shares(place, "killed", 2, pipeline="2")
    run.wait_for_lines(16)
    before = run.pids()
    run.signal(worker, signal.SIGKILL)
    run.wait_until(lambda: len(set(run.pids()) - set(before)) == 2)
    assert run.pids()[:2] == before[:2], "the other share went on"
    assert run.wait() == 1
    told = capfd.readouterr()
    assert "starting all workers of share 1 again from the last checkpoints (1 of 3)." in told.out
    assert "Traceback" not in told.out + told.err
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_killed_with_its_launcher_it_resumes_in_more_shares_and_ends_in_one_process(place, forks):
    output = place / fresh(place, "changing")
    words = ("--device", "cpu", "--gpus", "2", "--pipeline", "2")
    forks.start("train", "jobs.yaml", "--output", "changing", *words, cwd=place)
    while sum(path.read_bytes().count(b"\n") for path in share_metrics(output)) < 12:
        assert forks.running(), (place / "log").read_text()
        time.sleep(0.01)
    pids = [int(line.split()[1]) for line in (output / "ranks" / "pids").read_text().splitlines()]
    forks.signal(signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    interrupt(place, 3, resume=True, replicas=2)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 1
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_interrupted_it_resumes_with_other_numbers_of_stages_and_shards(sharded, monkeypatch):
    monkeypatch.setattr(weftune.launch.split, "run_share", exact_share)
    output = sharded / fresh(sharded, "changing")
    interrupt(sharded, 2, shards="2")
    interrupt(sharded, 2, resume=True, pipeline="2", shards="2")
    assert Shares(sharded, "changing", 3, resume=True).wait() == 1
    assert_equal(output, sharded / "undisturbed")


def interrupt(folder, count, **more):
    """Press Ctrl-C when the shares of the run `changing` have written some further lines of metrics."""
    pids = folder / "changing" / "ranks" / "pids"
    of_killed_run = pids.read_bytes() if pids.exists() else b""
    run = Shares(folder, "changing", count, **more)
    # Until then, the folders of the shares are those of the run before.
    run.wait_until(lambda: pids.exists() and pids.read_bytes() != of_killed_run)
    run.wait_for_lines(run.lines() + 3)
    run.interrupt()
    assert run.wait() == 130
    assert "paused" in states(folder / "changing").values()
