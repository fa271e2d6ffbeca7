"""The benchmark of many jobs: every place that it names is found in a profile."""

from __future__ import annotations

from pathlib import Path

from benchmarks.many_jobs import measure_here, write_many


def test_jobs_are_trained_and_their_cost_is_split_by_place(tmp_path: Path) -> None:
    path = write_many(tmp_path, jobs=3, steps=1, own_data=True, model=None)
    measured = measure_here(path, profiled=True)
    assert measured.jobs == 3
    assert 0 < measured.arithmetic_seconds < measured.wall_seconds
    assert measured.job_seconds > 0
    assert measured.peak_bytes > 1 << 20
    missing = [place for place, seconds in measured.places.items() if not seconds]
    assert missing == []
