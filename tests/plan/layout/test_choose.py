"""How to run is decided in one place: which layout each machine gets, for whom, and by which memory."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from tests.plan import costs
from tests.plan.outlooks import SHAPE, outline
from tests.plan.profiles import profile
from weftune.core.shapes import LayerRange
from weftune.errors import PlanError
from weftune.jobs.store.scheduler import admit_jobs
from weftune.plan.cost.memory import SLACK_BYTES, MemoryModel, decoder_row_bytes
from weftune.plan.cost.prior import uncalibrated_cost_model
from weftune.plan.cost.profile_cost import fit_profile_memory
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.layout.choose import (
    PIPELINE_ROUNDS,
    WINDOW_ROUNDS,
    LayoutChoice,
    Machine,
    choose_layout,
    fitting_jobs,
)
from weftune.plan.layout.need import gpu_device
from weftune.plan.layout.stages import cut_layers
from weftune.plan.program.layout import one_device_layout, pipeline_layout
from weftune.plan.window.pace import WindowPace, first_pace

GIB = 1 << 30


def measure_gpu(budget: int, host: int, _workers: int):
    return gpu_device(budget, host, 25e9, 300e12, 1e12)


def gpu(gib: float, **changes) -> Machine:
    return Machine(
        on_gpu=True,
        budget_bytes=int(gib * GIB),
        host_budget_bytes=1 << 50,
        measure_gpu=measure_gpu,
        **changes,
    )


def shapes(count: int, rank: int = 16):
    jobs = [outline(f"job{at}", 300, rank=rank).shape for at in range(count)]
    return [
        replace(job, file_position=at, batch_tokens=8 * job.max_sample_tokens) for at, job in enumerate(jobs)
    ]


@cache
def chosen(machine: Machine, count: int = 2, rank: int = 16) -> LayoutChoice:
    return choose_layout(SHAPE, shapes(count, rank), machine)


def test_a_base_that_fits_a_device_lies_there_whole():
    found = chosen(gpu(70, stream_budget_bytes=70 * GIB))
    assert found.layout == one_device_layout(SHAPE.layers)
    assert (found.is_streamed, found.window_rounds, found.capacity) == (False, WINDOW_ROUNDS, 8192)
    assert found.user_note == "", "a run says nothing of what everybody expects"
    assert (found.memory.process_bytes, found.peak_device_bytes) == (
        0,
        found.memory.peak_bytes(shapes(2), 8192),
    )
    assert found.first_pace == first_pace(uncalibrated_cost_model(SHAPE), SHAPE, on_gpu=True, max_tokens=8192)


@pytest.mark.slow
def test_memory_for_answers_is_reserved_and_a_divided_or_streamed_base_refuses_to_generate():
    jobs = [replace(one, answer_positions=1000 * (at + 1)) for at, one in enumerate(shapes(2))]
    found, plain = choose_layout(SHAPE, jobs, gpu(70, stream_budget_bytes=70 * GIB)), chosen(gpu(70))
    assert found.memory.decoder_bytes == 2000 * decoder_row_bytes(SHAPE) > 0
    assert found.peak_device_bytes == plain.peak_device_bytes + found.memory.decoder_bytes
    assert choose_layout(SHAPE, shapes(2), gpu(70, decoder_bytes=77)).memory.decoder_bytes == 77
    for machine in (gpu(70, workers=2), gpu(70, replicas=2), gpu(12, stream_budget_bytes=12 * GIB)):
        with pytest.raises(PlanError, match=r"generated on one device .* leave eval\.generate out"):
            choose_layout(SHAPE, jobs, machine)
        assert chosen(machine).memory.decoder_bytes == 0


def test_a_job_that_fits_only_without_its_answers_is_not_admitted_with_them():
    one = shapes(1)[0]
    asking = replace(one, answer_positions=1 << 20)
    least = choose_layout(SHAPE, [one], gpu(70)).memory.least_bytes([one])
    tight = gpu((least + GIB) / GIB)
    assert choose_layout(SHAPE, [one], tight).attached_jobs == (one,)
    memory = choose_layout(SHAPE, [asking], tight).memory
    assert "available" in memory.misfit_reason([asking])
    assert "eval.generate" in memory.advice(asking)


def test_a_base_that_does_not_fit_is_streamed_unless_it_is_loaded_already():
    found = chosen(gpu(12, stream_budget_bytes=12 * GIB))
    assert found.is_streamed
    assert any(not stage.is_resident for stage in found.layout.stages)
    assert found.peak_device_bytes <= 12 * GIB < SHAPE.base_bytes
    assert found.user_note == f"The base is {found.reason}."
    assert found.window_rounds == (TRAVEL_ROUNDS if found.layout.adapters_travel else WINDOW_ROUNDS)
    assert found.first_pace == WindowPace(round_seconds=found.round_seconds)
    assert not chosen(gpu(12)).is_streamed


def test_several_workers_hold_a_stage_each_and_stream_only_where_it_does_not_fit():
    found = chosen(gpu(24, workers=4, stream_budget_bytes=24 * GIB))
    assert found.layout.is_pipeline
    assert (found.layout.workers, found.window_rounds) == (4, PIPELINE_ROUNDS)
    tight = chosen(gpu(5, workers=4, stream_budget_bytes=5 * GIB))
    assert (tight.is_streamed, tight.layout.workers, tight.layout.is_pipeline) == (True, 4, False)
    assert tight.peak_device_bytes <= 5 * GIB
    assert tight.load_pace is not None
    assert tight.window_rounds == PIPELINE_ROUNDS


def test_without_a_gpu_a_worker_streams_where_its_part_is_a_byte_too_large():
    layout = pipeline_layout(cut_layers(SHAPE, 2))
    need = MemoryModel(SHAPE, 0, layout=layout, fixed_slack_bytes=0).least_bytes(shapes(1))
    fields = {"on_gpu": False, "budget_bytes": 70 * GIB, "host_budget_bytes": 1 << 50, "workers": 2}
    fits, lacks = (Machine(stream_budget_bytes=budget, **fields) for budget in (need, need - 1))
    assert not chosen(fits, 1).is_streamed
    assert chosen(lacks, 1).is_streamed


def test_only_one_of_several_workers_without_gpus_holds_the_rows_and_the_tokenizer():
    known = replace(profile(), first_worker_bytes=100, worker_bytes=23)
    fields = {"on_gpu": False, "budget_bytes": GIB, "workers": 2, "worker_profile": known}
    assert Machine(**fields).first_only_bytes == 77
    for other in ({"on_gpu": True}, {"workers": 1}, {"worker_profile": None}):
        assert Machine(**fields | other).first_only_bytes == 0


def test_replicas_of_one_worker_hold_all_of_the_base():
    found = chosen(gpu(70, workers=1, replicas=2))
    assert (len(found.layout.stages), found.layout.replicas) == (1, 2)


def test_where_nothing_fits_it_says_what():
    with pytest.raises(PlanError, match="one layer of the base needs"):
        chosen(gpu(2, stream_budget_bytes=2 * GIB))


@pytest.mark.parametrize("gib", [22, 26, 40])
def test_those_aboard_are_whom_the_scheduler_admits(gib):
    jobs = shapes(6, rank=64)
    jobs[1] = replace(jobs[1], trainable_parameters=10**11)
    jobs[4] = replace(jobs[4], priority=1)
    found = choose_layout(SHAPE, jobs, gpu(gib))
    assert (
        tuple(job.name for job in found.attached_jobs)
        == admit_jobs(jobs, [], found.memory.misfit_reason).admitted_names
    )
    assert found.attached_jobs == fitting_jobs(jobs, found.memory)


@pytest.mark.parametrize("seed", range(20))
def test_of_random_jobs_those_aboard_are_whom_the_scheduler_admits(seed):
    dice = random.Random(seed)
    jobs = [
        replace(
            job,
            max_sample_tokens=dice.choice([50, 300, 2000]),
            trainable_parameters=dice.choice([10**6, 10**7, 10**8, 10**11]),
            parameters_by_layer=(),
            priority=dice.randint(0, 2),
            source_job=dice.choice(["", "", "job0"]) if at else "",
        )
        for at, job in enumerate(shapes(12))
    ]
    memory = MemoryModel(SHAPE, dice.randint(17, 30) * GIB, uses_fused_ops=True)
    attached_jobs = fitting_jobs(jobs, memory)
    assert (
        tuple(job.name for job in attached_jobs) == admit_jobs(jobs, [], memory.misfit_reason).admitted_names
    )


def test_who_is_aboard_is_found_without_counting_all_of_them_for_each(monkeypatch):
    looked = []
    why_not = MemoryModel.misfit_reason

    def counted(memory, jobs):
        looked.append(len(jobs))
        return why_not(memory, jobs)

    monkeypatch.setattr(MemoryModel, "misfit_reason", counted)
    memory = MemoryModel(SHAPE, 200 * GIB, uses_fused_ops=True)
    for many in (250, 1000):
        looked.clear()
        assert 0 < len(fitting_jobs(shapes(many, rank=8), memory)) <= many
        assert sum(looked) <= many * (2 + many.bit_length())


def test_the_stage_that_needs_most_is_counted_and_not_the_one_with_the_most_weights():
    """An end has a large matrix; what stands between has more layers, which keep more."""
    cuts = (0, 8, 17, 26, SHAPE.layers)
    held = [LayerRange(start, stop, SHAPE.layers) for start, stop in pairwise(cuts)]
    memory = MemoryModel(SHAPE, 20 * GIB, uses_fused_ops=True, layout=pipeline_layout(held))
    needs = [need.total_bytes(memory.fit) for need in memory.worker_needs(shapes(1), 8192)]
    assert needs.index(max(needs)) in (1, 2)
    assert memory.peak_bytes(shapes(1), 8192) == max(needs)
    capacity = memory.choose_capacity(shapes(1), 8192)
    assert memory.peak_bytes(shapes(1), capacity) <= memory.budget_bytes


@pytest.mark.parametrize("known", [None, profile()])
def test_a_pretended_device_counts_the_process_and_what_of_the_base_waits_in_the_same_memory(known):
    taken, budget = 70 << 20, costs.SHAPE.base_bytes * 3 // 4
    machine = Machine(
        on_gpu=False,
        budget_bytes=8 * GIB,
        process_bytes=taken,
        stream_budget_bytes=budget,
        host_budget_bytes=8 * GIB,
        profile=known,
    )
    job = replace(
        shapes(1)[0], trainable_parameters=1000, max_sample_tokens=8, batch_tokens=8, parameters_by_layer=()
    )
    found = choose_layout(costs.SHAPE, [job], machine)
    assert found.is_streamed
    assert found.host_bytes > 0
    slack = 0
    if known is not None:
        fit = fit_profile_memory(known, MemoryModel(costs.SHAPE, 8 * GIB, taken))
        slack = int(fit.slack * SLACK_BYTES)
        assert slack > 0
    assert found.memory.process_bytes == taken + found.host_bytes + slack
    head = int(found.memory.fit.head * found.memory.logit_bytes(math.inf))
    assert found.memory.budget_bytes == budget + found.memory.process_bytes + head


def test_a_job_waits_for_its_source_only_if_that_is_among_the_jobs():
    """The adapter of a source that was trained before is there already."""
    first, second, third = shapes(3)
    jobs = [first, replace(second, source_job="job0"), replace(third, source_job="before")]
    assert [job.name for job in fitting_jobs(jobs, MemoryModel(SHAPE, 70 * GIB, uses_fused_ops=True))] == [
        "job0",
        "job2",
    ]
