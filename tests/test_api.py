"""The front door from Python: what it shows, what it takes, and that all of it is typed."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

import weftune
import weftune.cli.main  # a submodule that is imported must not show
from tests import bench
from tests.families import tiny
from weftune.jobs.spec.spec import JobKeys
from weftune.jobs.store.status import State
from weftune.run.events import Evaluated, Stepped

ROWS = [{"text": f"w{number} w{number + 1} w5 w6"} for number in range(4, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base as a folder."""
    import torch

    made = tmp_path_factory.mktemp("tiny")
    model = tiny("llama", torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(made)
    bench.tokenizer().save_pretrained(made)
    return made


def run_of(folder: Path, *names: str) -> dict[str, object]:
    jobs = [{"name": name, "data": ROWS, "adapter": {"rank": 2}, "steps": 3} for name in names]
    return {"base": str(folder), "jobs": jobs}


def test_dir_shows_the_api_and_nothing_else() -> None:
    assert set(dir(weftune)) == {
        "JobSpec", "Options", "Result", "SweepResult", "Trainer", "UserError", "__version__",
        "sweep", "train",
    }  # fmt: skip
    for name in dir(weftune):
        assert getattr(weftune, name) is not None
    assert weftune.__version__ == version("weftune")


def test_a_source_tree_that_is_not_installed_has_a_version_too(monkeypatch):
    def fail(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", fail)
    assert weftune.__version__ == "0+source"


def test_a_tracker_that_is_not_installed_is_found_before_the_output_is_begun(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftune.report.loggers.find_spec", lambda name: None)
    with pytest.raises(weftune.UserError, match="mlflow is not installed"):
        weftune.train(run_of(folder, "a") | {"report_to": ["mlflow"]}, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_train_takes_a_dict_and_goes_on_with_resume(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = weftune.train(run_of(folder, "a"), output=tmp_path / "out", max_steps=3)
    assert first["a"].state is State.SUCCEEDED
    shown = capsys.readouterr().out
    assert "a  running  step 1/3" in shown
    ending = shown[shown.index("job ") :].split()
    assert ending[:6] == ["job", "state", "steps", "loss", "validation", "change"]
    assert [word for word in ending if word in ("a", "succeeded", "3/3")] == ["a", "succeeded", "3/3"]
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in shown
    weftune.train(run_of(folder, "a"), output=tmp_path / "quiet", max_steps=3, progress=False)
    assert capsys.readouterr().out == "", "nobody asked for it"
    with pytest.raises(
        weftune.UserError, match=re.escape("continue it with options=weftune.Options(resume=True)")
    ):
        weftune.train(run_of(folder, "a"), output=tmp_path / "out", progress=False)
    both = weftune.train(
        run_of(folder, "a", "b"), output=tmp_path / "out", max_steps=3, resume=True, progress=False
    )
    assert {name: result.state for name, result in both.items()} == {
        "a": State.SUCCEEDED,
        "b": State.SUCCEEDED,
    }
    assert capsys.readouterr().out == ""


def test_a_job_is_cancelled_from_the_callback_and_the_others_go_on(folder: Path, tmp_path: Path) -> None:
    trainer = weftune.Trainer(str(folder), output=tmp_path / "out")
    for name in "ab":
        trainer.add(weftune.JobSpec(name=name, data=ROWS, adapter={"rank": 2}, steps=4))

    def callback(event: Stepped | Evaluated) -> None:
        if event.job == "a" and event.step == 2:
            trainer.cancel("a")

    results = trainer.run(callback)
    assert (results["a"].state, results["b"].state) == (State.CANCELLED, State.SUCCEEDED)


SWEPT = {
    "name": "s",
    "data": ROWS,
    "steps": 4,
    "batch_size": 2,
    "eval": {"fraction": 0.25},
    "adapter": {"rank": 2},
    "sweep": {"over": {"learning_rate": [1e-3, 1e-2]}, "halving": {"at": [0.5], "keep": 0.5}},
}


def test_sweep_gives_a_table_the_best_result_and_calls_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Stepped | Evaluated] = []
    made = weftune.sweep(str(folder), SWEPT, output=tmp_path / "out", progress=False, callback=seen.append)
    assert [row["state"] for row in made.rows] == ["finished", "left"]
    assert set(made.rows[0]) == {"trial", "learning_rate", "state", "eval_loss", "step", "reason"}
    assert made.best is not None
    assert made.best.path == tmp_path / "out" / str(made.rows[0]["trial"])
    assert made.rows[0]["eval_loss"] == made.best.metrics["eval_loss"]
    assert made.rows[1]["reason"] == "left the sweep at step 2: 2nd of 2, the best continues"
    assert bench.adapter(made.path / "best").keys() == bench.adapter(made.best.path).keys()
    assert {event.job for event in seen} == set(made.results)
    # As earlier versions had it: the winner in a folder of its name.
    (made.path / "best").rename(made.path / "winner")
    (made.path / "best").mkdir()
    (made.path / "winner").rename(made.path / "best" / made.best.path.name)
    again = weftune.sweep(str(folder), SWEPT, output=tmp_path / "out", progress=False, resume=True)
    assert bench.adapter(made.path / "best").keys() == bench.adapter(made.best.path).keys()
    assert "best" in [path.name for path in made.path.iterdir()]
    assert again.rows == made.rows
    with pytest.raises(weftune.UserError, match="needs this key"):
        weftune.sweep(str(folder), {"name": "s", "data": ROWS})
    if find_spec("pandas"):
        assert made.table.to_dict("records") == made.rows
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert made.table == made.rows


def test_all_of_it_is_typed() -> None:
    calls = [
        weftune.train,
        weftune.sweep,
        weftune.Trainer.__init__,
        weftune.Trainer.add,
        weftune.Trainer.cancel,
    ]
    for call in [*calls, weftune.Trainer.run, weftune.JobSpec.__init__]:
        hints = typing.get_type_hints(call, localns={"Callback": object})
        assert set(hints) >= {*inspect.signature(call).parameters} - {"self"} | {"return"}, call
    assert set(JobKeys.__annotations__) == {field.name for field in fields(weftune.JobSpec)}


USER = """
from pathlib import Path
import weftune

results: dict[str, weftune.Result] = weftune.train(
    {"base": "demo", "jobs": []}, output=Path("out"), resume=True, progress=False
)
trainer = weftune.Trainer("demo", options=weftune.Options(device="cpu"))
trainer.add(weftune.JobSpec(name="a", data=[{"text": "b"}], adapter={"rank": 8}, betas=(0.9, 0.95)))
trainer.cancel("a")
loss: float = trainer.run()["a"].metrics["loss"]
version: str = weftune.__version__
weftune.JobSpec(name="a", data="rows.jsonl", learning_rat=1e-4)
weftune.train(3)
"""


@pytest.mark.slow
def test_a_users_script_is_checked_by_mypy_and_its_two_mistakes_are_found(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    words = ["--strict", "--follow-imports=silent", "--no-error-summary", "user.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(weftune.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[1] for line in found] == ["13", "14"], done.stdout + done.stderr
    assert "learning_rat" in found[0]
    assert "train" in found[1]
