"""A run that is streamed over workers and interrupted, or loses one of them, ends as if nothing had been."""

import signal

import pytest

from tests.cases import slow_but
from tests.launches import Launch, copied, fresh
from tests.outputs import assert_same_results, assert_whole
from tests.test_streaming_workers import SMALL, notes, pretended


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    return copied(trained_deep, tmp_path_factory.mktemp("resumed"))


def stream(place, output, *more):
    return Launch(place, output, 2, *more, always=pretended(SMALL[2]))


@pytest.mark.slow
def test_interrupted_while_streaming_over_workers_it_goes_on_alone_to_the_same_curve(place, forks):
    output = place / fresh(place, "shrunk")
    run = stream(place, "shrunk")
    run.wait_for_lines(12)
    run.signal(0, signal.SIGINT)
    assert run.wait() == 130
    assert forks.weftune("train", "jobs.yaml", "--output", "shrunk", "--resume", cwd=place) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_interrupted_alone_it_goes_on_over_workers_to_the_same_curve(place, forks):
    output = place / fresh(place, "grown")
    forks.start("train", "jobs.yaml", "--output", "grown", cwd=place)
    forks.wait_for_lines(output, 12)
    forks.signal(signal.SIGINT)
    assert forks.wait() == 130
    assert stream(place, "grown", "--resume").wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.parametrize("worker", slow_but([0, 1], []))
def test_kill_9_of_a_worker_ends_in_the_same_adapters(place, worker, capfd):
    output = place / fresh(place, "killed")
    run = stream(place, "killed")
    run.wait_for_lines(10 + 8 * worker)
    before = run.pids()
    run.signal(worker, signal.SIGKILL)
    run.wait_until(lambda: run.pids() != before)
    assert run.wait() == 0
    assert "starting all workers again from the last checkpoints (1 of 3)" in capfd.readouterr().err
    assert "came from the host to 2 workers" in notes(output), "only a run that comes to its end says so"
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
