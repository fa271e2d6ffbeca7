"""The outlook for a base that does not fit: streamed, with the uploads that compute does not hide."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.plan.outlooks import SHAPE, ground, outline, outlines
from weftune.errors import PlanError
from weftune.plan.cost.cluster import Cluster, cluster_from, parse_cluster
from weftune.plan.outlook.fit import make_ground
from weftune.plan.outlook.streamed import ablate_streams, must_stream, stream_outlook, why_not_streamed
from weftune.plan.outlook.streamed_explain import explain_streams
from weftune.plan.program.check import check
from weftune.plan.program.program import Load


def cards(roots: list[int], host: float = 8.0, memory: float = 6.0) -> Cluster:
    """Small cards whose links to the host are slow for what they compute."""
    card = {
        "name": "card",
        "count": sum(roots),
        "memory_gib": memory,
        "peak_tflops": 60,
        "bandwidth_gbs": 500,
    }
    values = {"devices": [card], "link": "pcie", "roots": roots, "host": {"bandwidth_gbs": host}}
    return cluster_from(values, "cluster.yaml")


@pytest.fixture(scope="module")
def one_card():
    return stream_outlook(ground("T4"), outlines(2))


def test_a_base_is_streamed_only_where_it_does_not_fit():
    assert must_stream(ground("T4"), outlines(1))
    assert not must_stream(ground("RTX4090"), outlines(1))


def test_the_plan_fits_and_loads_every_layer_but_what_stays(one_card):
    assert one_card.forecast.fits
    check(one_card.run.program)
    assert any(isinstance(one, Load) for actions in one_card.run.program.devices for one in actions)
    cuts = one_card.chosen.streams.stages
    assert (cuts[0].start, cuts[-1].stop) == (0, 34)
    assert max(one_card.chosen.layout.need_bytes) <= min(one_card.chosen.layout.budgets)
    assert one_card.chosen.uploaded_bytes < 2 * 2 * SHAPE.base_bytes


def test_no_other_cut_or_mapping_is_faster(one_card):
    assert all(row.cost >= -1e-3 for row in ablate_streams(one_card) if row.mechanism != "prefetch")
    assert all(one.seconds >= one_card.forecast.seconds for one in one_card.alternatives)


def test_slow_links_leave_transfers_bare_and_fast_ones_hide_them():
    jobs = [outline("a", 100, batch=2), outline("b", 150, batch=2)]
    slow, fast = (
        stream_outlook(make_ground(SHAPE, cards([1], host, 12)), jobs).chosen for host in (2.0, 2000.0)
    )
    assert slow.unhidden > 0.5 * slow.seconds
    assert fast.unhidden < 0.05 * fast.seconds


def test_on_two_root_complexes_sequential_mapping_is_never_better_than_what_is_chosen():
    jobs = [outline("a", 200, batch=4), outline("b", 300, batch=4)]
    found = stream_outlook(make_ground(SHAPE, cards([2, 2])), jobs)
    same = {one.mapping: one.seconds for one in found.tried if one.cut == found.chosen.cut}
    assert "sequential" in same
    assert len(same) > 1
    assert found.chosen.seconds <= same["sequential"] * (1 + 1e-3)
    assert any(line.startswith("Mapping") for line in explain_streams(found))


def test_the_explanation_names_bytes_and_bare_seconds(one_card):
    text = "\n".join(explain_streams(one_card))
    assert "not hidden behind compute" in text
    assert f"Token capacity {one_card.forecast.capacity:,}" in text


def test_what_does_not_fit_even_streamed_is_named_with_its_numbers():
    huge = outline("huge", 100, rank=20000)
    with pytest.raises(
        PlanError, match=r"job huge: even alone, with the base streamed, it needs [\d.]+ GiB .*avail"
    ):
        stream_outlook(ground("T4"), [huge])
    many = [outline(f"job{number}", 100, rank=512) for number in range(4)]
    sentence = why_not_streamed(ground("T4"), many) or ""
    assert "with 3 other jobs aboard" in sentence
    need, available = (float(number) for number in re.findall(r"([\d.]+) GiB (?:on a device|are)", sentence))
    assert need > available


def test_a_line_may_tell_root_complexes():
    cluster = parse_cluster("2+2xRTX3090:pcie")
    assert (cluster.roots, cluster.name) == ((2, 2), "2+2xRTX3090:pcie")
    assert [device.root for device in cluster.priced().devices] == [0, 0, 1, 1]
    assert replace(cluster, roots=(4,)).name == "4xRTX3090:pcie"


def test_over_several_devices_it_says_what_runs_it_and_that_the_cut_will_be_another():
    found = stream_outlook(make_ground(SHAPE, cards([2])), outlines(2))
    said = "`weftune train --pipeline 2 --gpu-memory` chooses a cut of its own"
    assert said in " ".join(explain_streams(found))
