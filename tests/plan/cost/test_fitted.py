"""A run predicts its windows by fitted models, plans by a recorded version of these, and resumes with it."""

from dataclasses import replace

import pytest

from tests.plan.costs import SHAPE, TRUTH, measured, program, work
from tests.plan.program.test_check import course
from weftune.core.shapes import JobShape, LayerRange, ModelShape, SiteShape
from weftune.plan.cost.fitted import FittedModels, Outcome
from weftune.plan.cost.memory import MemoryFit, MemoryModel
from weftune.plan.cost.memory_fit import Peak, fit_memory, larger_factors, rows_in_flight, window_need
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.time import StateTime, pass_work
from weftune.plan.program.layout import pipeline_layout
from weftune.plan.program.program import (
    NOTHING,
    Backward,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    SegmentPlan,
    Step,
    cut_sample,
)
from weftune.plan.window.pace import guess_pace
from weftune.plan.window.window import Pacing, plan_window

SHAPES = {"a": JobShape("a", 0, 0, trainable_parameters=10**6, max_sample_tokens=60)}
JOBS = list(SHAPES.values())
FIT = MemoryFit(state=1.05, activations=0.8, slack=0.4)


def memory(**changes) -> MemoryModel:
    return replace(MemoryModel(SHAPE, budget_bytes=4 << 30, process_bytes=100 << 20), **changes)


def fitted_models(**changes) -> FittedModels:
    return FittedModels(initial_cost=uncalibrated_cost_model(SHAPE), memory=memory(**changes))


def outcome(one: Program, slower: float = 1.0, peak: int | None = None, own_peak: bool = True) -> Outcome:
    """As a device with the true terms would measure it, with 0.1 s for the rest."""
    passes = [
        measured(pass_work(microbatch, {"a": 10**6}), slower=slower, training=number > 0)
        for number, (_, microbatch) in enumerate(one.forward_passes())
    ]
    steps = [StateTime(1, 10**6, 0.009)]
    need = window_need(memory(), JOBS, one).total_bytes(FIT)
    seconds = sum(p.seconds for p in passes) + 0.009 + 0.1
    return Outcome(
        seconds, need if peak is None else peak, own_peak, passes, steps, [StateTime(1, 10**6, 0.02)]
    )


def test_the_first_window_has_a_time_only_with_a_profile() -> None:
    assert fitted_models().predict_window(program(30, 50), SHAPES).seconds is None
    known = FittedModels(initial_cost=TRUTH, memory=memory())
    assert known.predict_window(program(30, 50), SHAPES).seconds == pytest.approx(
        TRUTH.program_seconds(program(30, 50), SHAPES)
    )


def test_a_microbatch_of_the_returned_tokens_takes_the_given_seconds_in_its_slower_direction() -> None:
    run = FittedModels(initial_cost=TRUTH, memory=memory())
    assert run.tokens_within(0.5) is None, "nothing has been measured"
    run.times.passes += [measured(work([length] * 2)) for length in (10, 30, 50)]
    long = work([60] * 4)
    forward, backward = TRUTH.forward(long), TRUTH.backward(long)
    # The samples of the longer pass are longer, too, whose attention takes more.
    assert run.tokens_within(max(forward, backward)) == pytest.approx(long.tokens, rel=0.1)
    assert run.tokens_within(1e-9) == 0


def test_reserved_bytes_that_a_decoder_does_not_use_are_in_no_peak_but_in_every_plan() -> None:
    unused, one = 64 << 20, program(30, 50)
    usual, idle = fitted_models(decoder_bytes=unused), fitted_models(decoder_bytes=unused)
    idle.unused_decoder_bytes = lambda: unused
    predicted = usual.predict_window(one, SHAPES).peak_bytes
    assert idle.predict_window(one, SHAPES).peak_bytes == predicted - unused
    usual.record_outcome(one, SHAPES, outcome(one, peak=predicted))
    idle.record_outcome(one, SHAPES, outcome(one, peak=predicted - unused))
    assert idle.fitted_memory.fit.activations == pytest.approx(usual.fitted_memory.fit.activations)
    assert idle.fitted_memory.fit.state == pytest.approx(usual.fitted_memory.fit.state)
    # The decoder may use them while the jobs train that are admitted now.
    assert idle.memory.least_bytes(JOBS) == fitted_models().memory.least_bytes(JOBS) + unused


