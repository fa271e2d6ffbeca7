"""Workers that torchrun starts are the same pipeline, after a restart too."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cases import slow_but
from tests.launches import copied
from tests.outputs import assert_same_results, assert_whole

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("killed", slow_but([False, True], [False]))
def test_torchrun_starts_the_same_pipeline_and_goes_on_after_a_restart(killed, tmp_path, trained_deep):
    """Where a worker is killed, torchrun starts all again with the words of the first time."""
    place = copied(trained_deep, tmp_path)
    output = place / "elastic"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "weftune", "train", "jobs.yaml", "--output", "elastic"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with open(place / "elastic.log", "w") as log:
        agent = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
        try:
            metrics = output / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 8):
                assert agent.poll() is None, (place / "elastic.log").read_text()
                time.sleep(0.002)
            if killed:
                max(psutil.Process(agent.pid).children(), key=lambda child: child.pid).kill()
            assert agent.wait(90) == 0, (place / "elastic.log").read_text()
        finally:
            agent.kill()
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
