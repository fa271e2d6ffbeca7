from dataclasses import replace

import pytest

from weftune.core.shapes import (
    JobShape,
    LayerRange,
    ModelShape,
    SiteShape,
    logit_rows,
    sum_parameters_by_layer,
)
from weftune.plan.cost.memory import (
    ENOUGH_TOKENS,
    FUSED_SLACK_BYTES,
    MAX_SPARE,
    SLACK_BYTES,
    TILE_ROWS,
    MemoryFit,
    MemoryModel,
    format_bytes,
    max_sample_tokens,
)
from weftune.plan.cost.streamed_memory import ON_THE_WAY, token_bytes
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout, pipeline_layout
from weftune.plan.program.program import NOTHING, Recompute

SITES = (SiteShape("up", 100, 400), SiteShape("down", 400, 100))


def shape(bytes_per_value: int = 2) -> ModelShape:
    return ModelShape(
        layers=1, hidden=100, vocabulary=50, parameters=10**6, bytes_per_value=bytes_per_value, sites=SITES,
        context=64,
    )  # fmt: skip


def job(name: str = "a", trainable: int = 1000, tokens: int = 10) -> JobShape:
    return JobShape(
        name=name, priority=0, file_position=0, trainable_parameters=trainable, max_sample_tokens=tokens
    )


def model(spare: int, taken: int = 0) -> MemoryModel:
    """With `spare` bytes beyond what the base, the process and the slack take."""
    return MemoryModel(shape(), shape().base_bytes + SLACK_BYTES + taken + spare, taken)


def test_bytes_follow_from_widths_and_dtype() -> None:
    assert model(0).bytes_per_token() == 1.5 * 1000 * 2
    assert model(0).bytes_per_parameter == 2 + 4 * 4
    precise = MemoryModel(shape(8), 0)
    assert precise.bytes_per_parameter == 8 + 4 * 8
    assert precise.bytes_per_token() == 4 * model(0).bytes_per_token()


def test_the_peak_adds_process_base_adapters_and_one_microbatch() -> None:
    memory = model(0, taken=12345)
    both = memory.peak_bytes([job("a"), job("b", 500)], 7)
    assert both == 12345 + 2 * 10**6 + SLACK_BYTES + 1500 * 18 + 7 * 3000


def test_only_settings_that_decide_over_much_of_the_memory_are_advised() -> None:
    def advice(trainable: int, tokens: int) -> str:
        return model(0).advice(job(trainable=trainable, tokens=tokens))

    assert advice(10, tokens=9) == "lower the base's dtype, or give more memory"
    assert advice(10, tokens=10**5) == "lower data.max_length, or give more memory"
    assert advice(10**5, tokens=9) == "lower rank or the base's dtype, or give more memory"
    assert advice(10**5, tokens=1000) == (
        "lower data.max_length, rank or the base's dtype, or give more memory"
    )


def test_the_capacity_is_the_largest_that_fits() -> None:
    for spare in (18_000 + 12 * 3000, 18_000 + 13 * 3000 - 1):
        memory = model(spare)
        assert memory.choose_capacity([job()], max_tokens=1000) == 12
        assert memory.peak_bytes([job()], 12) <= memory.budget_bytes < memory.peak_bytes([job()], 13)


def test_the_capacity_is_never_above_the_most_nor_below_the_longest_sample() -> None:
    assert model(10**9).choose_capacity([job()], max_tokens=64) == 64
    assert model(10**9).choose_capacity([job(tokens=90)], max_tokens=64) == 90
    assert model(0).choose_capacity([job("a", tokens=3), job("b", tokens=10)], max_tokens=64) == 10


def test_jobs_fit_exactly_where_their_longest_sample_does() -> None:
    need = 18_000 + 10 * 3000
    assert model(need).misfit_reason([job()]) is None
    why = model(need - 1).misfit_reason([job()])
    assert why is not None
    assert "needs 0.25 GiB with 0 other jobs running and its longest sample of 10 tokens" in why
    assert "but 0.25 GiB are available" in why


