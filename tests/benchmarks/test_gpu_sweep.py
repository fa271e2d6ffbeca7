"""Sweeps as the benchmark for a GPU makes them, Weftune's and PEFT's, with a tiny shape on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_sweep
from benchmarks.commands import COLD, WARM, Run
from benchmarks.gpu_sweep import (
    BARS,
    PLAIN,
    Case,
    Side,
    absent,
    extrapolated_seconds,
    peft_task,
    ratios,
    rung_steps_made,
    sentences,
    steps_made,
    table,
    weftune_runs,
    with_training,
    write_work,
)
from benchmarks.peft_sweep import (
    Here,
    Outcome,
    PeftProcess,
    Workers,
    begun,
    busy_processes,
    dealt,
    read_task,
    search,
)
from tests.report.sweep_example import sweep_record
from weftune.bench.sizes import SIZES
from weftune.bench.timing import bench_hardware
from weftune.core.clock import Phase
from weftune.jobs.sweeps.halving import TrialEnd
from weftune.jobs.sweeps.record import SweepRecord
from weftune.jobs.sweeps.spec import Halving, SweepSpec

TOY = Case(
    shape="toy", size=SIZES["toy"], trials=6, steps=10, batch_size=2, length=8, real=False, processes=2,
    peft_steps=None, ranks=(4, 8),
)  # fmt: skip


def trained_as(record: SweepRecord) -> Any:
    """A side whose losses are those of a recorded sweep."""
    trials = {trial.name: trial for trial in record.trials}

    def outcome(name: str, limit: int) -> Outcome:
        trial = trials[name]
        if trial.state == "failed" and trial.left_at is not None:
            return Outcome(name=name, step=trial.left_at, end=TrialEnd.FAILED)
        value = trial.score if limit == record.steps else trial.at_rungs[str(limit)]
        return Outcome(name=name, step=limit, value=value)

    return lambda limits: [outcome(name, limit) for name, limit in limits.items()]


@pytest.mark.parametrize("failed", [None, 5])
def test_given_the_losses_of_a_weftune_sweep_peft_makes_its_decisions(failed: int | None) -> None:
    record = sweep_record(failed=failed)
    assert record.share is not None
    spec = SweepSpec(over={}, halving=Halving(record.at, record.share))
    rungs = begun(spec, [trial.name for trial in record.trials], record.steps)
    found = search(rungs, trained_as(record))
    assert rungs.decisions == list(record.decisions)
    assert found.best == record.best[0]
    assert found.best_loss == min(trial.score for trial in record.trials if trial.state == "finished")  # type: ignore[type-var]


def probe(step: float, evaluation: float = 0.0, begin: float = 0.0) -> dict[str, Any]:
    return {"steps": {"4": step, "8": 2 * step}, "evaluation": evaluation, "begin": begin}


def test_peft_is_extrapolated_to_the_steps_of_every_rung_as_its_processes_share_them() -> None:
    rungs = [{"a": (4, 10), "b": (8, 10), "c": (4, 10)}, {"b": (8, 20)}]
    alone = extrapolated_seconds({"1": probe(0.1, evaluation=1.0, begin=0.5)}, rungs, 1)
    assert alone == pytest.approx(3 * 1.5 + 1.0 + 2.0 + 1.0 + 1.0 + 4.0)
    # The longer share of the first rung is that of a and c; then one process has the device to itself.
    shared = extrapolated_seconds({"2": probe(0.2), "1": probe(0.1)}, rungs, 2)
    assert shared == pytest.approx(max(2.0 + 2.0, 4.0) + 4.0)


def test_steps_of_rungs_are_those_that_the_trials_made() -> None:
    record = sweep_record()
    rungs = rung_steps_made(record, dict.fromkeys((trial.name for trial in record.trials), 4))
    assert [len(rung) for rung in rungs] == [24, 8, 3]
    failed = next(trial for trial in record.trials if trial.state == "failed")
    assert rungs[0][failed.name] == (4, 4)
    assert {steps for _, steps in rungs[2].values()} == {140}
    assert sum(steps for rung in rungs for _, steps in rung.values()) * 8 == record.samples.trained


def test_only_training_is_extrapolated() -> None:
    run = Run(name=PLAIN, exit_code=0, seconds=20.0, phases={Phase.LOADING: 4.0, Phase.TRAINING: 10.0})
    more = with_training(run, 300.0, "extrapolated from 20 steps")
    assert more.seconds == 310.0
    assert (more.phases[Phase.TRAINING], more.note) == (300.0, "extrapolated from 20 steps")


def test_trials_stay_in_their_process_unless_it_has_too_many() -> None:
    assert dealt(list("abcde"), {}, 2) == [["a", "c", "e"], ["b", "d"]]
    homes = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    assert dealt(["b", "d"], homes, 2) == [["d"], ["b"]]
    assert dealt(["a", "d"], homes, 2) == [["a"], ["d"]]
    assert dealt(["c"], homes, 2) == [["c"], []]
    eleven = dict.fromkeys("abcdefghijk", 0)
    sizes = [len(share) for share in dealt(list(eleven), eleven, 8)]
    assert sorted(sizes) == [1] * 5 + [2] * 3


def side(key: str, name: str, seconds: float) -> Side:
    return Side(key=key, run=Run(name=name, exit_code=0, seconds=seconds))


def test_the_table_holds_every_side_against_weftunes_last_run_and_the_bars() -> None:
    sides = [
        side("weftune", COLD, 40.0),
        side("weftune", WARM, 20.0),
        side("peft", PLAIN, 310.0),
        absent("processes", "PEFT, 8 processes at once", "8 bases do not fit"),
    ]
    told = table(sides)
    assert "15.50" in told
    assert "8 bases do not fit" in told
    found = ratios(sides)
    assert found == {"peft": {COLD: 7.75, WARM: 15.5}}
    first, second = sentences(found, BARS["tinyllama", "4x64"])
    assert first.endswith(f"7.75 × {COLD} (bar 15: missed)")
    assert second.endswith(f"15.50 × {WARM} (bar 15: reached)")


def test_the_cases_ask_for_ranks_from_4_to_64_and_as_many_trials_as_the_bars(tmp_path: Path) -> None:
    case = replace(TOY, trials=32, steps=300, ranks=gpu_sweep.RANKS)
    work = write_work(tmp_path, case, bench_hardware(toy=True))  # type: ignore[arg-type]
    assert {job.adapter.rank for job in work.run.jobs} == {4, 8, 16, 32, 64}
    assert all(job.name.startswith(f"trial-r{job.adapter.rank}-lr") for job in work.run.jobs)
    task = peft_task(work, PLAIN, 8)
    assert len(task.trials) == len({trial.name for trial in task.trials}) == 32
    assert (len(task.batches), len(task.rates)) == (300, 300)
    assert busy_processes(task) == [8, 4]
    task.write(tmp_path / "task.json")
    assert read_task(tmp_path / "task.json") == task


def test_real_lengths_are_drawn_from_all_datasets() -> None:
    lengths = gpu_sweep.sample_lengths(replace(TOY, real=True))
    assert len(lengths) == gpu_sweep.SAMPLES + gpu_sweep.HELD_OUT
    assert min(lengths) < 64 < 300 < max(lengths)


@pytest.fixture
def processes(tmp_path: Path) -> Mapping[str, Any]:
    torch.manual_seed(0)
    work = write_work(tmp_path, replace(TOY, real=True), bench_hardware(toy=True))  # type: ignore[arg-type]
    task = peft_task(work, "peft", 2)
    return {"task": task, "first": PeftProcess(task), "second": PeftProcess(task)}


def test_a_trial_that_changes_its_process_goes_on_as_if_it_had_not(
    processes: Mapping[str, Any], tmp_path: Path
) -> None:
    first, second, task = processes["first"], processes["second"], processes["task"]
    name, other = task.trials[0].name, task.trials[1].name
    first.train({name: 3, other: 3})
    first.hand_over(other, str(tmp_path / "other.pt"))
    second.take_over(other, str(tmp_path / "other.pt"))
    second.hand_over(other, str(tmp_path / "again.pt"))
    first.take_over(other, str(tmp_path / "again.pt"))
    second.take_over(other, str(tmp_path / "again.pt"))
    assert first.train({other: 6}) == second.train({other: 6})


@pytest.mark.slow
def test_trials_of_one_process_do_not_touch_one_another(processes: Mapping[str, Any]) -> None:
    task = processes["task"]
    torch.manual_seed(1)
    names = [trial.name for trial in task.trials[:2]]
    together = processes["first"]
    torch.manual_seed(1)
    (before,) = together.train({names[0]: 2})
    together.train({names[1]: 2})
    (after,) = together.train({names[0]: 5})
    alone = processes["second"]
    torch.manual_seed(1)
    assert alone.train({names[0]: 2}) == [before]
    (whole,) = alone.train({names[0]: 5})
    assert whole == after
    assert whole.value != before.value


def test_peft_sweeps_in_this_process_and_saves_the_best(tmp_path: Path) -> None:
    work = write_work(tmp_path, replace(TOY, trials=3, steps=4), bench_hardware(toy=True))  # type: ignore[arg-type]
    task = peft_task(work, "peft", 1)
    workers = Workers([Here(task)], tmp_path)
    found = search(begun(task.sweep, [trial.name for trial in task.trials], task.steps), workers.train)
    assert found.best in [trial.name for trial in task.trials]
    assert found.trial_steps == 3 * 1 + 1 * 3
    workers.save(found.best, tmp_path / "best")
    assert list((tmp_path / "best").rglob("adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sides", "weft"], "some of weftune,peft,processes, not weft"),
        (["--sides", "peft", "--peft-steps", "3"], "needs weftune among the sides"),
    ],
)
def test_sides_that_cannot_be_measured_are_refused(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_sweep", "--toy", *words])
    with pytest.raises(SystemExit, match="2"):
        gpu_sweep.main()
    assert told in capsys.readouterr().err


def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu_sweep", "--toy", "--json", str(file), *words])
    with pytest.raises(SystemExit) as ended:
        gpu_sweep.main()
    assert ended.value.code == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_all_sides_search_to_the_end_and_stop_the_same_number_of_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path, monkeypatch)
    cold, warm, *_ = found["sides"]
    assert [side["key"] for side in found["sides"]] == ["weftune", "weftune", "peft", "processes"]
    assert warm["decisions"] == cold["decisions"]
    for one in found["sides"]:
        assert one["run"]["seconds"] > sum(one["run"]["phases"].values()) - 0.1
        assert [len(kept) for kept in one["decisions"]] == [2, 1]
        assert one["trial_steps"] == 6 * 1 + 2 * 2 + 1 * 7
        assert one["best_loss"] == pytest.approx(warm["best_loss"], rel=0.02)
    assert set(found["ratios"]) == {"peft", "processes"}


@pytest.mark.slow
def test_pefts_sides_are_extrapolated_to_weftunes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--runs", "1", "--peft-steps", "2", "--lengths", "real", "--trials", "4"]
    own, *others = measured(tmp_path, monkeypatch, *words)["sides"]
    assert [one["key"] for one in others] == ["peft", "processes"]
    for one in others:
        assert one["run"]["note"] == "extrapolated from 2 steps"
        assert one["trial_steps"] == own["trial_steps"]
        assert one["run"]["seconds"] > 0


def test_a_trial_that_left_made_the_steps_up_to_there() -> None:
    record = sweep_record()
    assert {steps_made(trial) for trial in record.trials} == {4, 20, 60, 200}


def test_a_folder_without_kernels_is_no_cache_of_an_earlier_run(tmp_path: Path) -> None:
    assert weftune_runs(None, 2) == [COLD, WARM]
    assert weftune_runs(tmp_path / "nowhere", 2) == [COLD, WARM]
    assert weftune_runs(tmp_path, 1) == [COLD]
    (tmp_path / "modules").mkdir()
    (tmp_path / "triton").mkdir()
    assert weftune_runs(tmp_path, 2) == [COLD, WARM]
    (tmp_path / "triton" / "kernel").mkdir()
    assert weftune_runs(tmp_path, 2) == [WARM]
