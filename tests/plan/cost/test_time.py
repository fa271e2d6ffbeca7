"""The time model prices a Program by its terms, and says nothing before anything was measured."""

from dataclasses import replace

import pytest

from tests.plan.costs import SHAPE, TRUTH, program, work
from weftune.core.shapes import JobShape
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.time import Rate, Terms, active_parameters_by_job, make_terms, pass_work, term_counts
from weftune.plan.program.program import GlobalBatch, MicrobatchPlan, PlacedSample, SegmentPlan


def shape(trainable: int, resting: int = 0) -> JobShape:
    return JobShape("a", 0, 0, trainable, max_sample_tokens=64, inactive_parameters=resting)


def test_a_program_costs_its_passes_looks_steps_and_saves() -> None:
    model = replace(TRUTH, save=Rate(job=0.5), overhead_per_action=0.25)
    found = model.program_seconds(program(30, 50), {"a": shape(1000)})
    passes = sum(model.pass_seconds(work([length], 0.5, 1000)) for length in (30, 50))
    look = model.evaluation(work([30], 0.5, 1000))
    assert found == pytest.approx(passes + look + model.step(1, 1000) + 0.5 + 5 * 0.25)


def test_of_adapters_on_experts_passes_cost_what_a_token_meets_and_steps_cost_all() -> None:
    model = replace(TRUTH, save=Rate(job=0.5, parameter=1e-3), overhead_per_action=0.25)
    most = shape(1000, resting=900)
    passes, all_of_it = (model.program_seconds(program(30), {"a": one}) for one in (most, shape(1000)))
    assert passes is not None
    assert all_of_it is not None
    apart = [
        model.pass_seconds(work([30], 0.5, size)) + model.evaluation(work([30], 0.5, size))
        for size in (1000, 100)
    ]
    assert all_of_it - passes == pytest.approx(apart[0] - apart[1])
    batch = GlobalBatch("a", 1, (PlacedSample(0, 30, 0),), supervised_tokens=30)
    assert model.solo_seconds([batch], 64, {"a": most}) == model.solo_seconds([batch], 64, {"a": shape(100)})


def test_every_term_has_its_own_count() -> None:
    one = work([3, 5], 0.25, 7, jobs=2)
    assert term_counts(one) == (1, 8, 34, 2, 2, 56, 2)
    for place, count in enumerate(term_counts(one)):
        only = make_terms([float(place == other) for other in range(len(term_counts(one)))])
        assert only(one) == count


def test_work_counts_padding_as_rows_and_each_adapter_by_its_own_rows() -> None:
    segments = (
        SegmentPlan("a", 1, (PlacedSample(0, 3, 0, 1), PlacedSample(1, 4, 3, 2))),
        SegmentPlan("b", 1, (PlacedSample(0, 5, 0, 5),)),
    )
    found = pass_work(MicrobatchPlan(segments, padded_rows=16), {"a": 10, "b": 100})
    assert (found.tokens, found.squares, found.samples, found.supervised) == (16, 9 + 16 + 25, 3, 8)
    assert (found.adapted, found.segments) == (7 * 10 + 5 * 100, 2)


def test_a_model_without_a_level_has_no_price() -> None:
    model = uncalibrated_cost_model(SHAPE)
    assert not model.is_measured
    assert model.program_seconds(program(30), {"a": shape(1)}) is None
    assert model.solo_seconds([], 64, {}) is None


def test_alone_costs_one_pass_for_each_microbatch_of_one_job() -> None:
    model = replace(TRUTH, forward=Terms(fixed=1.0), backward=Terms())
    batch = GlobalBatch("a", 1, (PlacedSample(0, 30, 0), PlacedSample(1, 50, 30)), supervised_tokens=80)
    assert model.solo_seconds([batch, batch], 64, {"a": shape(1)}) == pytest.approx(4.0)


def test_alone_costs_what_its_passes_cost_one_by_one() -> None:
    shapes = {"a": shape(1000), "b": shape(70)}
    batches = [
        GlobalBatch(
            job, 1, tuple(PlacedSample(at, length, 0, length // 2) for at, length in enumerate(own)), 9
        )
        for job, own in (("a", (30,)), ("b", (50, 10, 7)), ("a", (20, 20)))
    ]
    passes = [
        MicrobatchPlan((SegmentPlan(batch.job, 1, samples),))
        for batch, samples in (
            (batches[0], batches[0].samples),
            (batches[1], batches[1].samples[:2]),
            (batches[1], batches[1].samples[2:]),
            (batches[2], batches[2].samples),
        )
    ]
    each = sum(TRUTH.pass_seconds(pass_work(one, active_parameters_by_job(shapes))) for one in passes)
    assert TRUTH.solo_seconds(batches, 64, shapes) == pytest.approx(each)
    assert TRUTH.solo_seconds([], 64, shapes) == 0


def test_another_level_changes_passes_alone() -> None:
    slower = TRUTH.multiply_by(2.0)
    assert slower.pass_seconds(work([64])) == pytest.approx(2 * TRUTH.pass_seconds(work([64])))
    assert slower.step == TRUTH.step
