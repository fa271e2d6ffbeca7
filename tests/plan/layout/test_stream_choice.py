"""How a base is streamed: what is predicted fits, and nothing that fits is faster by more than a little."""

import math
from dataclasses import replace
from operator import ge
from time import process_time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.cases import is_within
from tests.plan.program.test_check import course
from tests.plan.stream_cases import (
    DEVICES,
    ENDS,
    HIDDEN,
    JOBS,
    LAYER,
    NEVER,
    SHARES,
    TOKENS,
    VOCABULARY,
    base,
    cases,
    chosen,
    every_draft,
    gpu,
    job,
    sized,
)
from weftune.core.shapes import JobShape, ModelShape, SiteShape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.memory import FUSED_SLACK_BYTES, MemoryFit, MemoryModel
from weftune.plan.cost.ring import PIECE, PIECES, TRAVEL_ROUNDS
from weftune.plan.layout.need import (
    LayoutDraft,
    StreamCase,
    StreamDevice,
    draft_from_layout,
    resident_round_seconds,
    undominated_jobs,
)
from weftune.plan.layout.search import mobius_drafts
from weftune.plan.layout.stream_choice import HOST_STATES, HostState, capacities, choose_stream
from weftune.plan.program.program import Recompute
from weftune.plan.window.window import plan_window


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6), JOBS, DEVICES, SHARES, st.sampled_from([64, 256]), TOKENS)
def test_on_small_bases_nothing_is_faster_by_more_than_a_fiftieth(layers, jobs, device, share, most, tokens):
    shape = base(layers)
    device = sized(device, share, shape, jobs, tokens)
    choice = chosen(shape, jobs, device, most, tokens)
    assume(choice is None or not choice.is_resident)
    drafts = list(every_draft(layers))
    least = min(
        case.round_seconds(draft) for case in cases(shape, jobs, device, most, tokens) for draft in drafts
    )
    assert (choice is None) == (least == math.inf)
    if choice:
        assert least * (1 - 1e-9) <= choice.round_seconds <= 1.02 * least


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(7, 24), JOBS, DEVICES, SHARES, TOKENS)
def test_it_is_never_slower_than_the_largest_or_the_smallest_stages(layers, jobs, device, share, tokens):
    shape = base(layers)
    device = sized(device, share, shape, jobs, tokens)
    choice = chosen(shape, jobs, device, 256, tokens)
    assume(choice is None or not choice.is_resident)
    plain = [
        case.round_seconds(draft)
        for case in cases(shape, jobs, device, 256, tokens)
        if choice is None
        or (case.adapters_travel, case.offloads_inputs)
        == (choice.layout.adapters_travel, choice.layout.offloads_inputs)
        for draft in mobius_drafts(case)
    ]
    assert (choice.round_seconds if choice else math.inf) <= min(plain, default=math.inf) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), JOBS, DEVICES, SHARES, TOKENS)
def test_the_largest_and_the_smallest_stages_fit_with_all_that_passes_beside_them(
    layers, jobs, device, share, tokens
):
    shape = base(layers)
    device = sized(device, share, shape, jobs, tokens)
    for case in cases(shape, jobs, device, 256, tokens):
        streamed = [
            draft
            for draft in mobius_drafts(case)
            if draft.slot_counts == (1,) and not any(draft.resident_stages)
        ]
        assert all(case.device_bytes(draft) <= device.budget_bytes for draft in streamed)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), JOBS, DEVICES, SHARES, TOKENS)
def test_what_is_chosen_fits_and_its_window_is_legal(layers, jobs, device, share, tokens):
    device = sized(device, share, base(layers), jobs, tokens)
    choice = chosen(base(layers), jobs, device, 256, tokens)
    assume(choice)
    assert choice.device_bytes <= device.budget_bytes
    assert choice.host_bytes <= device.host_budget_bytes
    assert choice.capacity >= max(one.max_sample_tokens for one in jobs)
    assert 0.0 <= choice.waiting_fraction < 1.0
    assert choice.layout.layers == layers
    plan_window([course("a", [[1, 1], [1]])], choice.layout, choice.capacity)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), JOBS, DEVICES, SHARES, TOKENS, st.integers(0, 2_000_000))
