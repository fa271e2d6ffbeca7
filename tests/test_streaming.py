"""`--gpu-memory`: a base larger than the device trains every job to what the resident base makes of it.

The device is pretended: the same code, with host memory on both sides of the copies.
"""

import json
import signal

import pytest

from tests import bench
from tests.launches import copied, fresh
from tests.outputs import FOUR_JOBS, assert_same_job, assert_same_results, assert_whole, status
from weftune import JobSpec, Options
from weftune.errors import UserError

SMALL = "960KiB"
"""The base takes 282 KiB; what passes and four adapters hold does not fit beside it."""
CROWDED = "1184KiB"
"""All four jobs find room at once, but not what four stages are given in a round of theirs."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    """A folder whose `undisturbed` is the output of a run with all of the base at hand."""
    return copied(trained_deep, tmp_path_factory.mktemp("streaming"))


def stream(forks, place, output, memory, *more):
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", output, "--gpu-memory", memory)
    return forks.weftune(*words, *more, cwd=place)


def notes(place, output):
    return " ".join(status(place / output)["notes"])


def test_losses_evaluations_and_adapters_equal_the_resident_run_and_it_says_what_it_chose(place, forks):
    output = place / fresh(place, "small")
    assert stream(forks, place, "small", SMALL) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    told = notes(place, "small")
    assert "The base is streamed in" in told
    assert "came from the host; training waited for the host in" in told
    assert "The base is streamed in" in " ".join((place / "log").read_text().split())


@pytest.mark.slow
def test_where_inputs_of_stages_find_no_room_they_wait_in_host_memory_and_nothing_else_changes(place, forks):
    output = place / fresh(place, "crowded")
    assert stream(forks, place, "crowded", CROWDED) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    assert "inputs of stages wait in host memory for the way back" in notes(place, "crowded")
    windows = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    assert max(window["jobs"] for window in windows) == len(FOUR_JOBS)


@pytest.mark.slow
def test_a_device_that_holds_it_all_streams_nothing(place, forks):
    output = place / fresh(place, "large")
    assert stream(forks, place, "large", "1GiB") == 0
    assert "stream" not in notes(place, "large")
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_interrupted_while_streaming_it_goes_on_resident_to_the_same_curve(place, forks):
    output = place / fresh(place, "shrunk")
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "shrunk", "--gpu-memory", SMALL)
    forks.start(*words, cwd=place)
    forks.wait_for_lines(output, 12)
    forks.signal(signal.SIGINT)
    assert forks.wait() == 130
    assert forks.weftune("train", "jobs.yaml", "--output", "shrunk", "--resume", cwd=place) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_killed_resident_it_goes_on_streamed_to_the_same_curve(place, forks):
    output = place / fresh(place, "killed")
    forks.start("train", "jobs.yaml", "--output", "killed", cwd=place)
    forks.wait_for_lines(output, 20)
    forks.signal(signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    assert stream(forks, place, "killed", SMALL, "--resume") == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_jobs_that_do_not_fit_beside_the_stages_wait_for_their_turn(place, forks):
    output = place / fresh(place, "tight")
    assert stream(forks, place, "tight", "700KiB") == 0
    assert_whole(output)
    windows = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    assert max(window["jobs"] for window in windows) < len(FOUR_JOBS)
    for job in FOUR_JOBS:
        assert_same_job(output, place / "undisturbed", job["name"])


def test_a_device_too_small_for_one_layer_is_a_mistake_with_a_sentence(place, forks):
    fresh(place, "never")
    assert stream(forks, place, "never", "60KiB") == 2
    told = " ".join((place / "log").read_text().split())
    assert "one layer of the base needs" in told
    assert "use a larger GPU or a smaller base" in told
    assert not (place / "never" / "status.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--pipeline", "auto"), "write how many to stream it over, such as --pipeline 2"),
        (
            ("--gpus", "2"),
            "need all of it on each: leave it out, or stream over several GPUs with",
        ),
        (("--replicas", "2"), "need all of it on each"),
    ],
)
def test_what_wants_the_whole_base_on_a_device_does_not_go_with_it(place, forks, words, sentence):
    assert stream(forks, place, "never", SMALL, *words) == 2
    assert sentence in " ".join((place / "log").read_text().split())


def test_a_size_that_is_none_is_a_mistake_with_a_sentence(place, forks):
    assert stream(forks, place, "never", "much") == 2
    assert "--gpu-memory much: write a number and a unit" in (place / "log").read_text()


def test_a_base_that_is_in_memory_already_cannot_be_streamed(tmp_path):
    run = bench.trainer(
        bench.base(),
        tmp_path / "out",
        [JobSpec(name="a", steps=1, data=bench.rows(bench.samples(4)), adapter={"rank": 2})],
        options=Options(gpu_memory=1 << 20),
    )
    with pytest.raises(UserError, match="on its device already"):
        run.run()