def test_the_first_pass_of_a_process_is_part_of_the_first_window_alone() -> None:
    one = program(30, 50)
    run = FittedModels(initial_cost=TRUTH, memory=memory(), first_seconds=2.0)
    first = run.predict_window(one, SHAPES).seconds
    assert first == pytest.approx(TRUTH.program_seconds(one, SHAPES) + 2.0)
    run.record_outcome(one, SHAPES, outcome(one))
    second = run.predict_window(one, SHAPES).seconds
    assert second is not None
    assert second < 1.0 + TRUTH.program_seconds(one, SHAPES)


def test_a_pipelines_window_needs_what_its_workers_hold_at_a_time() -> None:
    half = SHAPE.layers // 2
    layout = pipeline_layout(
        [LayerRange(0, half, SHAPE.layers), LayerRange(half, SHAPE.layers, SHAPE.layers)]
    )
    pacing = Pacing(tuple(guess_pace(stage.layer_count) for stage in layout.stages), spare_microbatches=1)
    model = memory(layout=layout)
    windows = [plan_window([course("a", [[40] * count])], layout, 40, pacing=pacing) for count in (1, 2, 8)]
    held = [rows_in_flight(model, one, model.key_value_fractions(JOBS, NOTHING)) for one in windows]
    assert held[0] == [40, 40], "one microbatch is in flight"
    assert held[1][0] == 80
    assert held[2][0] == 120, "as many as stages, and a spare one"
    assert held[2][1] <= held[2][0]
    needs = [window_need(model, JOBS, one).activation_bytes for one in windows]
    assert needs == sorted(needs)
    assert needs[2] == model.predict_need(JOBS, 40).activation_bytes


def test_after_some_windows_another_is_predicted_as_it_comes() -> None:
    run = fitted_models()
    for lengths in ((30, 50), (20, 20, 60), (64, 10), (33, 44, 55), (12, 13, 14, 15)):
        one = program(*lengths)
        run.predict_window(one, SHAPES)
        run.record_outcome(one, SHAPES, outcome(one))
    other = program(60, 40, 50)
    prediction, truth = run.predict_window(other, SHAPES), outcome(other)
    assert prediction.seconds == pytest.approx(truth.seconds, rel=0.1)
    assert prediction.peak_bytes == pytest.approx(truth.peak_bytes, rel=0.02)
    assert "refitted" in prediction.source


def test_a_window_has_changed_when_its_jobs_or_its_lengths_have() -> None:
    run = fitted_models()
    assert run.predict_window(program(30, 50), SHAPES).changed
    assert not run.predict_window(program(30, 50), SHAPES).changed
    assert run.predict_window(program(30, 51), SHAPES).changed


def test_plans_change_their_model_only_when_the_windows_have_doubled_and_each_time_is_counted() -> None:
    run, one, versions = fitted_models(), program(30, 50), []
    for _ in range(9):
        run.record_outcome(one, SHAPES, outcome(one))
        before = run.memory
        assert run.adopt_fitted_models() == (run.memory != before or run.windows in (1, 2, 4, 8))
        versions.append(run.version)
    assert versions == [1, 2, 2, 3, 3, 3, 3, 4, 4]


def test_a_resumed_run_plans_by_what_was_recorded() -> None:
    run, one = fitted_models(), program(30, 50)
    run.record_outcome(one, SHAPES, outcome(one))
    run.adopt_fitted_models()
    again = fitted_models()
    again.restore(run.state_record())
    assert again.memory == run.memory
    assert (again.version, again.windows) == (run.version, run.windows)
    assert again.row_seconds == run.row_seconds == pytest.approx(outcome(one).row_seconds())
    older = fitted_models()
    older.restore({key: value for key, value in run.state_record().items() if key != "row_seconds"})
    assert older.row_seconds is None, "a run that was begun before has not recorded its pace"
    for wrong in (None, {}, {"version": 1, "windows": 1, "memory": {}}, {"memory": 3}):
        with pytest.raises(ValueError, match="no record of a run's models"):
            fitted_models().restore(wrong)


