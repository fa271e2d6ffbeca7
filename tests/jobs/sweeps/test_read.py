"""What `sweep` may hold, the sentence for each thing that it may not, and trials as jobs of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import SpecError
from weftune.jobs.spec.read import parse_run, read_run
from weftune.jobs.spec.spec import JobSpec, RunSpec
from weftune.jobs.sweeps import read
from weftune.jobs.sweeps.read import read_sweep, sweep_warnings, trial_job
from weftune.jobs.sweeps.spec import Halving, SweepSpec, Trial, ValueRange

EVAL = {"fraction": 0.1}
OVER = {"learning_rate": [1e-4, 3e-4], "adapter.rank": [8, 64]}


def spec_of(**keys: Any) -> SweepSpec:
    spec, faults = read_sweep({"eval": EVAL, "sweep": {"over": OVER, **keys}})
    assert not faults
    assert spec is not None
    return spec


def told(job: Any = None, **keys: Any) -> dict[str, str]:
    """The place below `sweep` of each mistake → its sentence."""
    spec, faults = read_sweep({"eval": EVAL, "sweep": {"over": OVER, **keys}} | (job or {}))
    assert spec is None
    return {".".join(map(str, fault.loc[1:])): fault.sentence for fault in faults}


def over(**keys: Any) -> dict[str, str]:
    return told(over=keys, search="random", trials=2)


def test_the_example_of_the_conventions_is_read() -> None:
    spec = spec_of(
        search="random",
        trials=24,
        over={
            "learning_rate": {"min": 1e-5, "max": 1e-3, "log": True},
            "adapter": [{"rank": 8, "alpha": 16}, {"rank": 64, "alpha": 128}],
        },
        metric="eval_loss",
        mode="min",
        halving={"at": [0.1, 0.3], "keep": 0.33},
        keep=3,
    )
    assert spec == SweepSpec(
        search="random",
        trials=24,
        over={
            "learning_rate": ValueRange(1e-5, 1e-3, True),
            "adapter": ({"rank": 8, "alpha": 16}, {"rank": 64, "alpha": 128}),
        },
        halving=Halving((0.1, 0.3), 0.33),
        keep=3,
    )


def test_a_grid_by_the_lowest_loss_with_one_winner_is_what_over_alone_means() -> None:
    assert spec_of() == SweepSpec(over={key: tuple(values) for key, values in OVER.items()})
    assert spec_of(metric="eval_mean_token_accuracy").mode == "max"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("data.limit", "trials that train on other rows cannot be compared"),
        ("data", "trials that train on other rows cannot be compared"),
        ("eval.fraction", "losses on other held-out rows cannot be compared"),
        ("seed", "its trials would differ by chance alone"),
        ("objective", "the losses of other objectives cannot be compared"),
        ("objective.kind", "the losses of other objectives cannot be compared"),
        ("name", "every trial is named after what sets it apart"),
        ("priority", "it decides when a trial is trained, not what comes of it"),
        ("sweep.over", "a sweep holds no other"),
    ],
)
def test_what_makes_evaluations_incomparable_cannot_be_swept(key: str, why: str) -> None:
    ((place, sentence),) = over(**{key: [1, 2]}).items()
    assert place == f"over.{key}"
    assert sentence.startswith(f"cannot be swept: {why}")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("lr", "write learning_rate"),
        ("rank", "is not a key of a job; write adapter.rank"),
        ("lora_r", "write adapter.rank"),
        ("learning_rat", "is not a key of a job; did you mean learning_rate?"),
        ("adapter.rnk", "is not a key of adapter; did you mean rank?"),
        ("warmup.steps", "has no keys below it; write warmup"),
    ],
)
def test_a_key_that_is_none_is_answered_with_the_nearest(key: str, sentence: str) -> None:
    assert over(**{key: [1, 2]}) == {f"over.{key}": sentence}


@pytest.mark.parametrize(
    ("value", "place", "sentence"),
    [
        (8, "", "must be a list of values, or a range {min: ..., max: ...}, got 8; one value for all trials "
                "is written in the job itself"),
        ([], "", "must hold at least one value, got an empty list"),
        ([0.1, 0.2, 0.1], ".2", "0.1 is already there as weight_decay[0]; remove one"),
        ({}, "", "must be a list of values, or a range {min: ..., max: ...}"),
        ({"min": 0.1}, "", "needs min and max"),
        ({"min": 0.2, "max": 0.1}, ".max", "must be above min, which is 0.2, got 0.1"),
        ({"min": -1, "max": 0.1}, ".min", "must be at least 0, got -1"),
        ({"min": 0, "max": "much"}, ".max", 'must be a number, got "much"'),
        ({"min": 0, "max": 0.1, "log": True}, ".min", "must be above 0 where log is true, got 0"),
        ({"min": 0.1, "max": 0.1 + 1e-16}, "", "is too narrow to draw from; write a list of values"),
        ({"min": 0, "max": 0.1, "log": 10}, ".log", "must be true or false, got 10"),
        ({"min": 0, "max": 0.1, "base": 2}, ".base", "is not a key of a range; its keys are min, max, log"),
        ({"min": 0, "max": 0.1, "distribution": "log_uniform"}, ".distribution",
         "write {min: ..., max: ...}, and log: true for log_uniform"),
        ({"values": [0.1, 0.2]}, "", "write the list itself, weight_decay: [...]"),
    ],
)  # fmt: skip
def test_values_are_a_list_or_a_range(value: Any, place: str, sentence: str) -> None:
    assert over(weight_decay=value) == {f"over.weight_decay{place}": sentence}


def test_a_range_is_of_numbers_and_within_what_the_key_may_be() -> None:
    assert over(schedule={"min": 0, "max": 1}) == {
        "over.schedule": "takes no range, for it is no number; write a list of values"
    }
    ranks = {"adapter.rank": {"min": 0.5, "max": 64}}
    assert over(**ranks) == {"over.adapter.rank.min": "must be a whole number, got 0.5"}
    assert over(warmup={"min": 0.1, "max": 20}) == {
        "over.warmup": "must go over shares of the run (below 1) or over whole numbers of steps, not both"
    }


def test_keys_nested_as_in_the_job_are_answered_with_dotted_ones() -> None:
    assert over(adapter={"rank": [8, 16]}) == {
        "over.adapter": "write dotted keys, such as adapter.rank: [...], or a list of mappings"
    }


def test_two_keys_that_set_the_same_value_are_refused() -> None:
    keys = {"adapter": [{"rank": 8}, {"rank": 16, "alpha": 1}], "adapter.alpha": [1, 2]}
    assert over(**keys) == {
        "over.adapter.alpha": "adapter.alpha is set by the key adapter too; write it in one"
    }
    assert spec_of(over={"adapter": [{"rank": 8}, {"rank": 16}], "adapter.alpha": [1, 2]})


def test_a_grid_takes_no_range() -> None:
    assert told(over={"learning_rate": {"min": 1e-5, "max": 1e-3}}) == {
        "over.learning_rate": "a grid takes no range: write a list of values, or search: random and how many "
        "trials"
    }


@pytest.mark.parametrize("trials", [2, 4, 24])
def test_a_grid_takes_no_number_of_trials(trials: int) -> None:
    assert told(trials=trials) == {
        "trials": "a grid trains all of its 4 combinations: leave trials out, or write search: random"
    }


def test_a_grid_that_nobody_could_train_is_refused_before_it_is_made() -> None:
    many = list(range(1, 101))
    assert told(over={"batch_size": many, "steps": many, "adapter.rank": many}) == {
        "over": "is a grid of 1,000,000 trials, and a sweep has at most 1,000; write search: random and how "
        "many trials"
    }
    assert told(search="random", trials=1001) == {"trials": "must be at most 1000, got 1001"}


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_search_that_draws_must_know_how_many_and_no_more_than_there_are(search: str) -> None:
    pytest.importorskip("optuna")
    assert told(search=search) == {"": f"needs trials: how many to try, for search: {search}"}
    assert told(search=search, trials=5) == {
        "trials": "must be at most 4, the number of combinations, got 5; for all write search: grid"
    }


def test_tpe_without_optuna_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "find_spec", lambda name: None)
    assert told(search="tpe", trials=4) == {
        "search": 'tpe needs Optuna: pip install "weftune[sweeps]", or write search: random'
    }


@pytest.mark.parametrize(
    ("keys", "place"),
    [({}, ""), ({"metric": "eval_loss"}, "metric"), ({"halving": {"at": [0.5], "keep": 0.5}}, "halving")],
)
def test_trials_cannot_be_compared_without_held_out_rows(keys: Any, place: str) -> None:
    assert told({"eval": None}, **keys) == {
        place: "needs eval in the job: {fraction: 0.1} or {path: ...}, to know which trial is best"
    }


@pytest.mark.parametrize(
    ("halving", "place", "sentence"),
    [
        (3, "", "must be a mapping such as {at: [0.1, 0.3], keep: 0.33}, got 3"),
        ({"at": [0.1]}, "", "needs keep: the share of trials that continues, such as 0.33"),
        ({"keep": 0.3}, "", "needs at: a list of shares of the steps such as [0.1, 0.3]"),
        ({"at": 0.1, "keep": 0.3}, ".at",
         "must be a list of shares of the steps such as [0.1, 0.3], got 0.1"),
        ({"at": [], "keep": 0.3}, ".at", "must be a list of shares of the steps such as [0.1, 0.3]"),
        ({"at": [20], "keep": 0.3}, ".at.0", "must be below 1 (a share of the steps), got 20"),
        ({"at": [0.3, 0.1], "keep": 0.3}, ".at", "must rise from each share to the next, such as [0.1, 0.3]"),
        ({"at": [0.3, 0.3], "keep": 0.3}, ".at", "must rise from each share to the next, such as [0.1, 0.3]"),
        ({"at": [0.3], "keep": 3}, ".keep", "must be below 1 (a share of the trials), got 3"),
        ({"at": [0.3], "keep": 0.5, "eta": 3}, ".eta",
         "is not a key of sweep.halving; its keys are at, keep, judge"),
        ({"at": [0.3], "keep": 0.5, "judge": "first"}, ".judge", 'must be mean or last, got "first"'),
    ],
)  # fmt: skip
def test_halving_is_shares_of_the_steps_and_of_the_trials(halving: Any, place: str, sentence: str) -> None:
    assert told(halving=halving) == {f"halving{place}": sentence}


@pytest.mark.parametrize(("steps", "at", "rungs"), [(20, [0.01, 0.02], "1, 1"), (1, [0.5], "0")])
def test_every_rung_has_a_step_of_its_own(steps: int, at: list[float], rungs: str) -> None:
    assert told({"steps": steps}, halving={"at": at, "keep": 0.5}) == {
        "halving.at": f"must be at least a step apart, and of {steps} steps they are {rungs}; take fewer "
        "shares or more steps"
    }
    enough = {"eval": EVAL, "steps": 4, "sweep": {"over": OVER, "halving": {"at": [0.5, 0.6], "keep": 0.5}}}
    assert read_sweep(enough)[0] is not None


def test_no_more_winners_are_kept_than_reach_the_end() -> None:
    assert told(keep=5) == {"keep": "must be at most 4, the trials of the sweep, got 5"}
    assert told(keep=3, halving={"at": [0.1], "keep": 0.5}) == {
        "keep": "must be at most 2, the trials that reach the end, got 3"
    }


def test_a_mode_that_calls_the_worst_the_best_is_refused() -> None:
    assert told(mode="max") == {"mode": "must be min for eval_loss, or left out"}
    assert told(metric="eval_mean_token_accuracy", mode="min") == {
        "mode": "must be max for eval_mean_token_accuracy, or left out"
    }
    choices = (
        "eval_loss, eval_mean_token_accuracy, eval_rewards/accuracies, eval_rewards/margins, eval_accuracy "
        "or eval_margin"
    )
    hint = "a metric of answers is named in the job, eval: {generate: {...}, metric: ...}"
    assert told(metric="loss") == {"metric": f'must be {choices}, got "loss"; {hint}'}
    rewards = {"metric": "needs a job that learns from preferences, objective: dpo, cpo, orpo or kto"}
    assert told(metric="eval_rewards/margins") == rewards


def test_trials_are_compared_by_the_metric_of_their_answers() -> None:
    def read(own: str, **keys: Any) -> tuple[Any, Any]:
        held_out = {"fraction": 0.1, "generate": {"prompts": 2}, "metric": own}
        spec, faults = read_sweep({"eval": held_out, "sweep": {"over": OVER, **keys}})
        return spec, {".".join(map(str, fault.loc)): fault.sentence for fault in faults}

    assert read("exact_match", metric="eval_exact_match")[0].mode == "max"
    assert read("my.py:bleu", metric="eval_bleu")[0].mode == "max"
    assert read("my.py:bleu", metric="eval_exact_match")[1]["sweep.metric"].endswith('got "eval_exact_match"')
    wrong = {"sweep.mode": "must be max for eval_bleu, or left out"}
    assert read("my.py:bleu", metric="eval_bleu", mode="min")[1] == wrong


def test_numbers_of_an_objective_are_swept_and_compared_by_its_rewards():
    keys = {"over": {"objective.beta": [0.1, 0.3]}, "metric": "eval_rewards/accuracies"}
    spec, faults = read_sweep({"eval": EVAL, "objective": {"kind": "cpo"}, "sweep": keys})
    assert faults == []
    assert spec is not None
    assert (spec.mode, spec.over) == ("max", {"objective.beta": (0.1, 0.3)})


def test_reward_models_are_not_compared_by_a_token_accuracy_that_they_lack():
    keys = {"over": {"adapter.rank": [2, 4]}, "metric": "eval_mean_token_accuracy"}
    _, faults = read_sweep({"eval": EVAL, "objective": "reward", "sweep": keys})
    assert [fault.sentence for fault in faults] == [
        "is not measured for objective: reward; write eval_accuracy or eval_margin"
    ]


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("method", "write search (grid, random, or tpe for bayes)"),
        ("parameters", "write over"),
        ("n_trials", "write trials"),
        ("early_terminate", "write halving (such as {at: [0.1, 0.3], keep: 0.33})"),
        ("tirals", "is not a key of sweep; did you mean trials?"),
    ],
)
def test_the_keys_of_other_tools_are_answered_with_ours(key: str, sentence: str) -> None:
    assert told(**{key: 1}) == {key: sentence}


def test_a_sweep_is_a_mapping_that_says_what_over() -> None:
    for value, sentence in (
        (3, "must be a mapping such as {over: {learning_rate: [1e-4, 3e-4]}}, got 3"),
        ({}, "needs over: a mapping such as {learning_rate: [1e-4, 3e-4], adapter.rank: [8, 64]}"),
    ):
        _, (fault,) = read_sweep({"eval": EVAL, "sweep": value})
        assert (fault.loc, fault.sentence) == (("sweep",), sentence)
    assert told(over=["learning_rate"]) == {
        "over": "must be a mapping such as {learning_rate: [1e-4, 3e-4], adapter.rank: [8, 64]}, got a list"
    }


def test_every_mistake_of_a_file_is_told_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "jobs.yaml").write_text("""base: demo
defaults:
  data: rows.jsonl
  sweep: {over: {seed: [1, 2]}}
