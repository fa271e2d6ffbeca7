from __future__ import annotations

import pytest

from weftune.jobs.sweeps.saving import TrialWork, expected_saving, rung_counts
from weftune.jobs.sweeps.spec import Halving, SweepSpec

THIRDS = Halving((0.1, 0.3), 0.33)


def spec_of(trials: int, halving: Halving | None = THIRDS, search: str = "random") -> SweepSpec:
    return SweepSpec(over={"steps": (1, 2)}, search=search, trials=trials, halving=halving)  # type: ignore[arg-type]


def test_the_trials_of_each_rung_are_those_that_the_one_before_keeps() -> None:
    assert rung_counts(spec_of(24)) == (24, 8, 3)
    assert rung_counts(SweepSpec(over={"steps": (1, 2), "batch_size": (1, 2, 3)})) == (6,)


def test_every_generation_of_tpe_is_halved_by_itself() -> None:
    assert rung_counts(spec_of(24, search="tpe")) == (24, 8, 4)


def test_the_samples_of_the_rungs_are_set_against_those_of_the_grid() -> None:
    found = expected_saving(spec_of(24), [TrialWork(200, 16.0)] * 24)
    assert found.rungs == (24, 8, 3)
    assert found.whole == 24 * 200 * 16
    assert found.expected == pytest.approx((24 * 20 + 8 * 40 + 3 * 140) * 16)
    assert found.share == pytest.approx(1220 / 4800)


def test_some_trials_stand_for_all_and_their_mean_for_those_that_go_on() -> None:
    few = expected_saving(spec_of(24, search="tpe"), [TrialWork(100, 1.0), TrialWork(300, 1.0)])
    assert few.whole == 24 * 200
    assert few.expected == pytest.approx(24 * 20 + 8 * 40 + 4 * 140)


def test_without_halving_nothing_is_saved() -> None:
    assert expected_saving(spec_of(4, None), [TrialWork(10, 1.0)] * 4).share == 1
