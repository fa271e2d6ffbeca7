"""Bubbles that were found are held against the bars: all workers together, and beside them any worker."""

import pytest

from benchmarks.bubbles import Found, bars, table, told


def found(name, jobs, measured, predicted):
    workers = len(measured)
    return Found(
        name=name,
        jobs=jobs,
        passes=(0.1,) * workers,
        measured=measured,
        predicted=predicted,
        even=predicted,
        spread=(0.05,) * workers,
        tokens_per_second=100.0 * jobs,
        predicted_seconds=1.0,
        seconds=1.0,
    )


def test_one_worker_far_off_breaks_the_bar_of_any_worker_only():
    one = found("4 jobs, ours", 4, (0.09, 0.02), (0.01, 0.03))
    assert [bar.kept for bar in bars([one])] == [True, False, True, False]
    assert [bar.found for bar in bars([one])] == pytest.approx([0.035, 0.08, 0.055, 0.09])


def test_fewer_bubbles_than_foreseen_are_as_far_off_as_more():
    fewer, more = (found("1 job, ours", 1, (share,), (0.3,)) for share in (0.2, 0.4))
    assert [bar.found for bar in bars([fewer])] == pytest.approx([0.1, 0.1])
    assert [bar.found for bar in bars([more])] == pytest.approx([0.1, 0.1])


def test_few_jobs_may_leave_a_pipeline_idle_and_many_may_not():
    few, many = (found(f"{jobs} jobs, ours", jobs, (0.4, 0.4), (0.4, 0.4)) for jobs in (2, 4))
    assert all(bar.kept for bar in bars([few]))
    assert [bar.kept for bar in bars([few, many])] == [True, True, False, False]
    assert bars([few, many])[2].case == "4 jobs, ours"


def test_the_worst_case_is_named_with_each_bar_and_ratios_are_to_the_first():
    cases = [found("1 job, 1F1B", 1, (0.4,), (0.4,)), found("8 jobs, ours", 8, (0.09,), (0.01,))]
    lines = told(cases).splitlines()
    assert "8 jobs, ours: 8.00 × the tokens per second of 1F1B job by job" in lines
    assert lines[-4] == (
        "Points between measured and predicted, all workers together, 5 at most: 8.0 (8 jobs, ours); "
        "not kept."
    )
    assert lines[-1] == "Percent idle from 4 jobs on, any worker, 6 at most: 9.0 (8 jobs, ours); not kept."


def test_a_case_comes_as_the_mean_of_its_workers_with_the_workers_under_it():
    title, mean, *workers = table([found("4 jobs, ours", 4, (0.10, 0.02), (0.02, 0.03))]).splitlines()
    assert title.split()[:2] == ["case", "worker"]
    assert mean.split()[:9] == ["4", "jobs,", "ours", "all", "100.0", "5", "6.0%", "2.5%", "2.5%"]
    assert [row.split() for row in workers] == [
        ["0", "100.0", "5", "10.0%", "2.0%", "2.0%"],
        ["1", "100.0", "5", "2.0%", "3.0%", "3.0%"],
    ]
