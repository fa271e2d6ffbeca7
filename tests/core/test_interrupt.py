"""Ctrl-C and SIGTERM finish the step and save; the exit code says how a run ended."""

import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import weftune.core.interrupt
import weftune.trainer.trainer
from tests import bench
from tests.cases import slow_but
from tests.outputs import (
    FOUR_JOBS,
    Crash,
    assert_same_results,
    assert_whole,
    events_of,
    jobs_folder,
    lines,
    rich_jobs,
    rich_run,
    states,
    status,
)
from weftune import JobSpec, Options
from weftune.core.interrupt import handle_interrupts


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    folder = jobs_folder(tmp_path_factory.mktemp("interrupt"), FOUR_JOBS)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return rich_run(tmp_path_factory.mktemp("interrupt") / "out")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_first_signal_finishes_the_step_saves_and_exits_130_and_resume_completes(place, forks, number):
    shutil.rmtree(place / "out", ignore_errors=True)
    forks.start("train", "jobs.yaml", cwd=place)
    forks.wait_for_lines(place / "out", 12)
    forks.signal(number)
    assert forks.wait() == 130
    log = (place / "log").read_text()
    assert "Stopping: this step is finished and saved first." in log
    assert "Interrupted. Resume with weftune train jobs.yaml --resume\n" in log
    assert "Traceback" not in log
    jobs = status(place / "out")["jobs"]
    assert set(jobs) == {job["name"] for job in FOUR_JOBS}
    waiting = {name: job for name, job in jobs.items() if job["state"] == "paused"}
    assert {job["state"] for job in jobs.values()} <= {"paused", "succeeded"}
    assert waiting
    for name, job in waiting.items():
        assert (
            job["reason"]
            == f"interrupted at step {job['step']}; resume with weftune train jobs.yaml --resume"
        )
        assert (place / "out" / name / "checkpoints" / f"step-{job['step']:08d}").is_dir()
    before = lines(place / "out")
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=place) == 0, (place / "log").read_text()
    assert lines(place / "out")[: len(before)] == before, "no finished step was made again"
    assert_whole(place / "out")
    assert_same_results(place / "out", place / "undisturbed")


def _runs(output: Path) -> bool:
    """Whether its one job has been told to be at work."""
    return (output / "status.json").exists() and states(output) == {"a": "running"}