@pytest.mark.parametrize("spare", [0, 10**5, 10**7])
def test_whoever_does_not_fit_does_not_fit_with_others_either(spare: int) -> None:
    memory = model(spare)
    for tokens in (1, 30, 3000):
        alone, together = [job(tokens=tokens)], [job(tokens=tokens), job("b")]
        assert memory.misfit_reason(alone) is None or memory.misfit_reason(together) is not None


def test_the_longest_of_nobody_is_nothing() -> None:
    assert max_sample_tokens([]) == 0
    assert format_bytes(3 << 29) == "1.50 GiB"
    assert format_bytes(3 << 20) == "3.00 MiB"
    assert format_bytes(300) == "300 bytes"
    assert format_bytes(0) == "0.00 GiB"


def deep(budget: int) -> MemoryModel:
    """Ten fused layers."""
    sites = tuple(
        SiteShape(f"{n}.{site.name}", site.in_features, site.out_features)
        for n in range(10)
        for site in SITES
    )
    wide = replace(shape(), layers=10, sites=sites)
    return MemoryModel(wide, wide.base_bytes + FUSED_SLACK_BYTES + 18_000 + budget, uses_fused_ops=True)


def test_what_is_recomputed_is_the_least_that_lets_the_capacity_fit() -> None:
    whole, outputs = deep(0).bytes_per_token(), deep(0).bytes_per_token(Recompute(recomputes_outputs=True))
    assert outputs < whole
    assert deep(1000 * whole).choose_recompute([job()], 1000) == NOTHING
    assert deep(1000 * whole - 1).choose_recompute([job()], 1000) == Recompute(recomputes_outputs=True)
    # One layer that is recomputed is held whole in its backward: a few save nothing.
    assert deep(1000 * outputs - 1).choose_recompute([job()], 1000) == Recompute(True, 3)
    assert deep(0).choose_recompute([job()], 1000) == Recompute(True, 10)
    assert model(0).choose_recompute([job()], 1000) == NOTHING


def test_fewer_tokens_are_taken_before_layers_are_recomputed() -> None:
    outputs, most = deep(0).bytes_per_token(Recompute(recomputes_outputs=True)), 4 * ENOUGH_TOKENS
    memory = deep(ENOUGH_TOKENS * outputs)
    assert memory.choose_recompute([job()], most) == Recompute(recomputes_outputs=True)
    assert memory.choose_capacity([job()], most, Recompute(recomputes_outputs=True)) == ENOUGH_TOKENS
    little = deep(ENOUGH_TOKENS * outputs - 1)
    chosen = little.choose_recompute([job()], most)
    assert chosen == Recompute(True, 3)
    assert ENOUGH_TOKENS <= little.choose_capacity([job()], most, chosen) < 2 * ENOUGH_TOKENS
    long = [job(tokens=2 * ENOUGH_TOKENS)]
    assert memory.choose_recompute(long, most).recomputed_layers > 3
    assert memory.choose_capacity(long, most, memory.choose_recompute(long, most)) >= 2 * ENOUGH_TOKENS