def test_whether_a_job_can_run_alone_is_not_judged_by_the_noise_of_a_run() -> None:
    one = program(30, 50)
    tight = fitted_models(budget_bytes=memory().peak_bytes(JOBS, 60))
    assert tight.misfit_reason(JOBS) is None
    tight.record_outcome(one, SHAPES, outcome(one, peak=8 << 30))
    tight.adopt_fitted_models()
    assert tight.memory.misfit_reason(JOBS) is not None
    assert tight.misfit_reason(JOBS) is None


def test_fused_layers_never_count_for_less_than_was_known() -> None:
    one, plain, fused = program(30, 50), fitted_models(), fitted_models(uses_fused_ops=True)
    for run in (plain, fused):
        run.record_outcome(one, SHAPES, outcome(one, peak=SHAPE.base_bytes + (110 << 20)))
        run.adopt_fitted_models()
    assert plain.memory.fit.activations < 1.0
    assert fused.memory.fit.activations == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_plans_keep_the_slack_that_was_known_whatever_the_process_gathers(fused: bool) -> None:
    one, known = program(30, 50), MemoryFit(slack=0.7)
    run = fitted_models(uses_fused_ops=fused, fit=known)
    for _ in range(2):
        run.record_outcome(one, SHAPES, outcome(one, peak=8 << 30))
        assert run.adopt_fitted_models()
    assert run.fitted_memory.fit.slack > 1.5 * known.slack
    assert run.memory.fit.slack == known.slack
    assert run.memory.fit.activations == run.fitted_memory.fit.activations
    assert run.memory.fit.error == run.fitted_memory.fit.error


def test_a_peak_that_is_the_highest_so_far_teaches_only_when_it_rises() -> None:
    run, one = fitted_models(), program(30, 50)
    for peak in (10**9, 10**9, 2 * 10**9):
        run.record_outcome(one, SHAPES, outcome(one, peak=peak, own_peak=False))
    assert [seen.measured_bytes for seen in run.peaks] == [10**9, 2 * 10**9]


def test_the_fit_finds_the_factors_that_made_the_peaks_and_states_how_far_it_is_below_them() -> None:
    model = memory()
    needs = [
        model.predict_need([JobShape(str(n), 0, n, size, 60) for n in range(jobs)], tokens)
        for jobs, size, tokens in ((1, 10**6, 100), (8, 10**7, 200), (4, 10**7, 2000), (2, 10**6, 4000))
    ]
    fit = fit_memory([Peak(need, need.total_bytes(FIT)) for need in needs])
    assert fit.activations == pytest.approx(FIT.activations, rel=0.05)
    for need in needs:
        assert need.total_bytes(fit) == pytest.approx(need.total_bytes(FIT), rel=0.02)
    higher = [
        Peak(need, need.total_bytes(FIT) + (90 << 20) * (number == 0)) for number, need in enumerate(needs)
    ]
    wary = fit_memory(higher)
    assert all(
        peak.predicted_need.total_bytes(wary) + wary.error >= peak.measured_bytes - 1 for peak in higher
    )
    assert fit_memory([]) == MemoryFit()


