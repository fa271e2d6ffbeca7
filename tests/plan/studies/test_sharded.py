"""Devices that share layers: what collectives cost, and what of it another group hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.outlooks import SHAPE, outlines
from weftune.plan.cost.cluster import parse_cluster
from weftune.plan.program.prices import Link
from weftune.plan.studies.fit import ClusterCase, make_ground
from weftune.plan.studies.scheme import Scheme
from weftune.plan.studies.sharded import make_shards, sharded_forecast

JOBS = outlines(4)
SCHEME = Scheme("weftune", (tuple(job.name for job in JOBS),))


def pipe(bandwidth: float) -> ClusterCase:
    return make_ground(SHAPE, replace(parse_cluster("4xA100-80G"), link=Link(bandwidth)))


def seconds(bandwidth: float, hidden: bool) -> float:
    shards = make_shards(pipe(bandwidth), JOBS, 4096)
    return sharded_forecast(shards, SCHEME, JOBS, hidden).seconds


def test_two_devices_as_one_have_both_s_memory_and_speed():
    shards = make_shards(pipe(1e12), JOBS, 4096)
    assert len(shards.layout.stages) == 2
    one, two = pipe(1e12).cluster.devices[0], shards.ground.cluster.devices[0]
    assert (two.memory_bytes, two.peak) == (2 * one.memory_bytes, 2 * one.peak)
    assert shards.ground.speeds[0].flops == 2 * pipe(1e12).speeds[0].flops


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
    shards = make_shards(pipe(1e12), JOBS, 4096)
    found = sharded_forecast(shards, SCHEME, JOBS, hidden=False)
    assert found.devices == 4
    assert 0 <= found.bubbles < 1
