"""Mistakes that need no torch are told before it is imported, and before anything else is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cases import takes_less

SECONDS = 1.0

ASKED_IN_TURN = """
import contextlib, io, json, sys
from weftune.cli.main import main

answers = []
for words in json.load(sys.stdin):
    sys.argv = ["weftune", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in ("torch", "transformers", "datasets", "peft") if name in sys.modules]
    answers.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "heavy": heavy})
json.dump(answers, sys.stdout)
"""
"""One process for all of them: each starts in the modules that the ones before have left."""


@dataclass(frozen=True, slots=True)
class Case:
    words: tuple[str, ...]
    said: str


CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def lay_out(folder: Path) -> None:
    """A model folder without weights, good and bad jobs files, a used output, incomplete adapters."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "hollow").mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "torn.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "used").mkdir()
    (folder / "used" / "notes.txt").write_text("mine")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "job.yaml").write_text("base: {model: demo}\njob: {name: adapter}\n")
    shutil.copytree(folder / "adapter", folder / "trained")
    (folder / "trained" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (folder / "trained" / "adapter_model.safetensors").touch()

    def jobs(name: str, base: str = "model", job: str = "", data: str = "rows.jsonl", rest: str = "") -> None:
        text = f"base: {base}\noutput: fresh\njobs:\n- {{name: a, data: {data}{job}}}\n{rest}"
        (folder / f"{name}.yaml").write_text(text)

    jobs("good")
    jobs("key", job=", lr: 1")
    jobs("rank", job=", adapter: {rank: 0}")
    jobs("base", base="no/such/folder")
    jobs("hollow", base="hollow")
    jobs("target", job=", adapter: {targets: [nowhere_proj]}")
    jobs("rows", data="torn.jsonl")
    jobs("absent", data="absent.jsonl")
    jobs("hub", base="nobody/nothing")
    jobs("tracked", rest="report_to: [wandb]\n")
    jobs("swept", job=", eval: {fraction: 0.5}, sweep: {over: {learning_rate: [1e-4, 1e-3]}}")
    over = "{learning_rate: {min: 1e-5, max: 1e-3}, seed: [1, 2]}"
    jobs("sweep", job=f", eval: {{fraction: 0.1}}, sweep: {{over: {over}}}")


CASES = [
    *(Case((verb, "nosuch.yaml"), "there is no file") for verb in ("train", "preview", "plan")),
    *(Case((verb, "key.yaml"), "write learning_rate") for verb in ("train", "preview", "plan")),
    *(
        Case((verb, "sweep.yaml"), "sweep.over.learning_rate: a grid takes no range")
        for verb in ("train", "plan")
    ),
    Case(("preview", "sweep.yaml"), "sweep.over.seed: cannot be swept"),
    *(Case((verb, "rows.yaml"), "torn.jsonl:2") for verb in ("train", "preview", "plan")),
    *(Case((verb, "target.yaml"), "matches no module of the base") for verb in ("train", "preview", "plan")),
    Case(("train", "rank.yaml"), "must be at least 1, got 0"),
    Case(("train", "base.yaml"), "there is no file or folder"),
    Case(("train", "hollow.yaml"), "holds no config.json"),
    Case(("train", "absent.yaml"), "there is no file"),
    Case(("train", "hub.yaml"), "There is no folder nobody/nothing here, and the Hub cannot be reached"),
    *(
        [Case(("train", "tracked.yaml"), "wandb is not installed; run `pip install 'weftune[wandb]'`")]
        if find_spec("wandb") is None
        else []
    ),
    Case(("train", "good.yaml", "--output", "used"), "used is not empty; it holds other things than a run"),
    Case(("train", "good.yaml", "--output", "rows.jsonl"), "is a file; choose another --output"),
    Case(("train", "good.yaml", "--output", "used", "--resume"), "holds no status.json"),
    Case(("train", "good.yaml", "--memory", "lots"), "--memory lots: write a number and a unit"),
    Case(("train", "good.yaml", "--device", "gpu"), "--device: gpu is no device"),
    Case(("train", "good.yaml", "--pipeline", "1"), "--pipeline 1: write auto"),
    Case(("train", "good.yaml", "--gpus", "none"), "--gpus none: write all"),
    Case(("train", "swept.yaml", "--resume", "--restart", "a"), "no such job; known: a-lr1e-4, a-lr1e-3"),
    Case(("train", "good.yaml", "--restart", "a"), "--restart goes with --resume"),
    Case(("train", "good.yaml", "--resume", "--restart", "b"), "there is no such job; known: a"),
    Case(("preview", "good.yaml", "--job", "b"), "there is no job b; the file has a"),
    Case(("generate", "nowhere", "hello"), "nowhere is no folder"),
    Case(("eval", "nowhere", "--data", "rows.jsonl"), "nowhere is no folder"),
    Case(("eval", "adapter", "--data", "rows.jsonl"), "has not finished"),
    Case(("eval", "trained", "--data", "rows.jsonl", "--metric", "bleu"), "bleu is no metric"),
    Case(("generate", "adapter", "hello"), "has not finished"),
    Case(("export", "nowhere", "--portable"), "is no adapter folder"),
    Case(("export", "adapter", "--merged"), "has not finished"),
    Case(("export", "adapter"), "either --portable or --merged"),
    Case(("report", "nowhere"), "nowhere"),
    Case(("doctor", "--profile", "--base", "nobody/nothing"), "There is no folder nobody/nothing here"),
]


def test_mistakes_are_told_without_torch_and_before_anything_is_printed(tmp_path: Path) -> None:
    lay_out(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ASKED_IN_TURN],
        input=json.dumps([case.words for case in CASES]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, answer in zip(CASES, json.loads(done.stdout), strict=True):
        assert answer["code"] == 2, (case, answer)
        assert case.said in answer["err"], (case, answer)
        assert answer["out"] == "", case
        assert answer["heavy"] == [], case
    assert not (tmp_path / "fresh").exists()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Python keeps what it has compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.timed
@pytest.mark.parametrize("words", [("preview", "nosuch.yaml"), ("train", "good.yaml", "--output", "used")])
def test_a_mistake_is_told_within_a_second(
    words: tuple[str, ...], tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    # Once Python has compiled what it imports, wherever it is allowed to keep that.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(compiled))

    def refuse() -> None:
        done = subprocess.run([sys.executable, "-m", "weftune", *words], capture_output=True, cwd=tmp_path)
        assert done.returncode == 2

    assert takes_less(SECONDS, refuse)
