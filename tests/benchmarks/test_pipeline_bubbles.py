"""The benchmark of a real pipeline runs, and says for every rank what was measured and what was foreseen."""

import json
import sys
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import pipeline_bubbles
from tests.plan.costs import SHAPE
from weft.plan.cut import PartCosts, cut_layers


def test_the_toy_measures_every_case_on_every_rank(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pipeline_bubbles, "JOBS", (2,))
    monkeypatch.setattr(sys, "argv", ["pipeline_bubbles", "--toy", "--json", str(tmp_path / "found.json")])
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
        assert len(case["passes"]) == len(case["measured"]) == len(case["predicted"]) == 2
        assert all(0 < seconds < case["seconds"] for seconds in case["passes"])


def test_what_is_not_asked_for_is_as_the_setting_says():
    asked = pipeline_bubbles.bubble_arguments().parse_args(["--threads", "3"])
    assert pipeline_bubbles.setting_asked(asked) == pipeline_bubbles.Setting(threads=3)


@given(st.floats(0, 0.5), st.floats(0, 0.5))
def test_ends_of_up_to_half_a_layer_leave_four_stages_within_five_percent(embedding, head):
    layers = pipeline_bubbles.Setting().layers
    costs = PartCosts(embedding, 1.0, head)
    taken = [costs.of(held) for held in cut_layers(replace(SHAPE, layers=layers), 4, costs)]
    assert min(taken) >= 0.95 * max(taken)
