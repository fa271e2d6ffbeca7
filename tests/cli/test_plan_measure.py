"""`weftune plan --ablate --measure`: what each mechanism is worth on this machine."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.launches import deep_folder
from weftune.cli.main import main

JOBS = [{"name": name, "steps": 300, "adapter": {"rank": 2 + at}} for at, name in enumerate("ab")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return deep_folder(tmp_path_factory.mktemp("measured"), JOBS, eval={"fraction": 0.2, "every": 1})


@pytest.fixture
def weftune(folder, monkeypatch, capsys):
    """The command in this process: its exit code, what it has printed, and its numbers."""
    monkeypatch.setenv("WEFTUNE_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)

    def call(*words: str, file: str = "jobs.yaml") -> tuple[int, str, dict[str, Any]]:
        (folder / "plan.json").write_text("{}")
        monkeypatch.setattr(sys, "argv", ["weftune", "plan", file, "--json", "plan.json", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        numbers = json.loads((folder / "plan.json").read_text())
        return int(ended.value.code or 0), printed.out + printed.err, numbers

    return call


MEASURED = ("--device", "cpu", "--ablate", "--measure")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--measure",), "--measure: it measures the rows of --ablate; add --ablate"),
        (
            ("--ablate", "--measure", "--cluster", "4xT4"),
            "it trains on this machine; leave out --cluster 4xT4",
        ),
        ((*MEASURED, "--gpus", "2"), "one share of the jobs can be measured; plan it with --gpus 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_sentence(weftune, words, sentence):
    code, printed, _ = weftune(*words)
    assert (code, sentence in printed) == (2, True), printed


def test_jobs_without_a_second_window_are_refused(weftune, folder):
    text = (folder / "jobs.yaml").read_text()
    (folder / "short.yaml").write_text(text.replace("steps: 300", "steps: 2"))
    code, printed, _ = weftune(*MEASURED, file="short.yaml")
    assert (code, "the jobs end within their first window" in printed) == (2, True), printed


def assert_measured(printed: str, numbers: dict[str, Any]) -> None:
    before, after = numbers["measured_step_seconds"]
    assert min(before, after) > 0
    rows = {row["mechanism"]: row["measured_step_seconds"] for row in numbers["ablations"]}
    assert rows.pop("sharing") is None, "no option of a run separates the jobs"
    rows.pop("partition", None)
    assert rows
    assert all(seconds > 0 for seconds in rows.values())
    assert "measured step" in printed
    assert "A step of the plan itself took" in " ".join(printed.split())


def test_on_one_device_the_plan_and_its_alternatives_are_measured(weftune, folder):
    code, printed, numbers = weftune(*MEASURED, "--capacity", "64")
    assert code == 0, printed
    assert_measured(printed, numbers)
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_in_a_pipeline_every_mechanism_of_the_planner_is_measured(weftune):
    code, printed, numbers = weftune(*MEASURED, "--pipeline", "2", "--capacity", "64")
    assert code == 0, printed
    assert_measured(printed, numbers)
    assert {"order", "hand-over"} <= {row["mechanism"] for row in numbers["ablations"]}
    assert printed.count("Measuring") == 2 + sum(
        row["measured_step_seconds"] is not None for row in numbers["ablations"]
    )
