from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from weftune.errors import MissingPackage, SpecError
from weftune.report.loggers import Loggers, open_loggers

JOBS: Mapping[str, Mapping[str, Any]] = {"a": {"learning_rate": 1e-3}, "b": {"learning_rate": 1e-4}}

LINES: list[dict[str, Any]] = [
    {"job": "a", "step": 0, "eval_loss": 2.5, "time": 10.0},
    {"job": "a", "step": 1, "loss": 2.0, "grad_norm": None, "time": 11.0},
    {"job": "b", "step": 1, "loss": 3.0, "time": 11.5},
    {"job": "a", "step": 2, "loss": 1.0, "time": 12.0},
]


def test_an_unknown_logger_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'comet' is not known; write tensorboard, wandb or mlflow"):
        open_loggers(["comet"], tmp_path, JOBS)


def test_a_missing_package_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftune.report.loggers.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'weftune\[tensorboard\]'"):
        open_loggers(["tensorboard"], tmp_path, JOBS)


def test_a_logger_that_breaks_is_given_up_with_a_note_and_the_others_go_on() -> None:
    class Good:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
            self.steps.append(step)

        def close(self) -> None:
            self.steps.append(-1)

    class Broken(Good):
        def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
            raise ConnectionError("the server is gone")

    good = Good()
    openers: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
        "broken": lambda job, spec: Broken(),
        "good": lambda job, spec: good,
    }
    loggers = Loggers(openers, JOBS)
    for line in LINES:
        loggers.log(line)
    loggers.close()
    assert good.steps[:4] == [0, 1, 1, 2]
    assert loggers.notes == ["broken was given up: ConnectionError: the server is gone"]


def test_tensorboard_gets_one_run_a_job_with_finite_values_only(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert scalars(tmp_path, LINES) == {"loss": [(1, 2.0), (2, 1.0)], "eval_loss": [(0, 2.5)]}
    assert {path.name for path in (tmp_path / "tensorboard").iterdir()} == {"a", "b"}


def test_tensorboard_forgets_the_steps_that_a_resumed_job_does_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    scalars(tmp_path, LINES)
    again = [{"job": "a", "step": 2, "loss": 1.5, "time": 20.0}]
    assert scalars(tmp_path, again)["loss"] == [(1, 2.0), (2, 1.5)]


def scalars(output: Path, lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Log `lines`, and read the curves of job a as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = open_loggers(["tensorboard"], output, JOBS)
    for line in lines:
        loggers.log(line)
    loggers.close()
    assert loggers.notes == []
    events = EventAccumulator(str(output / "tensorboard" / "a"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


PROGRAM = """
import json, sys
from pathlib import Path
from weftune.report.loggers import open_loggers
jobs, lines = json.loads(sys.argv[3])
loggers = open_loggers([sys.argv[1]], Path(sys.argv[2]), jobs)
for line in lines:
    loggers.log(line)
loggers.close()
assert loggers.notes == [], loggers.notes
"""


def log_elsewhere(name: str, output: Path, environment: Mapping[str, str]) -> None:
    """In a process of its own: these packages start threads and read the environment once."""
    command = [sys.executable, "-c", PROGRAM, name, str(output), json.dumps([JOBS, LINES])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=output)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wandb_writes_one_offline_run_a_job(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    log_elsewhere(
        "wandb", tmp_path, {"WANDB_MODE": "offline", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 2


@pytest.mark.slow
def test_mlflow_gets_an_experiment_named_after_the_folder_with_one_run_a_job(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    output = tmp_path / "sweep"
    output.mkdir()
    log_elsewhere("mlflow", output, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    import sqlite3

    with sqlite3.connect(output / "mlflow.db") as database:
        names = database.execute("select name from experiments where name = 'sweep'").fetchall()
        runs = dict(database.execute("select name, run_uuid from runs").fetchall())
        values = database.execute(
            "select step, value from metrics where key = 'loss' and run_uuid = ? order by step", (runs["a"],)
        ).fetchall()
    assert names == [("sweep",)]
    assert set(runs) == {"a", "b"}
    assert values == [(1, 2.0), (2, 1.0)]
