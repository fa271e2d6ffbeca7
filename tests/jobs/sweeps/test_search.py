from __future__ import annotations

from weftune.jobs.sweeps.search import propose
from weftune.jobs.sweeps.spec import SweepSpec, Trial


def test_a_grid_and_random_draws_are_one_generation() -> None:
    for spec in (
        SweepSpec(over={"steps": (1, 2)}),
        SweepSpec(over={"steps": (1, 2)}, search="random", trials=2),
    ):
        found = propose("a", spec, 0)
        assert {trial.name for trial in found.first()} == {"a-s1", "a-s2"}
        assert found.next([(trial, 1.0) for trial in found.first()]) == ()


def test_a_trial_holds_the_values_under_the_keys_of_over() -> None:
    spec = SweepSpec(over={"adapter": ({"rank": 8},), "learning_rate": (1e-4, 3e-4)})
    assert propose("sql", spec, 0).first()[1] == Trial(
        "sql-lr3e-4", {"adapter": {"rank": 8}, "learning_rate": 3e-4}
    )
