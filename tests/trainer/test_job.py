"""What a job's spec comes to in steps."""

import pytest
import torch

from tests import bench
from tests.run import executors
from weftune import JobSpec


def test_a_job_is_saved_on_the_way_only():
    """Its start can be drawn again, and at its end the adapter itself is written."""
    base = bench.base("llama", torch.float64)
    assert executors.prepare(base, "a", steps=100).save_at == {12, 25, 37, 50, 62, 75, 87}
    assert executors.prepare(base, "a", steps=6, save_every=2).save_at == {1, 2, 3, 4, 5}
    assert executors.prepare(base, "a", steps=6, save_every=1).save_at == {1, 2, 3, 4, 5}
    assert executors.prepare(base, "a", steps=6).save_at == set()


@pytest.mark.parametrize("interval", [2, 3, 4, 7, 10])
def test_two_saves_one_after_the_other_are_never_more_than_an_interval_apart(interval):
    """The second is begun only when the first is whole, so that is the most that a kill can cost."""
    ready = executors.prepare(bench.base("llama", torch.float64), "a", steps=40, save_every=interval)
    saves = [0, *sorted(ready.save_at), 40]
    assert all(after - before <= interval for before, after in zip(saves, saves[2:], strict=False))
    assert ready.save_at >= set(range(interval, 40, interval))


def test_a_job_that_begins_with_an_adapter_is_saved_at_its_start(tmp_path):
    """The folder that it begins with may be gone when the job is to go on."""
    base, rows = bench.base("llama", torch.float64), bench.rows(bench.samples(4))
    bench.train(base, tmp_path, [JobSpec(name="first", data=rows, steps=1, adapter={"rank": 4})])
    start = {"rank": 4, "init_from": str(tmp_path / "first")}
    assert executors.prepare(base, "second", steps=6, save_every=2, adapter=start).save_at == {
        0,
        1,
        2,
        3,
        4,
        5,
    }
