"""The benchmark of a real pipeline runs, and says for every rank what was measured and what was foreseen."""

import sys

from benchmarks import pipeline_bubbles


def test_the_toy_measures_every_case_on_every_rank(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(pipeline_bubbles, "JOBS", (2,))
    monkeypatch.setattr(sys, "argv", ["pipeline_bubbles", "--toy", "--json", str(tmp_path / "found.json")])
    pipeline_bubbles.main()
    told = capsys.readouterr().out
    assert "1 job, 1F1B" in told
    assert "2 jobs, ours" in told
    assert "× the tokens per second of 1F1B" in told
    assert (tmp_path / "found.json").exists()


def test_what_is_not_asked_for_is_as_the_setting_says():
    asked = pipeline_bubbles.bubble_arguments().parse_args(["--threads", "3"])
    assert pipeline_bubbles.setting_asked(asked) == pipeline_bubbles.Setting(threads=3)
