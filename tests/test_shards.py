"""`weftune train --shards`: layers are divided among processes, and every job gets what one process gives it.

Llama's norms compute in float32, so that a sum in another order can move a result by a rounding of float32.
"""

import json
import signal

import pytest
from safetensors.torch import load_file

from tests import oracle
from tests.cases import slow_but
from tests.launches import Launch, deep_folder, fresh
from tests.outputs import FOUR_JOBS, assert_whole, lines, numbers, states, status

LOSS_GAP, WEIGHT_GAP = 1e-6, 1e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("shards"), FOUR_JOBS, family="llama")
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


def started(place, name, shards, *more, stages=1, always=()):
    words = ("--shards", str(shards), *always) + ("--pipeline", str(stages)) * (stages > 1)
    return Launch(place, name, shards * stages, *more, always=words)


SMALL = {(2, 1): "760KiB", (2, 2): "460KiB", (4, 1): "690KiB"}
"""By the numbers of shards and of stages: the memory of a device that a base is streamed to."""


def pretended(shards, stages):
    return "--device", "cpu", "--gpu-memory", SMALL[shards, stages]


def assert_equal(output, undisturbed):
    assert_whole(output)
    assert states(output) == states(undisturbed)
    for name in states(undisturbed):
        got, want = numbers(output, name), numbers(undisturbed, name)
        assert [one[:2] for one in got] == [one[:2] for one in want]
        assert [one[2] for one in got] == pytest.approx([one[2] for one in want], rel=LOSS_GAP)
        files = [load_file(folder / name / "adapter_model.safetensors") for folder in (output, undisturbed)]
        assert files[0].keys() == files[1].keys()
        assert oracle.distance(*files) <= WEIGHT_GAP
        assert status(output)["jobs"][name]["step"] == status(undisturbed)["jobs"][name]["step"]


def test_losses_evaluations_and_adapters_equal_one_process(place, forks):
    words = ("train", "jobs.yaml", "--output", "two", "--shards", "2")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    assert "model, in 2 shards" in (place / "log").read_text()
    assert len((place / "two" / "ranks" / "pids").read_text().splitlines()) == 2
    assert_equal(place / "two", place / "undisturbed")


def test_each_of_two_stages_in_two_shards_equals_one_process(place, forks):
    words = ("train", "jobs.yaml", "--output", "four", "--shards", "2", "--pipeline", "2")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    assert "model, in 2 stages of 2 shards" in (place / "log").read_text()
    assert_equal(place / "four", place / "undisturbed")


@pytest.mark.parametrize("worker", slow_but([0, 1], [1]))
def test_kill_9_of_a_shard_ends_in_the_same_adapters(place, worker, capfd):
    output = place / fresh(place, "killed")
    run = started(place, "killed", 2)
    run.wait_for_lines(12)
    run.signal(worker, signal.SIGKILL)
    assert run.wait() == 0
    told = capfd.readouterr().err
    assert "starting all workers again from the last checkpoints (1 of 3)" in told
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_it_resumes_with_another_number_of_shards_and_with_none(place, forks):
    output = place / fresh(place, "changing")
    for shards, more in ((4, ()), (2, ("--resume",))):
        before = len(lines(output)) if more else 0
        run = started(place, "changing", shards, *more)
        run.wait_for_lines(before + 8)
        run.signal(0, signal.SIGINT)
        assert run.wait() == 130
    assert "paused" in states(output).values()
    before = lines(output)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 0
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    assert_equal(output, place / "undisturbed")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--shards", "3"), "which 3 shards cannot divide evenly; choose another number for --shards"),
        (
            ("--shards", "auto", "--gpu-memory", "1MiB"),
            "how many to stream it over, such as --shards 2",
        ),
    ],
)
def test_what_shards_cannot_do_is_a_mistake_with_a_sentence(place, forks, words, sentence):
    assert forks.weftune("train", "jobs.yaml", "--output", "never", *words, cwd=place) == 2
    assert sentence in (place / "log").read_text()
    assert not (place / "never").exists()


