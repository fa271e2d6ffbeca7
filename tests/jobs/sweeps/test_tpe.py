"""Generations that Optuna proposes; without it nothing here can run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("optuna")

from weftune.jobs.sweeps import search
from weftune.jobs.sweeps.search import TrialSearch, combination_key
from weftune.jobs.sweeps.spec import Ends, SweepSpec, Trial, ValueRange

SPEC = SweepSpec(
    search="tpe",
    trials=24,
    over={
        "learning_rate": ValueRange(1e-5, 1e-1, True),
        "adapter": ({"rank": 8}, {"rank": 64}),
        "warmup": ValueRange(0, 20),
    },
)


def loss(values: Any) -> float:
    """Best at a warmup of 5 with the larger rank."""
    return abs(values["warmup"] - 5) / 5 + (values["adapter"]["rank"] == 8)


def swept(spec: SweepSpec = SPEC, seed: int = 0) -> list[tuple[Trial, ...]]:
    proposer = TrialSearch("a", spec, seed)
    generations, ended = [proposer.first_generation()], []
    while generations[-1]:
        ended += [(trial, loss(trial.values)) for trial in generations[-1]]
        generations.append(proposer.next_generation(ended))
    return generations[:-1]


def test_trials_come_in_four_generations_and_none_twice() -> None:
    found = swept()
    assert [len(generation) for generation in found] == [6, 6, 6, 6]
    everyone = [trial for generation in found for trial in generation]
    assert (
        len({trial.name for trial in everyone})
        == len({combination_key(trial.values) for trial in everyone})
        == 24
    )
    assert all(1e-5 <= trial.values["learning_rate"] <= 1e-1 for trial in everyone)
    assert all(isinstance(trial.values["warmup"], int) for trial in everyone)


def test_later_generations_are_better_than_random_ones() -> None:
    better = 0
    for seed in range(5):
        first, *_, last = swept(seed=seed)
        better += sum(loss(trial.values) for trial in last) < sum(loss(trial.values) for trial in first)
    assert better >= 4


def test_told_the_same_ends_it_proposes_the_same_in_whatever_order_they_came() -> None:
    first, second, third, _ = swept()
    ended: Ends = [(trial, loss(trial.values)) for trial in (*first, *second)]
    shuffled = random.Random(1).sample(ended, len(ended))
    assert TrialSearch("a", SPEC, 0).next_generation(ended) == third
    assert TrialSearch("a", SPEC, 0).next_generation(shuffled) == third
    other = [(trial, -value if value else None) for trial, value in ended]
    assert TrialSearch("a", SPEC, 0).next_generation(other) != third
    assert swept(seed=1) != swept(seed=0)


def test_trials_as_a_record_gives_them_back_are_the_same_trials() -> None:
    over = {
        "adapter": ({"rank": 8, "alpha": 16}, {"rank": 64, "alpha": 1}),
        "betas": ([0.9, 0.99], [0.8, 0.9]),
    }
    spec = SweepSpec(search="tpe", trials=4, over=over)
    proposer = TrialSearch("a", spec, 0)
    ends: Ends = [(trial, 1.0) for trial in proposer.first_generation()]
    record = json.loads(json.dumps([trial.values for trial, _ in ends], sort_keys=True))
    recalled: Ends = [
        (Trial(trial.name, values), 1.0) for (trial, _), values in zip(ends, record, strict=True)
    ]
    assert proposer.next_generation(recalled) == proposer.next_generation(ends)
    assert len({combination_key(trial.values) for trial, _ in (*recalled, *ends)}) == len(ends)


def test_a_trial_without_a_value_is_avoided_and_stops_nothing() -> None:
    proposer = TrialSearch("a", SPEC, 0)
    first = proposer.first_generation()
    for value in (None, float("nan"), float("inf")):
        assert len(proposer.next_generation([(trial, value) for trial in first])) == 6
    mixed: Ends = [(trial, None if trial.values["warmup"] > 10 else 1.0) for trial in first]
    assert len(proposer.next_generation(mixed)) == 6


def test_a_small_grid_is_tried_whole() -> None:
    spec = SweepSpec(
        search="tpe", trials=8, over={"warmup": (0, 5, 10, 15), "adapter": ({"rank": 8}, {"rank": 64})}
    )
    found = [trial for generation in swept(spec) for trial in generation]
    assert len({combination_key(trial.values) for trial in found}) == 8


def test_accuracy_is_maximised() -> None:
    spec = SweepSpec(search="tpe", trials=24, metric="eval_mean_token_accuracy", mode="max", over=SPEC.over)
    least = TrialSearch("a", SPEC, 0)
    most = TrialSearch("a", spec, 0)
    ends: Ends = [(trial, loss(trial.values)) for trial in least.first_generation()]
    assert most.next_generation([(trial, -(value or 0)) for trial, value in ends]) == least.next_generation(
        ends
    )


def test_every_generation_draws_with_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ends say nothing, generations of one seed would propose the same values again and again."""
    seeds = []

    def noted(spec: SweepSpec, known: Ends, seed: int) -> Any:
        seeds.append(seed)
        return real(spec, known, seed)

    real = search._optuna_study
    monkeypatch.setattr(search, "_optuna_study", noted)
    swept(seed=0)
    swept(seed=1)
    assert len(set(seeds)) == len(seeds) == 6


def test_names_of_other_jobs_are_not_taken() -> None:
    proposer = TrialSearch("a", SPEC, 0)
    ends: Ends = [(trial, loss(trial.values)) for trial in proposer.first_generation()]
    (one, *_) = proposer.next_generation(ends)
    (renamed, *_) = TrialSearch("a", SPEC, 0, (one.name,)).next_generation(ends)
    assert (renamed.name, renamed.values) == (f"{one.name}-2", one.values)
