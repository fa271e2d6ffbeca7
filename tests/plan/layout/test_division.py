"""Several devices are divided as the fastest of all divisions that fit, and the simplest of those that are as
fast."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import pytest

from tests.cases import is_within, slow_but
from tests.plan.costs import SHAPE
from tests.plan.program.test_check import course
from weftune.cli import early
from weftune.core.shapes import JobShape
from weftune.launch.choice import choose_planned_layout
from weftune.launch.plan_case import read_case
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import data_sheet_speed
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.time import NO_TIME
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.plan.layout.division import AUTO, Division, Workload
from weftune.plan.layout.foresee import StageTimes
from weftune.plan.outlook.forecast import price_window
from weftune.plan.program.prices import Link
from weftune.plan.program.program import Recompute

CLUSTER = parse_cluster("4xA100-80G")
FLOPS = data_sheet_speed(CLUSTER.devices[0]).flops
TIMES = StageTimes(
    SHAPE.layers, flop_terms(SHAPE).multiply_by(1 / FLOPS), NO_TIME, CLUSTER.link, 2 * SHAPE.hidden
)
WINDOWS = {
    name: course(name, [[size] * 4] * 2, evaluation=[])
    for name, size in (("a", 200), ("b", 300), ("c", 200), ("d", 500))
}
JOBS = [JobShape(name, 0, order, 10**5, 500, 4000) for order, name in enumerate(WINDOWS)]
EXAMPLE = Path(__file__).parents[3] / "examples" / "plan" / "70b.yaml"


def machine(gib=72.0, devices=4, **numbers):
    fields = {"workers": AUTO, "replicas": AUTO, "shards": AUTO, "shares": AUTO} | numbers
    return Machine(
        on_gpu=True,
        devices=devices,
        budget_bytes=int(gib * 2**30),
        device_flops=FLOPS,
        capacity=1024,
        **fields,
    )


def workload(names="abcd", times=TIMES, **changes):
    def job_window(name, rounds, begins):
        return replace(WINDOWS[name], batches=WINDOWS[name].batches[:rounds], evaluation=())

    def price(choice):
        return price_window(choice, job_window, times.divide_among_shards(SHAPE, choice.machine.shards))

    return Workload(
        windows={name: job_window(name, 2, False) for name in names},
        seconds={name: float(WINDOWS[name].batches[0].tokens) for name in names},
        shape=SHAPE,
        times=times,
        price=price,
        shard_counts=(1, 2, 4),
        **changes,
    )


def chosen(on, known, names="abcd"):
    return choose_layout(SHAPE, [job for job in JOBS if job.name in names], on, known)


@pytest.mark.parametrize("names", slow_but(["abcd", "ad", "d"], ["abcd", "d"]))
def test_no_division_that_flags_can_force_is_faster(names):
    known = workload(names)
    best = chosen(machine(), known, names).candidates[0]
    limits = known.search_space(Division(shares=AUTO, replicas=AUTO, stages=AUTO, shards=AUTO), 4)
    forced = list(limits.divisions(4))
    assert len(forced) > 10
    for one in forced:
        numbers = {"shares": one.shares, "replicas": one.replicas, "shards": one.shards}
        found = chosen(machine(workers=one.stages, **numbers), known, names).candidates
        assert [replace(each.division, capacity=None) for each in found] == [one]
        assert found[0].tokens_per_second <= best.tokens_per_second * 1.0101


def test_where_the_base_fits_one_device_shares_are_the_fastest_and_the_simplest():
    found = chosen(machine(devices=2), workload("ac"), "ac")
    assert found.machine.division.workers_per_share == 1
    assert found.machine.shares == 2
    assert found.candidates[0].division == replace(found.machine.division, capacity=1024)


def with_overlap(link, slower=1000.0, may_overlap=True, **fields):
    """The choice for two shards of devices that are slower than an A100."""
    terms = flop_terms(SHAPE).multiply_by(slower / FLOPS)
    times = StageTimes(SHAPE.layers, terms, NO_TIME, link, 2 * SHAPE.hidden)
    capacity = fields.pop("capacity", 1024)
    two = machine(**{"workers": 1, "replicas": 1, "shards": 2, "shares": 1, **fields})
    jobs = [replace(job, batch_tokens=WINDOWS[job.name].batches[0].tokens) for job in JOBS]
    known = workload(times=times, may_overlap=may_overlap)
    return choose_layout(SHAPE, jobs, replace(two, capacity=capacity), known)


SLOW_LINK = Link(bandwidth=1e8)


def test_microbatches_overlap_where_the_sums_of_shards_take_time():
    found, plain = with_overlap(SLOW_LINK), with_overlap(SLOW_LINK, may_overlap=False)
    assert found.layout.overlaps
    assert not plain.layout.overlaps
    assert "whose sums overlap with the computation of another microbatch" in found.reason
    best, second = found.candidates
    assert best.division.description == "2 shards whose microbatches overlap"
    assert second.division == plain.candidates[0].division
    assert (
        best.tokens_per_second > 1.1 * second.tokens_per_second == 1.1 * plain.candidates[0].tokens_per_second
    )
    assert best.needs_bytes > second.needs_bytes
    assert best.idle_fraction < second.idle_fraction


def test_microbatches_overlap_on_devices_that_are_divided_freely():
    found = with_overlap(SLOW_LINK, workers=AUTO, replicas=AUTO, shards=AUTO, shares=AUTO)
    assert found.candidates[0].tokens_per_second >= with_overlap(SLOW_LINK).candidates[0].tokens_per_second
    assert found.layout.overlaps == found.candidates[0].division.overlaps


def test_a_round_of_one_microbatch_is_divided_so_that_it_can_overlap():
    """The round of all jobs has 4,800 tokens."""
    found = with_overlap(SLOW_LINK, capacity=None)
    best = found.candidates[0]
    assert best.division.overlaps
    assert best.capacity == found.capacity == 2432
    assert with_overlap(SLOW_LINK, capacity=1024).candidates[0].capacity == 1024


@pytest.mark.parametrize(
    ("link", "slower"),
    [(Link(), 1000.0), (CLUSTER.link, 1.0)],
    ids=["sums take no time", "the host cannot launch half layers fast enough"],
)
def test_microbatches_do_not_overlap_where_that_gains_nothing(link, slower):
    found = with_overlap(link, slower)
    assert not found.layout.overlaps
    assert [one.division.overlaps for one in found.candidates] == [False, True]


def test_two_microbatches_that_overlap_have_room_in_memory_unless_layers_are_recomputed():
    memory = with_overlap(SLOW_LINK).memory
    plain = replace(memory, layout=replace(memory.layout, overlaps=False))
    again = Recompute(recomputed_layers=3)
    assert memory.bytes_per_token(jobs=JOBS) == 2 * plain.bytes_per_token(jobs=JOBS)
    assert memory.bytes_per_token(again, JOBS) == plain.bytes_per_token(again, JOBS)


def test_jobs_that_stay_together_are_not_divided_into_shares():
    assert chosen(machine(), workload(max_shares=1)).machine.shares == 1


def test_what_does_not_fit_in_memory_is_no_candidate():
    least = min(
        chosen(machine(workers=one, replicas=1, shards=1, shares=1), workload()).peak_device_bytes
        for one in (1, 2, 4)
    )
    found = chosen(machine(least / 2**30), workload())
    assert all(one.division.workers_per_share > 1 for one in found.candidates)
    assert all(one.needs_bytes <= least for one in found.candidates)
    assert not chosen(machine(0.5, workers=1, replicas=1, shards=1, shares=1), workload()).candidates


def test_idle_devices_count_as_idle():
    one = chosen(machine(shares=1, workers=1, replicas=1, shards=1), workload()).candidates[0]
    assert one.idle_fraction == pytest.approx(0.75, abs=0.01)
    assert one.limited_by == "devices"


def test_flags_name_what_is_not_one():
    assert Division().flags == ""
    assert Division(shares=2, stages=4, capacity=1024).flags == "--gpus 2 --pipeline 4 --capacity 1024"
    assert Division(replicas=2, shards=4).description == "2 replicas of 4 shards"


def example(cluster, jobs=8, **flags):
    none = dict.fromkeys(("device", "memory", "gpu_memory", "pipeline", "gpus"))
    options = early.read_options(**{**none, "replicas": 1, **flags})
    run = early.read_jobs_file(EXAMPLE)
    run = replace(run, jobs=run.jobs[:jobs])
    return read_case(run, parse_cluster(cluster), options, on_this_machine=False)


@pytest.mark.slow
def test_70b_on_eight_gpus_is_above_its_bar_with_no_gpu_idle():
    best = choose_planned_layout(example("8xH100")).candidates[0]
    assert best.tokens_per_second > 13_767
    assert best.division.devices == 8
    for flags in ({"pipeline": "8"}, {"shards": "8"}, {"shards": "4", "replicas": 2}, {"pipeline": "4"}):
        forced = choose_planned_layout(example("8xH100", **flags)).candidates
        assert all(one.tokens_per_second <= best.tokens_per_second for one in forced)


@pytest.mark.slow
def test_one_70b_job_on_eight_gpus_leaves_them_idle_for_less_than_15_percent():
    best = choose_planned_layout(example("8xH100", jobs=1)).candidates[0]
    assert best.idle_fraction < 0.15
    assert best.division.devices == 8


@pytest.mark.slow
def test_70b_with_64_jobs_on_64_gpus_takes_less_than_ten_seconds():
    case = example("64xH100")
    jobs = [
        replace(one, job=replace(one.job, shape=replace(one.shape, name=f"{one.name}-{number}")))
        for number in range(8)
        for one in case.jobs
    ]
    many = replace(case, jobs=[_renamed(one) for one in jobs])
    began = time.process_time()
    best = choose_planned_layout(many).candidates[0]
    assert is_within(time.process_time() - began, 10)
    assert best.division.devices == 64


def _renamed(job):
    """The job with a curriculum whose windows have its name."""
    window = partial(job.curriculum.job_window)
    name = job.name

    class Renamed:
        def job_window(self, *arguments):
            found = window(*arguments)
            batches = tuple(replace(one, job=name) for one in found.batches)
            return replace(found, job=name, batches=batches)

    return replace(job, curriculum=Renamed())


def test_the_divisions_of_four_devices_are_all_that_fit_on_them():
    limits = workload().search_space(Division(shares=AUTO, replicas=AUTO, stages=AUTO, shards=AUTO), 4)
    found = {astuple(one)[:4] for one in limits.divisions(4)}
    assert (2, 1, 2, 1) in found
    assert all(a * b * c * d <= 4 for a, b, c, d in found)
    assert {d for *_, d in found} == {1, 2, 4}
