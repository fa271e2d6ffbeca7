"""A device that has no room for a pass: the run goes on in smaller microbatches or with fewer jobs at once,
and no result changes."""

from functools import partial

import pytest

from tests.launch.mains import short_main
from tests.launch.modes import modes
from tests.launches import copied
from tests.outputs import FOUR_JOBS, assert_same_job, assert_whole, status


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    return copied(trained_deep, tmp_path_factory.mktemp("short"))


@pytest.mark.parametrize("mode", modes("one device", "streamed", "pipeline", "streamed workers"))
def test_a_pass_that_does_not_fit_one_device_is_dropped_on_all_and_every_job_ends_the_same(
    place, mode, tmp_path
):
    output = mode.output(place)
    assert mode.start(place, output.name, runs=partial(short_main, tmp_path / "struck")).wait() == 0
    struck = len((tmp_path / "struck").read_text())
    assert struck > (0 if mode.gpu_memory else 3), "from 1024 tokens to 512, and so on"
    told = [note for note in status(output)["notes"] if note.startswith("Out of memory with")]
    assert len(told) <= struck
    assert told or mode.gpu_memory, "where microbatches cannot be smaller a job waits"
    assert (output / "ranks" / "pids").exists()
    mode.assert_it_was(output)
    assert_whole(output)
    for job in FOUR_JOBS:
        assert_same_job(output, place / "undisturbed", job["name"])
