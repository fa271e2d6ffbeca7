"""Scalar heads: where they live, how they start, and what PEFT writes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests import bench
from tests.families import tiny
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import adapter_layout, get_kind
from weftune.adapters.scalar_head import STORED_HEAD
from weftune.adapters.target import HEAD, last_hidden_width
from weftune.core.shapes import SCORE, SiteShape
from weftune.errors import AdapterError
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

SPEC = LoraSpec(rank=2, modules_to_save=("score",))


def started(base, seed, spec=SPEC):
    frozen = base.weight_reader()
    made = new_training(
        JobAdapter("job", spec, seed), Recipe(1), base.shape.sites, base.dtype, bench.CPU, frozen=frozen
    )
    return made.layout.parameter_views(made.master)


def test_a_head_is_drawn_as_transformers_draws_it_and_from_the_seed():
    base = bench.base("llama")
    base.model.config.initializer_range = 0.5
    first, again, other = (started(base, seed)[SCORE, HEAD] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.3 < first.std() < 0.7
    plain = started(base, 1, replace(SPEC, modules_to_save=()))
    assert (SCORE, HEAD) not in plain
    assert all(torch.equal(value, started(base, 1)[name]) for name, value in plain.items())


def test_only_a_stage_with_the_last_layer_has_the_head():
    sites = bench.base("llama").shape.sites
    last = [site for site in sites if site.in_last_layer]
    first = [site for site in sites if not site.in_last_layer]
    assert (SCORE, HEAD) in {(one.site, one.name) for one in adapter_layout(SPEC, last).parameters}
    assert (SCORE, HEAD) not in {(one.site, one.name) for one in adapter_layout(SPEC, first).parameters}
    whole = adapter_layout(SPEC, sites).size
    assert whole == adapter_layout(SPEC, first).size + adapter_layout(SPEC, last).size
    assert sum(count for _, count in SPEC.parameter_counts(sites)) == whole


def test_the_head_is_as_wide_as_the_projection_after_the_last_layer():
    layer = [SiteShape(f"model.decoder.layers.0.{name}", 8, 8, in_last_layer=True) for name in ("q", "k")]
    projection = SiteShape("model.decoder.project_out", 8, 4)
    assert (
        last_hidden_width(layer),
        last_hidden_width([projection, *layer]),
        last_hidden_width([projection]),
    ) == (8, 4, 0)


def written_by_peft(folder):
    """Write a reward model as TRL's users do; return its head."""
    base = tiny("llama", torch.float32)
    base.config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(base.config)
    model.base_model.load_state_dict(base.base_model.state_dict())
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"], modules_to_save=["score"])
    model = get_peft_model(model, config)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return load_file(folder / "adapter_model.safetensors")[STORED_HEAD]


def test_a_reward_model_of_peft_is_read_with_its_head(tmp_path):
    head = written_by_peft(tmp_path)
    kind, sites = get_kind("lora"), bench.base("llama").shape.sites
    spec = kind.spec_of(tmp_path)
    assert spec.modules_to_save == ("score",)
    found = kind.read_start(replace(spec, init_from=str(tmp_path)), sites)
    assert torch.equal(found[SCORE, HEAD], head[0])
    with pytest.raises(AdapterError, match="holds a reward model, which only objective: reward continues"):
        kind.read_start(replace(spec, init_from=str(tmp_path), modules_to_save=()), sites)


def test_a_head_that_does_not_fit_is_a_sentence(tmp_path):
    head = written_by_peft(tmp_path)
    kind, sites = get_kind("lora"), bench.base("llama").shape.sites
    spec = replace(kind.spec_of(tmp_path), init_from=str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, STORED_HEAD: torch.cat([head, head])}, file)
    with pytest.raises(AdapterError, match=r"score.weight is \[2, 32\], and the base needs \[1, 32\]"):
        kind.read_start(spec, sites)
    save_file({name: value for name, value in tensors.items() if name != STORED_HEAD}, file)
    with pytest.raises(AdapterError, match=r"its adapter_config\.json names a head, and it has no"):
        kind.read_start(spec, sites)


@pytest.mark.parametrize("modules", [["lm_head"], ["score", "lm_head"]])
def test_other_saved_modules_are_refused(tmp_path, modules):
    written_by_peft(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": modules}))
    with pytest.raises(
        AdapterError, match=r"is more than plain LoRA: its adapter_config\.json sets modules_to"
    ):
        get_kind("lora").spec_of(tmp_path)
