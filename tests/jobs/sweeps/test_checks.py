"""Sweeps that run but may not be what the user meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.sweeps.test_expand import run_of
from weftune.jobs.sweeps.checks import sweep_warnings


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
