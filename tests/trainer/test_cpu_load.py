"""A run on a CPU that is much slower than planned says so once, with what the cores do instead."""

import subprocess
import sys
import time

import psutil
import pytest

from tests import bench
from tests.outputs import status
from weftune import JobSpec
from weftune.trainer import cpu_load
from weftune.trainer.cpu_load import CpuLoad, SlowRun, slow_sentence


def test_a_slow_run_is_told_with_the_cores_that_others_take():
    assert slow_sentence(10.0, 19.0, others=2.0, cores=2, threads=2, has_profile=True) == ""
    crowded = slow_sentence(10.0, 31.0, others=1.5, cores=2, threads=2, has_profile=False)
    assert crowded.startswith(
        "warning: training takes 3.1 times as long as planned: other processes keep 1.5 of"
    )
    alone = slow_sentence(10.0, 31.0, others=0.1, cores=8, threads=4, has_profile=True)
    assert "although other processes keep only 0.1 of the 8 cores busy" in alone
    assert alone.endswith("weftune doctor --profile")


def test_on_free_cores_a_plan_by_the_data_sheet_warns_of_nothing():
    """The quickstart on an idle machine takes almost three times as long as its data sheet says."""
    assert slow_sentence(10.0, 31.0, others=0.1, cores=8, threads=4, has_profile=False) == ""


def test_it_is_told_once_and_not_of_single_short_windows():
    run = SlowRun(has_profile=True)
    assert run.add(None, 100.0) == "", "nothing was planned"
    assert run.add(1.0, 9.0) == ""
    assert run.add(1.0, 9.0).startswith("warning: training takes 9.0 times as long as planned")
    assert run.add(1.0, 90.0) == ""
    steady = SlowRun(has_profile=True)
    assert [steady.add(9.0, 10.0) for _ in range(3)] == [""] * 3


def test_a_run_tells_it_once(tmp_path, monkeypatch):
    """A tiny model takes far longer than its products would at the speed of the data sheet."""
    monkeypatch.setattr(cpu_load, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(CpuLoad, "others", lambda self: float(psutil.cpu_count() or 1))
    rows = bench.rows(bench.samples(8))
    job = JobSpec(name="a", data=rows, steps=6, batch_size=2, eval={"fraction": 0.3, "every": 2})
    bench.train(bench.base(), tmp_path / "out", [job])
    notes = status(tmp_path / "out")["notes"]
    assert sum("times as long as planned" in note for note in notes) == 1, notes


@pytest.mark.timed
def test_the_cores_of_another_process_are_counted_and_those_of_this_one_are_not():
    own = CpuLoad()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        pass
    before = own.others()
    # No child of this process: its parent ends at once.
    code = "import time; end = time.time() + 2\nwhile time.time() < end: pass"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    subprocess.run([sys.executable, "-c", start], check=True)
    load = CpuLoad()
    time.sleep(1.5)
    cores = psutil.cpu_count() or 1
    assert load.others() > 0.3 or before > cores - 1.5, "unless others have taken all of them already"
