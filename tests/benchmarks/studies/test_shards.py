"""The launch order is legal, hides communication, and its timeline keeps to the two lanes; devices that share
layers pay for their collectives, and another group hides a part of it."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.placement import ClusterCase, cluster_case
from benchmarks.studies.scheme import Scheme
from benchmarks.studies.shards import (
    Operator,
    OperatorKind,
    overlap,
    sharded_forecast,
    sharded_placement,
    subgraphs,
)
from tests.cases import is_within
from tests.plan.outlooks import SHAPE, outlines
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.program.prices import Link

COMPUTE, COMMUNICATION, ADAPTER = OperatorKind.compute, OperatorKind.communication, OperatorKind.adapter


def layers(count: int, matmul: float = 1.0, reduce: float = 1.0, adapter: float = 0.1):
    """Blocks as tensor parallelism runs them: a norm, a linear with its adapter, the sum, an all-reduce."""
    made = []
    before = ()
    for index in range(count):
        norm, linear, lora, total, gather = (
            f"{n}{index}" for n in ("norm", "linear", "lora", "add", "reduce")
        )
        made += [
            Operator(norm, COMPUTE, 0.05, before),
            Operator(linear, COMPUTE, matmul, (norm,)),
            Operator(lora, ADAPTER, adapter, (norm,)),
            Operator(total, COMPUTE, 0.05, (linear, lora)),
            Operator(gather, COMMUNICATION, reduce, (total,)),
        ]
        before = (gather,)
    return tuple(made)


@st.composite
def graphs(draw):
    """Up to three graphs of up to nine operators of all kinds, each needing some of those before it."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        operators = []
        for index in range(draw(st.integers(1, 9))):
            needs = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
            kind = draw(st.sampled_from(OperatorKind))
            operators.append(
                Operator(f"op{index}", kind, draw(st.floats(0, 3)), tuple(f"op{n}" for n in sorted(needs)))
            )
        made.append(tuple(operators))
    return made


def test_a_block_is_cut_into_its_run_its_adapter_and_the_sum_with_its_communication():
    cut = subgraphs(layers(2))
    assert [[one.name for one in subgraph.operators] for subgraph in cut] == [
        ["norm0", "linear0"],
        ["lora0"],
        ["add0", "reduce0"],
        ["norm1", "linear1"],
        ["lora1"],
        ["add1", "reduce1"],
    ]
    assert [subgraph.depth for subgraph in cut] == [0, 1, 2, 3, 4, 5]
    assert [subgraph.needs for subgraph in cut] == [(), (0,), (0, 1), (2,), (3,), (3, 4)]


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_subgraphs_hold_every_operator_once_and_need_only_shallower_ones(drawn):
    for graph in drawn:
        cut = subgraphs(graph)
        assert sorted(one.name for each in cut for one in each.operators) == sorted(one.name for one in graph)
        for each in cut:
            assert all(cut[need].depth < each.depth for need in each.needs)
            assert each.depth == max((cut[need].depth + 1 for need in each.needs), default=0)
            kinds = {one.kind for one in each.operators}
            assert kinds <= {COMPUTE, COMMUNICATION} or ADAPTER in kinds
            if COMMUNICATION not in kinds:
                assert len(kinds) == 1
            inside = {one.name for one in each.operators}
            silent = {one.name for one in each.operators if one.kind is COMMUNICATION}
            assert not any(need in silent & inside for one in each.operators for need in one.needs)


def test_communication_goes_with_its_producer():
    graph = (
        Operator("a", COMPUTE, 1),
        Operator("b", COMMUNICATION, 1, ("a",)),
        Operator("c", COMPUTE, 1, ("b",)),
    )
    assert [[one.name for one in each.operators] for each in subgraphs(graph)] == [["a", "b"], ["c"]]


