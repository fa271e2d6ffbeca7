"""How several workers stream a base: what is predicted fits and is legal, no cut that fits is much faster."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plan.cost.test_streamed_memory import CAPACITIES, JOB_SETS
from tests.plan.program.test_check import course
from tests.plan.stream_cases import ENDS, HIDDEN, JOBS, LAYER, NEVER, TOKENS, base, gpu, job
from tests.plan.window.test_streamed_workers import cuts
from weftune.core.shapes import shard_shape
from weftune.errors import HostTooSmall, PlanError
from weftune.plan.cost.memory import MemoryModel, max_sample_tokens
from weftune.plan.layout.need import LayoutDraft, StreamCase, draft_from_layout
from weftune.plan.layout.stream_choice import capacities, choose_for_workers
from weftune.plan.program.prices import Link
from weftune.plan.window.window import plan_window

LAYERS = 6
PARTED = 1 << 30


def case(jobs, device, workers, tokens, capacity, layers=LAYERS):
    return StreamCase(
        base(layers), tuple(jobs), device, tokens, capacity, adapters_travel=False, workers=workers
    )


def single_layers(layers, workers):
    """Each comes and goes through the one slot of its worker."""
    return LayoutDraft((1,) * layers, (False,) * layers, (1,) * workers)


def choose(layers, jobs, device, workers, most, tokens, later=()):
    """For jobs whose rounds have so many tokens."""
    together = [replace(jobs[0], batch_tokens=tokens), *jobs[1:]]
    return choose_for_workers(base(layers), together, later, device, workers, most, PARTED)


def every_draft(layers, workers):
    for chosen in product((False, True), repeat=layers - 1):
        ends = [0, *(end for end, here in enumerate(chosen, 1) if here), layers]
        sizes = tuple(stop - start for start, stop in pairwise(ends))
        if len(sizes) >= workers:
            for resident in product((False, True), repeat=len(sizes)):
                for slots in (1, 2):
                    yield LayoutDraft(sizes, resident, (slots,) * workers)


@settings(max_examples=60, deadline=None)
@given(JOBS, TOKENS, st.integers(2, 4), st.integers(0, 100), st.sampled_from([1e5, 1e6, 1e7]))
def test_what_is_chosen_fits_and_its_windows_are_legal(jobs, tokens, workers, room, bandwidth):
    device = gpu(NEVER, bandwidth=bandwidth)
    tokens = max(tokens, max_sample_tokens(jobs))
    frugal = single_layers(LAYERS, workers)
    least = case(jobs, device, workers, tokens, max_sample_tokens(jobs)).device_bytes(frugal)
    device = replace(device, budget_bytes=least + room * LAYER // 20)
    found = choose(LAYERS, jobs, device, workers, 512, tokens)
    judged = case(jobs, device, workers, tokens, found.capacity)
    assert judged.device_bytes(draft_from_layout(found.layout)) == found.device_bytes <= device.budget_bytes
    assert found.round_seconds == pytest.approx(judged.round_seconds(draft_from_layout(found.layout)))
    assert 0 <= found.waiting_fraction < 1
    assert found.layout.layers == LAYERS
    plan_window([course("a", [[9, 9, 4], [7]])], found.layout, max(found.capacity, 9))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 3), st.integers(0, 60), st.sampled_from([1e5, 1e6, 1e7]), st.integers(60, 400))
@example(2, 58, 1e7, 81)
def test_no_cut_that_fits_is_much_faster(workers, room, bandwidth, tokens):
    jobs, layers = [job()], 5
    device = gpu(NEVER, bandwidth=bandwidth)
    frugal = single_layers(layers, workers)
    least = case(jobs, device, workers, tokens, 40, layers).device_bytes(frugal)
    device = replace(device, budget_bytes=least + room * LAYER // 20)
    found = choose(layers, jobs, device, workers, 512, tokens)
    for capacity in capacities(40, 512, tokens):
        judged = case(jobs, device, workers, tokens, capacity, layers)
        fastest = min(
            (
                judged.round_seconds(one)
                for one in every_draft(layers, workers)
                if not judged.excess_bytes(one)
            ),
            default=None,
        )
        assert fastest is None or found.round_seconds <= 1.1 * fastest


@settings(max_examples=100, deadline=None)
@given(cuts(), JOB_SETS, CAPACITIES)
def test_who_is_aboard_is_counted_as_the_choice_counted(chosen, jobs, capacity):
    tokens = sum(one.batch_tokens for one in jobs)
    device = gpu(NEVER, uses_fused_ops=False)
    judged = case(jobs, device, chosen.workers, tokens, capacity, chosen.layers)
    memory = MemoryModel(base(chosen.layers), NEVER, layout=chosen, fixed_slack_bytes=device.slack_bytes)
    assert memory.peak_bytes(jobs, capacity) == judged.device_bytes(draft_from_layout(chosen))
    room = memory.choose_capacity(jobs, 10_000)
    assert room == 10_000
    tight = replace(memory, budget_bytes=memory.peak_bytes(jobs, capacity))
    fits = tight.choose_capacity(jobs, 10_000)
    assert fits == max_sample_tokens(jobs) or tight.peak_bytes(jobs, fits) <= tight.budget_bytes


@settings(max_examples=40, deadline=None)
@given(JOBS, JOBS, st.integers(2, 4), st.integers(0, 60))
def test_who_comes_later_fits_the_same_cut_alone(jobs, later, workers, room):
    device = gpu(NEVER, bandwidth=1e6)
    frugal = single_layers(LAYERS, workers)
    large = [
        replace(
            one, batch_tokens=one.max_sample_tokens + 50, trainable_parameters=4 * one.trainable_parameters
        )
        for one in later
    ]
    longest_later = max(one.max_sample_tokens for one in large)
    largest = replace(
        large[0],
        batch_tokens=longest_later + 50,
        trainable_parameters=max(one.trainable_parameters for one in large),
    )
    least = max(
        case(together, device, workers, tokens, max_sample_tokens(together)).device_bytes(frugal)
        for together, tokens in (
            (jobs, 100),
            ([replace(largest, max_sample_tokens=longest_later)], longest_later + 50),
        )
    )
    device = replace(device, budget_bytes=least + room * LAYER // 20)
    cut = choose(LAYERS, jobs, device, workers, 256, 100, large).layout
    memory = MemoryModel(
        base(LAYERS),
        device.budget_bytes,
        uses_fused_ops=True,
        layout=cut,
        fixed_slack_bytes=device.slack_bytes,
    )
    assert all(memory.misfit_reason([one]) is None for one in large)


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_stream_their_parts_of_layers_and_the_host_holds_all_parts(workers):
    whole, part, device = base(LAYERS), shard_shape(base(LAYERS), 2), gpu(NEVER, uses_fused_ops=False)
    draft = single_layers(LAYERS, workers)

    def judged(shape):
        return StreamCase(shape, (job(),), device, 100, 40, adapters_travel=False, workers=workers)

    # Every shard keeps the state of whole adapters, and a copy and a gradient of its part.
    copied = judged(part).memory.state_bytes - judged(whole).memory.state_bytes
    assert copied == 5000 * math.ceil((2 + 4) * part.values_per_token / whole.values_per_token)
    assert judged(part).memory.layer_bytes == LAYER // 2
    tight = replace(device, budget_bytes=judged(part).device_bytes(draft))
    assert judged(whole).device_bytes(draft) > tight.budget_bytes
    found = choose_for_workers(part, [replace(job(), batch_tokens=100)], [], tight, workers, 64, PARTED)
    assert (found.layout.workers, found.layout.shards) == (workers, 2)
    assert found.reason.startswith(f"streamed over {'2 workers of ' * (workers > 1)}2 shards in 6 stages")
    assert found.host_bytes == sum(not stage.is_resident for stage in found.layout.stages) * LAYER
    memory = MemoryModel(part, tight.budget_bytes, layout=found.layout, fixed_slack_bytes=tight.slack_bytes)
    assert memory.peak_bytes(found.attached_jobs, found.capacity) == found.device_bytes <= tight.budget_bytes


def test_sums_over_shards_take_time_in_every_forward_and_backward():
    """Two per layer: in the forward, in the backward, and where the forward is recomputed before it."""
    part, draft = shard_shape(base(LAYERS), 2), single_layers(LAYERS, 1)
    unlinked = gpu(NEVER, bandwidth=1e15)
    linked = replace(unlinked, worker_link=Link(1e6, latency=1e-3))
    seconds = [
        StreamCase(part, (job(),), device, 100, 50, adapters_travel=False).round_seconds(draft)
        for device in (unlinked, linked)
    ]
    size = (100 + 100 // 16) * HIDDEN * 2 / 2
    once = 2 * 2 * (2 * (1e-3 + size / 2 / 1e6))
    assert seconds[1] - seconds[0] == pytest.approx((3 * LAYERS - 1) * once)
    coded = replace(part, multiplies_stored_format=True)
    case = StreamCase(coded, (job(),), linked, 100, 50, adapters_travel=False)
    assert case.sum_seconds - once == pytest.approx(2 * 2 * (2 * (1e-3 + 4 * 53 / 1e6)))


def test_each_end_of_the_base_is_counted_on_its_rank():
    for stages, tied, wanted in (
        (4, False, (ENDS // 2, ENDS // 2)),
        (3, False, (ENDS, 0)),
        (3, True, (ENDS // 2, 0)),
        (4, True, (ENDS // 2, ENDS // 2)),
    ):
        judged = StreamCase(
            base(12, tied), (), gpu(NEVER, slack_bytes=0), 0, 0, adapters_travel=False, workers=2
        )
        draft = LayoutDraft((12 // stages,) * stages, (False,) * stages, (1, 1))
        needs = [judged.worker_bytes(draft, worker) for worker in (0, 1)]
        assert tuple(need - 12 // stages * LAYER for need in needs) == wanted


def test_the_more_ranks_the_shorter_a_round():
    device = gpu(NEVER, bandwidth=1e5)
    least = case([job()], device, 2, 400, 40, 12).device_bytes(single_layers(12, 2))
    device = replace(device, budget_bytes=least + LAYER)
    seconds = [choose(12, [job()], device, workers, 64, 400).round_seconds for workers in (2, 3, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_it_says_what_it_chose_and_why():
    device = gpu(NEVER, bandwidth=1e6)
    least = case([job()], device, 2, 100, 40).device_bytes(single_layers(6, 2))
    why = choose(6, [job()], replace(device, budget_bytes=least), 2, 100, 100).reason
    assert why.startswith(
        "streamed over 2 workers in 6 stages of 1 layer, 0 of them resident, the others in 1 slot"
    )
    assert "would need 1.00 GiB of a device that has" in why
    assert "stay on their worker's device" in why


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(
        PlanError, match=r"job a does not fit: streamed over 2 workers with 40 tokens .* needs"
    ):
        choose(6, [job()], gpu(LAYER // 2), 2, 64, 100)
    with pytest.raises(PlanError, match="with 1 other job running"):
        choose(6, [job(), job("b")], gpu(LAYER // 2), 2, 64, 100)
    huge = job("c", trainable=10**7)
    with pytest.raises(PlanError, match="job c does not fit: streamed over 2 workers with 40 tokens"):
        choose(6, [job()], gpu(5 * LAYER), 2, 64, 100, [huge])
    device = gpu(NEVER, host_budget_bytes=LAYER)
    least = case([job()], device, 2, 100, 40).device_bytes(single_layers(6, 2))
    for later in ([], [job("b")]):
        with pytest.raises(HostTooSmall, match="weights that stay in their files are streamed to one device"):
            choose(6, [job()], replace(device, budget_bytes=least), 2, 64, 100, later)