jobs:
  - name: sql
    sweep:
      search: randm
      over:
        lr:
          - 1e-4
  - name: other
    steps: 0
    eval: {fraction: 0.1}
    sweep:
      over:
        adapter.rank:
          - 8
          - 0
        schedule: [cosine, cosin]
""")
    with pytest.raises(SpecError) as caught:
        read_run(tmp_path / "jobs.yaml")
    assert str(caught.value).splitlines() == [
        "jobs.yaml:4 defaults.sweep: must be given in the job whose values are to be tried",
        "jobs.yaml:7 jobs[0].sweep: needs eval in the job: {fraction: 0.1} or {path: ...}, to know which "
        "trial is best",
        'jobs.yaml:8 jobs[0].sweep.search: must be grid, random or tpe, got "randm"; did you mean random?',
        "jobs.yaml:10 jobs[0].sweep.over.lr: write learning_rate",
        "jobs.yaml:13 jobs[1].steps: must be at least 1, got 0",
        "jobs.yaml:19 jobs[1].sweep.over.adapter.rank[1]: must be at least 1, got 0",
        'jobs.yaml:20 jobs[1].sweep.over.schedule[1]: must be linear, cosine or constant, got "cosin"; did '
        "you mean cosine?",
    ]


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


def warned(steps: int = 60, at: tuple[float, ...] = (0.1, 0.5), **job: Any) -> list[str]:
    over = job.pop("over", {"learning_rate": [1e-4, 3e-4]})
    halving = {"at": list(at), "keep": 0.5} if at else None
    sweep = {"over": over, **({"halving": halving} if halving else {})}
    run = run_of({"name": "sql", "steps": steps, "sweep": sweep, **job}, {"name": "other", "warmup": 0.5})
    found = {one.name: one.total_steps(10) for one in run.jobs}
    return sweep_warnings(run.sweeps, {one.name: one for one in run.jobs}, found)


@pytest.mark.parametrize("warmup", [6, 0.1, 7, 0.5])
def test_a_first_rung_within_the_warm_up_is_told(warmup: float) -> None:
    until = {6: 6, 0.1: 6, 7: 7, 0.5: 30}[warmup]
    assert warned(warmup=warmup) == [
        f"sql: sweep.halving.at: the first rung is at step 6, and trials warm up until step {until}: they "
        "are judged before their learning rate is reached; set it later, or warmup shorter"
    ]


@pytest.mark.parametrize(
    "job", [{"warmup": 5}, {"warmup": 0}, {"warmup": 30, "at": ()}, {"warmup": 6, "at": (0.5,)}]
)
def test_a_rung_behind_the_warm_up_is_not(job: dict[str, Any]) -> None:
    assert warned(**job) == []


def test_trials_that_warm_up_longer_than_others_are_counted() -> None:
    (sentence,) = warned(over={"warmup": [0, 0.05, 12]})
    assert "the first rung is at step 6, and 1 of 3 trials warm up until step 12" in sentence


def test_trials_that_are_not_known_are_not_asked_for() -> None:
    run = run_of(
        {"name": "s", "sweep": {"over": {"adapter.rank": [2, 4]}, "halving": {"at": [0.1], "keep": 0.5}}}
    )
    assert sweep_warnings(run.sweeps, {}, {}) == []


@pytest.mark.parametrize(("kind", "metric"), [("dpo", "rewards/accuracies"), ("kto", "rewards/margins")])
def test_losses_of_trials_with_other_objectives_are_compared_with_a_warning(kind: str, metric: str) -> None:
    def found(**sweep: Any) -> list[str]:
        over = {"objective.beta": [0.1, 0.5]}
        run = run_of({"name": "s", "objective": {"kind": kind}, "sweep": {"over": over, **sweep}})
        return sweep_warnings(run.sweeps, {job.name: job for job in run.jobs}, {})

    assert found() == [
        "s: sweep.metric: objective.beta changes what the validation loss measures, so that trials cannot be "
        f"compared by it; write metric: eval_{metric}"
    ]
    assert found(metric=f"eval_{metric}") == []
