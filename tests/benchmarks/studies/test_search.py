from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rivals import at_its_best, greedily_packed, one_piped_after_another
from benchmarks.studies.ablate import ablate
from benchmarks.studies.placement import (
    SAME_TIME_SHARE,
    cluster_case,
    cut_stages,
    full_rows,
    misfit_reason,
    placements,
    recompute_cases,
)
from benchmarks.studies.scheme import SchemeOrder, run_scheme
from benchmarks.studies.search import PIPELINE_ORDERS, candidates, outlook
from tests.plan.outlooks import PARAMETERS, SHAPE, ground, outline, outlines
from weftune.errors import PlanError
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.cost.estimate import data_sheet_speed
from weftune.plan.program.check import check
from weftune.plan.program.program import NOTHING

FOUR = "4xA100-80G:pcie"
RIVALS = (one_piped_after_another, greedily_packed)


@pytest.fixture(scope="module")
def four():
    return outlook(ground(FOUR), outlines(4))


def rivals(found):
    where = placements(found.placement.case, found.jobs)
    return [at_its_best(way(found.jobs), where, found.jobs) for way in RIVALS]


def test_the_weights_of_all_layers_are_those_of_the_base():
    assert SHAPE.parameters == PARAMETERS
    layers = ground("H200").layers
    assert sum(layer.weight_bytes for layer in layers) == SHAPE.base_bytes
    tied = replace(SHAPE, parameters=PARAMETERS - SHAPE.vocabulary * SHAPE.hidden)
    assert (
        sum(layer.weight_bytes for layer in cluster_case(tied, parse_cluster("H200")).layers)
        == tied.base_bytes
    )
    apart = cluster_case(tied, parse_cluster("2xH200")).layers
    assert sum(layer.weight_bytes for layer in apart) == SHAPE.base_bytes, "both ends hold the tied matrix"


def test_one_device_is_never_idle_and_no_way_is_faster():
    found = outlook(ground("A100-80G"), outlines(3))
    assert found.forecast.bubbles == pytest.approx(0, abs=1e-9)
    assert all(one.seconds >= found.forecast.seconds for one in rivals(found))
    tokens = sum(sum(batch) for job in found.jobs for batch in job.batches)
    assert found.forecast.tokens_per_second == pytest.approx(tokens / found.forecast.seconds)


def test_the_time_on_one_device_is_its_flops_over_the_stated_share():
    """Long samples of one job: all but attention, adapters and launches is arithmetic of the base."""
    job = replace(outline("a", 100), batches=((2048,) * 16,))
    seconds = outlook(ground("A100-80G"), [job]).forecast.seconds
    products = 4 * 2048 * 16 * (PARAMETERS - SHAPE.vocabulary * SHAPE.hidden) / (0.6 * 312e12)
    assert products < seconds < 1.35 * products


def test_a_pipeline_beats_every_alternative_and_each_device_has_room(four):
    assert len(four.placement.stages) == 4
    others = rivals(four)
    assert [one.name for one in others] == ["1F1B per job", "greedy packing only"]
    assert all(one.seconds >= four.forecast.seconds for one in others)
    slowest = max(one.bubbles for one in others)
    assert four.forecast.bubbles < 0.25 < slowest
    assert four.forecast.fits
    scheme = replace(four.scheme, order=SchemeOrder.alternating)
    alternating = run_scheme(scheme, four.jobs, four.placement).forecast
    needs = zip(alternating.peaks, four.placement.need_bytes, strict=True)
    assert all(peak + four.placement.other_bytes <= need * 1.01 for peak, need in needs)


def test_the_head_is_counted_when_the_base_is_cut(four):
    counted = four.placement.stages
    blind = cut_stages(four.placement.case, four.jobs, four.placement.capacity, count_ends=False).stages
    assert counted[-1].stop - counted[-1].start < blind[-1].stop - blind[-1].start
    assert max(stage.seconds for stage in counted) < max(stage.seconds for stage in blind)


def test_an_ablation_has_a_row_for_each_mechanism_and_none_of_them_gains(four):
    rows = ablate(four)
    names = [row.mechanism for row in rows]
    assert list(dict.fromkeys(names))[:5] == ["packing", "merging", "sharing", "order", "partition"]
    assert {row.alternative for row in rows if row.mechanism == "order"} | {four.scheme.order} == {
        *PIPELINE_ORDERS,
        SchemeOrder.gpipe,
    }
    assert len([row for row in rows if row.alternative.startswith("groups by")]) == 4
    costs = {row.alternative: row.relative_cost for row in rows if not row.is_added}
    added = [row for row in rows if row.is_added]
    assert [row.alternative for row in added[:2]] == ["groups by fusion", "groups by buckets"]
    assert [row.mechanism for row in added[2:]] == ["chunks", "tensor parallelism", "subgraph order"]
    assert min(costs.values()) >= -SAME_TIME_SHARE
    assert costs["embedding and head not counted"] > 0.01
    assert costs["GPipe"] > 0.01