def test_logits_that_a_profile_has_measured_are_not_learned_again_as_activations() -> None:
    known = MemoryFit(head=0.5)
    model, jobs = memory(fit=known), [JobShape("a", 0, 0, 10**6, 60)]
    needs = [model.predict_need(jobs, tokens, supervised=3 * tokens // 4) for tokens in (100, 400, 1600)]
    fit = fit_memory([Peak(need, need.total_bytes(known)) for need in needs], known)
    assert fit.head == known.head
    assert fit.activations == pytest.approx(1.0, rel=0.01)
    assert fit.slack == pytest.approx(1.0, rel=0.01)


def test_a_run_that_was_begun_before_the_head_was_counted_alone_goes_on() -> None:
    run = fitted_models(fit=MemoryFit(head=0.5))
    older = run.state_record()
    assert older["memory"]["head"] == 0.5
    del older["memory"]["head"]
    run.restore(older)
    assert run.memory.fit.head == 0.0


def test_the_stated_error_is_kept_free_by_whoever_must_fit() -> None:
    sure, wary = memory(), memory(fit=MemoryFit(error=1 << 30))
    assert wary.peak_bytes(JOBS, 100) == sure.peak_bytes(JOBS, 100)
    assert wary.choose_capacity(JOBS, 10**9) < sure.choose_capacity(JOBS, 10**9)
    need = sure.peak_bytes(JOBS, 60)
    assert memory(budget_bytes=need).misfit_reason(JOBS) is None
    assert memory(budget_bytes=need, fit=MemoryFit(error=1)).misfit_reason(JOBS) is not None


def test_an_evaluation_holds_about_one_layer() -> None:
    looks = program(60)
    only = replace(looks, devices=(looks.actions[:1],))
    whole, look = window_need(memory(), JOBS, looks), window_need(memory(), JOBS, only)
    assert look.activation_bytes == pytest.approx(whole.activation_bytes / SHAPE.layers, rel=0.01)


def test_the_safer_of_two_fits_has_the_larger_of_each_factor() -> None:
    assert larger_factors(FIT, MemoryFit(error=5)) == MemoryFit(state=1.05, error=5)


def test_after_a_shortage_more_is_recomputed_until_nothing_more_can_be() -> None:
    sites = tuple(SiteShape(f"{layer}.up", 100, 400) for layer in range(10))
    shape = ModelShape(10, 100, 50, 10**6, 2, sites, context=10**6)
    memory = MemoryModel(shape, 6 << 30, uses_fused_ops=True)
    long = [JobShape("a", 0, 0, 1000, 100_000)]
    fitted_models = FittedModels(initial_cost=uncalibrated_cost_model(shape), memory=memory)
    before, found = memory.choose_recompute(long, 8192), []
    while fitted_models.recompute_more(long, 8192):
        found.append(fitted_models.memory.choose_recompute(long, 8192))
        assert len(found) < 100
    assert found
    assert found[0] != before
    assert [one.recomputed_layers for one in found] == sorted(one.recomputed_layers for one in found)
    assert found[-1].recomputed_layers == 10
    fitted_models.adopt_fitted_models()
    assert fitted_models.memory.choose_recompute(long, 8192) == found[-1]


def test_a_process_that_holds_most_of_the_memory_does_not_lead_to_recomputation_that_frees_nothing() -> None:
    small = [JobShape("a", 0, 0, 10, 100)]
    memory = MemoryModel(SHAPE, 40 << 30, process_bytes=38 << 30)
    fitted_models = FittedModels(initial_cost=uncalibrated_cost_model(SHAPE), memory=memory)
    assert not fitted_models.recompute_more(small, 20)
    assert memory.misfit_reason(small) is None


def test_a_window_with_chunks_holds_whole_keys_and_their_gradients() -> None:
    """A sample of 12 rows in three chunks: its keys count from the first forward to the last backward, and
    their gradients, as wide as float32 makes them, in the place of the last chunk as soon as that has gone
    back."""
    whole = PlacedSample(0, 12, 0)
    plans = tuple(MicrobatchPlan((SegmentPlan("a", 1, (one,)),)) for one in cut_sample(whole, 4))
    passes = (*map(Forward, range(3)), *map(Backward, (2, 1, 0)), Step("a", 1))
    batch = GlobalBatch("a", 1, (whole,), 12)
    window, model = Program(12, plans, (batch,), (passes,)), memory()
    share = 0.5
    assert rows_in_flight(model, replace(window, devices=(passes[:1],)), [share]) == [2 + 6]
    assert rows_in_flight(model, replace(window, devices=(passes[:3],)), [share]) == [3 * 2 + 6]
    wide = 4 / SHAPE.bytes_per_value
    assert model.gradient_byte_ratio == wide
    assert rows_in_flight(model, window, [share]) == [max(12, 2 * 2 + 6 + wide * 6)]
    (share,) = model.key_value_fractions(JOBS, NOTHING)
    assert 0 < share < 1
