"""`weftune train` with a sweep: halved, killed and resumed with the same decisions and the same adapters."""

import json
import random
import shutil
import signal
import time

import pytest

from tests import bench, oracle
from tests.outputs import assert_same_job, jobs_folder, lines, states, status
from weftune.jobs.sweeps.record import best_folder

SEED = 20260107

JOBS = [
    {"name": "other", "steps": 14, "data": "b.jsonl", "adapter": {"rank": 2}},
    {
        "name": "s",
        "steps": 20,
        "adapter": {"rank": 3, "dropout": 0.1},
        "eval": {"fraction": 0.25, "every": 8},
        "sweep": {
            "over": {"learning_rate": [3e-2, 1e-2, 3e-3, 1e-3], "adapter.rank": [2, 5]},
            "halving": {"at": [0.2, 0.5], "keep": 0.4},
            "keep": 2,
        },
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of a run that nobody killed, and how long that took."""
    folder = jobs_folder(tmp_path_factory.mktemp("sweeps"), JOBS)
    seconds = float("inf")
    for _ in range(2):  # The first run still tokenises.
        shutil.rmtree(folder / "undisturbed", ignore_errors=True)
        began = time.monotonic()
        assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0, log(folder)
        seconds = min(seconds, time.monotonic() - began)
    return folder, seconds


def log(folder):
    return (folder / "log").read_text()


def record(output):
    return json.loads((output / "s" / "sweep.json").read_text())


def test_eight_trials_and_two_rungs_leave_two_winners_beside_an_ordinary_job(place):
    folder, _ = place
    output = folder / "undisturbed"
    found = record(output)
    assert [(one["step"], len(one["kept"]), len(one["left"])) for one in found["decisions"]] == [
        (4, 4, 4),
        (10, 2, 2),
    ]
    ended = states(output)
    assert ended.pop("other") == "succeeded"
    assert sorted(ended.values()) == ["cancelled"] * 6 + ["succeeded"] * 2
    assert {path.name for path in (output / "s" / "best").iterdir()} == set(found["best"])
    assert found["samples"] == {"trained": 4 * (4 * 4 + 2 * 10 + 2 * 20), "all": 4 * 8 * 20}


def rung_losses(output):
    return {(one["job"], one["step"]): one["rung_loss"] for one in lines(output) if "rung_loss" in one}


@pytest.mark.parametrize(
    "words",
    [
        ("--pipeline", "2"),
        pytest.param(("--replicas", "2"), marks=pytest.mark.slow),
        pytest.param(("--device", "cpu", "--gpu-memory", "512KiB"), marks=pytest.mark.slow),
        pytest.param(("--device", "cpu", "--gpus", "2"), marks=pytest.mark.slow),
        pytest.param(("--device", "cpu", "--gpus", "3", "--pipeline", "2"), marks=pytest.mark.slow),
    ],
    ids=["two stages", "two replicas", "streamed", "two shares", "three shares of two stages"],
)
def test_rungs_judge_the_same_means_in_every_layout(forks, place, words):
    folder, _ = place
    output, want = folder / "laid", folder / "undisturbed"
    shutil.rmtree(output, ignore_errors=True)
    assert forks.weftune("train", "jobs.yaml", "--output", "laid", *words, cwd=folder) == 0, log(folder)
    assert_same_sweep(output, want)
    judged = rung_losses(want)
    assert len(judged) == 8 + 4
    assert rung_losses(output) == pytest.approx(judged, rel=1e-9)
    streamed = any("The base is streamed in" in note for note in status(output)["notes"])
    assert streamed == ("--gpu-memory" in words)


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [("--device", "cpu", "--gpus", "3"), ()], ids=["three shares", "alone"])
def test_killed_in_any_round_of_shares_it_resumes_to_the_same_decisions_and_adapters(forks, place, resumed):
    folder, _ = place
    output, want = folder / "out", folder / "undisturbed"
    shutil.rmtree(output, ignore_errors=True)
    rng, codes = random.Random(SEED), []
    for number in range(5):
        words = ("--device", "cpu", "--gpus", "2", *(["--resume"] if number else []))
        forks.start("train", "jobs.yaml", *words, cwd=folder)
        # Later than the first steps, where nothing would be lost.
        while forks.running() and not list(output.glob(".shares/*/metrics.jsonl")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 3.0))
        forks.signal(signal.SIGKILL)
        codes.append(forks.wait())
        assert codes[-1] in (0, -signal.SIGKILL), log(folder)
    assert codes[0] == -signal.SIGKILL
    words = ("train", "jobs.yaml", "--resume", *resumed)
    assert forks.weftune(*words, cwd=folder) == 0, log(folder)
    assert_same_sweep(output, want)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 24])
def test_killed_at_random_moments_it_resumes_to_the_same_decisions_and_adapters(forks, place, times):
    folder, seconds = place
    rng = random.Random(SEED)
    output, want = folder / "out", folder / "undisturbed"
    shutil.rmtree(output, ignore_errors=True)
    kills = ended = 0
    while kills < times:
        forks.start("train", "jobs.yaml", *(["--resume"] if output.exists() else []), cwd=folder)
        time.sleep(rng.uniform(0.3, 1.0) * seconds if times == 1 else rng.random() * seconds)
        forks.signal(signal.SIGKILL)
        code = forks.wait()
        assert code in (0, -signal.SIGKILL), log(folder)
        kills += code != 0
        if code == 0 or kills % 3 == 0:
            finish(forks, folder)
            assert_same_sweep(output, want)
            shutil.rmtree(output)
            ended += 1
            if times == 1:
                return
    finish(forks, folder)
    assert_same_sweep(output, want)
    print(f"{kills} kills in {ended + 1} runs of {seconds:.2f} s")


def finish(forks, folder):
    resume = ["--resume"] if (folder / "out").exists() else []
    assert forks.weftune("train", "jobs.yaml", *resume, cwd=folder) == 0, log(folder)


def assert_same_sweep(output, want):
    mine, theirs = record(output), record(want)
    assert mine["decisions"] == theirs["decisions"]
    assert mine["best"] == theirs["best"]
    assert [one["reason"] for one in mine["trials"]] == [one["reason"] for one in theirs["trials"]]
    assert states(output) == states(want)
    for name in ("other", *theirs["best"]):
        assert_same_job(output, want, name)
    for name in theirs["best"]:
        kept = [bench.adapter(best_folder(folder / "s", name)) for folder in (output, want)]
        assert oracle.distance(*kept) <= 1e-8
    assert not list(output.glob("*/checkpoints"))
    assert not list(output.rglob("*.partial"))
