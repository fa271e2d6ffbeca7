"""The planner's benchmarks at a toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import plan_bubbles, plan_stream, plan_week
from benchmarks.trace import DEVIATION, MEAN, RATE, WEEK, Kind, Service, Task, trace


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def toy(script: ModuleType) -> dict[str, Any]:
        file = tmp_path / "found.json"
        monkeypatch.setattr(sys, "argv", [script.__name__, "--toy", "--json", str(file)])
        script.main()
        return json.loads(file.read_text())

    return toy


@pytest.mark.slow
def test_the_formula_holds_in_every_case_and_the_figure_has_all_bars(run: Any) -> None:
    found = run(plan_bubbles)
    assert all(row["equal"]["many"] == row["cases"] for row in found["formula"])
    assert set(found["figure20"][0]["bars"]) == {"1F1B", "mLoRA", "1", "2", "3", "4"}


@pytest.mark.slow
def test_a_streamed_base_is_foreseen(run: Any, capsys: pytest.CaptureFixture) -> None:
    (case,) = run(plan_stream)["cases"]
    # Each of 32 layers of 436 MB has to come twice, but for the few that stay: at least 0.3 s at 55 GB/s.
    assert 0.3 < case["seconds"] < 3.0
    assert "8b, 10 GiB, 1 × 1" in capsys.readouterr().out


@pytest.mark.slow
def test_weftune_serves_more_than_batching_and_that_more_than_separate_instances(run: Any) -> None:
    rows = run(plan_week)["rows"]
    for combination in ("uniform", "non-uniform"):
        found = {row["way"]: row["throughput"] for row in rows if row["combination"] == combination}
        assert found["Weftune"] > found["batching only"] > found["separate instances"]


def test_a_week_has_the_paper_s_arrivals_and_durations() -> None:
    tasks = trace([Kind("rte", 4)])
    assert len(tasks) == pytest.approx(RATE * WEEK, rel=0.03)
    mean = sum(task.duration for task in tasks) / len(tasks)
    spread = (sum((task.duration - mean) ** 2 for task in tasks) / len(tasks)) ** 0.5
    assert mean == pytest.approx(MEAN, rel=0.05)
    assert spread == pytest.approx(DEVIATION, rel=0.15)


def test_tasks_that_share_an_instance_step_together_and_the_next_waits_its_turn() -> None:
    """Two places, rounds of a second for each task aboard: the third starts when the first has ended."""
    kind = Kind("rte", 4)
    tasks = [Task(0.0, 0.0, kind), Task(0.0, 0.0, kind), Task(1.0, 0.0, kind)]
    service = Service(tasks, [10, 20, 5], lambda _: 7.0, 1, 2, lambda aboard: float(len(aboard)))
    served = service.run(100.0)
    assert served.finished == 3
    assert served.tokens == pytest.approx(7 * 35)
    assert served.waited == pytest.approx(19 / 3)
