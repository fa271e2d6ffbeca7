"""The benchmark of overlap measures rounds on real processes, and its link passes one sum after another."""

import json
import sys
import time

import pytest
import torch

from benchmarks import shard_overlap
from benchmarks.shard_overlap import ComputeClock, DelayedLink, WallClock
from weftune.core.shards import ShardTeam


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_toy_measures_every_share(processes, monkeypatch, capsys, tmp_path):
    json_file = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["shard_overlap", "--toy", "--processes", processes, "--json", str(json_file)]
    )
    shard_overlap.main()
    assert "without overlap" in capsys.readouterr().out
    found = json.loads(json_file.read_text())["shares"]
    assert [one["share"] for one in found] == list(shard_overlap.SHARES)
    assert all(one["plain"] > 0 and one["overlapped"] > 0 and one["predicted"] > 0.5 for one in found)


def test_sums_on_a_delayed_link_follow_one_another_while_the_process_goes_on():
    link = DelayedLink(WallClock())
    started = []

    def start_sum(tensor):
        started.append(tensor)
        return lambda: None

    team = link.delay(ShardTeam(0, 2, lambda tensor: None, start_sum=start_sum))
    link.seconds_per_byte = 0.15 / 16
    began = time.perf_counter()
    waits = [team.start_sum(torch.zeros(2, 2)) for _ in range(2)]
    assert time.perf_counter() - began < 0.12
    waits[1]()
    assert time.perf_counter() - began >= 0.3
    assert link.busy_seconds == pytest.approx(0.3)
    assert len(started) == 2
    link.is_used = False
    team.start_sum(torch.zeros(2, 2))()
    assert len(started) == 2


def test_a_clock_of_computation_counts_waits_but_not_other_work():
    clock = ComputeClock()
    began = clock.now()
    time.sleep(0.05)
    assert clock.now() - began < 0.04
    clock.wait_until(began + 2.0)
    assert 2.0 <= clock.now() - began < 2.04
