"""One job of every kind that PEFT has: its keys here, its config there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests import bench, oracle
from tests.families import MIXTURES, tiny
from weftune import JobSpec

STEPS = 6
GATES = {"l0_weight": 1e-4, "mask_lr_ratio": 400.0, "relaxed": 0.5}
NARROW = {"gpt2": ["c_attn", "mlp.c_proj"], "phi3": ["qkv_proj", "down_proj"]}
NARROW |= {family: ["k_proj", "v_proj"] for family in MIXTURES}
WITH_PEFT = ("lora", "dora", "dora-dropped", "vera", "ia3", "prompt", "prefix", "layers", "plus")
NOT_NEUTRAL = ("prompt", "prefix")
"""Kinds whose new adapters change what the base computes."""
NOT_MERGED = ("prompt", "prefix")
WITHOUT_PEFT = ("bottleneck", "pfeiffer")
CONVERTED = ("pissa",)
"""Kinds that change the base in PEFT, and are saved here as PEFT converts them."""
PRUNED = ("diff", "diff-flat")


@dataclass(frozen=True)
class Case:
    adapter: Mapping[str, Any]
    config: Callable[[Mapping[str, Any]], Any]
    """PEFT's config, from what all of them share."""
    lr_ratio: float = 1.0
    """Of B."""


def absent(shared: Mapping[str, Any]) -> Any:
    raise AssertionError("PEFT has no such kind")


def targets(family: str) -> list[str]:
    return NARROW.get(family, ["k_proj", "v_proj", "down_proj"])


def case(kind: str, family: str) -> Case:
    own = targets(family)
    lora = {"r": 3, "lora_alpha": 6.0, "target_modules": own}
    ours = {"rank": 3, "alpha": 6.0, "targets": own}
    feedforward = [name for name in own if name in ("down_proj", "mlp.c_proj")]
    return {
        "lora": Case(ours, lambda shared: LoraConfig(**lora, **shared)),
        "dora": Case({"kind": "dora", **ours}, lambda shared: LoraConfig(**lora, use_dora=True, **shared)),
        "dora-dropped": Case(
            {"kind": "dora", **ours, "dropout": 0.25},
            lambda shared: LoraConfig(**lora, use_dora=True, lora_dropout=0.25, **shared),
        ),
        "pissa": Case(
            {"kind": "pissa", **ours}, lambda shared: LoraConfig(**lora, init_lora_weights="pissa", **shared)
        ),
        "vera": Case(
            {"kind": "vera", "rank": 5, "targets": own, "projection_prng_key": 7},
            lambda shared: VeraConfig(r=5, target_modules=own, projection_prng_key=7, **shared),
        ),
        "ia3": Case(
            {"kind": "ia3", "targets": own, "feedforward": feedforward},
            lambda shared: IA3Config(target_modules=own, feedforward_modules=feedforward, **shared),
        ),
        "prompt": Case(
            {"kind": "prompt", "num_virtual_tokens": 4},
            lambda shared: PromptTuningConfig(num_virtual_tokens=4, task_type=shared["task_type"]),
        ),
        "prefix": Case(
            {"kind": "prefix", "num_virtual_tokens": 3},
            lambda shared: PrefixTuningConfig(num_virtual_tokens=3, task_type=shared["task_type"]),
        ),
        "bottleneck": Case({"kind": "bottleneck", "size": 5, "activation": "gelu"}, absent),
        "pfeiffer": Case({"kind": "bottleneck", "size": 3, "placement": "pfeiffer"}, absent),
        "diff": Case({"kind": "diff", "targets": own, "sparsity": 0.05, **GATES}, absent),
        "diff-flat": Case(
            {"kind": "diff", "targets": own, "sparsity": 0.02, "structured": False, **GATES}, absent
        ),
        "layers": Case(
            {**ours, "layers": "1-1"}, lambda shared: LoraConfig(**lora, layers_to_transform=[1], **shared)
        ),
        "plus": Case(
            {**ours, "loraplus_lr_ratio": 8.0}, lambda shared: LoraConfig(**lora, **shared), lr_ratio=8.0
        ),
    }[kind]


def peft_config(kind: str, family: str) -> Any:
    shared = {"task_type": "CAUSAL_LM", "fan_in_fan_out": family == "gpt2"}
    return case(kind, family).config(shared)


def write_start(folder: Path, model: PreTrainedModel, kind: str, family: str) -> Path:
    """As PEFT begins, then a little off, so that every parameter has a gradient from the first step on."""
    torch.manual_seed(5)
    get_peft_model(tiny(family, model.dtype), peft_config(kind, family)).save_pretrained(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    for name, value in weights.items():
        if not name.endswith((".vera_A", ".vera_B")):
            weights[name] = value + 0.05 * torch.randn_like(value)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def samples(kind: str) -> list[oracle.Sample]:
    made = bench.samples(11, seed=len(kind))
    # Behind virtual tokens the first token is predicted, too, where it is supervised.
    return [(tokens, [True, *mask[1:]]) for tokens, mask in made[:6]] + made[6:] if kind == "prompt" else made


def job(kind: str, family: str, start: Path | None = None, **more: Any) -> JobSpec:
    adapter = dict(case(kind, family).adapter)
    if start is not None:
        adapter["init_from"] = str(start)
    keys = {"steps": STEPS, "batch_size": 3, "learning_rate": 2e-3, "seed": 2, "warmup": 2, **more}
    return JobSpec(name=kind, data=bench.rows(samples(kind)), adapter=adapter, **keys)


def by_peft(kind: str, family: str, start: Path) -> oracle.Trained:
    model = tiny(family, torch.float64)
    config = peft_config(kind, family)
    drops = oracle.HashedDropout(seed=2) if getattr(config, "lora_dropout", 0.0) else None
    recipe = oracle.Recipe(STEPS, 2e-3, "linear", 2)
    batches = bench.batches(samples(kind), 3, 2, STEPS)
    return oracle.train_with_peft(
        model,
        config,
        start,
        batches,
        recipe,
        padded=drops is None,
        dropout=drops,
        b_ratio=case(kind, family).lr_ratio,
    )