def test_more_memory_is_never_slower(layers, jobs, device, share, tokens, more):
    device = sized(device, share, base(layers), jobs, tokens)
    less = chosen(base(layers), jobs, device, 256, tokens)
    assume(less)
    found = chosen(base(layers), jobs, replace(device, budget_bytes=device.budget_bytes + more), 256, tokens)
    assert found is not None
    # What fits whole is never streamed, even where all its layers are made again for that.
    assert found.is_resident or (not less.is_resident and found.round_seconds <= 1.02 * less.round_seconds)


def test_the_bytes_are_those_of_ends_residents_slots_adapters_inputs_and_one_stage_at_work():
    draft = LayoutDraft((1, 2, 2, 1), (True, False, False, False), slot_counts=(2,))
    pair, fields = (job("a", 6000), job("b", 3000)), dict(process_bytes=70, uses_fused_ops=False)
    kept = math.ceil(1.5 * 8 * HIDDEN * 2 * 30)
    inputs = 4 * 100 * HIDDEN * 2
    stay = StreamCase(base(6), pair, gpu(NEVER, **fields), 100, 30, adapters_travel=False)
    assert stay.device_bytes(draft) == 70 + 5000 + ENDS + 5 * LAYER + 9000 * 18 + inputs + 2 * kept
    assert stay.host_bytes(draft) == 5 * LAYER
    mapped = replace(stay, device=replace(stay.device, staging_bytes=300))
    assert (mapped.host_bytes(draft), mapped.device_bytes(draft)) == (300, stay.device_bytes(draft))
    travel = replace(stay, adapters_travel=True)
    ring = 3 * (2 * (1000 + 500) + 2 * 128) * 18
    assert travel.device_bytes(draft) == 70 + 5000 + ENDS + 5 * (LAYER + 1500 * 6) + ring + inputs + 2 * kept
    assert travel.host_bytes(draft) == 5 * LAYER + 9000 * 18
    assert replace(mapped, adapters_travel=True).host_bytes(draft) == 300 + 9000 * 18


def test_offloaded_inputs_leave_two_rounds_and_two_microbatches_on_the_device():
    """Of inputs and gradients each a round and a microbatch; inputs of the two inner stages wait there."""
    draft = LayoutDraft((1, 2, 2, 1), (True, False, False, False), slot_counts=(2,))
    kept = StreamCase(base(6), (job("a", 6000),), gpu(NEVER), 100, 30, adapters_travel=False)
    offloaded = replace(kept, offloads_inputs=True)
    row, padded = HIDDEN * 2, 100 + 100 // 16
    assert kept.device_bytes(draft) - offloaded.device_bytes(draft) == (4 * padded - 2 * (padded + 30)) * row
    assert offloaded.host_bytes(draft) - kept.host_bytes(draft) == 2 * padded * row
    longer = LayoutDraft((1, 1, 1, 1, 1, 1), (True, False, False, False, False, False), slot_counts=(2,))
    shorter = LayoutDraft((2, 1, 1, 1, 1), (True, False, False, False, False), slot_counts=(1,))
    assert kept.device_bytes(longer) - kept.device_bytes(shorter) == padded * row - kept.memory.kept_bytes
    assert offloaded.device_bytes(longer) - offloaded.device_bytes(shorter) == -kept.memory.kept_bytes


def test_a_tied_head_takes_no_room_of_its_own():
    tied = StreamCase(base(6, tied=True), (job(),), gpu(NEVER), 100, 30, adapters_travel=False)
    assert tied.memory.embedding_head_bytes == ENDS // 2


