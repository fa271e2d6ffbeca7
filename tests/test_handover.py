"""Runs of a pipeline whose windows hand over: losses and adapters of one process, whoever leaves or dies."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launches import Launch, deep_folder, fresh
from tests.outputs import assert_same_job, assert_same_results, assert_whole, lines, states, status
from weftune.jobs.store.inbox import FileRequest, write_request

STEPS = {"first": 60, "second": 60, "short": 22}
JOBS = [
    {"name": "first", "steps": 60, "adapter": {"rank": 4, "dropout": 0.1}, "save_every": 5, "batch_size": 3},
    {"name": "second", "steps": 60, "adapter": {"rank": 3, "targets": ["q_proj"]}, "data": "b.jsonl",
     "save_every": 7},
    {"name": "short", "steps": 22, "adapter": {"rank": 2}, "seed": 5, "save_every": 1, "batch_size": 5},
]  # fmt: skip
"""Without evaluations, at which a pipeline drains."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    folder = deep_folder(tmp_path_factory.mktemp("handover"), JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


def windows(output):
    return [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (4, 1), (2, 2)])
def test_windows_hand_over_and_results_equal_one_process(place, stages, replicas):
    output = place / fresh(place, f"out{stages}x{replicas}")
    assert Launch(place, output.name, stages * replicas, replicas=replicas).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    passed = [one["tokens"] for one in windows(output)]
    whole = [one["tokens"] for one in windows(place / "undisturbed")]
    assert sum(passed) == sum(whole)
    # The first window leaves passes to the second.
    rounds = sum(line["tokens"] for line in lines(output) if "loss" in line and line["step"] <= 16)
    assert passed[0] < rounds


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_that_is_killed_costs_no_step_and_changes_no_result(place, replicas):
    output = place / fresh(place, f"killed{replicas}")
    run = Launch(place, output.name, 4, replicas=replicas)
    for worker, at in ((2, 40), (0, 90)):
        run.wait_for_lines(at)
        before = run.pids()
        run.signal(worker, signal.SIGKILL)
        run.wait_until(lambda before=before: run.pids() != before)
    assert run.wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


def test_interrupted_while_batches_are_unfinished_it_resumes_alone_to_the_same_curve(place, forks):
    output = place / fresh(place, "interrupted")
    run = Launch(place, "interrupted", 2)
    run.wait_for_lines(60)
    run.signal(0, signal.SIGINT)
    assert run.wait() == 130
    assert "paused" in states(output).values()
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "interrupted", cwd=place) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.parametrize("replicas", [1, 2])
def test_jobs_that_are_cancelled_and_paused_at_a_seam_reach_no_other(place, forks, replicas):
    output = place / fresh(place, f"requests{replicas}")
    run = Launch(place, output.name, 2 * replicas, replicas=replicas)
    run.wait_for_lines(20)
    write_request(output, FileRequest(verb="cancel", job="short"))
    write_request(output, FileRequest(verb="pause", job="second"))
    run.wait()
    assert states(output)["short"] == "cancelled"
    assert states(output)["second"] == "paused"
    assert status(output)["jobs"]["second"]["step"] < STEPS["second"]
    assert_same_job(output, place / "undisturbed", "first")
    # A job that is cancelled has not succeeded.
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", output.name, cwd=place) == 1
    assert_same_job(output, place / "undisturbed", "second")


def planner_of(pid):
    """The process that plans this worker's windows, or None if there is none."""
    children = (
        word for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()
    )
    for child in map(int, children):
        if b"weftune.trainer.planner" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_planner_that_is_killed_costs_no_window_and_changes_no_result(place):
    output = place / fresh(place, "planner")
    run = Launch(place, output.name, 2)
    killed = []
    for at in (10, 50):
        run.wait_for_lines(at)
        run.wait_until(lambda: planner_of(run.pids()[0]) not in {None, *killed})
        killed.append(planner_of(run.pids()[0]))
        os.kill(killed[-1], signal.SIGKILL)
    assert run.wait() == 0
    assert len(set(killed)) == 2
    assert_same_results(output, place / "undisturbed")
