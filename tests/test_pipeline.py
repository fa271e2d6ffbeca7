"""A base cut into stages trains every job to what one process makes of it, whoever comes, goes or resumes."""

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests import oracle
from tests.cases import slow_but
from tests.launches import Launch, copied, deep_folder, fresh
from tests.outputs import assert_same_results, assert_whole, lines, numbers, states, status
from tests.plan.profiles import profile
from tests.run.models import deep
from weftune import JobSpec
from weftune.base.load import inspect
from weftune.base.spec import BaseSpec
from weftune.jobs.store.status import lock_folder
from weftune.plan.cost.profile import profile_folder, profile_path, write_profile
from weftune.report.gantt import read_timelines
from weftune.run.profile import device_profile_key


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    """A folder whose `undisturbed` is the output of one process."""
    folder = copied(trained_deep, tmp_path_factory.mktemp("pipeline"))
    assert status(folder / "undisturbed")["jobs"]["stops"]["reason"].startswith("stopped early")
    return folder


@pytest.mark.parametrize("workers", slow_but([2, 4], [4]))
def test_losses_evaluations_and_adapters_equal_one_process(place, workers):
    output = place / fresh(place, "out")
    assert Launch(place, "out", workers).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


def test_the_trace_has_a_line_for_every_worker_and_an_event_for_every_action(place):
    output = place / "out"
    if not (output / "trace.json").exists():
        assert Launch(place, fresh(place, "out"), 4).wait() == 0
    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"worker 0", "worker 1", "worker 2", "worker 3"}
    done = [event for event in events if event["ph"] == "X"]
    for kind in ("Forward", "Backward", "Evaluate", "Reduce", "Step", "Save"):
        counts = [sum(e["cat"] == kind and e["tid"] == worker for e in done) for worker in range(4)]
        assert min(counts) == max(counts) > 0, kind
    for worker in range(4):
        mine = sorted((e["ts"], e["dur"]) for e in done if e["tid"] == worker)
        assert all(a + d <= b + 2 for (a, d), (b, _) in pairwise(mine))


def test_every_window_stands_beside_its_prediction(place):
    output = place / "out"
    if not (output / "windows.jsonl").exists():
        assert Launch(place, fresh(place, "out"), 4).wait() == 0
    windows = [json.loads(line) for line in (output / "windows.jsonl").read_text().splitlines()]
    trained = [one for one in windows if one["tokens"] > 0]
    assert len(trained) >= 4
    assert all(one["microbatches"] > 0 for one in trained)
    assert any(one["predicted_seconds"] for one in trained[1:])


def test_the_report_shows_the_last_window_as_foreseen_and_as_measured(place):
    output = place / "out"
    if not (output / "timelines.json").exists():
        assert Launch(place, fresh(place, "out"), 4).wait() == 0
    found = read_timelines(output)
    assert found is not None
    for one in (found.foreseen, found.measured):
        assert {bar.row for bar in one.bars} == {f"worker {worker}" for worker in range(4)}
        assert all(0 <= share < 1 for share in one.bubbles)
    passes = [
        sum(bar.kind in ("forward", "backward") for bar in one.bars)
        for one in (found.foreseen, found.measured)
    ]
    assert passes[0] == passes[1] > 0
    page = (output / "report.html").read_text()
    assert page.index("<h3>Predicted</h3>") < page.index("<h3>Measured</h3>")


@pytest.mark.slow
@pytest.mark.slow
def test_interrupted_at_four_stages_it_goes_on_at_two_and_then_alone_to_the_same_curve(place, forks):
    output = place / fresh(place, "changing")
    for workers, count, more in ((4, 10, ()), (2, 25, ("--resume",))):
        run = Launch(place, "changing", workers, *more)
        run.wait_for_lines(count)
        run.signal(0, signal.SIGINT)
        assert run.wait() == 130
        before = lines(output)
        assert "paused" in states(output).values()
        newest = [max(folder.glob("step-*")) for folder in output.glob("*/checkpoints")]
        assert newest
        for folder in newest:
            assert len(list(folder.glob("tensors-*.safetensors"))) == workers
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 0
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_profiled_since_it_goes_on_with_other_stages_to_the_same_curve(place):
    output = place / fresh(place, "profiled")
    run = Launch(place, "profiled", 2)
    run.wait_for_lines(10)
    run.signal(0, signal.SIGINT)
    assert run.wait() == 130
    assert not any("stages" in note for note in status(output)["notes"])
    cpu = torch.device("cpu")
    key = device_profile_key(inspect(BaseSpec(model=str(place / "model"), dtype="float64"), cpu), cpu)
    file = profile_path(profile_folder(), key)
    write_profile(file, replace(profile(), key=key))
    try:
        assert Launch(place, "profiled", 2, "--resume").wait() == 0
    finally:
        file.unlink()
    (note,) = (note for note in status(output)["notes"] if "stages" in note)
    # Its head takes longer than all layers; by arithmetic the stages have two each.
    assert note.startswith("The stages hold 3 + 1 layers, alike by times from the profile of this cpu")
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_interrupted_alone_it_goes_on_in_stages_to_the_same_curve(place, forks):
    output = place / fresh(place, "growing")
    forks.start("train", "jobs.yaml", "--output", "growing", cwd=place)
    forks.wait_for_lines(output, 12)
    forks.signal(signal.SIGINT)
    assert forks.wait() == 130
    assert Launch(place, "growing", 2, "--resume").wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


