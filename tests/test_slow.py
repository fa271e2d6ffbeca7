"""What takes minutes on the demo base: run with `make test-slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_parity import real_model_equals_peft
from weftune.base.load import model_source
from weftune.base.spec import BaseSpec

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def test_two_jobs_together_equal_solo_peft_on_smollm2_in_float32(tmp_path):
    lines = (ROOT / "examples" / "quickstart" / "gsm8k.jsonl").read_text().split("\n")[:4]
    rows = [{"text": json.loads(line)["messages"][1]["content"][:160]} for line in lines]
    real_model_equals_peft(
        {"model": "demo", "dtype": "float32"}, model_source(BaseSpec(model="demo")), rows, tmp_path
    )


def test_eight_jobs_take_at_most_half_as_much_memory_again_as_one(tmp_path):
    found = benchmark("cpu_memory", tmp_path)
    assert found["ratio"] <= 1.5


def test_together_is_the_fastest_of_the_three_ways(tmp_path):
    seconds = benchmark("cpu_quickstart", tmp_path)["seconds"]
    assert min(seconds, key=seconds.get) == "Weftune, together"


def benchmark(name, folder):
    subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", str(folder / "numbers.json")],
        cwd=ROOT,
        check=True,
    )
    return json.loads((folder / "numbers.json").read_text())


def test_after_one_window_the_memory_of_every_kind_is_predicted_within_a_tenth(tmp_path):
    for one in benchmark("kinds_memory", tmp_path)["kinds"]:
        second = one["second"]
        assert second["predicted"] == pytest.approx(second["measured"], rel=0.1), one["kind"]
