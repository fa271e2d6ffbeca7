"""`weftune train` as a benchmark starts it, with a tiny shape on the CPU."""

import json
import sys

import pytest

from benchmarks import gpu_train


@pytest.mark.slow
def test_both_runs_end_and_their_parts_are_all_of_the_time(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    words = ["--toy", "--jobs", "2", "--steps", "3", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_train", *words])
    with pytest.raises(SystemExit) as ended:
        gpu_train.main()
    assert ended.value.code == 0
    first, second = json.loads(file.read_text())["runs"]
    for run in (first, second):
        assert run["exit_code"] == 0
        assert run["windows"]
        assert 0 < run["before"] + sum(run["windows"]) < run["seconds"]