def test_a_command_hears_ctrl_c_and_the_second_one_stops_it_at_once(tmp_path, forks):
    """With steps too long to end in time."""
    job = {"name": "a", "steps": 1, "batch_size": 5_000, "adapter": {"rank": 4}}
    folder = jobs_folder(tmp_path, [job])
    row = (folder / "a.jsonl").read_text().splitlines()[0]
    (folder / "a.jsonl").write_text(f"{row}\n" * 5_000)
    forks.start("train", "jobs.yaml", cwd=folder)
    deadline = time.monotonic() + 120
    while not _runs(folder / "out"):
        assert forks.running(), (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    forks.signal(signal.SIGINT)
    while "Stopping" not in (folder / "log").read_text():
        assert forks.running(), (folder / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    forks.signal(signal.SIGINT)
    assert forks.wait() == 130
    assert time.monotonic() - began < 10
    assert "Traceback" not in (folder / "log").read_text()
    assert not (folder / "out" / "metrics.jsonl").exists(), "its one step was not made"
    assert states(folder / "out") == {"a": "running"}


@pytest.mark.parametrize("stride", slow_but([4, 9], [9]))
def test_interrupted_at_every_event_a_run_resumes_to_the_undisturbed_curve(undisturbed, tmp_path, stride):
    """Between a step and its evaluation too: what was owed is looked at after the resumption, and once."""
    want, count = undisturbed
    model = bench.base()
    for at in range(1, count + 1, stride):
        output, seen = tmp_path / str(at), 0

        def callback(_event, at=at):
            nonlocal seen
            seen += 1
            if seen == at:
                signal.raise_signal(signal.SIGINT)

        trainer = bench.trainer(model, output, rich_jobs(), options=Options())
        trainer.run(callback)
        assert trainer.interrupted == ("paused" in states(output).values())
        assert set(states(output).values()) <= {"paused", "succeeded"}
        assert trainer.interrupted or at > count - 4
        events_of(output, model, resume=True)
        assert_whole(output)
        assert_same_results(output, want)


@pytest.mark.slow
def test_interrupted_before_an_evaluation_and_killed_after_it_no_line_is_written_twice(undisturbed, tmp_path):
    """The evaluation that was owed is made after the resumption, and lost again with the crash."""
    want, count = undisturbed
    model = bench.base()
    owed = 0
    for at in range(2, count - 3):
        output, seen = tmp_path / str(at), []

        def callback(event, at=at, seen=seen):
            seen.append(event)
            if len(seen) == at:
                signal.raise_signal(signal.SIGINT)

        bench.trainer(model, output, rich_jobs()).run(callback)
        stood = {name: job["step"] for name, job in status(output)["jobs"].items()}
        looked = {(line["job"], line["step"]) for line in lines(output) if "eval_loss" in line}
        due = {(line["job"], line["step"]) for line in lines(want) if "eval_loss" in line}
        if not any((name, step) in due - looked for name, step in stood.items()):
            continue
        owed += 1
        with pytest.raises(Crash):
            events_of(output, model, at=2, resume=True)
        events_of(output, model, resume=True)
        assert_whole(output)
        assert_same_results(output, want)
        if owed == 3:
            return
    raise AssertionError("no interruption fell before an evaluation")


@pytest.mark.slow
def test_interrupted_after_every_single_event_it_still_ends_the_same(undisturbed, tmp_path):
    want, count = undisturbed
    model, output = bench.base(), tmp_path / "out"
    for _ in range(2 * count):
        events = []

        def callback(event, events=events):
            events.append(event)
            if len(events) == 1:
                signal.raise_signal(signal.SIGTERM)

        trainer = bench.trainer(model, output, rich_jobs(), options=Options(resume=output.exists()))
        trainer.run(callback)
        if not trainer.interrupted:
            break
    assert not trainer.interrupted
    assert_whole(output)
    assert_same_results(output, want)


def test_the_handlers_of_before_are_put_back_and_a_second_signal_interrupts():
    before = signal.getsignal(signal.SIGINT)
    told = []
    with handle_interrupts(lambda: told.append(1)) as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert told == [], "a handler does not print"
        assert stop()
        assert stop()
        assert told == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_while_the_base_is_loaded_the_first_signal_ends_the_run_at_once(tmp_path, monkeypatch):
    def load(*_):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("a base can take minutes to load")

    monkeypatch.setattr(weftune.trainer.trainer, "open_engine", load)
    trainer = bench.trainer(bench.base(), tmp_path / "out", rich_jobs())
    # Processes that a shell starts in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nobody_asks_to_stop():
    heard = []

    def inside():
        with handle_interrupts(lambda: None) as stop:
            heard.append(stop())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert heard == [False]


def test_some_failed_is_exit_1_and_they_are_named(tmp_path, forks):
    wild = {"name": "wild", "steps": 6, "learning_rate": 1e200, "clip": None, "adapter": {"rank": 2}}
    folder = jobs_folder(tmp_path, [wild, {"name": "calm", "steps": 3, "adapter": {"rank": 2}}])
    assert forks.weftune("train", "jobs.yaml", cwd=folder) == 1
    log = (folder / "log").read_text()
    assert states(folder / "out") == {"wild": "failed", "calm": "succeeded"}
    assert "wild: its " in log
    assert "Traceback" not in log
    assert forks.weftune("train", "jobs.yaml", "--resume", cwd=folder) == 1, (
        "it stays failed until it is restarted"
    )


def test_a_mistake_is_exit_2_with_its_place(tmp_path, forks):
    folder = jobs_folder(tmp_path, [{"name": "a", "steps": 3, "adapter": {"r": 2}}])
    assert forks.weftune("train", "jobs.yaml", cwd=folder) == 2
    assert "adapter.r: write rank" in (folder / "log").read_text()
    assert not (folder / "out").exists()


def test_on_the_way_out_a_step_that_takes_long_is_dropped_and_made_after_the_resumption(
    tmp_path, monkeypatch
):
    """Asked when one of two jobs has made its second step: the other is in the middle of its own."""
    model, rows = bench.base(), [bench.rows(bench.samples(8, seed=seed, shortest=18)) for seed in (1, 2)]
    jobs = [
        JobSpec(name="a", data=rows[0], steps=6, batch_size=3, adapter={"rank": 2}),
        JobSpec(name="b", data=rows[1], steps=6, batch_size=3, adapter={"rank": 3, "dropout": 0.1}),
    ]
    bench.train(model, tmp_path / "undisturbed", jobs, capacity=20)
    monkeypatch.setattr(weftune.core.interrupt, "FINISH_SECONDS", -1.0)

    def callback(event):
        if event.step == 2:
            signal.raise_signal(signal.SIGTERM)

    trainer = bench.trainer(model, tmp_path / "out", jobs, options=Options(capacity=20))
    trainer.run(callback)
    assert trainer.interrupted
    stood = sorted(job["step"] for job in status(tmp_path / "out")["jobs"].values())
    assert stood == [1, 2], "one was finished, the other dropped"
    bench.train(model, tmp_path / "out", jobs, capacity=20, resume=True)
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", tmp_path / "undisturbed")
