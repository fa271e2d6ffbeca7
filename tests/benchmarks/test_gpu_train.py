"""`weftune train` and PEFT as a benchmark starts them, with a tiny shape on the CPU."""

import json
import sys

import pytest
import torch

from benchmarks import gpu_train
from benchmarks.commands import COLD, WARM, Run
from benchmarks.gpu_train import (
    DATASETS,
    PLAIN,
    STRONG,
    Work,
    extrapolated,
    long_ratios,
    ratios,
)
from benchmarks.peft_train import Encoded, PeftTask, compute_gradients, packed, padded
from tests import bench
from tests.families import tiny
from weftune.core.clock import Phase


@pytest.fixture
def command(tmp_path, monkeypatch):
    def run(*words):
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", ["gpu_train", "--toy", "--json", str(file), *words])
        with pytest.raises(SystemExit) as ended:
            gpu_train.main()
        assert ended.value.code == 0
        return json.loads(file.read_text())

    return run


def chats(folder):
    folder.mkdir()
    for name in DATASETS[:2]:
        rows = [
            {"messages": [{"role": "user", "content": f"w{at}"}, {"role": "assistant", "content": "w7 w8"}]}
            for at in range(10, 30)
        ]
        (folder / f"{name}_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_every_way_of_training_ends_and_its_phases_are_the_wall_time(tmp_path, command):
    bench.tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = chats(tmp_path / "data")
    words = "--data", str(data), "--tokenizer", str(tmp_path / "tokenizer"), "--jobs", "2", "--long", "6"
    found = command(*words)
    names = [run["name"] for run in found["runs"]]
    peft = [PLAIN, STRONG, "PEFT, 2 processes at once"]
    assert names == [COLD, WARM, *peft, "Weftune, 6 steps"]
    for run in found["runs"]:
        assert run["exit_code"] == 0
        assert {"imports", "loading", "training", "export"} <= run["phases"].keys()
        assert 0 < sum(run["phases"].values()) < run["seconds"] + 0.1
    cold, _, plain, strong, _, long = found["runs"]
    assert long["tokens"] > cold["tokens"]
    assert cold["tokens"] == plain["tokens"] == strong["tokens"] > 0
    own = [COLD, WARM, "Weftune, 6 steps"]
    assert set(found["ratios"]) == {f"{ours} / {other}" for ours in own for other in peft}


@pytest.mark.slow
def test_without_data_weftune_runs_alone_on_random_tokens(command):
    first, second = command("--jobs", "2", "--steps", "3")["runs"]
    for run in (first, second):
        assert run["exit_code"] == 0
        assert run["windows"]
        assert 0 < sum(run["windows"]) < run["seconds"]


def test_both_forms_of_a_batch_supervise_the_same_tokens():
    samples = [Encoded([5, 6, 7], [-100, 6, 7]), Encoded([8, 9], [8, 9])]
    flat, square = packed(samples, "cpu"), padded(samples, "cpu")
    assert flat["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert flat["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert square["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert square["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert square["labels"].tolist() == [[-100, 6, 7], [8, 9, -100]]


class Short:
    """A model that has no memory for more than so many samples at a time."""

    def __init__(self, model, most):
        self.model, self.most, self.sizes = model, most, []

    def __call__(self, **inputs):
        self.sizes.append(len(inputs["input_ids"]))
        if self.sizes[-1] > self.most:
            raise torch.OutOfMemoryError("no more")
        return self.model(**inputs)

    def zero_grad(self):
        self.model.zero_grad()


def test_peft_accumulates_over_parts_of_a_batch_that_does_not_fit_and_gets_the_same_gradients():
    samples = [Encoded([5 + at, 6, 7, 8][: 2 + at % 3], [-100, 6, 7, 8][: 2 + at % 3]) for at in range(8)]
    task = PeftTask("", "cpu", "float64", "", False, 4, [])
    gradients = []
    for most, sizes in ((8, [8]), (2, [8, 4, 2, 2, 2, 2])):
        model = tiny("llama")
        model.requires_grad_()
        short = Short(model, most)
        compute_gradients(short, samples, task)
        assert short.sizes == sizes
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert gradients[0]
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole)


def test_only_training_grows_with_the_steps(tmp_path):
    phases = {Phase.LOADING: 4.0, Phase.TRAINING: 10.0, Phase.TOKENISING: 1.0}
    run = Run(name=PLAIN, exit_code=0, seconds=16.0, phases=phases, tokens=100)
    more = extrapolated(run, Work(tmp_path, None, 200, 8, 25))
    assert more.seconds == 16.0 + 7 * 11.0
    assert more.phases[Phase.LOADING] == 4.0
    assert more.note == "extrapolated from 25 steps"
    assert extrapolated(run, Work(tmp_path, None, 25, 8, 25)) == run


def test_ratios_are_those_of_runs_that_ended():
    seconds = {COLD: 60.0, WARM: 30.0, PLAIN: 100.0}
    runs = [Run(name=name, exit_code=0, seconds=one) for name, one in seconds.items()]
    lost = Run(name=STRONG, exit_code=1, seconds=1.0)
    assert ratios([*runs, lost]) == {f"{COLD} / {PLAIN}": 0.6, f"{WARM} / {PLAIN}": 0.3}


def test_a_long_run_is_held_against_the_time_that_peft_would_take(tmp_path):
    phases = {Phase.LOADING: 10.0, Phase.TRAINING: 90.0}
    plain = Run(name=PLAIN, exit_code=0, seconds=100.0, phases=phases)
    long = Run(name="Weftune, 200 steps", exit_code=0, seconds=146.0)
    found = long_ratios(long, [plain], Work(tmp_path, None, 200, 8, 25))
    assert found == {f"Weftune, 200 steps / {PLAIN}": 146.0 / 730.0}