def test_what_is_made_again_is_what_memory_asks_for():
    """24 GiB hold the base and little else; 80 hold every activation of a full microbatch."""
    jobs = [outline(f"job{number}", 400, batch=16) for number in range(4)]
    tight, roomy = outlook(ground("RTX4090"), jobs), outlook(ground("A100-80G"), jobs)
    assert roomy.placement.capacity == 8192
    assert roomy.placement.case.recompute == NOTHING
    assert tight.placement.case.recompute.recomputes_outputs
    assert max(tight.placement.need_bytes) <= min(tight.placement.budgets)


def test_layers_made_again_hold_less_and_take_a_forward_more():
    keeping, _, making = recompute_cases(ground("A100-80G"))
    jobs = outlines(2)
    rows = full_rows(jobs, 2048)
    kept, made = keeping.costs(jobs, rows)[1], making.costs(jobs, rows)[1]
    assert made.backward == pytest.approx(kept.backward + kept.forward)
    assert made.kept_bytes == 2048 * SHAPE.hidden * 2 < kept.kept_bytes / 5
    assert cut_stages(making, jobs, 2048).need_bytes < cut_stages(keeping, jobs, 2048).need_bytes


def test_measured_speeds_take_the_place_of_the_data_sheet():
    cluster = parse_cluster("A100-80G")
    sheet = data_sheet_speed(cluster.devices[0])
    slow = replace(sheet, flops=sheet.flops / 2, adapter_flops=sheet.adapter_flops / 2, source="measured")
    jobs = outlines(2)
    fast_run = outlook(cluster_case(SHAPE, cluster), jobs)
    slow_run = outlook(cluster_case(SHAPE, cluster, [slow]), jobs)
    assert slow_run.source == "measured"
    assert 1.8 < slow_run.forecast.seconds / fast_run.forecast.seconds <= 2.0


def test_a_job_that_does_not_fit_even_alone_is_named_with_its_numbers():
    with pytest.raises(
        PlanError, match=r"^job job0: even alone it needs \d+\.\d+ GiB .* 13\.\d+ GiB are avail"
    ):
        outlook(ground("T4"), outlines(1))
    with pytest.raises(
        PlanError, match=r"job job1: even alone .* stage \d needs .* but its device has 10\.98"
    ):
        outlook(ground("2xT4"), [outline("job1", 2000, rank=512)])


def test_a_job_without_samples_is_named():
    with pytest.raises(PlanError, match="job empty: it has 0 samples"):
        outlook(ground("H200"), [outline("a", 100), replace(outline("empty", 1), batches=((),))])


def test_a_device_without_room_for_anything_is_named():
    small = parse_cluster("T4")
    device = replace(small.devices[0], memory_bytes=2 << 30)
    with pytest.raises(PlanError, match=r"1xT4: 1\.84 GiB may be taken of a device, but 2\.25 GiB"):
        outlook(cluster_case(SHAPE, replace(small, devices=(device,))), outlines(1))


def test_too_many_jobs_are_refused_as_a_whole():
    place = ground("RTX4090")
    many = [outline(f"job{number}", 100, rank=16) for number in range(8)]
    assert misfit_reason(place, many[:1]) is None
    assert "with 7 other jobs running" in (misfit_reason(place, many) or "")
    with pytest.raises(PlanError, match="do not fit together"):
        outlook(place, many)


def test_of_many_ways_few_are_simulated():
    """What keeps 32 jobs on 8 devices within seconds: an order that cannot win is not simulated."""
    jobs = [outline(f"job{number}", 100 + 10 * number, batch=4, rounds=2) for number in range(32)]
    found = outlook(ground("8xA100-80G:pcie"), jobs)
    proposals = set(candidates(jobs, found.placement).items())
    assert len(proposals) * len(PIPELINE_ORDERS) >= 6
    assert 1 <= len(found.simulated_schemes) <= 4


def test_each_rival_has_the_capacity_that_suits_it_best(four):
    where = placements(four.placement.case, four.jobs)
    for way, one in zip(RIVALS, rivals(four), strict=True):
        everywhere = [at_its_best(way(four.jobs), [place], four.jobs) for place in where]
        same = [other for other in everywhere if other.fits]
        assert len(same) >= 3
        assert one.seconds <= min(other.seconds for other in same) * 1.01


@settings(max_examples=12, deadline=None)
@given(
    cluster=st.sampled_from(["H100", "2xA100-40G", "3xL40S", "8xH200"]),
    jobs=st.lists(
        st.lists(st.lists(st.integers(2, 900), min_size=1, max_size=5), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    ),
)
def test_every_program_is_legal_and_trains_every_sample(cluster, jobs):
    made = []
    for number, batches in enumerate(jobs):
        job = outline(f"job{number}", 10)
        lengths = tuple(map(tuple, batches))
        longest = max(map(max, lengths))
        made.append(replace(job, batches=lengths, shape=replace(job.shape, max_sample_tokens=longest)))
    found = outlook(ground(cluster), made)
    program = found.run.program
    check(program)
    held = [
        placed.length
        for microbatch in program.microbatches
        for segment in microbatch.segments
        for placed in segment.samples
    ]
    assert sorted(held) == sorted(length for batches in jobs for batch in batches for length in batch)
