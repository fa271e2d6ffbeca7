"""SIGTERM ends a run in any mode long before who sent it loses patience, however long its windows are, and
nothing that was finished is lost."""

import signal
import time

import pytest

from tests.launch.mains import slow_main
from tests.launch.modes import modes
from tests.launches import deep_folder
from tests.outputs import assert_same_results, assert_whole, lines, status
from weftune.plan.layout.choose import PIPELINE_ROUNDS

pytestmark = pytest.mark.timed
PATIENCE = 8.0
"""Seconds, most of which the machine may take for other things."""
JOBS = [
    {"name": "a", "steps": 24, "adapter": {"rank": 4, "dropout": 0.1}, "save_every": 3},
    {"name": "b", "steps": 20, "adapter": {"rank": 2}, "data": "b.jsonl"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    folder = deep_folder(tmp_path_factory.mktemp("terminated"), JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


@pytest.mark.parametrize("mode", modes("pipeline", "streamed", "streamed workers"))
def test_sigterm_in_a_long_window_saves_and_ends_soon_and_resume_ends_in_the_same_losses(place, mode):
    output = mode.output(place)
    run = mode.start(place, output.name, runs=slow_main)
    run.wait_for_lines(2)
    run.signal(0, signal.SIGTERM)
    began = time.monotonic()
    assert run.wait() == 130
    seconds = time.monotonic() - began
    print(f"{mode.name}: {seconds:.1f} s after SIGTERM")
    assert seconds < PATIENCE
    assert max(job["step"] for job in status(output)["jobs"].values()) < PIPELINE_ROUNDS
    for name, job in status(output)["jobs"].items():
        assert job["state"] == "paused", name
        assert job["reason"].startswith(f"interrupted at step {job['step']}; resume with weftune train ")
        assert job["reason"].endswith(" --resume")
        assert job["step"] == 0 or (output / name / "checkpoints" / f"step-{job['step']:08d}").is_dir()
    before = lines(output)
    assert mode.start(place, output.name, "--resume").wait() == 0
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    mode.assert_it_was(output)
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
