"""Shares of the jobs that several workers train each: every job gets what one process gives it, and a lost
worker restarts its own share only."""

from __future__ import annotations

import os
import signal
import time

import pytest

import weftune.launch.split
from tests.launch.mains import exact_main, exact_share
from tests.launches import Launch, Shares, dealt, deep_folder, fresh, share_metrics
from tests.outputs import FOUR_JOBS, assert_same_results, states

EXPLODING = {"name": "exploding", "steps": 6, "learning_rate": 1e200, "clip": None, "save_every": 1}
JOBS = [EXPLODING, *FOUR_JOBS]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("teams"), JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 1
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """As `place`, for a model whose layers can be divided."""
    folder = deep_folder(tmp_path_factory.mktemp("sharded"), JOBS, family="llama")
    assert Launch(folder, "undisturbed", 1, runs=exact_main).wait() == 1
    return folder


def assert_equal(output, undisturbed):
    assert states(output)["exploding"] == "failed"
    assert_same_results(output, undisturbed)
    assert not (output / ".shares").exists()


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
    assert Shares(sharded, "out", 2, shards=2).wait() == 1
    assert_equal(output, sharded / "undisturbed")


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
    interrupt(Shares(place, "changing", 3, resume=True, replicas=2), 8)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 1
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_interrupted_it_resumes_with_other_numbers_of_stages_and_shards(sharded, monkeypatch):
    monkeypatch.setattr(weftune.launch.split, "run_share", exact_share)
    output = sharded / fresh(sharded, "changing")
    interrupt(Shares(sharded, "changing", 2, shards=2), 8)
    interrupt(Shares(sharded, "changing", 2, resume=True, pipeline="2", shards=2), 8)
    assert Shares(sharded, "changing", 3, resume=True).wait() == 1
    assert_equal(output, sharded / "undisturbed")


def interrupt(run, count):
    """Press Ctrl-C when `count` further lines of metrics have been written; no step may be made again."""
    before = run.lines()
    run.wait_for_lines(before + count)
    run.interrupt()
    assert run.wait() == 130
    assert "paused" in states(run.output).values()
