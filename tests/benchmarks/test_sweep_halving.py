"""The benchmark of halving: what random search is expected to find, and a whole run at a toy size."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import sweep_halving
from benchmarks.sweep_halving import TOY_CASE, Case, Found, compared, expected_best, jobs, summary
from tests.report.sweep_example import sweep_record
from weftune.jobs.spec.read import parse_run
from weftune.jobs.sweeps.record import read_record

LOSSES = [1.5, 1.2, 1.9, 1.21, 3.0, 1.4]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_best_of_a_random_choice_is_the_mean_over_all_choices(count: int) -> None:
    every = [min(chosen) for chosen in combinations(LOSSES, count)]
    assert expected_best(LOSSES, count) == pytest.approx(mean(every))


def test_a_seed_compares_the_best_of_each_way_and_the_samples() -> None:
    halved = sweep_record(failed=None)
    whole = replace(
        halved,
        trials=tuple(
            trial if trial.state == "finished" else replace(trial, state="finished", score=2.0 + at / 100)
            for at, trial in enumerate(halved.trials)
        ),
    )
    found = compared(3, whole, halved)
    assert (found.grid, found.halving, found.near, found.apart) == (1.2667, 1.2667, True, 0.0)
    assert found.share == pytest.approx(halved.samples.trained / (8 * 200 * 24))
    assert found.random_trials == 7
    assert found.random > found.halving


def test_the_summary_names_the_bars() -> None:
    one = Found(seed=0, grid=1.0, halving=1.005, random=1.1, random_trials=7, share=0.25, apart=0.0)
    told = summary([one, replace(one, halving=1.02, share=0.27)])
    assert "in 1 of 2 seeds" in told
    assert "at most 0.270" in told
    assert "ends +0.0875 above" in told


def test_the_case_is_a_grid_of_24_trials_that_is_read(tmp_path: Path) -> None:
    for name in ("rows", "held_out"):
        (tmp_path / f"{name}.jsonl").touch()
    halving = {"at": list(sweep_halving.AT), "keep": sweep_halving.KEEP}
    run = parse_run(jobs(tmp_path, tmp_path, Case(), 0, halving), tmp_path)
    assert len(run.sweeps[0].trials) == len(run.jobs) == 24
    assert len(parse_run(jobs(tmp_path, tmp_path, TOY_CASE, 0, None), tmp_path).jobs) == 6


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["mean", "last"])
def test_at_a_toy_size_trials_end_where_they_end_in_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], judge: str
) -> None:
    file = tmp_path / "found.json"
    words = ["sweep_halving", "--toy", "--only", "3", "--work", str(tmp_path / "work"), "--json", str(file)]
    words += ["--judge", judge]
    monkeypatch.setattr(sys, "argv", words)
    sweep_halving.main()
    (seed,) = json.loads(file.read_text())["seeds"]
    assert seed["seed"] == 3
    assert seed["apart"] < 1e-5
    assert seed["share"] < 0.6
    told = capsys.readouterr().out
    assert f"judge: {judge}." in told
    assert "of the grid's samples" in told
    rungs = {"at": list(sweep_halving.AT), "keep": sweep_halving.KEEP}
    assert json.loads(file.read_text())["halving"] == rungs | {"judge": judge}
    record = read_record(tmp_path / "work" / "seed-3" / "halved" / "trial")
    assert record is not None
    assert record.judge == judge
    sweep_halving.main()  # goes on behind the last step of both runs
    assert json.loads(file.read_text())["seeds"] == [seed]