def test_every_further_layer_that_is_recomputed_takes_less() -> None:
    sizes = [deep(0).bytes_per_token(Recompute(True, layers)) for layers in range(2, 11)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.4 * deep(0).bytes_per_token(Recompute(True))


def test_outputs_that_jobs_scale_are_kept_once_for_all_of_them_where_kernels_scale() -> None:
    one, other = replace(job("a"), scaled_outputs=5000), replace(job("b"), scaled_outputs=3000)
    memory, plain = deep(10**6), model(10**6)
    for jobs, values in (([one], 5000), ([one, other], 5000), ([other], 3000), ([job()], 0)):
        kept = (
            memory.predict_need(jobs, 7).activation_bytes - memory.predict_need([job()], 7).activation_bytes
        )
        assert kept == 7 * values * 2
    assert memory.choose_capacity([one], max_tokens=10**6) < memory.choose_capacity([job()], max_tokens=10**6)
    assert plain.predict_need([one], 7) == plain.predict_need([job()], 7)


def test_copies_of_a_kinds_rows_are_counted_beside_scaled_outputs() -> None:
    jobs = [replace(job("a"), scaled_outputs=5000), replace(job("b"), copied_values=2000)]
    for attached, values in ((jobs, 7000), (jobs[:1], 5000), (jobs[1:], 2000)):
        assert deep(0).bytes_per_token(jobs=attached) - deep(0).bytes_per_token(jobs=[job()]) == values * 2


def test_a_job_that_fits_only_with_everything_recomputed_is_let_aboard() -> None:
    everything = deep(0).bytes_per_token(Recompute(True, 10))
    assert deep(10 * everything).misfit_reason([job()]) is None
    assert deep(10 * everything - 1).misfit_reason([job()]) is not None


def test_of_a_mixture_all_experts_are_held_and_the_active_ones_activated() -> None:
    """Its layers are fused nowhere, and so nothing of them is recomputed."""
    experts = (
        SiteShape("up", 100, 400, experts=8, active_matrices=2),
        SiteShape("down", 200, 100, experts=8, active_matrices=2),
    )
    mixture = replace(shape(), sites=experts)
    for fused in (False, True):
        memory = MemoryModel(mixture, 10**9, uses_fused_ops=fused)
        assert memory.bytes_per_token() == 1.5 * 2 * (500 + 300) * 2
        assert memory.choose_recompute([job()], max_tokens=10**9) == NOTHING
    assert [site.weight_count for site in experts] == [8 * 40_000, 8 * 20_000]
    assert mixture.active_parameters == 10**6 - 6 * 60_000


LONG = 4 * TILE_ROWS


def long_choices(budget: int, host_budget: int = 0) -> Recompute:
    """What is chosen for a sample of LONG tokens."""
    memory = replace(deep(budget), host_budget_bytes=host_budget)
    return memory.choose_recompute([job(tokens=LONG)], TILE_ROWS)


def least_budget(recompute: Recompute, host_budget: int = 0) -> int:
    """The least bytes beside base and state with which a sample of LONG tokens fits so."""
    memory = replace(deep(0), host_budget_bytes=host_budget)
    return memory.peak_bytes([job(tokens=LONG)], LONG, recompute) - memory.budget_bytes


def test_a_long_sample_runs_in_tiles_and_keeps_what_fits() -> None:
    """First layers, then the output of attention, then in host memory, and only then it is recomputed."""
    everything = Recompute(True, 10, TILE_ROWS, keeps_attention=True)
    half, host = replace(everything, recomputed_layers=5), 10**9
    assert long_choices(10**9) == replace(everything, recomputed_layers=0)
    assert long_choices(least_budget(half) + 2) == half
    # The backward of a recomputed layer needs as much as one more layer that is kept.
    assert long_choices(least_budget(everything) + 2) in (
        everything,
        replace(everything, recomputed_layers=9),
    )
    offloaded = replace(everything, offloaded_layers=4)
    assert long_choices(least_budget(offloaded, host) + 2, host) == offloaded
    recomputed = replace(everything, keeps_attention=False)
    assert long_choices(least_budget(recomputed) + 2) == recomputed
    assert not long_choices(least_budget(recomputed) + 2, host_budget=1000).offloaded_layers


def test_a_sample_of_one_tile_is_not_run_in_tiles_where_memory_suffices() -> None:
    assert deep(10**9).choose_recompute([job(tokens=TILE_ROWS)], TILE_ROWS) == NOTHING
    assert deep(10**9).choose_recompute([job(tokens=TILE_ROWS + 1)], TILE_ROWS).tile_rows == TILE_ROWS


def test_a_sample_that_does_not_fit_is_told_the_length_that_does() -> None:
    memory = deep(least_budget(Recompute(True, 10, TILE_ROWS)))
    sentence = memory.misfit_reason([job(tokens=4 * LONG)])
    assert sentence is not None
    fitting = int(sentence.removesuffix(" tokens fit").rpartition(" ")[2])
    assert memory.misfit_reason([job(tokens=fitting)]) is None
    assert memory.misfit_reason([job(tokens=fitting + 2)]) is not None


def in_two(**changes) -> MemoryModel:
    """Ten layers cut into seven and three, by two workers."""
    layout = pipeline_layout([LayerRange(0, 7, 10), LayerRange(7, 10, 10)])
    sites = tuple(replace(site, name=f"layers.{n}.{site.name}") for n in range(10) for site in SITES)
    whole = replace(shape(4), layers=10, sites=sites, vocabulary=1000)
    return replace(MemoryModel(whole, 10**12, 5000, layout=layout), **changes)


def test_as_many_microbatches_are_in_flight_as_fit_beside_the_capacity() -> None:
    wanted, jobs, found = 200, [job()], set()
    least = in_two().peak_bytes(jobs, 0)
    most = replace(in_two(), spare_microbatches=MAX_SPARE + 1).peak_bytes(jobs, wanted) + 10**7
    for budget in range(least, most, (most - least) // 40):
        memory = in_two(budget_bytes=budget)
        spare = memory.choose_spare(jobs, wanted)
        found.add(spare)
        assert spare == 1 or replace(memory, spare_microbatches=spare).choose_capacity(jobs, wanted) == wanted
        more = replace(memory, spare_microbatches=spare + 1)
        assert spare == MAX_SPARE or more.choose_capacity(jobs, wanted) < wanted
    assert found == {1, 2, 3, MAX_SPARE}


def test_logits_are_counted_for_the_worker_that_has_the_head_and_up_to_one_chunk() -> None:
    known = in_two(fit=MemoryFit(head=0.5))
    chunk = logit_rows("cpu", 1000)
    for supervised in (0, 100, chunk, 10 * chunk):
        without, with_head = known.worker_needs([job()], 200, supervised=supervised)
        assert without.logit_bytes == 0
        assert with_head.logit_bytes == 2 * 4 * 1000 * min(supervised, chunk)
    free = replace(with_head, logit_bytes=0)
    assert with_head.total_bytes(known.fit) - free.total_bytes(known.fit) == with_head.logit_bytes // 2
    assert with_head.total_bytes(MemoryFit()) == free.total_bytes(MemoryFit()), (
        "until measured, the slack counts them"
    )


def turning(workers: int, stages: int, tied: bool = False) -> MemoryModel:
    """Twelve layers in stages that come and go through one slot of each worker."""
    sites = tuple(replace(site, name=f"layers.{n}.{site.name}") for n in range(12) for site in SITES)
    ends = 100 * 1000 * (1 if tied else 2)
    whole = replace(shape(4), layers=12, sites=sites, vocabulary=1000, parameters=12 * 2 * 100 * 400 + ends)
    held = tuple(StageLayers(start, start + 12 // stages) for start in range(0, 12, 12 // stages))
    return MemoryModel(whole, 10**12, layout=Layout(held, (1,) * workers))


@pytest.mark.parametrize(
    ("workers", "stages", "tied", "ends"),
    [
        (1, 4, False, (2,)),
        (2, 4, False, (1, 1)),
        (2, 3, False, (2, 0)),
        (2, 4, True, (1, 1)),
        (2, 3, True, (1, 0)),
        (3, 4, True, (1, 0, 0)),
    ],
)
def test_where_stages_take_turns_each_end_is_on_the_worker_of_its_stage(
    workers: int, stages: int, tied: bool, ends: tuple[int, ...]
) -> None:
    memory = turning(workers, stages, tied)
    needs = memory.worker_needs([], 0, supervised=5)
    matrix, layers = 100 * 1000 * 4, 12 // stages * 2 * 100 * 400 * 4
    assert tuple((need.resident_bytes - layers) / matrix for need in needs) == ends
    last = (stages - 1) % workers
    assert [need.logit_bytes > 0 for need in needs] == [worker == last for worker in range(workers)]


def test_several_workers_hold_rows_on_their_way_and_one_holds_none() -> None:
    row = 100 * 4
    for workers, moving in ((1, 0), (2, ON_THE_WAY), (3, ON_THE_WAY)):
        memory = turning(workers, 6)
        passing = [
            2 * token_bytes(memory.shape, memory.shape.layers, memory.uses_fused_ops, NOTHING, ()) // 12
        ] * workers
        needs = [need.activation_bytes for need in memory.worker_needs([], 1)]
        assert needs == [each + moving * row for each in passing]


def test_a_pass_holds_the_layers_of_the_largest_stage_or_of_all_that_take_turns() -> None:
    assert in_two().pass_layers == 7
    assert turning(1, 4).pass_layers == 12


def test_the_fullest_worker_is_the_one_by_what_was_measured() -> None:
    """By the layers it is the first; with logits that were measured, the last."""
    plain, known = in_two(), in_two(fit=MemoryFit(head=1.0))
    assert plain.need_for_rows([job()], [100, 100], NOTHING, 4000).logit_bytes == 0
    assert known.need_for_rows([job()], [100, 100], NOTHING, 4000).logit_bytes > 0


def test_the_state_of_adapters_is_where_their_layers_are() -> None:
    memory, spread = in_two(), job(trainable=1000)
    assert [need.state_bytes for need in memory.worker_needs([spread], 0)] == [20 * 700, 20 * 300]
    last = replace(spread, parameters_by_layer=(0,) * 9 + (1000,))
    assert [need.state_bytes for need in memory.worker_needs([last], 0)] == [0, 20 * 1000]
    shared = replace(spread, parameters_by_layer=(0,) * 9 + (600,))
    assert [need.state_bytes for need in memory.worker_needs([shared], 0)] == [20 * 400, 20 * 1000]


def test_parameters_are_summed_by_the_layer_that_a_site_is_named_after() -> None:
    parameters = [("model.layers.1.up", 3), ("model.layers.1.down", 4), ("model.layers.0.up", 1), ("", 9)]
    assert sum_parameters_by_layer(parameters, 3) == (1, 7, 0)


def test_only_the_first_worker_holds_what_its_process_has_alone() -> None:
    first, other = in_two(first_only_bytes=2000).worker_needs([job()], 10)
    plain_first, plain_other = in_two().worker_needs([job()], 10)
    assert first.resident_bytes == plain_first.resident_bytes
    assert other.resident_bytes == plain_other.resident_bytes - 2000


def test_the_capacity_leaves_room_for_the_logits_of_a_chunk() -> None:
    fit = MemoryFit(head=1.0)
    wide = replace(model(10**8), fit=fit, shape=replace(shape(), vocabulary=10**6))
    capacity = wide.choose_capacity([job()], 10**6)
    assert wide.peak_bytes([job()], capacity) <= wide.budget_bytes
    assert capacity < model(10**8).choose_capacity([job()], 10**6)


@pytest.mark.parametrize(("value", "each"), [(2, 4), (4, 4), (8, 8)])
def test_the_mean_of_a_trial_takes_a_master_more_where_that_is(value: int, each: int) -> None:
    plain, averaged = [job("a"), job("b", 500)], [job("a"), replace(job("b", 500), mean_weight_count=1)]
    model = MemoryModel(shape(value), budget_bytes=1 << 40)
    assert model.state_bytes(averaged) - model.state_bytes(plain) == 500 * each
    assert (
        model.predict_need(averaged, 10).state_bytes - model.predict_need(plain, 10).state_bytes == 500 * each
    )
    layout = one_device_layout(1, offloads_optimizer=True)
    offloaded = replace(model, layout=layout, host_budget_bytes=1 << 40)
    assert offloaded.host_bytes(averaged) - offloaded.host_bytes(plain) == 500 * each
    assert offloaded.predict_need(averaged, 10).state_bytes == offloaded.predict_need(plain, 10).state_bytes