def test_more_stages_than_layers_is_a_mistake_with_a_sentence(place, forks):
    fresh(place, "never")
    assert forks.weftune("train", "jobs.yaml", "--output", "never", "--pipeline", "5", cwd=place) == 2
    assert "--pipeline 5: the base has 4 layers, and each stage needs one" in (place / "log").read_text()
    assert not (place / "never").exists()


def test_auto_trains_in_one_process_where_the_base_fits_and_says_so(place, forks):
    output = place / fresh(place, "auto")
    assert forks.weftune("train", "jobs.yaml", "--output", "auto", "--pipeline", "auto", cwd=place) == 0
    assert "Weftune: one process, since there is one device. The base is whole" in (place / "log").read_text()
    assert not (output / "ranks").exists()
    assert_same_results(output, place / "undisturbed")


def test_auto_with_a_base_that_fits_nowhere_is_a_mistake_with_a_sentence(place, forks):
    words = ("train", "jobs.yaml", "--output", "never", "--pipeline", "auto", "--memory", "100MiB")
    assert forks.weftune(*words, cwd=place) == 2
    told = " ".join((place / "log").read_text().split())
    assert "even alone it needs" in told
    assert "but 0.10 GiB are available" in told
    assert not (place / "never").exists()


@pytest.mark.parametrize("text", slow_but(["1", "0", "-3", "many", "2.5"], ["1", "many"]))
def test_a_number_of_stages_that_is_none_is_a_mistake_with_a_sentence(place, forks, text):
    assert forks.weftune("train", "jobs.yaml", "--output", "never", f"--pipeline={text}", cwd=place) == 2
    assert f"--pipeline {text}: write auto, or how many stages: 2 or more" in (place / "log").read_text()


def test_a_mistake_that_the_first_worker_finds_is_exit_2_and_nobody_is_left_waiting(tmp_path, forks):
    folder = deep_folder(tmp_path, [{"name": "a", "steps": 3, "adapter": {"init_from": "a.jsonl"}}])
    assert forks.weftune("train", "jobs.yaml", "--pipeline", "2", cwd=folder) == 2
    log = (folder / "log").read_text()
    assert "adapter.init_from" in log
    assert "Traceback" not in log


FLOAT32 = [
    {"name": "a", "steps": 12, "adapter": {"rank": 4, "alpha": 8.0, "dropout": 0.1}, "learning_rate": 1e-3},
    {"name": "b", "steps": 7, "adapter": {"rank": 7, "dropout": 0.1}, "data": "b.jsonl", "seed": 3},
]


@pytest.mark.slow
def test_in_float32_it_is_as_near_to_float64_as_one_process_is(tmp_path, forks):
    found = {}
    for name, dtype in (("exact", torch.float64), ("alone", torch.float32), ("out", torch.float32)):
        folder = deep_folder(tmp_path / str(dtype), FLOAT32, family="llama", eval=None)
        text = (folder / "jobs.yaml").read_text()
        (folder / "jobs.yaml").write_text(text.replace("float64", str(dtype).removeprefix("torch.")))
        if name == "out":
            assert Launch(folder, name, 4).wait() == 0
        else:
            assert forks.weftune("train", "jobs.yaml", "--output", name, cwd=folder) == 0
        found[name] = folder / name
    for job in "ab":
        runs = {name: trained(output, job) for name, output in found.items()}
        alone = runs["alone"]
        oracle.assert_equal_float32(runs["out"], alone, alone, runs["exact"], floor=oracle.FLIPPED)


def trained(output, job):
    from tests import bench
    from weftune.base.model import Base
    from weftune.base.spec import BaseSpec

    (given,) = (one for one in FLOAT32 if one["name"] == job)
    spec = JobSpec(name=job, data=[{"text": "w7"}], adapter=given["adapter"], seed=given.get("seed", 0))
    base = Base.from_model(deep("llama", torch.float64), BaseSpec(model="tiny"), bench.CPU)
    losses = [loss for _, what, loss in numbers(output, job) if what == "loss"]
    return oracle.Trained(losses, bench.start(base, spec), bench.adapter(output / job))


@pytest.mark.parametrize("more", [("--pipeline", "2"), ("--device", "cpu", "--gpus", "2")], ids=" ".join)
def test_a_second_run_is_refused_and_leaves_the_files_of_the_first_alone(place, forks, more):
    output = place / fresh(place, "taken")
    (output / "ranks").mkdir(parents=True)
    (output / "ranks" / "pids").write_text("0 1\n")
    lock = lock_folder(output, output)
    try:
        assert forks.weftune("train", "jobs.yaml", "--output", "taken", *more, cwd=place) == 2
    finally:
        os.close(lock)
    assert "another weftune train is writing to taken" in (place / "log").read_text()
    assert {path.name for path in output.rglob("*")} == {".lock", "ranks", "pids"}
    assert (output / "ranks" / "pids").read_text() == "0 1\n"
