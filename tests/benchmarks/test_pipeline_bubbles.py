"""The benchmark of a real pipeline says for every worker what was measured and what was foreseen."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import pipeline_bubbles
from benchmarks.pipeline_bubbles import Case
from tests.plan.costs import SHAPE
from weftune.plan.layout.stages import PartCosts, cut_layers
from weftune.plan.program.program import Backward, Forward, Step
from weftune.plan.window.pipeline import PipelineOrder
from weftune.run.workers.agreed import TimedAction, WorkerReport
from weftune.run.workers.trace import make_timeline


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--handover"]])
def test_the_toy_measures_every_case_on_every_worker(options, monkeypatch, capsys, tmp_path):
    cases = Case(1, 2, PipelineOrder.alternating), Case(2, 2)
    monkeypatch.setattr(pipeline_bubbles, "CASES", cases)
    json_file = str(tmp_path / "found.json")
    monkeypatch.setattr(sys, "argv", ["pipeline_bubbles", "--toy", *options, "--json", json_file])
    pipeline_bubbles.main()
    told = capsys.readouterr().out
    assert "1 job, 1F1B" in told
    assert "2 jobs, ours" in told
    assert "× the tokens per second of 1F1B" in told
    found = json.loads((tmp_path / "found.json").read_text())
    counts = [held["stop"] - held["start"] for held in found["cut"]["held"]]
    assert sum(counts) == pipeline_bubbles.TOY.layers
    assert f"Stages of {counts[0]} + {counts[1]} layers; by the profile 16 rows take " in told
    for case in found["cases"]:
        assert (
            len(case["passes"]) == len(case["measured"]) == len(case["predicted"]) == len(case["even"]) == 2
        )
        assert all(0 < seconds < case["seconds"] for seconds in case["passes"])
        assert all(-1e-9 < share < 1 for share in (*case["measured"], *case["predicted"]))
        assert case["predicted_seconds"] > 0
        assert all(spread > 0 for spread in case["spread"])
    assert [bar["kept"] for bar in found["bars"]] == [line.endswith("; kept.") for line in bar_lines(told)]


def test_windows_that_hand_over_are_one_timeline_with_the_time_between_them():
    """Both compute for 6 of 8 seconds: from 1 s, when both have begun, to 9 s, when one has ended."""
    first, second = Forward(0, 0), Forward(1, 0)
    windows = [
        [WorkerReport(times=[TimedAction(first, 0, 4)]), WorkerReport(times=[TimedAction(first, 1, 5)])],
        [WorkerReport(times=[TimedAction(second, 6, 9)]), WorkerReport(times=[TimedAction(second, 7, 10)])],
    ]
    timeline = make_timeline(pipeline_bubbles.joined_reports(windows))
    assert pipeline_bubbles.steady_bubbles(timeline) == pytest.approx((2 / 8, 2 / 8))


def bar_lines(told):
    return [line for line in told.splitlines() if line.endswith("kept.")]


def test_what_is_not_asked_for_is_as_the_setting_says():
    asked = pipeline_bubbles.bubble_arguments().parse_args(["--threads", "3"])
    assert pipeline_bubbles.setting_asked(asked) == pipeline_bubbles.Setting(threads=3)


@given(st.floats(0, 1 / 7), st.floats(0, 1 / 7))
def test_ends_of_up_to_a_seventh_of_a_layer_leave_four_stages_within_five_percent(embedding, head):
    layers = pipeline_bubbles.Setting().layers
    costs = PartCosts(embedding, 1.0, head)
    taken = [costs.stage_cost(held) for held in cut_layers(replace(SHAPE, layers=layers), 4, costs)]
    assert min(taken) >= 0.95 * max(taken)


def test_a_pass_spreads_around_the_mean_of_its_own_kind_and_steps_do_not_count():
    even = [
        TimedAction(Forward(0, 0), 0.0, 1.0),
        TimedAction(Backward(0, 0), 1.0, 3.0),
        TimedAction(Step("a", 1), 3.0, 9.0),
    ]
    assert pipeline_bubbles.pass_seconds(WorkerReport(times=even)) == 3.0
    assert pipeline_bubbles.pass_spread(WorkerReport(times=even)) == 0.0
    uneven = [TimedAction(Forward(0, 0), 0.0, 0.5), TimedAction(Forward(1, 0), 1.0, 2.5), *even[1:]]
    assert pipeline_bubbles.pass_seconds(WorkerReport(times=uneven)) == 3.0
    assert pipeline_bubbles.pass_spread(WorkerReport(times=uneven)) > 0.4
