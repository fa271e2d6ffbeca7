"""Trials as jobs of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import SpecError
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import JobSpec, RunSpec
from weftune.jobs.sweeps.spec import SweepSpec, Trial, ValueRange
from weftune.jobs.sweeps.trials import trial_job

ROWS = [{"text": "one"}, {"text": "two"}]


def run_of(*jobs: dict[str, Any], **keys: Any) -> RunSpec:
    whole = [{"data": ROWS, "eval": {"fraction": 0.5}, **job} for job in jobs]
    return parse_run({"base": "demo", "jobs": whole, **keys}, Path("somewhere"))


def sentences(*jobs: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        run_of(*jobs)
    return str(caught.value).splitlines()


def test_trials_are_jobs_where_the_job_stood() -> None:
    run = run_of(
        {"name": "before"},
        {
            "name": "sql",
            "seed": 3,
            "sweep": {"over": {"adapter.rank": [8, 64], "learning_rate": [1e-4, 3e-4]}},
        },
        {"name": "after"},
    )
    names = ["sql-r8-lr1e-4", "sql-r8-lr3e-4", "sql-r64-lr1e-4", "sql-r64-lr3e-4"]
    assert [job.name for job in run.jobs] == ["before", *names, "after"]
    assert [(job.adapter.rank, job.learning_rate, job.seed) for job in run.jobs[1:5]] == [
        (8, 1e-4, 3), (8, 3e-4, 3), (64, 1e-4, 3), (64, 3e-4, 3),
    ]  # fmt: skip
    (sweep,) = run.sweeps
    assert (sweep.name, [trial.name for trial in sweep.trials]) == ("sql", names)
    assert sweep.trials[1].values == {"adapter.rank": 8, "learning_rate": 3e-4}


def test_a_mapping_is_merged_into_the_jobs_key_by_key() -> None:
    run = run_of(
        {"name": "a", "adapter": {"dropout": 0.1, "alpha": 5},
         "sweep": {"over": {"adapter": [{"rank": 8, "alpha": 16}, {"rank": 64}]}}},
        defaults={"adapter": {"targets": ["q_proj"]}},
    )  # fmt: skip
    assert [(job.adapter.rank, job.adapter.alpha) for job in run.jobs] == [(8, 16), (64, 5)]
    assert all(job.adapter.dropout == 0.1 and job.adapter.targets == ("q_proj",) for job in run.jobs)


def test_values_are_settled_as_the_jobs_own_keys_are() -> None:
    run = run_of(
        {"name": "a", "epochs": 2, "eval": {"fraction": 0.5, "every": 0.1},
         "early_stop": {"patience": 9, "min_delta": 1},
         "sweep": {"over": {"steps": [10, 20], "clip": [0, 1], "early_stop.patience": [2]}}},
    )  # fmt: skip
    assert [(job.steps, job.epochs, job.clip) for job in run.jobs] == [
        (10, None, None), (10, None, 1), (20, None, None), (20, None, 1),
    ]  # fmt: skip
    assert all(job.early_stop is not None and job.early_stop.patience == 2 for job in run.jobs)
    assert all(job.early_stop is not None and job.early_stop.min_delta == 1 for job in run.jobs)


def test_a_trial_equals_the_job_that_says_the_same_itself() -> None:
    (trial,) = run_of({"name": "a", "sweep": {"over": {"adapter.rank_pattern.self_attn.q_proj": [4]}}}).jobs
    alone = JobSpec(
        name=trial.name, data=ROWS, eval={"fraction": 0.5},
        adapter={"rank_pattern": {"self_attn.q_proj": 4}},
    )  # fmt: skip
    assert trial == alone


def test_records_from_python_are_read_as_the_file_is() -> None:
    from weftune.jobs.spec.layer import plain_values

    spec = SweepSpec(search="random", trials=3, over={"learning_rate": ValueRange(1e-5, 1e-3, True)})
    keys = {"name": "a", "data": {"rows": ROWS}, "eval": {"fraction": 0.5}, "sweep": spec}
    run = parse_run(plain_values({"base": "demo", "jobs": [keys]}), Path("somewhere"))
    assert run.sweeps[0].spec == spec
    assert len(run.jobs) == 3


def test_a_jobspec_is_one_job() -> None:
    with pytest.raises(SpecError, match="a JobSpec is one job; give a job with sweep as a mapping"):
        JobSpec(name="a", data=ROWS, sweep={})  # type: ignore[call-arg]


def test_a_mistake_in_the_job_is_told_once_and_not_for_each_trial() -> None:
    job = {
        "name": "a",
        "adapter": {"alpha": -1},
        "sweep": {"over": {"adapter.rank": [4, 8], "steps": [1, 2]}},
    }
    assert sentences(job) == ["jobs[0].adapter.alpha: must be above 0, got -1"]


def test_a_mistake_in_the_job_is_told_where_only_ranges_are_searched_over() -> None:
    rates = {"learning_rate": {"min": 1e-5, "max": 1e-3, "log": True}}
    job = {"name": "a", "batch_size": -3, "sweep": {"search": "random", "trials": 2, "over": rates}}
    assert sentences(job) == ["jobs[0].batch_size: must be at least 1, got -3"]


def test_a_value_that_no_draw_has_hit_is_checked_too() -> None:
    ranks = [*range(1, 500), 0]
    job = {"name": "a", "sweep": {"search": "random", "trials": 2, "over": {"adapter.rank": ranks}}}
    assert sentences(job) == ["jobs[0].sweep.over.adapter.rank[499]: must be at least 1, got 0"]


def test_what_only_goes_wrong_together_is_told_once() -> None:
    over = {"adapter.target_parameters": [["mlp.experts.down_proj"], []], "adapter.dropout": [0, 0.1, 0.2]}
    found = sentences({"name": "a", "sweep": {"over": over}})
    sentence = "must be 0 where target_parameters names experts, as in PEFT"
    assert found == [f"jobs[0].sweep.over.adapter.dropout[{index}]: {sentence}" for index in (1, 2)]


def test_steps_and_epochs_cannot_both_be_swept() -> None:
    found = sentences({"name": "a", "sweep": {"over": {"steps": [1, 2], "epochs": [1, 2]}}})
    assert found == [f"jobs[0].sweep.over.steps[{index}]: give epochs or steps, not both" for index in (0, 1)]


def test_a_trial_with_the_name_of_a_job_is_refused() -> None:
    sweep = {"over": {"adapter.rank": [8, 16]}}
    assert sentences({"name": "A-r8"}, {"name": "a", "sweep": sweep}, {"name": "a-R16"}) == [
        'jobs[1].name: its trial "a-r8" has the name of jobs[0]; choose another',
    ]
    assert sentences({"name": "a", "sweep": sweep}, {"name": "a", "sweep": sweep}) == [
        'jobs[1].name: "a" is already the name of jobs[0]; choose another',
    ]


def test_the_name_of_a_sweep_is_no_trials() -> None:
    (job,) = run_of({"name": "a", "sweep": {"over": {"adapter.rank": [8]}}}).jobs
    assert job.name != "a"


def test_a_target_that_the_base_does_not_have_is_told_once_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "jobs.yaml").write_text("""base: demo
jobs:
  - name: a
    data: rows.jsonl
    eval: {fraction: 0.5}
    sweep:
      over:
        learning_rate: [1e-4, 2e-4, 3e-4]
        adapter.targets:
          - all-linear
          - [q_proj, x_proj]
""")
    shape = ModelShape(1, 8, 16, 64, 4, (SiteShape("model.layers.0.self_attn.q_proj", 8, 8),), 32)
    with pytest.raises(SpecError) as caught:
        read_run(tmp_path / "jobs.yaml", lambda base: shape)
    (told,) = str(caught.value).splitlines()
    assert told.startswith("jobs.yaml:11 jobs[0].sweep.over.adapter.targets[1][1]:")


def test_a_trial_of_a_later_generation_becomes_a_job_as_the_first_did(tmp_path: Path) -> None:
    (sweep,) = run_of(
        {"name": "a", "steps": 7, "sweep": {"over": {"adapter": [{"rank": 8, "alpha": 1}, {"rank": 16}]}}}
    ).sweeps
    job = trial_job(sweep, Trial("a-late", {"adapter": {"rank": 16}}))
    assert (job.name, job.adapter.rank, job.adapter.alpha, job.steps) == ("a-late", 16, 32, 7)


def test_a_thousand_trials_are_read_in_a_few_seconds() -> None:
    run = run_of(
        {"name": "a", "sweep": {"over": {"steps": list(range(1, 101)), "batch_size": list(range(1, 11))}}}
    )
    assert len({job.name for job in run.jobs}) == 1000
