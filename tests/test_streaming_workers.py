"""`--pipeline N --gpu-memory`: workers that cannot hold even their part of the base stream it together, and
train every job to what one process makes of it.

The devices are pretended: the same code, with host memory on both sides of the copies.
"""

import json

import pytest

from tests.launches import Launch, copied, fresh
from tests.outputs import FOUR_JOBS, assert_same_job, assert_same_results, assert_whole, status

SMALL = {2: "870KiB", 3: "770KiB"}
"""By the number of workers, of each one's device: its layers and what a pipeline's passes hold do not fit."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    """A folder whose `undisturbed` is the output of one process with all of the base at hand."""
    return copied(trained_deep, tmp_path_factory.mktemp("workers"))


def notes(output):
    return " ".join(status(output)["notes"])


def pretended(memory):
    return "--device", "cpu", "--gpu-memory", memory


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_losses_evaluations_and_adapters_equal_one_process_and_it_says_what_it_chose(place, forks, workers):
    output = place / fresh(place, "out")
    words = ("train", "jobs.yaml", "--output", "out", "--pipeline", str(workers), *pretended(SMALL[workers]))
    assert forks.weftune(*words, cwd=place) == 0
    told = " ".join((place / "log").read_text().split())
    assert f"model, in {workers} workers" in told
    assert f"The base is streamed over {workers} workers in 4 stages of 1 layer" in told
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    assert f"The base is streamed over {workers} workers in 4 stages of 1 layer" in notes(output)
    assert f"came from the host to {workers} workers" in notes(output)
    windows = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    assert max(window["jobs"] for window in windows) > 1
    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    loads = {event["tid"] for event in events if event.get("cat") == "Load"}
    assert loads == {2: {0, 1}, 3: {0}}[workers], "the other workers have one layer each"


@pytest.mark.slow
def test_jobs_that_do_not_fit_beside_the_stages_wait_for_their_turn(place):
    output = place / fresh(place, "tight")
    assert Launch(place, "tight", 2, always=pretended("490KiB")).wait() == 0
    assert_whole(output)
    windows = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    assert max(window["jobs"] for window in windows) < len(FOUR_JOBS)
    for job in FOUR_JOBS:
        assert_same_job(output, place / "undisturbed", job["name"])


@pytest.mark.slow
def test_devices_that_hold_their_parts_stream_nothing(place):
    output = place / fresh(place, "large")
    assert Launch(place, "large", 2, always=pretended("1GiB")).wait() == 0
    assert "stream" not in notes(output)
    assert_same_results(output, place / "undisturbed")


def test_devices_too_small_for_a_job_are_a_mistake_with_a_sentence(place, forks):
    fresh(place, "never")
    words = ("train", "jobs.yaml", "--output", "never", "--pipeline", "2", *pretended("200KiB"))
    assert forks.weftune(*words, cwd=place) == 2
    told = " ".join((place / "log").read_text().split())
    assert (
        "job best does not fit: streamed over 2 workers with 18 tokens in a microbatch, a worker needs"
        in told
    )
    assert "Traceback" not in told