def test_the_last_stage_makes_nothing_again_and_adapters_that_travel_come_before_their_forward():
    device = gpu(NEVER, flops=1e6, bandwidth=1e3)
    stay = StreamCase(base(4), (job(trainable=1000),), device, 100, 100, adapters_travel=False)
    layer, head = 2 * LAYER / 2 * 100 / 1e6, 2 * HIDDEN * VOCABULARY * 100 / 1e6
    everything = LayoutDraft((1, 1, 2), (True,) * 3, (1,))
    assert stay.round_seconds(everything) == pytest.approx((2 * 3 + 2 * 2) * layer + 2 * head)
    travel = replace(stay, adapters_travel=True)
    # The first stages' gradients leave while others compute, the last one's when all is done. Of the Steps
    # only the first stage's is waited for: gradient, master and moments; and all of them once a window.
    left, came = 250 * 4 / 1e3, 250 * 16 / 1e3
    bare = 4 * came / TRAVEL_ROUNDS
    assert travel.round_seconds(everything) == pytest.approx(
        stay.round_seconds(everything) + left + came + bare
    )
    # A link that takes 80 s for what a layer's Step needs, and layers that take 50: the last stage's two come
    # when the two before have been passed for a while.
    slow = replace(travel, device=replace(device, bandwidth=50.0))
    assert 50.0 < layer < 55.0
    assert slow.round_seconds(everything) == pytest.approx(
        stay.round_seconds(everything) - 2 * layer + 20 * left + 4 * 20 * came + 20 * bare
    )


def test_of_a_stage_that_travels_its_parameters_come_and_go_as_often_as_they_must():
    travel = StreamCase(base(4), (job(trainable=1000),), gpu(NEVER), 100, 100, adapters_travel=True)
    stage = travel.stage_rounds((1, 2, 1))[1]
    assert (stage.load_bytes, stage.adapter_bytes, stage.gradient_bytes) == (2 * LAYER, 500 * 2, 500 * 4)
    assert (stage.step_bytes, stage.state_bytes) == (500 * 16, 500 * 14)
    doubles = replace(travel, shape=replace(base(4), bytes_per_value=8)).stage_rounds((1, 2, 1))[1]
    assert (doubles.step_bytes, doubles.state_bytes) == (500 * 32, 500 * 32)
    stay = replace(travel, adapters_travel=False).stage_rounds((1, 2, 1))[1]
    assert (stage.forward_seconds, stage.load_bytes) == (stay.forward_seconds, stay.load_bytes)
    assert (stay.adapter_bytes, stay.gradient_bytes, stay.step_bytes, stay.state_bytes) == (0, 0, 0, 0)


def test_buffers_that_steps_pass_through_hold_what_the_largest_stage_has_of_all_jobs_up_to_a_piece():
    draft = LayoutDraft((1, 3), (False, False), (1,))
    small, huge = (job("a", 1000), job("b", 500)), (job("a", 3 * PIECE), job("b", 500))
    for together, piece in ((small, 3 * (250 + 125) + 2 * 128), (huge, PIECE)):
        travel = StreamCase(base(4), together, gpu(NEVER), 100, 100, adapters_travel=True)
        nobody = replace(travel, jobs=())
        there = 3 * (travel.memory.copy_bytes + travel.memory.gradient_bytes)
        more = travel.device_bytes(draft) - nobody.device_bytes(draft)
        assert more == there + PIECES * piece * 18


def test_no_pass_is_faster_than_the_host_asks_for_it():
    """Four passes of 25 tokens: 13.1 ms of arithmetic each."""
    quick = StreamCase(
        base(4), (job(),), gpu(NEVER, host_launch_seconds=0.010), 100, 25, adapters_travel=False
    )
    slow = replace(quick, device=gpu(NEVER, host_launch_seconds=0.020))
    assert quick.layer_seconds == replace(quick, device=gpu(NEVER)).layer_seconds == 2 * 4 * HIDDEN**2 * 1e-7
    assert slow.layer_seconds == pytest.approx(4 * 0.020)
    assert replace(slow, capacity=50).layer_seconds == quick.layer_seconds


def test_passes_over_a_base_that_stays_do_not_wait_until_they_are_asked_for():
    """Four layers, of which one is recomputed, and the head; they are captured, so that nobody asks."""
    device = gpu(NEVER, backward_ratio=1.5, host_launch_seconds=9.0)
    layer, head = 2 * 4 * HIDDEN**2 * 100 / 1e9, 2 * HIDDEN * VOCABULARY * 100 / 1e9
    seconds = resident_round_seconds(base(4), [job()], device, 100, 50, Recompute(recomputed_layers=1))
    assert seconds == pytest.approx((2.5 * 4 + 1) * layer + 2 * head)


