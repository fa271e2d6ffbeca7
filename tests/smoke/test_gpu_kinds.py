"""Kinds of adapter and quantised bases that the README names, by `weftune train` on a GPU."""

from __future__ import annotations

import json
from statistics import mean

import pytest
import torch
import yaml

from tests import bench
from tests.smoke.commands import STEPS, assert_trained, losses, weftune
from weftune.base.quant.formats import supports_fp8

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

KINDS = ("lora", "dora", "pissa", "vera", "ia3", "bottleneck", "prompt", "prefix")
SHARE_OF_CODES = 0.1
"""How far the mean loss on a base in fewer bits may be from that on the plain one, of itself; single steps on
so small a base differ by more."""


def test_jobs_of_all_kinds_learn_in_one_run(stories, tmp_path):
    spec = yaml.safe_load(stories.read_text())
    spec["defaults"] |= {"data": str(stories.parent / "rows.jsonl"), "learning_rate": 3e-3}
    spec["jobs"] = [{"name": kind, "adapter": {"kind": kind}} for kind in KINDS]
    few = {"kind": "diff", "targets": ["k_proj"], "layers": "0-1", "sparsity": 0.05}
    spec["jobs"].append({"name": "diff", "adapter": few})
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(spec))
    output = tmp_path / "output"
    weftune("train", tmp_path / "jobs.yaml", "--output", output, "--device", "cuda")
    jobs = json.loads((output / "status.json").read_text())["jobs"]
    assert {name: job["state"] for name, job in jobs.items()} == dict.fromkeys((*KINDS, "diff"), "succeeded")
    for name, found in losses(output).items():
        assert len(found) == STEPS, name
        assert found[-1] < found[0], name


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
def test_jobs_on_a_quantised_base_learn_as_on_the_plain_one(quantize, stories, plain, tmp_path):
    spec = yaml.safe_load(stories.read_text())
    spec["base"]["quantize"] = quantize
    spec["defaults"]["data"] = str(stories.parent / "rows.jsonl")
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(spec))
    output = tmp_path / "output"
    command = "train", tmp_path / "jobs.yaml", "--output", output, "--device", "cuda"
    if quantize == "fp8" and not supports_fp8(torch.device("cuda", 0)):
        assert "fp8 needs a GPU with fp8 tensor cores" in weftune(*command, code=2).said
        return
    weftune(*command)
    assert_trained(output)
    for name, found in losses(output).items():
        assert mean(found) == pytest.approx(mean(losses(plain)[name]), rel=SHARE_OF_CODES), name
