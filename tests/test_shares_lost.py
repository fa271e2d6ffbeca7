"""A share, or the launcher of all, that is killed: whoever is left goes on, and nobody's result changes."""

import os
import random
import shlex
import signal
import threading
import time
from contextlib import suppress

import pytest
import typer

import weftune.launch.split
import weftune.launch.supervise
from tests.launches import Shares, dealt, fresh, share_metrics
from tests.outputs import FIVE_JOBS, assert_same_results, assert_whole, jobs_folder, states, status
from tests.run.processes import context
from weftune.cli.train import train
from weftune.report.read import read_run

SEED = 20240607


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = jobs_folder(tmp_path_factory.mktemp("shares"), FIVE_JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


def strike(place, name, number):
    """Send the second of two shares a signal: it alone is started again, and ends in the same adapters."""
    output = place / fresh(place, name)
    run = Shares(place, name, 2)
    run.wait_for_lines(16)
    before = run.pids()
    run.signal(1, number)
    run.wait_until(lambda: run.pids() != before)
    assert run.pids()[0] == before[0], "the other share went on"
    assert run.wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    return output


def test_a_killed_share_alone_is_started_again_and_ends_in_the_same_adapters(place, capfd):
    output = strike(place, "killed", signal.SIGKILL)
    told = capfd.readouterr()
    assert "share 1 was ended by SIGKILL; starting it again from the last checkpoints (1 of 3)." in told.out
    assert "Traceback" not in told.out + told.err + (output / "ranks" / "share-1.log").read_text()


@pytest.mark.slow
def test_a_share_that_hangs_is_ended_and_started_again(place, capfd, monkeypatch):
    monkeypatch.setattr(weftune.launch.split, "SILENT_SECONDS", 6.0)
    strike(place, "hangs", signal.SIGSTOP)
    assert "share 1 has given no sign of life for 6 seconds." in capfd.readouterr().out


@pytest.mark.slow
def test_a_share_that_is_given_up_leaves_its_jobs_to_be_resumed_and_the_others_finish(
    place, capfd, monkeypatch
):
    monkeypatch.setattr(weftune.launch.supervise, "MAX_RESTARTS", 0)
    output = place / fresh(place, "lost")
    run = Shares(place, "lost", 2)
    run.wait_for_lines(16)
    run.signal(0, signal.SIGKILL)
    assert run.wait() == 1
    lost, kept = dealt(output)
    assert {states(output)[name] for name in kept} == {"succeeded"}
    unfinished = [name for name in lost if states(output)[name] != "succeeded"]
    assert unfinished
    words = ["weftune", "train", f"{place / 'jobs.yaml'}", "--output", f"{output}", "--device", "cpu"]
    resumed = shlex.join([*words, "--gpus", "2", "--resume"])
    for name in unfinished:
        assert states(output)[name] == "paused"
        reason = status(output)["jobs"][name]["reason"]
        assert reason == f"share 0 was ended by SIGKILL; resume with {resumed}"
    told = capfd.readouterr().out
    assert f"share 0 was ended by SIGKILL; giving up; resume with {resumed}\n" in told
    assert Shares(place, "lost", 2, resume=True).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_ctrl_c_is_handed_to_all_and_resumed_by_one_process(place, forks, capfd):
    output = place / fresh(place, "out")

    def at_work() -> bool:
        counts = [path.read_bytes().count(b"\n") for path in share_metrics(output)]
        return len(counts) == 2 and min(counts) >= 4

    def press() -> None:
        # A job that has not begun is not interrupted either.
        deadline = time.monotonic() + 60
        while not at_work() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    context()
    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(typer.Exit) as end:
        train(place / "jobs.yaml", output=output, device="cpu", gpus="2")
    finger.join()
    assert end.value.exit_code == 130
    told = capfd.readouterr().out
    assert told.count("Stopping: this step is finished and saved first") == 1
    words = ["weftune", "train", f"{place / 'jobs.yaml'}", "--output", f"{output}", "--device", "cpu"]
    assert f"Interrupted. Resume with {shlex.join([*words, '--gpus', '2', '--resume'])}\n" in told
    assert "paused" in states(output).values()
    assert {status(output)["jobs"][name]["reason"].partition(" at ")[0] for name in unended(output)} == {
        "interrupted"
    }
    assert forks.weftune("train", "jobs.yaml", "--output", "out", "--resume", cwd=place) == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


def unended(output):
    return [name for name, state in states(output).items() if state == "paused"]


@pytest.mark.slow
def test_a_killed_launcher_takes_its_shares_along_and_one_process_goes_on(place, forks):
    output = place / fresh(place, "out")
    forks.start("train", "jobs.yaml", "--output", "out", "--device", "cpu", "--gpus", "2", cwd=place)
    while sum(path.read_bytes().count(b"\n") for path in share_metrics(output)) < 8:
        assert forks.running(), (place / "log").read_text()
        time.sleep(0.005)
    forks.signal(signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    assert (output / ".shares").exists()
    run = read_run(output)
    assert {job.name for job in run.jobs} == {job["name"] for job in FIVE_JOBS}
    assert sum(len(job.losses) + len(job.evaluations) for job in run.jobs) >= 8

    words = ("train", "jobs.yaml", "--output", "out", "--resume")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    assert not (output / ".shares").exists()
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_shares_killed_at_random_moments_end_in_the_same_adapters(place):
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    kills = 0
    for _ in range(12):
        output = place / fresh(place, "out")
        run = Shares(place, "out", 2)
        run.wait_until(lambda run=run: (run.output / "ranks" / "pids").exists() and len(run.pids()) == 2)
        for _ in range(rng.randint(1, 3)):
            time.sleep(rng.uniform(0.0, 0.8))
            if run.code is None:
                with suppress(ProcessLookupError):
                    run.signal(rng.randrange(2), signal.SIGKILL)
                    kills += 1
        assert run.wait() == 0
        assert_whole(output)
        assert_same_results(output, place / "undisturbed")
    print(f"{kills} kills in 12 runs")
    assert kills >= 12


def test_a_base_that_no_share_can_load_is_told_once_with_exit_code_2(tmp_path, capfd):
    folder = jobs_folder(tmp_path, [{"name": "a", "steps": 2}, {"name": "b", "steps": 2}])
    (folder / "model" / "model.safetensors").unlink()
    assert Shares(folder, "out", 2).wait() == 2
    told = capfd.readouterr().out
    assert told.count("model.safetensors") == 1 + 2, "once when it is found, and in the reasons of both jobs"
    assert set(states(folder / "out").values()) == {"paused"}