def test_the_host_has_room_for_each_job_that_waits_by_itself():
    """Its adapter travels, so that its state is in host memory as long as it trains."""
    draft = LayoutDraft((1,) * 4, (False,) * 4, (1,))
    small, large = (
        StreamCase(base(4), (job(name, trainable),), gpu(NEVER), 100, 40, adapters_travel=True)
        for name, trainable in (("a", 1000), ("b", 100_000))
    )
    room = small.host_bytes(draft)
    assert large.host_bytes(draft) == room + 99_000 * 18
    both = replace(small, later_cases=(large,), device=gpu(NEVER, host_budget_bytes=room))
    assert replace(both, later_cases=()).excess_bytes(draft) == 0
    assert both.excess_bytes(draft) == 99_000 * 18


def test_a_cut_leaves_room_for_each_job_that_waits_by_itself():
    """With the cut of those aboard, which keeps all it can on the device, the large job could never train."""
    together, large = [job("a", 1000), job("b", 1000)], job("c", 100_000, longest=60)
    device = gpu(ENDS + 5000 + 11 * LAYER)
    alone = choose_stream(base(8), together, device, 64, 100)
    both = choose_stream(base(8), together, device, 64, 100, waiting_jobs=[large])

    def by_itself(choice):
        cut = choice.layout
        case = StreamCase(base(8), (large,), device, 60, 60, cut.adapters_travel, cut.offloads_inputs)
        return case.fits(draft_from_layout(cut))

    assert (by_itself(alone), by_itself(both)) == (False, True)
    with pytest.raises(PlanError, match="each of the waiting ones by itself"):
        choose_stream(base(8), together, device, 64, 100, waiting_jobs=[job("d", 3_000_000)])


@pytest.mark.slow
def test_a_cut_of_eighty_layers_is_found_in_seconds():
    """A 70B base on a GPU that holds most of it: every way, capacity and number of slots comes close."""
    widths = {"qo": (8192, 8192), "kv": (8192, 1024), "gu": (8192, 28672), "d": (28672, 8192)}
    named = [(name, *widths[kind]) for kind in widths for name in kind]
    sites = tuple(
        SiteShape(f"model.layers.{layer}.{name}", *sides) for layer in range(80) for name, *sides in named
    )
    parameters = sum(site.in_features * site.out_features for site in sites) + 2 * 8192 * 128256
    shape = ModelShape(80, 8192, 128256, parameters, 2, sites, context=8192)
    together = [JobShape(str(at), 0, at, 207_000_000, 902, 902) for at in range(8)]
    device = StreamDevice(
        budget_bytes=138 << 30, host_budget_bytes=NEVER, bandwidth=55e9, flops=593e12, slack_bytes=2 << 30
    )
    began = process_time()
    choice = choose_stream(shape, together, device, 8192, 8 * 902)
    assert is_within(process_time() - began, 10)
    assert choice.waiting_fraction < 0.01


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3), max_size=12))
def test_of_the_jobs_that_wait_only_the_hungriest_are_looked_at(wants):
    jobs = [JobShape(str(at), 0, at, *want) for at, want in enumerate(wants)]
    found = {
        (one.trainable_parameters, one.max_sample_tokens, one.batch_tokens) for one in undominated_jobs(jobs)
    }
    assert all(any(all(map(ge, most, want)) for most in found) for want in wants)
    assert not any(one != other and all(map(ge, one, other)) for one in found for other in found)


def test_a_base_that_fits_is_not_streamed():
    choice = choose_stream(base(4), [job()], gpu(NEVER), 256, 100)
    assert choice.is_resident
    assert choice.layout.for_worker(0).streamed_stages == ()
    assert (choice.host_bytes, choice.waiting_fraction, choice.capacity) == (0, 0.0, 256)
    assert choice.reason.startswith(
        "nothing is streamed, since the base, the adapters and their passes need 5."
    )


