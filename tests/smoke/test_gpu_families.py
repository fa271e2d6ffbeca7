"""A text tower and a mixture of experts, through the command line.

Run with `make smoke-gpu`. Without a GPU the same commands train on the CPU: `pytest -m smoke` with this file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.base.folders import model_folder, wrapper_folder
from tests.smoke.commands import losses, weftune

pytestmark = pytest.mark.smoke

STEPS = 3
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def trained(folder: Path, jobs: dict[str, dict]) -> dict[str, dict[str, torch.Tensor]]:
    """Every job's adapter: it succeeded, and all of its losses are finite."""
    (folder / "rows.jsonl").write_text('{"prompt": "w10 w20", "completion": "w30 w40 w50"}\n' * 8)
    spec = {
        "base": {"model": "base", "dtype": "bfloat16"},
        "defaults": {"data": "rows.jsonl", "steps": STEPS, "batch_size": 4, "learning_rate": 1e-2},
        "jobs": [{"name": name, "adapter": adapter} for name, adapter in jobs.items()],
    }
    (folder / "jobs.yaml").write_text(yaml.safe_dump(spec))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weftune("train", folder / "jobs.yaml", "--output", folder / "out", "--device", device)
    states = json.loads((folder / "out" / "status.json").read_text())["jobs"]
    found = losses(folder / "out")
    for name in jobs:
        assert states[name]["state"] == "succeeded"
        assert len(found[name]) == STEPS
        assert all(map(math.isfinite, found[name]))
    return {name: load_file(folder / "out" / name / "adapter_model.safetensors") for name in jobs}


def assert_learned(adapter: dict[str, torch.Tensor], sites: set[str]) -> None:
    """It has A and B at these sites and nowhere else, and B is no longer 0."""
    matrices = ("lora_A", "lora_B")
    assert adapter.keys() == {f"base_model.model.{site}.{name}.weight" for site in sites for name in matrices}
    for name, value in adapter.items():
        assert bool(value.isfinite().all()), name
        assert bool(value.any()), name


def test_jobs_on_a_text_tower_leave_adapters_with_its_wrappers_names(tmp_path):
    wrapper_folder(tmp_path / "base", "gemma3", torch.bfloat16)
    adapters = trained(tmp_path, {"values": {"rank": 4, "targets": ["v_proj"]}, "every": {"rank": 8}})
    layers = [f"model.language_model.layers.{number}" for number in range(3)]
    assert_learned(adapters["values"], {f"{layer}.self_attn.v_proj" for layer in layers})
    linears = [f"self_attn.{name}_proj" for name in "qkvo"]
    linears += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert_learned(adapters["every"], {f"{layer}.{linear}" for layer in layers for linear in linears})


def test_jobs_on_a_mixtures_experts_leave_adapters_as_peft_names_them(tmp_path):
    model_folder(tmp_path / "base", "qwen3_moe", torch.bfloat16)
    jobs = {
        "experts": {"rank": 4, "targets": ["q_proj"], "target_parameters": EXPERTS},
        "down": {"rank": 2, "targets": [], "target_parameters": EXPERTS[1:]},
    }
    adapters = trained(tmp_path, jobs)
    layers = [f"model.layers.{number}" for number in range(2)]
    # PEFT wraps the module once for each parameter; the outer one is the last.
    both = {f"{layer}.mlp.experts{inner}" for layer in layers for inner in ("", ".base_layer")}
    assert_learned(adapters["experts"], both | {f"{layer}.self_attn.q_proj" for layer in layers})
    assert_learned(adapters["down"], {f"{layer}.mlp.experts" for layer in layers})
