"""A base whose weights stay in their files trains every job to the bits that the resident base gives it."""

import os

import pytest
import torch

from tests import bench
from tests.cases import slow_but
from tests.run.models import deep
from tests.run.test_streamed import (
    CAPACITY,
    CUTS,
    attach_jobs,
    evaluated_jobs,
    run,
    travelling,
    windows,
)
from weftune.base.host.source import MappedFile, MappedStage
from weftune.base.host.streamed import load_streamed
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError
from weftune.plan.program.layout import one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.events import Stepped
from weftune.run.measure.link import SAMPLE_BYTES, measure_file_bandwidth


def saved(folder, family):
    deep(family, torch.float32).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return BaseSpec(model=str(folder), dtype="float32")


def mapped(spec, cut):
    executor = streamed_executor(load_streamed(spec, bench.CPU, cut, keeps_files_mapped=True))
    assert all(isinstance(source, MappedStage) for source in executor.weights.base.sources.values())
    return executor


CASES = [
    ("llama", CUTS["one slot"]),
    ("llama", travelling(CUTS["uneven, two stay"])),
    ("gemma3", travelling(CUTS["a layer at a time"])),
    ("opt", CUTS["two and two"]),
    ("gpt2", CUTS["three slots"]),
]


@pytest.mark.parametrize(("family", "cut"), slow_but(CASES, [CASES[1], CASES[4]]))
def test_losses_evaluations_and_adapters_have_the_bits_of_the_resident_run(family, cut, tmp_path):
    spec = saved(tmp_path, family)
    executor, whole = mapped(spec, cut), resident_executor(load_base(spec, bench.CPU))
    found = []
    for one, plan in (
        (executor, lambda courses: plan_window(courses, cut, CAPACITY)),
        (whole, lambda courses: plan_window(courses, one_device_layout(), CAPACITY)),
    ):
        jobs = evaluated_jobs(one.base)
        attach_jobs(one, jobs)
        found.append(windows(one, jobs, plan))
    (events, masters), (wanted, wanted_masters) = found
    assert {event.job for event in wanted if isinstance(event, Stepped)} == set(wanted_masters)
    assert sorted(events, key=str) == sorted(wanted, key=str)
    for name, master in wanted_masters.items():
        assert torch.equal(masters[name], master), name


def test_a_file_that_fails_under_way_ends_the_window_with_its_name(tmp_path):
    cut = CUTS["one slot"]
    executor = mapped(saved(tmp_path, "llama"), cut)
    jobs = evaluated_jobs(executor.base)
    attach_jobs(executor, jobs)
    program = plan_window([job.job_window(0, 2, False) for job in jobs], cut, CAPACITY)
    executor.weights.begin_window()
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, 100)
    with pytest.raises(BaseModelError, match=r"safetensors has changed while weights are read from it"):
        run(executor, program, jobs)


def test_files_are_measured_by_a_sample_of_them(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(bytes(range(256)) * (3 << 12))
    speed = measure_file_bandwidth([MappedFile(path) for path in paths])
    assert 1e6 < speed < 1e12
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 4 * SAMPLE_BYTES)
    never = MappedFile(paths[0])
    os.truncate(paths[0], 1)
    # All of the sample comes from the first file, so that the other, which would fail, is not read.
    assert measure_file_bandwidth([MappedFile(tmp_path / "sparse"), never]) > 1e6
