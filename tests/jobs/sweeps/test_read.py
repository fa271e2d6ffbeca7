"""What `sweep` may hold, and the sentence for each thing that it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weftune.errors import SpecError
from weftune.jobs.spec.read import read_run
from weftune.jobs.sweeps import read
from weftune.jobs.sweeps.read import read_sweep
from weftune.jobs.sweeps.spec import Halving, SweepSpec, ValueRange

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
        ("objective.beta", "the losses of other objectives cannot be compared"),
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
        ({"at": [0.1]}, "", "needs keep: the share that goes on, such as 0.33"),
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
    assert told(metric="loss") == {"metric": 'must be eval_loss or eval_mean_token_accuracy, got "loss"'}


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
