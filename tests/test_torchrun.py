"""Workers that torchrun starts are the same pipeline, after a restart too."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.forks import fork_server
from tests.launches import copied
from tests.outputs import assert_same_results, assert_whole
from tests.run.processes import context
from weftune.cli.main import main

REPOSITORY = Path(__file__).parents[1]


def train_under_torchrun(place, log):
    """In a process of its own: torchrun's agent, with workers that are forked and need no imports."""
    os.chdir(place)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
    )
    elastic_launch(config, train_as_worker)("train", "jobs.yaml", "--output", "elastic")


def train_as_worker(*words):
    sys.argv = ["weftune", *words]
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


@pytest.mark.slow
def test_workers_that_torchruns_agent_starts_are_the_same_pipeline(tmp_path, trained_deep):
    place = copied(trained_deep, tmp_path)
    agent = context().Process(target=train_under_torchrun, args=(place, place / "elastic.log"))
    agent.start()
    agent.join(120)
    assert agent.exitcode == 0, (place / "elastic.log").read_text()
    assert_whole(place / "elastic")
    assert_same_results(place / "elastic", place / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
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
