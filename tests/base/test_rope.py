"""The context of a base by its config, and what rope scaling makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.base.folders import model_folder
from tests.families import CONTEXT
from weftune.base.architecture import spec_shape
from weftune.base.config import read_config
from weftune.base.host.streamed import load_streamed
from weftune.base.load import inspect, load_base, load_plain
from weftune.base.rope import context_length, scaled_rope_values, unscaled_context
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.base.stages import load_stage
from weftune.core.shapes import LayerRange
from weftune.errors import BaseModelError
from weftune.plan.program.layout import Layout, StageLayers

CPU = torch.device("cpu")

PLAIN: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaled(config: dict[str, Any], rope_type: str, factor: float, **keys: Any) -> dict[str, Any]:
    scaling = RopeScaling(rope_type=rope_type, factor=factor, **keys)  # type: ignore[arg-type]
    return {**config, **scaled_rope_values(config, BaseSpec(model="mine", rope_scaling=scaling))}


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_a_factor_multiplies_the_context_and_the_unscaled_one_stays(rope_type: str) -> None:
    found = scaled(PLAIN, rope_type, 2.5)
    assert context_length(found) == 10240
    assert unscaled_context(found) == unscaled_context(PLAIN) == 4096
    assert scaled_rope_values(PLAIN, BaseSpec(model="mine")) == {}


def test_the_original_context_may_be_named_and_is_never_below_what_the_base_has() -> None:
    qwen = {**PLAIN, "max_position_embeddings": 40960}
    assert context_length(scaled(qwen, "yarn", 4.0, original_max_position_embeddings=32768)) == 131072
    assert context_length(scaled(qwen, "yarn", 1.0, original_max_position_embeddings=32768)) == 40960


def test_the_factor_of_a_scaled_base_counts_from_the_context_before() -> None:
    base = {**PLAIN, "max_position_embeddings": 131072, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert unscaled_context(base) == 8192
    again = scaled(base, "llama3", 32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert context_length(again) == 262144
    assert again["rope_parameters"] == {"rope_theta": 5e5, **LLAMA3, "factor": 32.0}
    other = scaled(base, "yarn", 2.0)
    assert context_length(other) == 16384, "what the base says of its context holds for its own rope"
    assert other["rope_parameters"] == {
        "rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192
    }  # fmt: skip


def test_a_base_that_does_not_name_its_context_before_is_asked_for_it() -> None:
    older = {**PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert unscaled_context(older) == 1024
    assert context_length(scaled(older, "linear", 8.0)) == 8192
    with pytest.raises(BaseModelError, match=r"mine is linear already.* write original_max_position_embeddi"):
        scaled(older, "yarn", 8.0)
    assert context_length(scaled(older, "yarn", 8.0, original_max_position_embeddings=2048)) == 16384


def test_where_layers_differ_full_attention_is_scaled() -> None:
    local = {"rope_type": "default", "rope_theta": 1e4}
    own = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    gemma = {"model_type": "gemma3_text", "max_position_embeddings": 131072}
    gemma |= {"rope_parameters": {"sliding_attention": local, "full_attention": own}}
    found = scaled(gemma, "linear", 16.0)
    assert found["rope_parameters"] == {"sliding_attention": local, "full_attention": {**own, "factor": 16.0}}
    assert context_length(found) == 262144


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt2", "no rotary positions"), ("opt", "no rotary positions"), ("phi3", "with longrope only")],
)
def test_positions_that_cannot_be_scaled_are_refused(family: str, reason: str) -> None:
    assert unscaled_context({**PLAIN, "model_type": family}) is None
    with pytest.raises(BaseModelError, match=reason):
        scaled({**PLAIN, "model_type": family}, "yarn", 2.0)


STREAMED = Layout((StageLayers(0, 1, is_resident=False), StageLayers(1, 2, is_resident=False)), (2,))
WAYS: dict[str, Callable[[BaseSpec], PreTrainedModel]] = {
    "plain": lambda spec: load_plain(spec, CPU),
    "resident": lambda spec: load_base(spec, CPU).model,
    "quantised": lambda spec: load_base(replace(spec, quantize="int8"), CPU).model,
    "stage": lambda spec: load_stage(spec, CPU, LayerRange(1, 2, 2)).model,
    "streamed": lambda spec: load_streamed(spec, CPU, STREAMED).whole.model,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_loading_has_the_cosines_of_transformers(way: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    scaling = RopeScaling(rope_type="yarn", factor=3.0)
    found: Any = WAYS[way](BaseSpec(model=str(folder), dtype="float32", rope_scaling=scaling))
    theirs = {"rope_type": "yarn", "factor": 3.0, "rope_theta": 1e4}
    config = AutoConfig.from_pretrained(folder, rope_parameters=theirs)
    expected: Any = AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert expected.model.rotary_emb.attention_scaling > 1.1
    given = torch.zeros(1), torch.arange(3 * CONTEXT)[None]
    for mine, wanted in zip(found.model.rotary_emb(*given), expected.model.rotary_emb(*given), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_the_config_alone_says_the_context_of_the_scaled_model(
    family: str, rope_type: Any, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model", family)
    spec = BaseSpec(model=str(folder), rope_scaling=RopeScaling(rope_type=rope_type, factor=1.7))
    shape = inspect(spec, CPU)
    assert shape == load_base(spec, CPU).shape == spec_shape(spec, read_config(spec), 4)
    assert shape.context == int(1.7 * CONTEXT)
