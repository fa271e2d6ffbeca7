"""`weftune plan` where the base fits each device: shares, and more tokens a second than any cut."""

import pytest

from tests.plan.outlooks import ground, outline, outlines
from weftune.plan.outlook.outlook import outlook
from weftune.plan.outlook.split import share_outlook


def steps(jobs, each=100):
    return dict.fromkeys((job.name for job in jobs), each)


@pytest.mark.parametrize("cluster", ["4xA100-80G:pcie", "4xH100:nvlink", "2xH200"])
def test_shares_train_more_tokens_a_second_than_the_best_cut_of_the_base(cluster):
    jobs = outlines(8)
    found = share_outlook(ground(cluster), jobs, steps(jobs))
    cut = outlook(ground(cluster), jobs, compared=False)
    assert len(found.shares) == len(found.parts) == len(ground(cluster).cluster.devices)
    assert sorted(name for share in found.shares for name in share.jobs) == sorted(job.name for job in jobs)
    assert found.tokens_per_second > cut.forecast.tokens_per_second
    for part in found.parts:
        assert part.forecast.fits
        assert part.forecast.devices == 1
    print(f"{cluster}: {found.tokens_per_second / cut.forecast.tokens_per_second:.2f} x")


def test_longer_runs_weigh_more():
    jobs = [outline(name, 400) for name in "abcd"]
    even = share_outlook(ground("2xA100-80G"), jobs, steps(jobs))
    assert [len(share.jobs) for share in even.shares] == [2, 2]
    long = share_outlook(ground("2xA100-80G"), jobs, {**steps(jobs), "a": 1000})
    assert sorted(share.jobs for share in long.shares) == [("a",), ("b", "c", "d")]


def test_a_base_that_does_not_fit_each_device_one_device_and_unlike_devices_have_no_shares():
    jobs = outlines(3)
    assert share_outlook(ground("4xT4"), jobs, steps(jobs)) is None
    assert share_outlook(ground("H200"), jobs, steps(jobs)) is None
    assert share_outlook(ground("4xA100-80G"), jobs[:1], steps(jobs)) is None
    large = outline("large", 400, rank=20_000)
    assert share_outlook(ground("2xA100-80G"), [*jobs, large], steps([*jobs, large])) is None


def test_a_share_whose_jobs_do_not_fit_together_shows_who_comes_first():
    jobs = [outline(name, 200, rank=64) for name in "abcd"]
    found = share_outlook(ground("2xRTX4090"), jobs, steps(jobs))
    assert [len(share.jobs) for share in found.shares] == [2, 2]
    assert all(1 <= len(part.jobs) <= 2 for part in found.parts)
    assert all(
        part.jobs[0].name == share.jobs[0] for part, share in zip(found.parts, found.shares, strict=True)
    )
