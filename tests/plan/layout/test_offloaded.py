"""Master weights and moments go to host memory where more jobs come aboard so and training is as fast, or
where all of them train faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.layout.test_choose import GIB, gpu, shapes
from tests.plan.outlooks import SHAPE
from weftune.core.shapes import JobShape
from weftune.jobs.store.scheduler import admit
from weftune.plan.cost.learned import Learned
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.prior import arithmetic
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.layout.choose import Machine, choose
from weftune.plan.layout.need import gpu_device
from weftune.plan.layout.offloaded import (
    OffloadedRound,
    is_worth,
    job_groups,
    offloaded_round,
    offloading,
)
from weftune.plan.program.layout import one_device
from weftune.plan.program.program import Recompute

OFFLOADED = one_device(SHAPE.layers, optimizer_offloaded=True)


def jobs(count: int, tokens: int = 4096, rank: int = 16) -> list[JobShape]:
    return [replace(job, batch_tokens=tokens, longest=512) for job in shapes(count, rank)]


def test_it_is_chosen_where_more_jobs_come_aboard_and_nowhere_else():
    asked = jobs(32)
    tight, ample = (choose(SHAPE, asked, gpu(gib)) for gib in (32, 60))
    assert (ample.layout, len(ample.attached)) == (one_device(SHAPE.layers), 32)
    assert (ample.host_bytes, ample.note) == (0, "")
    assert tight.layout == OFFLOADED
    without = choose(SHAPE, asked, replace(gpu(32), host_budget=0))
    assert without.layout == one_device(SHAPE.layers)
    assert len(without.attached) < len(tight.attached) <= 32
    assert tight.bytes <= 32 * GIB
    assert tight.host_bytes == 12 * sum(job.trainable for job in tight.attached)
    told = f"since {len(tight.attached)} of 32 jobs are admitted with it and {len(without.attached)} without"
    assert told in tight.why
    assert tight.note == f"The base is {tight.why}."


def test_a_run_and_a_plan_admit_the_jobs_that_it_was_chosen_for():
    asked = jobs(32)
    found = choose(SHAPE, asked, gpu(30))
    assert found.layout == OFFLOADED
    known = Learned(initial_cost=arithmetic(SHAPE), memory=found.memory)
    for fits in (found.memory.why_not, known.misfit_reason):
        assert admit(asked, [], fits).admitted == tuple(job.name for job in found.attached)


def test_the_host_has_room_for_those_aboard_and_the_next_one_is_told_so():
    asked = jobs(32)
    plain = len(choose(SHAPE, asked, replace(gpu(32), host_budget=0)).attached)
    most = plain + 2
    host = 12 * sum(job.trainable for job in asked[:most])
    found = choose(SHAPE, asked, replace(gpu(32), host_budget=host))
    assert (found.layout, len(found.attached), found.host_bytes) == (OFFLOADED, most, host)
    decision = admit(asked, [], found.memory.why_not)
    assert decision.waiting[asked[most].name].startswith("needs ")
    assert "of the host's memory for master weights and moments" in decision.waiting[asked[most].name]
    short = 12 * sum(job.trainable for job in asked[:plain])
    assert choose(SHAPE, asked, replace(gpu(32), host_budget=short)).layout == one_device(SHAPE.layers)


def test_jobs_of_few_tokens_had_better_wait_for_their_turn():
    """A step on 32 tokens takes less time than its optimizer takes over the link."""
    assert choose(SHAPE, jobs(32, tokens=32), gpu(32)).layout == one_device(SHAPE.layers)


def test_a_job_with_a_short_batch_does_not_make_the_others_pay_for_it():
    """By itself it would take little: what counts is a step of all of them, in turns or together."""
    short, long = replace(jobs(1, tokens=64, rank=64)[0], longest=8), jobs(2, tokens=2048, rank=64)[1]
    memory = MemoryModel(SHAPE, int(21.6 * GIB), fused=True)
    offloaded, place = offloading(memory, 1 << 50), gpu_device(0, 0, 25e9, 165e12, 1e12)
    assert [len(turn) for turn in job_groups([short, long], memory)] == [1, 1]
    assert [len(turn) for turn in job_groups([short, long], offloaded)] == [2]
    assert not is_worth(offloaded, memory, [short, long], place, 8192)
    longer = replace(long, batch_tokens=64 * 1024)
    assert is_worth(offloaded, memory, [short, longer], place, 8192)


def unmeasured(_budget, _host, _workers):
    raise AssertionError("nobody needs to know")


def test_nothing_is_measured_where_every_job_is_aboard_with_all_the_room_it_wants():
    assert len(choose(SHAPE, jobs(4), replace(gpu(60), gpu=unmeasured)).attached) == 4


def test_jobs_that_are_all_aboard_get_room_for_what_would_be_recomputed():
    asked = jobs(8)
    found, without = (choose(SHAPE, asked, replace(gpu(25), host_budget=host)) for host in (1 << 50, 0))
    assert (found.layout, len(found.attached)) == (OFFLOADED, 8)
    assert (without.layout, len(without.attached)) == (one_device(SHAPE.layers), 8)
    before, after = (one.memory.recompute(asked, 8192).layers for one in (without, found))
    assert before > after
    assert f"{after} layers are recomputed instead of {before}" in found.why


def test_jobs_on_a_quantised_base_get_room_for_larger_microbatches():
    """A matrix is dequantised for every microbatch, so fewer of them take less time; one that is stored as it
    is multiplied gains nothing by it."""
    asked, quantised = jobs(16), replace(SHAPE, site_bytes_per_value=0.52)
    tight = gpu(27)
    found, without = (choose(quantised, asked, replace(tight, host_budget=host)) for host in (1 << 50, 0))
    assert (found.layout, len(found.attached)) == (OFFLOADED, 16)
    assert (without.layout, len(without.attached)) == (one_device(SHAPE.layers), 16)
    after, before = (one.memory.capacity(asked, 8192, Recompute(outputs=True)) for one in (found, without))
    assert after > 1.3 * before
    assert f"microbatches have {after:,} tokens with it and {before:,} without, and the GPU" in found.why


def test_few_tokens_hide_no_steps_so_nothing_is_gained():
    assert choose(SHAPE, jobs(8, tokens=32), gpu(25)).layout == one_device(SHAPE.layers)


def test_on_a_cpu_there_is_no_other_memory():
    machine = Machine(on_gpu=False, budget=30 * GIB, host_budget=1 << 50)
    assert choose(SHAPE, jobs(32), machine).layout == one_device(SHAPE.layers)


def test_beside_a_base_that_is_loaded_already_a_job_may_fit_only_so():
    large = jobs(1, rank=256)
    machine = gpu(24)
    assert machine.stream_budget is None
    found = choose(SHAPE, large, machine)
    assert (found.layout, found.attached) == (OFFLOADED, tuple(large))
    assert choose(SHAPE, large, replace(machine, host_budget=0)).attached == ()


def test_steps_are_hidden_behind_passes_of_the_other_group_as_far_as_those_are_long():
    def seconds(first, second):
        return OffloadedRound(*zip(first, second, strict=True)).seconds

    bare = 1 / TRAVEL_ROUNDS
    assert seconds((2.0, 3.0), (0.0, 0.0)) == 5.0
    assert seconds((4.0, 2.0), (4.0, 2.0)) == pytest.approx(8.0 + 2 * bare)
    assert seconds((4.0, 8.0), (4.0, 8.0)) == pytest.approx(16.0 + 8 * bare)
    assert seconds((6.0, 3.0), (2.0, 1.0)) == pytest.approx(9.0 + bare)
    uneven = OffloadedRound((6.0, 2.0), (3.0, 1.0))
    assert uneven.unhidden == pytest.approx(1.0 + bare)


def test_steps_take_the_link_as_fast_as_it_is_both_ways_where_that_was_measured():
    """Twelve bytes of every parameter come while as many go."""
    memory, asked = offloading(MemoryModel(SHAPE, 60 * GIB, fused=True), 1 << 50), jobs(2)
    plain, measured = (gpu_device(0, 0, 25e9, 300e12, 1e12, both_ways=rate) for rate in (None, 5e9))
    for place, rate in ((plain, 25e9), (measured, 5e9)):
        found = offloaded_round(memory, asked, place, 8192)
        assert found.transfer_seconds == pytest.approx(tuple(12 * job.trainable / rate for job in asked))


def test_what_a_window_takes_knows_of_unhidden_steps():
    found = choose(SHAPE, jobs(32), gpu(32))
    assert 0 < found.unhidden < 0.2
    parameters = sum(job.trainable for job in found.attached)
    seconds = found.unhidden_steps(len(found.attached), parameters)
    assert 0 < seconds < 2.0
    assert found.rounds == TRAVEL_ROUNDS


def test_twelve_bytes_of_a_parameter_are_the_hosts_and_six_stay():
    plain = MemoryModel(SHAPE, 30 * GIB, fused=True)
    memory = offloading(plain, 1 << 50)
    some, more = jobs(4), jobs(8)
    for model, each in ((plain, 18), (memory, 6)):
        grown = model.peak_bytes(more, 512) - model.peak_bytes(some, 512)
        assert grown == each * sum(job.trainable for job in more[4:])
    assert memory.host_bytes(more) == 12 * sum(job.trainable for job in more)
    assert plain.host_bytes(more) == 0
