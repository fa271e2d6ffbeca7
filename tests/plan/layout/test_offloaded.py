"""Master weights and moments go to host memory where more jobs come aboard so and training is as fast, or
where all of them train faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.layout.test_choose import GIB, gpu, shapes
from tests.plan.outlooks import SHAPE
from weftune.core.shapes import JobShape
from weftune.jobs.store.scheduler import admit_jobs
from weftune.plan.cost.fitted import FittedModels
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.plan.layout.need import gpu_device
from weftune.plan.layout.offloaded import (
    OffloadedRound,
    is_offloading_worthwhile,
    job_groups,
    offload_optimizer,
    offloaded_round,
)
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Recompute

OFFLOADED = one_device_layout(SHAPE.layers, offloads_optimizer=True)


def jobs(count: int, tokens: int = 4096, rank: int = 16) -> list[JobShape]:
    return [replace(job, batch_tokens=tokens, max_sample_tokens=512) for job in shapes(count, rank)]


def test_it_is_chosen_where_more_jobs_come_aboard_and_nowhere_else():
    asked = jobs(32)
    tight, ample = (choose_layout(SHAPE, asked, gpu(gib)) for gib in (32, 60))
    assert (ample.layout, len(ample.attached_jobs)) == (one_device_layout(SHAPE.layers), 32)
    assert (ample.host_bytes, ample.user_note) == (0, "")
    assert tight.layout == OFFLOADED
    without = choose_layout(SHAPE, asked, replace(gpu(32), host_budget_bytes=0))
    assert without.layout == one_device_layout(SHAPE.layers)
    assert len(without.attached_jobs) < len(tight.attached_jobs) <= 32
    assert tight.peak_device_bytes <= 32 * GIB
    assert tight.host_bytes == 12 * sum(job.trainable_parameters for job in tight.attached_jobs)
    counts = len(tight.attached_jobs), len(without.attached_jobs)
    told = f"since {counts[0]} of 32 jobs are admitted with it and {counts[1]} without"
    assert told in tight.reason
    assert tight.user_note == f"The base is {tight.reason}."


def test_a_run_and_a_plan_admit_the_jobs_that_it_was_chosen_for():
    asked = jobs(32)
    found = choose_layout(SHAPE, asked, gpu(30))
    assert found.layout == OFFLOADED
    known = FittedModels(initial_cost=uncalibrated_cost_model(SHAPE), memory=found.memory)
    for fits in (found.memory.misfit_reason, known.misfit_reason):
        assert admit_jobs(asked, [], fits).admitted_names == tuple(job.name for job in found.attached_jobs)


def test_the_host_has_room_for_those_aboard_and_the_next_one_is_told_so():
    asked = jobs(32)
    plain = len(choose_layout(SHAPE, asked, replace(gpu(32), host_budget_bytes=0)).attached_jobs)
    most = plain + 2
    host = 12 * sum(job.trainable_parameters for job in asked[:most])
    found = choose_layout(SHAPE, asked, replace(gpu(32), host_budget_bytes=host))
    assert (found.layout, len(found.attached_jobs), found.host_bytes) == (OFFLOADED, most, host)
    decision = admit_jobs(asked, [], found.memory.misfit_reason)
    assert decision.wait_reasons[asked[most].name].startswith("needs ")
    assert "of the host's memory for master weights and moments" in decision.wait_reasons[asked[most].name]
    short = 12 * sum(job.trainable_parameters for job in asked[:plain])
    assert choose_layout(SHAPE, asked, replace(gpu(32), host_budget_bytes=short)).layout == one_device_layout(
        SHAPE.layers
    )


def test_jobs_of_few_tokens_had_better_wait_for_their_turn():
    """A step on 32 tokens takes less time than its optimizer takes over the link."""
    assert choose_layout(SHAPE, jobs(32, tokens=32), gpu(32)).layout == one_device_layout(SHAPE.layers)


def test_a_job_with_a_short_batch_does_not_make_the_others_pay_for_it():
    """By itself it would take little: what counts is a step of all of them, in turns or together."""
    short, long = (
        replace(jobs(1, tokens=64, rank=64)[0], max_sample_tokens=8),
        jobs(2, tokens=2048, rank=64)[1],
    )
    memory = MemoryModel(SHAPE, int(21.6 * GIB), uses_fused_ops=True)
    offloaded, place = offload_optimizer(memory, 1 << 50), gpu_device(0, 0, 25e9, 165e12, 1e12)
    assert [len(turn) for turn in job_groups([short, long], memory)] == [1, 1]
    assert [len(turn) for turn in job_groups([short, long], offloaded)] == [2]
    assert not is_offloading_worthwhile(offloaded, memory, [short, long], place, 8192)
    longer = replace(long, batch_tokens=64 * 1024)
    assert is_offloading_worthwhile(offloaded, memory, [short, longer], place, 8192)


def unmeasured(_budget, _host, _workers):
    raise AssertionError("nobody needs to know")


def test_nothing_is_measured_where_every_job_is_aboard_with_all_the_room_it_wants():
    assert len(choose_layout(SHAPE, jobs(4), replace(gpu(60), measure_gpu=unmeasured)).attached_jobs) == 4


def test_jobs_that_are_all_aboard_get_room_for_what_would_be_recomputed():
    asked = jobs(8)
    found, without = (
        choose_layout(SHAPE, asked, replace(gpu(25), host_budget_bytes=host)) for host in (1 << 50, 0)
    )
    assert (found.layout, len(found.attached_jobs)) == (OFFLOADED, 8)
    assert (without.layout, len(without.attached_jobs)) == (one_device_layout(SHAPE.layers), 8)
    before, after = (one.memory.choose_recompute(asked, 8192).recomputed_layers for one in (without, found))
    assert before > after
    assert f"{after} layers are recomputed instead of {before}" in found.reason


def test_jobs_on_a_quantised_base_get_room_for_larger_microbatches():
    """A matrix is dequantised for every microbatch, so fewer of them take less time; one that is stored as it
    is multiplied gains nothing by it."""
    asked, quantised = jobs(16), replace(SHAPE, site_bytes_per_value=0.52)
    tight = gpu(27)
    found, without = (
        choose_layout(quantised, asked, replace(tight, host_budget_bytes=host)) for host in (1 << 50, 0)
    )
    assert (found.layout, len(found.attached_jobs)) == (OFFLOADED, 16)
    assert (without.layout, len(without.attached_jobs)) == (one_device_layout(SHAPE.layers), 16)
    after, before = (
        one.memory.choose_capacity(asked, 8192, Recompute(recomputes_outputs=True))
        for one in (found, without)
    )
    assert after > 1.3 * before
    assert f"microbatches have {after:,} tokens with it and {before:,} without, and the GPU" in found.reason


def test_few_tokens_hide_no_steps_so_nothing_is_gained():
    assert choose_layout(SHAPE, jobs(8, tokens=32), gpu(25)).layout == one_device_layout(SHAPE.layers)


def test_on_a_cpu_there_is_no_other_memory():
    machine = Machine(on_gpu=False, budget_bytes=30 * GIB, host_budget_bytes=1 << 50)
    assert choose_layout(SHAPE, jobs(32), machine).layout == one_device_layout(SHAPE.layers)


def test_beside_a_base_that_is_loaded_already_a_job_may_fit_only_so():
    large = jobs(1, rank=256)
    machine = gpu(24)
    assert machine.stream_budget_bytes is None
    found = choose_layout(SHAPE, large, machine)
    assert (found.layout, found.attached_jobs) == (OFFLOADED, tuple(large))
    assert choose_layout(SHAPE, large, replace(machine, host_budget_bytes=0)).attached_jobs == ()


def test_steps_are_hidden_behind_passes_of_the_other_group_as_far_as_those_are_long():
    def seconds(first, second):
        return OffloadedRound(*zip(first, second, strict=True)).seconds

    bare = 1 / TRAVEL_ROUNDS
    assert seconds((2.0, 3.0), (0.0, 0.0)) == 5.0
    assert seconds((4.0, 2.0), (4.0, 2.0)) == pytest.approx(8.0 + 2 * bare)
    assert seconds((4.0, 8.0), (4.0, 8.0)) == pytest.approx(16.0 + 8 * bare)
    assert seconds((6.0, 3.0), (2.0, 1.0)) == pytest.approx(9.0 + bare)
    uneven = OffloadedRound((6.0, 2.0), (3.0, 1.0))
    assert uneven.exposed_seconds == pytest.approx(1.0 + bare)


def test_steps_take_the_link_as_fast_as_it_is_both_ways_where_that_was_measured():
    """Twelve bytes of every parameter come while as many go."""
    memory, asked = offload_optimizer(MemoryModel(SHAPE, 60 * GIB, uses_fused_ops=True), 1 << 50), jobs(2)
    plain, measured = (gpu_device(0, 0, 25e9, 300e12, 1e12, duplex_bandwidth=rate) for rate in (None, 5e9))
    for place, rate in ((plain, 25e9), (measured, 5e9)):
        found = offloaded_round(memory, asked, place, 8192)
        assert found.transfer_seconds == pytest.approx(
            tuple(12 * job.trainable_parameters / rate for job in asked)
        )


def test_what_a_window_takes_knows_of_unhidden_steps():
    found = choose_layout(SHAPE, jobs(32), gpu(32))
    assert 0 < found.waiting_fraction < 0.2
    parameters = sum(job.trainable_parameters for job in found.attached_jobs)
    seconds = found.step_wait(len(found.attached_jobs), parameters)
    assert 0 < seconds < 2.0
    assert found.window_rounds == TRAVEL_ROUNDS


def test_twelve_bytes_of_a_parameter_are_the_hosts_and_six_stay():
    plain = MemoryModel(SHAPE, 30 * GIB, uses_fused_ops=True)
    memory = offload_optimizer(plain, 1 << 50)
    some, more = jobs(4), jobs(8)
    for model, each in ((plain, 18), (memory, 6)):
        grown = model.peak_bytes(more, 512) - model.peak_bytes(some, 512)
        assert grown == each * sum(job.trainable_parameters for job in more[4:])
    assert memory.host_bytes(more) == 12 * sum(job.trainable_parameters for job in more)
    assert plain.host_bytes(more) == 0
