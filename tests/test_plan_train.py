"""Who plans and then trains sees the same: the cut, who is aboard at the start, the bytes, a round's seconds.

The device is pretended, as in `test_streaming.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest

from tests.launches import deep_folder
from tests.outputs import FOUR_JOBS
from weftune import Options
from weftune.cli.early import parse_bytes
from weftune.cli.main import main
from weftune.errors import PlanError
from weftune.jobs.spec.read import read_run
from weftune.plan.cost import cluster
from weftune.plan.layout.choose import LayoutChoice
from weftune.trainer.train import make_trainer

ALL = [job["name"] for job in FOUR_JOBS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return deep_folder(tmp_path_factory.mktemp("planned"), FOUR_JOBS)


@pytest.fixture
def planned(place, monkeypatch, capsys):
    """`weftune plan --gpu-memory` on a machine without a GPU: its exit code, and what it has written."""
    monkeypatch.setattr(cluster, "_query_smi", lambda: "")
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.chdir(place)

    def call(memory, *more):
        words = ["weftune", "plan", "jobs.yaml", "--gpu-memory", memory, "--json", "plan.json", *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = int(ended.value.code or 0)
        return Planned(code, printed.out + printed.err, json.loads((place / "plan.json").read_text()))

    (place / "plan.json").write_text("{}")
    return call


@dataclass(frozen=True, slots=True)
class Planned:
    code: int
    told: str
    numbers: dict


@dataclass(frozen=True, slots=True)
class Trained:
    choice: LayoutChoice | None
    attached: list[str]
    notes: list[str]


class Heard:
    """A view that keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, row) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(place, output, memory) -> Trained:
    """The beginning of `weftune train --device cpu --gpu-memory`: who is aboard at the first step."""
    options, heard = Options(device="cpu", gpu_memory=parse_bytes(memory)), Heard()
    trainer = make_trainer(
        read_run(place / "jobs.yaml"), output=output, max_steps=1, options=options, view=heard
    )
    found: list[Trained] = []

    def look(_event) -> None:
        loop = trainer.loop
        assert loop is not None
        if not found:
            choice = loop.choice if loop.choice.is_streamed else None
            found.append(Trained(choice, list(loop.executor.attached), heard.notes))

    trainer.run(look)
    return found[0]


def cut_numbers(choice: LayoutChoice) -> dict:
    cut = choice.layout
    return {
        "stages": [{"layers": one.stop - one.start, "resident": one.is_resident} for one in cut.stages],
        "slots": cut.slot_counts[0],
        "adapters_travel": cut.adapters_travel,
        "inputs_offloaded": cut.offloads_inputs,
        "weights_in_files": choice.reads_weight_files,
        "capacity": choice.capacity,
    }


@pytest.mark.parametrize(
    ("memory", "aboard"),
    [
        ("700KiB", ALL[:2]),
        pytest.param("960KiB", ALL[:2], marks=pytest.mark.slow),
        pytest.param("1100KiB", ALL[:3], marks=pytest.mark.slow),
        pytest.param("1184KiB", ALL, marks=pytest.mark.slow),
        ("1400KiB", ALL),
    ],
)
def test_the_plan_has_the_cut_the_jobs_the_bytes_and_the_seconds_of_the_run(
    place, planned, tmp_path, memory, aboard
):
    plan, run = planned(memory), train(place, tmp_path / "out", memory)
    assert plan.code == 0, plan.told
    numbers, choice = plan.numbers, run.choice
    assert choice is not None
    assert {key: numbers[key] for key in cut_numbers(choice)} == cut_numbers(choice)
    assert numbers["aboard"] == run.attached == aboard
    assert list(numbers["waiting"]) == [name for name in ALL if name not in aboard]
    assert (numbers["device_bytes"], numbers["host_bytes"]) == (choice.peak_device_bytes, choice.host_bytes)
    assert numbers["forecast"]["step_seconds"] == numbers["round_seconds"] == choice.round_seconds
    assert f"The base is {choice.reason}." in run.notes
    assert f"The base is {choice.reason}." in plan.told


def test_where_the_run_streams_nothing_the_plan_does_not_either(place, planned, tmp_path):
    plan, run = planned("1GiB"), train(place, tmp_path / "out", "1GiB")
    assert run.choice is None
    assert plan.numbers["streamed"] is False
    assert "they fit" in plan.told


def test_what_the_run_refuses_the_plan_refuses_with_the_same_sentence(place, planned, tmp_path):
    plan = planned("60KiB")
    with pytest.raises(PlanError) as refused:
        train(place, tmp_path / "out", "60KiB")
    assert plan.code == 2
    assert str(refused.value) in plan.told


@pytest.mark.slow
def test_where_the_host_is_too_small_both_leave_the_weights_in_their_files(
    place, planned, tmp_path, monkeypatch
):
    monkeypatch.setattr("weftune.trainer.machine.host_budget", lambda *_: 20_480)
    monkeypatch.setattr("weftune.launch.choice.host_budget", lambda *_: 20_480)
    plan, run = planned("700KiB"), train(place, tmp_path / "out", "700KiB")
    assert run.choice is not None
    assert run.choice.reads_weight_files
    assert plan.numbers["weights_in_files"]
    assert f"The base is {run.choice.reason}." in plan.told
    assert "The speed of the files is not known here" in plan.told
