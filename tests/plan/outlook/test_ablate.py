"""What each mechanism of a plan is worth: the predicted time without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.plan.costs import SHAPE
from tests.plan.program.test_check import course
from weftune.core.shapes import JobShape
from weftune.plan.cost.prior import DirectionTerms, KindTerms, flop_terms
from weftune.plan.cost.time import Rate
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.outlook.ablate import ablate
from weftune.plan.outlook.forecast import Ablation, predict_window
from weftune.plan.program.program import GlobalBatch
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import Mechanisms

PASS_SECONDS = 0.1
"""Fixed seconds of a pass, in which a stage computes some 1,500 rows."""


def with_fixed_time(terms: KindTerms) -> KindTerms:
    return replace(terms, embedding=replace(terms.embedding, fixed=PASS_SECONDS))


COUNTED = flop_terms(SHAPE).multiply_by(1 / 1e12)
TERMS = DirectionTerms(*map(with_fixed_time, (COUNTED.forward, COUNTED.backward, COUNTED.evaluation)))
TIMES = StageTimes(SHAPE.layers, TERMS, Rate())
Batches = Sequence[Sequence[int]]


def supervise_all(batch: GlobalBatch) -> GlobalBatch:
    """Return the batch with the loss of all tokens, so that the head takes its time."""
    return replace(batch, samples=tuple(replace(one, supervised_tokens=one.length) for one in batch.samples))


def ablated(jobs: dict[str, Batches], stages: int, capacity: int) -> list[Ablation]:
    """Return what each mechanism is worth to jobs with these sample lengths."""
    shapes = [
        JobShape(name, 0, number, 10**6, max(map(max, batches)))
        for number, (name, batches) in enumerate(jobs.items())
    ]

    def job_window(name: str, rounds: int, begins_run: bool = False) -> JobWindow:
        made = course(name, jobs[name][:rounds], begins=begins_run)
        return replace(made, batches=tuple(map(supervise_all, made.batches)))

    machine = Machine(on_gpu=False, budget_bytes=64 << 30, workers=stages, capacity=capacity)
    prediction = predict_window(choose_layout(SHAPE, shapes, machine), shapes, job_window, TIMES)
    return ablate(prediction, job_window, TIMES)


TIGHT: Batches = [[600, 600, 500, 500, 400, 400]] * 8
"""Lengths of which best fit needs three microbatches of 1,500 rows, and exchanges need two."""
FEW = dict.fromkeys("abc", TIGHT)


@pytest.fixture(scope="module")
def rows() -> list[Ablation]:
    return ablated(FEW, 2, 1500)


def worst(rows: Sequence[Ablation], mechanism: str) -> float:
    """Return the most time that an alternative to this mechanism costs."""
    return max(row.relative_cost for row in rows if row.mechanism == mechanism)


@pytest.mark.parametrize(
    "mechanism", ["sharing", "capacity", "packing", "order", "groups", "hand-over", "partition"]
)
def test_a_mechanism_that_is_left_out_costs_time(rows, mechanism):
    assert worst(rows, mechanism) > 0.005


def test_a_single_job_of_long_samples_needs_chunks_to_fill_a_pipeline():
    assert worst(ablated({"a": [[1900, 1700]] * 4}, 4, 2048), "chunks") > 0.01


def test_exchanges_of_samples_save_a_pass_on_one_device():
    assert worst(ablated({"a": TIGHT}, 1, 1500), "packing") > 0.01


def test_rows_name_the_options_with_which_a_run_leaves_the_mechanism_out(rows):
    found = {row.mechanism: row.options for row in rows}
    assert found["hand-over"] == {"mechanisms": Mechanisms(hands_over=False)}
    assert found["packing"] == {"mechanisms": Mechanisms(exchanges_samples=False)}
    assert found["capacity"] == {"capacity": 750}
    assert found["sharing"] == found["partition"] == {}


def test_windows_that_cannot_hand_over_have_no_such_row():
    for jobs, stages in (({name: batches[:1] for name, batches in FEW.items()}, 2), (FEW, 1)):
        rows = ablated(jobs, stages, 1500)
        assert not {"hand-over", "chunks"} & {row.mechanism for row in rows}