def test_algorithm_1_takes_the_shallowest_first_and_of_those_the_longest():
    short, long = layers(1, matmul=1.0), (Operator("x", COMPUTE, 5.0),)
    order = overlap([short, long]).by_depth.order
    assert [(one.graph, one.depth) for one in order] == [(1, 0), (0, 0), (0, 1), (0, 2)]


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_every_operator_runs_once_after_what_it_needs_and_lanes_do_one_thing_at_a_time(drawn):
    found = overlap(drawn)
    for launch in (found.sequential, found.by_depth, found.by_start):
        spans = {(span.graph, span.operator): span for span in (*launch.compute, *launch.communication)}
        assert len(spans) == len(launch.compute) + len(launch.communication) == sum(map(len, drawn))
        for number, graph in enumerate(drawn):
            for operator in graph:
                span = spans[number, operator.name]
                assert span.stop == span.start + operator.seconds
                assert all(spans[number, need].stop <= span.start for need in operator.needs)
        for lane in (launch.compute, launch.communication):
            assert all(one.stop <= other.start for one, other in pairwise(lane))
        assert launch.seconds == max(span.stop for span in spans.values())


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_the_best_order_is_never_slower_than_one_graph_after_another(drawn):
    found = overlap(drawn)
    assert found.best.seconds <= min(found.sequential.seconds, found.by_depth.seconds)


def test_in_step_two_groups_hide_one_of_two_communications_and_apart_they_hide_both():
    found = overlap([layers(16), layers(16)])
    # A block takes 1.2 of compute and 1.0 of communication; the two ends of the timeline hide nothing.
    assert found.sequential.seconds == pytest.approx(16 * 2 * 2.2 - 1.0, rel=0.01)
    assert found.by_depth.seconds == pytest.approx(16 * (2.4 + 1.0), rel=0.02)
    assert found.by_start.seconds == pytest.approx(16 * 2.4 + 1.0, rel=0.01)


@pytest.mark.parametrize("reduce", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_the_best_order_comes_near_the_busier_lane(groups, reduce):
    found = overlap([layers(16, reduce=reduce) for _ in range(groups)])
    compute = groups * 16 * 1.2
    assert compute < found.best.seconds <= 1.03 * compute


def test_a_single_group_has_nothing_to_hide_behind():
    found = overlap([layers(3)])
    assert found.best.seconds == found.sequential.seconds == pytest.approx(3 * 2.2)


def test_eight_groups_of_32_layers_are_ordered_in_under_two_seconds():
    began = time.process_time()
    overlap([layers(64) for _ in range(8)])
    assert is_within(time.process_time() - began, 2.0)


def test_an_operator_before_what_it_needs_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="comes before"):
        subgraphs((Operator("a", COMPUTE, 1.0, ("b",)), Operator("b", COMPUTE, 1.0)))


JOBS = outlines(4)
SCHEME = Scheme("weftune", (tuple(job.name for job in JOBS),))


def pipe(bandwidth: float) -> ClusterCase:
    return cluster_case(SHAPE, replace(parse_cluster("4xA100-80G"), link=Link(bandwidth)))


def seconds(bandwidth: float, hidden: bool) -> float:
    shards = sharded_placement(pipe(bandwidth), JOBS, 4096)
    return sharded_forecast(shards, 2, SCHEME, JOBS, hidden).seconds


def test_two_devices_as_one_have_both_s_memory_and_speed():
    shards = sharded_placement(pipe(1e12), JOBS, 4096)
    assert len(shards.stages) == 2
    one, two = pipe(1e12).cluster.devices[0], shards.case.cluster.devices[0]
    assert (two.memory_bytes, two.peak_flops) == (2 * one.memory_bytes, 2 * one.peak_flops)
    assert shards.case.speeds[0].flops == 2 * pipe(1e12).speeds[0].flops


def test_collectives_take_time_in_proportion_to_the_link():
    free, fast, slow = (seconds(bandwidth, hidden=False) for bandwidth in (1e18, 100e9, 50e9))
    assert free < fast < slow
    # Hops between stages grow as well, but are hidden save in the fill and the drain.
    assert (slow - free) / (fast - free) == pytest.approx(2, rel=0.1)


def test_another_group_s_compute_hides_collectives_that_are_shorter_than_it():
    plain, hidden, free = seconds(100e9, False), seconds(100e9, True), seconds(1e18, True)
    assert hidden < plain
    assert hidden < 1.1 * free


def test_all_devices_of_a_stage_count():
    shards = sharded_placement(pipe(1e12), JOBS, 4096)
    found = sharded_forecast(shards, 2, SCHEME, JOBS, interleave=False)
    assert found.devices == 4
    assert 0 <= found.bubbles < 1
