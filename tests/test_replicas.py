"""Replicas of a base, whole or in stages, train every job to what one process makes of it, and resume."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import oracle
from tests.launches import Launch, copied, deep_folder, fresh
from tests.outputs import assert_same_results, assert_whole, lines, states
from tests.test_pipeline import FLOAT32, trained
from weftune.cli.train import assign_replica_position
from weftune.errors import UserError
from weftune.report.gantt import read_timelines
from weftune.run.workers.groups import WorkerPosition

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained_deep):
    """A folder whose `undisturbed` is the output of one process."""
    return copied(trained_deep, tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def both(place, forks):
    """The output of two replicas of two stages, as the command line starts them."""
    words = ("train", "jobs.yaml", "--output", "both", "--pipeline", "2", "--replicas", "2")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    (place / "log").rename(place / "both.log")
    return place / "both"


def test_losses_evaluations_and_adapters_equal_one_process(place, both):
    assert_whole(both)
    assert_same_results(both, place / "undisturbed")


def test_trace_and_report_show_the_workers_of_all_replicas(both):
    events = json.loads((both / "trace.json").read_text())["traceEvents"]
    workers = [f"worker {worker}" for worker in range(4)]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == workers
    for worker in range(4):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == worker]
        for start in ("Forward", "Backward", "Reduce gradient", "Reduce long", "Step"):
            assert any(name.startswith(start) for name in names), (worker, start)
        assert any(name.startswith("Save") for name in names) == (worker < 2), "one replica saves"
    found = read_timelines(both)
    assert found is not None
    for one in (found.foreseen, found.measured):
        assert {bar.row for bar in one.bars} == set(workers)


def test_the_command_line_starts_a_process_for_every_stage_of_every_replica(place, both):
    assert "model, in 2 replicas of 2 stages" in (place / "both.log").read_text()
    assert len((both / "ranks" / "pids").read_text().splitlines()) == 4


@pytest.mark.slow
def test_replicas_of_the_whole_base_equal_one_process(place):
    output = place / fresh(place, "out")
    assert Launch(place, "out", 2, replicas=2).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


def interrupted(place, name, workers, replicas, at, *more):
    """Run until so many lines are written, then stop as Ctrl-C does; how many files its checkpoints have."""
    run = Launch(place, name, workers, *more, replicas=replicas)
    run.wait_for_lines(at)
    run.signal(0, signal.SIGINT)
    assert run.wait() == 130
    assert "paused" in states(place / name).values()
    newest = [max(folder.glob("step-*")) for folder in (place / name).glob("*/checkpoints")]
    return {len(list(folder.glob("tensors-*.safetensors"))) for folder in newest}


@pytest.mark.slow
def test_interrupted_at_two_replicas_of_two_stages_it_goes_on_alone_to_the_same_curve(place, forks):
    output = place / fresh(place, "alone")
    assert interrupted(place, "alone", 4, 2, 12) == {2}, "only one replica writes"
    before = lines(output)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "alone", cwd=place) == 0
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_it_goes_on_at_any_other_number_of_replicas_and_stages(place):
    output = place / fresh(place, "changing")
    interrupted(place, "changing", 4, 2, 8)
    interrupted(place, "changing", 2, 1, 20, "--resume")
    interrupted(place, "changing", 3, 3, 30, "--resume")
    assert Launch(place, "changing", 4, "--resume", replicas=2).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("worker", range(4))
def test_kill_9_of_a_worker_of_any_replica_ends_in_the_same_adapters(place, worker, capfd):
    output = place / fresh(place, "out")
    run = Launch(place, "out", 4, replicas=2)
    run.wait_for_lines(10 + 5 * worker)
    run.signal(worker, signal.SIGKILL)
    assert run.wait() == 0
    assert "starting all workers again from the last checkpoints (1 of 3)" in capfd.readouterr().err
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")


@pytest.mark.slow
def test_torchrun_starts_the_same_replicas_and_says_where_workers_cannot_be_divided(place):
    def torchrun(workers):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        command += ["-m", "weftune", "train", "jobs.yaml", "--output", "elastic", "--replicas", "2"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)

    refused = torchrun(3)
    assert refused.returncode != 0
    assert "--replicas 2: 3 workers cannot be divided into 2 equal pipelines" in refused.stderr
    assert not (place / "elastic").exists()
    assert torchrun(4).returncode == 0
    assert_same_results(place / "elastic", place / "undisturbed")


@pytest.mark.slow
def test_in_float32_it_is_as_near_to_float64_as_one_process_is(tmp_path, forks):
    found = {}
    for name, dtype in (("exact", "float64"), ("alone", "float32"), ("out", "float32")):
        folder = deep_folder(tmp_path / dtype, FLOAT32, family="llama", eval=None)
        text = (folder / "jobs.yaml").read_text()
        (folder / "jobs.yaml").write_text(text.replace("float64", dtype))
        if name == "out":
            assert Launch(folder, name, 4, replicas=2).wait() == 0
        else:
            assert forks.weftune("train", "jobs.yaml", "--output", name, cwd=folder) == 0
        found[name] = folder / name
    for job in "ab":
        runs = {name: trained(output, job) for name, output in found.items()}
        alone = runs["alone"]
        oracle.assert_equal_float32(runs["out"], alone, alone, runs["exact"], floor=oracle.FLIPPED)


def test_workers_that_cannot_be_divided_are_a_mistake_with_a_sentence():
    assert assign_replica_position(WorkerPosition(2, 6), 3) == WorkerPosition(2, 6, replicas=3)
    with pytest.raises(UserError, match="--replicas 4: 6 workers cannot be divided into 4 equal pipelines"):
        assign_replica_position(WorkerPosition(2, 6), 4)


def test_more_stages_than_layers_in_a_replica_is_a_mistake_with_a_sentence(place, forks):
    words = ("train", "jobs.yaml", "--output", "never", "--pipeline", "5", "--replicas", "2")
    assert forks.weftune(*words, cwd=place) == 2
    assert "--pipeline 5: the base has 4 layers, and each stage needs one" in (place / "log").read_text()
    assert not (place / "never").exists()
