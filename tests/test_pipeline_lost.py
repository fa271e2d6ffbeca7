"""A worker that dies or hangs: noticed in time, all stop and start again, and nobody's result changes."""

import json
import signal
import time

import pytest

import weftune.launch.supervise
from tests.cases import slow_but
from tests.launches import Launch, copied, fresh
from tests.outputs import assert_same_results, assert_whole, lines
from weftune.run.workers.heartbeat import LOST

NOTICED = 10.0


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    return copied(trained_deep, tmp_path_factory.mktemp("lost"))


def strike(place, workers, worker, number, at):
    """Send the signal once `at` lines are written; how long it took until all workers were started again."""
    output = place / fresh(place, "out")
    run = Launch(place, "out", workers)
    run.wait_for_lines(at)
    before = run.pids()
    run.signal(worker, number)
    began = time.monotonic()
    run.wait_until(lambda: run.pids() != before)
    seconds = time.monotonic() - began
    assert run.wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    return seconds


@pytest.mark.timed
@pytest.mark.parametrize(
    ("workers", "worker"), slow_but([(2, 1), *((4, worker) for worker in range(4))], [(2, 1)])
)
def test_kill_9_of_each_worker_in_turn_ends_in_the_same_adapters(place, workers, worker, capfd):
    seconds = strike(place, workers, worker, signal.SIGKILL, at=8 + 6 * worker)
    assert seconds < NOTICED
    told = capfd.readouterr().err
    assert "starting all workers again from the last checkpoints (1 of 3)" in told
    assert "Traceback" not in told
    print(f"worker {worker} killed: all started again after {seconds:.1f} s")


@pytest.mark.timed
@pytest.mark.parametrize("worker", slow_but([0, 1], [0]))
def test_a_worker_that_hangs_is_noticed_in_ten_seconds(place, worker, capfd):
    seconds = strike(place, 2, worker, signal.SIGSTOP, at=14)
    assert seconds < NOTICED
    print(f"worker {worker} stopped: all started again after {seconds:.1f} s")


@pytest.mark.slow
def test_no_more_than_one_checkpoint_interval_is_recomputed(place):
    """A worker's first step after the restart, read from the trace, beside what was written before it."""
    output = place / fresh(place, "out")
    run = Launch(place, "out", 2)
    run.wait_for_lines(30)
    before = run.pids()
    run.signal(1, signal.SIGKILL)
    run.wait_until(lambda: run.pids() != before)
    reached = {line["job"]: line["step"] for line in lines(output) if "loss" in line}
    assert run.wait() == 0
    first = {}
    for event in json.loads((output / "trace.json").read_text())["traceEvents"]:
        if event.get("cat") == "Step" and event["tid"] == 0:
            first.setdefault(event["args"]["job"], event["args"]["step"])
    assert first
    for job, step in first.items():
        save_every = {"other": 1}.get(job, 4)
        assert step > reached[job] - save_every, (job, step, reached[job])


def test_after_its_restarts_it_gives_up_with_a_sentence(place, capfd, monkeypatch):
    monkeypatch.setattr(weftune.launch.supervise, "MAX_RESTARTS", 1)
    fresh(place, "out")
    run, before = Launch(place, "out", 2), []
    for _ in range(2):
        run.wait_until(lambda seen=before: (run.output / "ranks" / "pids").exists() and run.pids() != seen)
        before = run.pids()
        run.signal(1, signal.SIGKILL)
    assert run.wait() == LOST
    assert "worker 1 was ended by SIGKILL; giving up" in capfd.readouterr().err
