"""kill -9 at any moment: `--resume` ends where the undisturbed run ended, nothing torn and nobody lost."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from fnmatch import fnmatch

import pytest

from tests.outputs import FOUR_JOBS, assert_same_results, assert_whole, jobs_folder, states, status

SEED = 20240607


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of a run that nobody killed, and how long that took."""
    folder = jobs_folder(tmp_path_factory.mktemp("killed"), FOUR_JOBS)
    seconds = float("inf")
    for _ in range(2):  # The first run still tokenises.
        shutil.rmtree(folder / "undisturbed", ignore_errors=True)
        began = time.monotonic()
        assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
        seconds = min(seconds, time.monotonic() - began)
    assert_whole(folder / "undisturbed")
    assert status(folder / "undisturbed")["jobs"]["stops"]["reason"].startswith("stopped early")
    return folder, seconds


class Chain:
    """Runs that are killed and resumed until one of them ends; then it begins again with an empty output."""

    def __init__(self, forks, folder):
        self.forks, self.folder, self.output = forks, folder, folder / "out"
        self.kills = self.ended = 0
        self.made = {}
        """(job, step) → when it was made, at the last kill."""
        shutil.rmtree(self.output, ignore_errors=True)

    def start(self):
        self.forks.start("train", "jobs.yaml", *self.resume(), cwd=self.folder)

    def strike(self):
        """Kill the run, or find that it has ended. Says whether it was killed."""
        self.forks.signal(signal.SIGKILL)
        code = self.forks.wait()
        assert code in (0, -signal.SIGKILL), (self.folder / "log").read_text()
        if code == 0:
            self.check()
            return False
        self.kills += 1
        self.note_redone()
        if (self.output / "status.json").exists():
            assert set(states(self.output)) <= {job["name"] for job in FOUR_JOBS}
        return True

    def resume(self):
        """A kill may have come before there was an output."""
        return ["--resume"] if self.output.exists() else []

    def finish(self):
        assert self.forks.weftune("train", "jobs.yaml", *self.resume(), cwd=self.folder) == 0, (
            self.folder / "log"
        ).read_text()
        self.check()

    def note_redone(self):
        """Of what was made before the last kill, a job makes no more again than one interval."""
        path = self.output / "metrics.jsonl"
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        found = [json.loads(line) for line in whole]
        now = {(line["job"], line["step"]): line["time"] for line in found if "loss" in line}
        for job in FOUR_JOBS:
            again = [
                key for key, moment in self.made.items() if key[0] == job["name"] and now.get(key) != moment
            ]
            assert len(again) <= job.get("save_every", 4), again
        self.made = now

    def check(self):
        self.note_redone()
        self.made = {}
        assert_whole(self.output)
        assert_same_results(self.output, self.folder / "undisturbed")
        shutil.rmtree(self.output)
        self.ended += 1

    def partials(self):
        found = set()
        for job in FOUR_JOBS:
            folder = self.output / job["name"] / "checkpoints"
            with suppress(FileNotFoundError):  # The folder is there while the job trains.
                names = os.listdir(folder)
                found |= {folder / name for name in names if fnmatch(name, ".step-*.partial")}
        return found


@pytest.mark.parametrize("times", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_moments_uniform_over_the_run_it_resumes_to_the_same_adapters(forks, place, times):
    folder, seconds = place
    rng = random.Random(SEED)
    chain = Chain(forks, folder)
    print(f"seed {SEED}")
    moments = []
    while chain.kills < times:
        # One moment in each equal part of the run, in random order; a resumed run may end before its own.
        moments = moments or [(part + rng.random()) / times for part in rng.sample(range(times), times)]
        chain.start()
        time.sleep(moments.pop() * seconds)
        chain.strike()
    chain.finish()
    print(f"{chain.kills} kills in {chain.ended} runs of {seconds:.2f} s")


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_inside_a_checkpoint_write_it_resumes_to_the_same_adapters(forks, place, times):
    folder, _ = place
    rng = random.Random(SEED + 1)
    chain = Chain(forks, folder)
    print(f"seed {SEED + 1}")
    inside = 0
    for _ in range(8 * times):
        if inside >= times:
            break
        sights, seen = rng.randrange(1, 12), chain.partials()
        chain.start()
        while sights and chain.forks.running():
            if new := chain.partials() - seen:
                seen |= new
                sights -= 1
            time.sleep(0.0005)  # A write takes a few times as long.
        # What is left of a write that had begun proves that the kill fell inside it.
        before = seen if sights == 0 else set()
        inside += chain.strike() and bool(chain.partials() & before)
    assert inside >= times
    chain.finish()
    print(f"{inside} of {chain.kills} kills inside a write, in {chain.ended} runs")
