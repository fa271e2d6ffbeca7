"""What a job's spec comes to in steps."""

import torch

from tests import bench
from tests.run import aboard
from weftune import JobSpec


def test_a_job_is_saved_on_the_way_only():
    """Its start can be drawn again, and at its end the adapter itself is written."""
    base = bench.base("llama", torch.float64)
    assert aboard.ready(base, "a", steps=100).save_at == {25, 50, 75}
    assert aboard.ready(base, "a", steps=6, save_every=2).save_at == {2, 4}
    assert aboard.ready(base, "a", steps=6).save_at == set()


def test_a_job_that_begins_with_an_adapter_is_saved_at_its_start(tmp_path):
    """The folder that it begins with may be gone when the job is to go on."""
    base, rows = bench.base("llama", torch.float64), bench.rows(bench.samples(4))
    bench.train(base, tmp_path, [JobSpec(name="first", data=rows, steps=1, adapter={"rank": 4})])
    start = {"rank": 4, "init_from": str(tmp_path / "first")}
    assert aboard.ready(base, "second", steps=6, save_every=2, adapter=start).save_at == {0, 2, 4}