def test_what_a_resident_run_would_refuse_is_not_called_whole():
    shape, jobs = base(4), [job()]
    device = gpu(choose_stream(shape, jobs, gpu(NEVER), 40, 40).device_bytes)
    assert choose_stream(shape, jobs, device, 40, 40).is_resident
    more = device.budget_bytes // 2
    fit = MemoryFit(slack=more / FUSED_SLACK_BYTES)
    assert MemoryModel(shape, device.budget_bytes, uses_fused_ops=True, fit=fit).misfit_reason(jobs)
    choice = choose_stream(shape, jobs, replace(device, resident_slack_bytes=more), 40, 40)
    assert not choice.is_resident
    assert choice.device_bytes <= device.budget_bytes


def test_adapters_stay_on_the_device_unless_they_find_no_room_there():
    room = ENDS + 5000 + 8 * LAYER
    device = gpu(room)
    few = choose_stream(base(12), [job(longest=20)], device, 64, 100)
    many = choose_stream(base(12), [job(str(one), 20_000, 20) for one in range(12)], device, 64, 100)
    assert not few.layout.adapters_travel
    assert "adapters stay on the GPU" in few.reason
    assert many.layout.adapters_travel
    assert "adapters travel with their stage" in many.reason


def test_a_base_that_stays_only_because_its_adapters_travel_is_not_whole():
    jobs = [job(str(one), 120_000, longest=1) for one in range(8)]
    device = sized(
        gpu(0, bandwidth=1e5, flops=1e8, slack_bytes=0, uses_fused_ops=False), 0.7, base(12), jobs, 229
    )
    choice = choose_stream(base(12), jobs, device, 256, 229)
    assert (choice.layout.for_worker(0).streamed_stages, choice.layout.adapters_travel) == ((), True)
    assert not choice.is_resident


def offloading_jobs() -> list[JobShape]:
    return [job(str(one), 1000, 40) for one in range(10)]


def test_inputs_are_offloaded_where_that_is_clearly_faster_and_the_sentence_says_so():
    """A round has 1000 tokens, for every stage as many bytes as one layer."""
    together, device = offloading_jobs(), gpu(ENDS + 5000 + 16 * LAYER, bandwidth=1e7, flops=1e12)
    kept = choose_stream(
        base(24), together, device, 64, 1000, [way for way in HOST_STATES if not way.offloads_inputs]
    )
    free = choose_stream(base(24), together, device, 64, 1000)
    assert not kept.layout.offloads_inputs
    assert "inputs of stages" not in kept.reason
    assert free.layout.offloads_inputs
    assert free.layout.offloaded_rows == 1000 + 1000 // 16
    assert free.round_seconds < 0.99 * kept.round_seconds
    assert "inputs of stages wait in host memory for the way back" in free.reason
    assert free.host_bytes > kept.host_bytes


def test_inputs_are_kept_where_offloading_gains_nothing():
    """One token a round: there is nothing to gain, and what is equal is left alone."""
    choice = choose_stream(base(8), [job(longest=1)], gpu(ENDS + 5000 + 5 * LAYER), 64, 1)
    assert not choice.is_resident
    assert not choice.layout.offloads_inputs


def test_jobs_fit_with_inputs_offloaded_that_do_not_fit_with_inputs_kept():
    together, device = offloading_jobs(), gpu(ENDS + 5000 + 6 * LAYER)
    with pytest.raises(PlanError, match="the jobs do not fit together"):
        choose_stream(base(16), together, device, 64, 2000, [HostState(False, False)])
    choice = choose_stream(base(16), together, device, 64, 2000)
    assert choice.layout.offloads_inputs
    assert choice.device_bytes <= device.budget_bytes


def test_the_sentence_names_stages_residents_slots_and_what_is_not_hidden():
    choice = choose_stream(base(8), [job(longest=20)], gpu(ENDS + 5000 + 5 * LAYER), 64, 64)
    assert not choice.is_resident
    stays = sum(stage.is_resident for stage in choice.layout.stages)
    assert f"streamed in {len(choice.layout.stages)} stages of" in choice.reason
    assert f"{stays} of them resident" in choice.reason
    assert f"in {choice.layout.slot_counts[0]} slot" in choice.reason
    assert f"waits for the host in {choice.waiting_fraction:.0%} of a step" in choice.reason


def test_capacities_are_halves_down_to_the_longest_sample_and_none_beyond_a_round():
    assert capacities(300, 4096, 10_000) == [4096, 2048, 1024, 512, 300]
    assert capacities(300, 4096, 1000) == [1024, 512, 300]
    assert capacities(5000, 4096, 10_000) == [5000]
    assert capacities(1, 1024, 2048) == [1024, 512, 256, 1]


