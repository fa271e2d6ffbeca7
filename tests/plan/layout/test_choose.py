"""How to run is decided in one place: which layout each machine gets, for whom, and by which memory."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.plan import costs
from tests.plan.outlooks import SHAPE, outline
from tests.plan.profiles import profile
from weftune.core.shapes import LayerRange
from weftune.errors import PlanError
from weftune.jobs.store.scheduler import admit
from weftune.plan.cost.memory import SLACK_BYTES, MemoryModel
from weftune.plan.cost.prior import arithmetic
from weftune.plan.cost.profile_cost import memory_of
from weftune.plan.cost.ring import TRAVEL_ROUNDS
from weftune.plan.layout.choose import PIPELINE_ROUNDS, WINDOW_ROUNDS, Choice, Machine, choose, fitting
from weftune.plan.layout.need import gpu_device
from weftune.plan.layout.stages import cut_layers
from weftune.plan.program.layout import in_stages, one_device
from weftune.plan.window.pace import WindowPace, first_pace

GIB = 1 << 30


def gpu(gib: float, **changes) -> Machine:
    return Machine(
        on_gpu=True,
        budget=int(gib * GIB),
        host_budget=1 << 50,
        gpu=lambda budget, host, workers: gpu_device(budget, host, 25e9, 300e12, 1e12),
        **changes,
    )


def shapes(count: int, rank: int = 16):
    jobs = [outline(f"job{at}", 300, rank=rank).shape for at in range(count)]
    return [replace(job, order=at, batch_tokens=8 * job.longest) for at, job in enumerate(jobs)]


def chosen(machine: Machine, count: int = 2, rank: int = 16) -> Choice:
    return choose(SHAPE, shapes(count, rank), machine)


def test_a_base_that_fits_a_device_lies_there_whole():
    found = chosen(gpu(70, stream_budget=70 * GIB))
    assert found.layout == one_device(SHAPE.layers)
    assert (found.streamed, found.rounds, found.capacity) == (False, WINDOW_ROUNDS, 8192)
    assert found.note == "", "a run says nothing of what everybody expects"
    assert (found.memory.taken, found.bytes) == (0, found.memory.peak_bytes(shapes(2), 8192))
    assert found.first_pace == first_pace(arithmetic(SHAPE), SHAPE, on_gpu=True, max_tokens=8192)


def test_a_base_that_does_not_fit_is_streamed_unless_it_is_loaded_already():
    found = chosen(gpu(12, stream_budget=12 * GIB))
    assert found.streamed
    assert any(not stage.resident for stage in found.layout.stages)
    assert found.bytes <= 12 * GIB < SHAPE.base_bytes
    assert found.note == f"The base is {found.why}."
    assert found.rounds == (TRAVEL_ROUNDS if found.layout.travels else WINDOW_ROUNDS)
    assert found.first_pace == WindowPace(round_seconds=found.seconds)
    assert not chosen(gpu(12)).streamed


def test_several_workers_hold_a_stage_each_and_stream_only_where_it_does_not_fit():
    found = chosen(gpu(24, workers=4, stream_budget=24 * GIB))
    assert found.layout.pipelined
    assert (found.layout.workers, found.rounds) == (4, PIPELINE_ROUNDS)
    tight = chosen(gpu(5, workers=4, stream_budget=5 * GIB))
    assert (tight.streamed, tight.layout.workers, tight.layout.pipelined) == (True, 4, False)
    assert tight.bytes <= 5 * GIB
    assert tight.loads is not None
    assert tight.rounds == PIPELINE_ROUNDS


def test_without_a_gpu_a_worker_streams_where_its_part_is_a_byte_too_large():
    layout = in_stages(cut_layers(SHAPE, 2))
    need = MemoryModel(SHAPE, 0, layout=layout, slack=0).least_bytes(shapes(1))
    fields = {"on_gpu": False, "budget": 70 * GIB, "host_budget": 1 << 50, "workers": 2}
    fits, lacks = (Machine(stream_budget=budget, **fields) for budget in (need, need - 1))
    assert not chosen(fits, 1).streamed
    assert chosen(lacks, 1).streamed


def test_only_one_of_several_workers_without_gpus_holds_the_rows_and_the_tokenizer():
    known = replace(profile(), first_worker_bytes=100, worker_bytes=23)
    fields = {"on_gpu": False, "budget": GIB, "workers": 2, "worker_profile": known}
    assert Machine(**fields).first_only_bytes == 77
    for other in ({"on_gpu": True}, {"workers": 1}, {"worker_profile": None}):
        assert Machine(**fields | other).first_only_bytes == 0


def test_replicas_of_one_worker_hold_all_of_the_base():
    found = chosen(gpu(70, workers=1, replicas=2))
    assert (len(found.layout.stages), found.layout.replicas) == (1, 2)


def test_where_nothing_fits_it_says_what():
    with pytest.raises(PlanError, match="one layer of the base needs"):
        chosen(gpu(2, stream_budget=2 * GIB))


@pytest.mark.parametrize("gib", [22, 26, 40])
def test_those_aboard_are_whom_the_scheduler_admits(gib):
    jobs = shapes(6, rank=64)
    jobs[1] = replace(jobs[1], trainable=10**11)
    jobs[4] = replace(jobs[4], priority=1)
    found = choose(SHAPE, jobs, gpu(gib))
    assert tuple(job.name for job in found.attached) == admit(jobs, [], found.memory.why_not).admitted
    assert found.attached == fitting(jobs, found.memory)


@pytest.mark.parametrize("seed", range(20))
def test_of_random_jobs_those_aboard_are_whom_the_scheduler_admits(seed):
    dice = random.Random(seed)
    jobs = [
        replace(
            job,
            longest=dice.choice([50, 300, 2000]),
            trainable=dice.choice([10**6, 10**7, 10**8, 10**11]),
            parameters_by_layer=(),
            priority=dice.randint(0, 2),
            starts_from=dice.choice(["", "", "job0"]) if at else "",
        )
        for at, job in enumerate(shapes(12))
    ]
    memory = MemoryModel(SHAPE, dice.randint(17, 30) * GIB, fused=True)
    aboard = fitting(jobs, memory)
    assert tuple(job.name for job in aboard) == admit(jobs, [], memory.why_not).admitted


def test_who_is_aboard_is_found_without_counting_all_of_them_for_each(monkeypatch):
    looked = []
    why_not = MemoryModel.why_not

    def counted(memory, jobs):
        looked.append(len(jobs))
        return why_not(memory, jobs)

    monkeypatch.setattr(MemoryModel, "why_not", counted)
    memory = MemoryModel(SHAPE, 200 * GIB, fused=True)
    for many in (250, 1000):
        looked.clear()
        assert 0 < len(fitting(shapes(many, rank=8), memory)) <= many
        assert sum(looked) <= many * (2 + many.bit_length())


def test_the_stage_that_needs_most_is_counted_and_not_the_one_with_the_most_weights():
    """An end has a large matrix; what stands between has more layers, which keep more."""
    cuts = (0, 8, 17, 26, SHAPE.layers)
    held = [LayerRange(start, stop, SHAPE.layers) for start, stop in pairwise(cuts)]
    memory = MemoryModel(SHAPE, 20 * GIB, fused=True, layout=in_stages(held))
    needs = [need.total(memory.fit) for need in memory.worker_needs(shapes(1), 8192)]
    assert needs.index(max(needs)) in (1, 2)
    assert memory.peak_bytes(shapes(1), 8192) == max(needs)
    capacity = memory.capacity(shapes(1), 8192)
    assert memory.peak_bytes(shapes(1), capacity) <= memory.budget


@pytest.mark.parametrize("known", [None, profile()])
def test_a_pretended_device_counts_the_process_and_what_of_the_base_waits_in_the_same_memory(known):
    taken, budget = 70 << 20, costs.SHAPE.base_bytes * 3 // 4
    machine = Machine(
        on_gpu=False,
        budget=8 * GIB,
        taken=taken,
        stream_budget=budget,
        host_budget=8 * GIB,
        profile=known,
    )
    job = replace(shapes(1)[0], trainable=1000, longest=8, batch_tokens=8, parameters_by_layer=())
    found = choose(costs.SHAPE, [job], machine)
    assert found.streamed
    assert found.host_bytes > 0
    slack = 0
    if known is not None:
        fit = memory_of(known, MemoryModel(costs.SHAPE, 8 * GIB, taken))
        slack = int(fit.slack * SLACK_BYTES)
        assert slack > 0
    assert found.memory.taken == taken + found.host_bytes + slack
    head = int(found.memory.fit.head * found.memory.head_bytes(math.inf))
    assert found.memory.budget == budget + found.memory.taken + head


def test_a_job_waits_for_its_source_only_if_that_is_among_the_jobs():
    """The adapter of a source that was trained before is there already."""
    first, second, third = shapes(3)
    jobs = [first, replace(second, starts_from="job0"), replace(third, starts_from="before")]
    assert [job.name for job in fitting(jobs, MemoryModel(SHAPE, 70 * GIB, fused=True))] == ["job0", "job2"]