def test_a_kind_that_cannot_be_cut_is_refused_before_anything_starts(tmp_path, forks):
    jobs = [{"name": "a", "steps": 1, "adapter": {"kind": "bottleneck", "size": 2}}]
    folder = deep_folder(tmp_path, jobs, family="llama")
    assert forks.weftune("train", "jobs.yaml", "--shards", "2", cwd=folder) == 2
    assert "--shards 2: a has a bottleneck adapter, which cannot be trained" in (folder / "log").read_text()
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "text"), [(1, "2 shards"), (2, "2 workers of 2 shards")])
def test_shards_that_stream_their_parts_equal_one_process(place, forks, stages, text):
    output = place / fresh(place, "streamed")
    words = ("--shards", "2", *pretended(2, stages)) + ("--pipeline", "2") * (stages > 1)
    assert forks.weftune("train", "jobs.yaml", "--output", "streamed", *words, cwd=place) == 0
    assert f"model, in {text}" in (place / "log").read_text()
    notes = " ".join(status(output)["notes"])
    assert f"The base is streamed over {text} in 4 stages of 1 layer, 0 of them resident" in notes
    assert f"came from the host to {2 * stages} workers" in notes
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 1])
def test_kill_9_of_a_shard_that_streams_ends_in_the_same_adapters(place, worker, capfd):
    output = place / fresh(place, "killed")
    run = started(place, "killed", 2, always=pretended(2, 1))
    run.wait_for_lines(12)
    run.signal(worker, signal.SIGKILL)
    assert run.wait() == 0
    assert "starting all workers again from the last checkpoints (1 of 3)" in capfd.readouterr().err
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_a_streamed_run_resumes_with_other_numbers_of_shards_and_with_none(place, forks):
    output = place / fresh(place, "changing")
    for shards, stages, more in ((2, 1, ()), (2, 2, ("--resume",)), (4, 1, ("--resume",))):
        before = len(lines(output)) if more else 0
        run = started(place, "changing", shards, *more, stages=stages, always=pretended(shards, stages))
        run.wait_for_lines(before + 6)
        run.signal(0, signal.SIGINT)
        assert run.wait() == 130
    assert "paused" in states(output).values()
    before = lines(output)
    assert forks.weftune("train", "jobs.yaml", "--resume", "--output", "changing", cwd=place) == 0
    assert lines(output)[: len(before)] == before, "no finished step was made again"
    assert_equal(output, place / "undisturbed")


@pytest.mark.slow
def test_preferences_labels_and_rewards_equal_one_process(tmp_path, forks):
    """With reference policies and mismatched answers, which are scored without gradients, in two stages."""
    pairs = [{"prompt": f"w{n}", "chosen": f"w{n + 7} w9", "rejected": f"w{n + 20}"} for n in range(6, 26)]
    labelled = [{"prompt": f"w{n}", "completion": f"w{n + 3} w8", "label": n % 3 > 0} for n in range(6, 26)]
    kinds = {"dpo": pairs, "orpo": pairs, "reward": pairs, "kto": labelled}
    jobs = [
        {"name": kind, "objective": kind, "steps": 4, "batch_size": 4, "data": f"{kind}.jsonl",
         "adapter": {"rank": 2}, "eval": {"fraction": 0.2, "every": 2}}
        for kind in kinds
    ]  # fmt: skip
    folder = deep_folder(tmp_path, jobs, family="llama")
    for kind, rows in kinds.items():
        (folder / f"{kind}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    words = ("train", "jobs.yaml", "--output")
    assert forks.weftune(*words, "one", cwd=folder) == 0, (folder / "log").read_text()
    assert forks.weftune(*words, "four", "--shards", "2", "--pipeline", "2", cwd=folder) == 0, (
        folder / "log"
    ).read_text()
    assert_equal(folder / "four", folder / "one")


@pytest.mark.slow
def test_a_base_in_nf4_equals_one_process(tmp_path, forks):
    folder = deep_folder(tmp_path, FOUR_JOBS[:2], family="llama")
    file = folder / "jobs.yaml"
    file.write_text(file.read_text().replace("  dtype: float64", "  dtype: float64\n  quantize: nf4"))
    words = ("train", "jobs.yaml", "--output")
    assert forks.weftune(*words, "one", cwd=folder) == 0, (folder / "log").read_text()
    assert forks.weftune(*words, "two", "--shards", "2", cwd=folder) == 0, (folder / "log").read_text()
    assert_equal(folder / "two", folder / "one")
