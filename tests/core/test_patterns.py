"""A regular expression that would never end is a sentence, wherever it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.base.packs import base_of
from tests.cases import slow_but
from tests.families import tiny
from tests.oracle import lora_config, write_start
from weftune.adapters.lora.files import read_adapter
from weftune.core.limited import slow_pattern_error, suffix_expression
from weftune.core.shapes import ModelShape, SiteShape
from weftune.errors import AdapterError, SpecError
from weftune.generate.adapters import attach_adapter_folder
from weftune.jobs.spec.checks import check_targets
from weftune.jobs.spec.spec import JobSpec
from weftune.run.passes.adapted import AdaptedBase

ENDLESS = [
    "(.*.*)*x",
    "((a|.)+)+x",
    ".*" * 12 + "x",
    "(.*)(.*)(.*)(.*)(.*)(.*)\\6\\5\\4x",
    "(?i)" + "[\\x00-\\U0010ffff]" * 400,
    "a" * 10_001,
]
HONEST = [
    "all-linear",
    "q_proj",
    ".*\\.(q|v)_proj",
    "model\\.layers\\.(1[0-9]|2[0-3])\\..*proj",
    ".*layers.*(self_attn|mlp).*proj.*",
    "(?!.*lm_head$).*_proj",
]


@pytest.mark.parametrize("expression", slow_but(ENDLESS, [ENDLESS[0], *ENDLESS[4:]]))
def test_an_endless_pattern_is_told(expression: str) -> None:
    sentence = slow_pattern_error([expression])
    assert sentence is not None
    assert "is a regular expression" in sentence
    if not expression.startswith("(?i)"):  # which must stand first
        assert slow_pattern_error([suffix_expression(expression)]) is not None


@pytest.mark.parametrize("expression", HONEST)
def test_an_honest_pattern_is_not(expression: str) -> None:
    names = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(80) for part in "qkvo"]
    assert slow_pattern_error([expression, suffix_expression(expression)], names) is None


@pytest.mark.parametrize(
    ("adapter", "place"),
    [
        ({"targets": ENDLESS[0]}, "adapter.targets"),
        ({"rank_pattern": {ENDLESS[0]: 4}}, "adapter.rank_pattern.(.*.*)*x"),
        ({"alpha_pattern": {ENDLESS[0]: 4.0}}, "adapter.alpha_pattern.(.*.*)*x"),
    ],
)
def test_a_job_with_an_endless_pattern_is_refused_with_its_place(adapter: dict, place: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(name="a", data=[{"text": "b"}], adapter=adapter)
    (mistake,) = caught.value.mistakes
    assert mistake.location == place
    assert "took more than 0.5 s of processor time" in mistake.sentence


def test_a_pattern_that_is_endless_only_on_the_names_of_the_base_is_refused_there() -> None:
    adapter = {"targets": "(z.*.*)*x", "rank_pattern": {"(z+)+y": 1}}
    job = JobSpec(name="a", data=[{"text": "b"}], adapter=adapter)
    shape = ModelShape(1, 8, 8, 8, 4, (SiteShape("z" * 60, 8, 8, False),), 8)
    places = [mistake.location for mistake in check_targets([job], shape)]
    assert places == ["job a adapter.targets", "job a adapter.rank_pattern.(z+)+y"]


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    model = tiny("llama", torch.float32)
    return write_start(tmp_path, model, lora_config(model, 4, 6.0, ["q_proj", "down_proj"]))


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_an_adapter_folder_with_an_endless_pattern_is_refused(key: str, stranger: Path) -> None:
    file = stranger / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: {ENDLESS[0]: 4}}))
    with pytest.raises(AdapterError, match="processor time"):
        read_adapter(stranger)


@pytest.mark.parametrize("keys", [{"target_modules": ENDLESS[0]}, {"rank_pattern": {ENDLESS[0]: 4}}])
def test_an_endless_pattern_does_not_reach_peft(keys: dict, stranger: Path) -> None:
    file = stranger / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(AdapterError, match="processor time"):
        attach_adapter_folder(AdaptedBase(base_of(tiny("llama", torch.float32))), "a", stranger)