def huge(layers: int) -> ModelShape:
    """Layers of 2 GiB, and as much for both ends."""
    sites = tuple(SiteShape(f"m.{number}.q", 1 << 15, 1 << 15) for number in range(layers))
    return ModelShape(layers, 1 << 15, 1 << 14, (layers + 1) << 30, 2, sites, context=64)


def test_a_gpu_too_small_for_one_layer_is_told_what_stands_beside_it():
    device = gpu(3 << 30, slack_bytes=1 << 30, process_bytes=1 << 29)
    with pytest.raises(PlanError) as told:
        choose_stream(huge(2), [job()], device, 64, 64)
    assert "one layer of the base needs 2.00 GiB" in str(told.value)
    assert "2.00 GiB of embedding and head, 1.00 GiB of slack and 0.50 GiB that are taken" in str(told.value)
    assert "the GPU has 3.00 GiB for a run; use a larger GPU" in str(told.value)


def test_a_job_too_large_even_alone_is_named():
    large = job("greedy", longest=4000)
    with pytest.raises(PlanError) as told:
        choose_stream(base(8), [job(longest=10), large], gpu(ENDS + 5 * LAYER), 64, 64)
    assert str(told.value).startswith("job greedy: even alone, with the base streamed, it needs 26.")
    assert "with adapters in host memory, inputs of stages in host memory" in str(told.value)
    assert "and 4000 tokens in a microbatch, but 2.60 MiB are available" in str(told.value)


def test_too_many_jobs_are_told_to_train_fewer():
    together = [job(str(one), 40_000, longest=10) for one in range(300)]
    with pytest.raises(PlanError, match=r"the jobs do not fit together: the run needs .* train fewer"):
        choose_stream(base(8), together, gpu(ENDS + 4 * LAYER), 64, 64)


def test_a_host_too_small_is_told_what_it_needs_and_has():
    """Of 8 layers the GPU holds 3, one of them in the slot."""
    device = gpu(10 << 30, slack_bytes=1 << 29, host_budget_bytes=10 << 30)
    with pytest.raises(PlanError) as told:
        choose_stream(huge(8), [job()], device, 64, 64)
    assert "the host needs 12.00 GiB for the layers that find no room on the GPU, but" in str(told.value)
    assert "10.00 GiB of its memory are available; use a host with more memory" in str(told.value)
    assert (
        choose_stream(huge(8), [job()], replace(device, host_budget_bytes=12 << 30), 64, 64).host_bytes
        == 12 << 30
    )


def test_weights_in_their_files_need_a_staging_area_of_the_host_only():
    device = gpu(10 << 30, slack_bytes=1 << 29, host_budget_bytes=10 << 30)
    with pytest.raises(HostTooSmall):
        choose_stream(huge(8), [job()], device, 64, 64)
    choice = choose_stream(huge(8), [job()], replace(device, staging_bytes=1 << 27), 64, 64)
    assert choice.reads_weight_files
    assert choice.host_bytes == 1 << 27
    assert choice.device_bytes <= device.budget_bytes
    assert "weights are read from their files in every step, since the host has 10.00 GiB" in choice.reason
    streamed = [stage for stage in choice.layout.stages if not stage.is_resident]
    assert f"they would take {2 * len(streamed)}.00 GiB" in choice.reason
    kept = choose_stream(huge(8), [job()], replace(device, host_budget_bytes=12 << 30), 64, 64)
    assert not kept.reads_weight_files
    assert "files" not in kept.reason


def test_a_host_too_small_even_for_that_is_told_what_it_needs():
    device = gpu(10 << 30, slack_bytes=1 << 29, host_budget_bytes=1 << 30, staging_bytes=2 << 30)
    with pytest.raises(HostTooSmall) as told:
        choose_stream(huge(8), [job()], device, 64, 64)
    assert "the host needs 2.00 GiB for reading the layers that find no room on the GPU from their" in str(
        told.value
    )
    assert "but 1.00 GiB of its memory are available" in str(told.value)
