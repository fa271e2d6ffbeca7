"""A run of one job with long samples in a pipeline: samples in chunks, results as of one process."""

import json

import pytest

from tests.cases import slow_but
from tests.launch.mains import with_short_chunks
from tests.launches import Launch, deep_folder
from tests.outputs import assert_same_results, assert_whole, write_rows

JOBS = [
    {"name": "long", "steps": 4, "adapter": {"rank": 4, "dropout": 0.1}, "keep": "best",
     "eval": {"fraction": 0.2, "every": 2}},
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory, forks):
    """A folder whose `undisturbed` is the output of one process."""
    folder = deep_folder(tmp_path_factory.mktemp("chunks"), JOBS, batch_size=3)
    write_rows(folder / "a.jsonl", seed=1, shortest=30, longest=60)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=folder) == 0
    return folder


@pytest.mark.parametrize("workers", slow_but([2, 4], [2]))
def test_a_pipeline_trains_one_job_of_long_samples_in_chunks(place, workers):
    output = place / f"out{workers}"
    assert Launch(place, output.name, workers, runs=with_short_chunks).wait() == 0
    assert_whole(output)
    assert_same_results(output, place / "undisturbed")
    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    forwards = sum(one.get("cat") == "Forward" and one["tid"] == 0 for one in events)
    assert forwards >= 2 * 3 * 4, "a batch has three samples"
