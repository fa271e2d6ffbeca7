"""Of a model that sees images too, the text tower is a base: its numbers, and its names in the wrapper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.base.folders import wrapper_folder
from tests.base.packs import CPU, packed, random_samples
from tests.families import CONTEXT, WRAPPERS, tiny_wrapper
from weftune.base.architecture import model_shape, spec_shape
from weftune.base.config import read_config
from weftune.base.host.streamed import load_streamed, weights_in_files
from weftune.base.load import inspect, load_base, load_plain, model_source
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.base.stages import load_stage
from weftune.base.weights import write_wrapper
from weftune.core.shapes import LayerRange
from weftune.errors import BaseModelError
from weftune.plan.program.layout import Layout, StageLayers
from weftune.run.passes.layers import Layers

MICROBATCH = packed(random_samples())


@pytest.fixture(scope="module", params=WRAPPERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spec(family: str, tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return BaseSpec(model=str(wrapper_folder(tmp_path_factory.mktemp("base"), family)), dtype="float32")


def test_the_text_tower_computes_what_its_wrapper_computes(family: str, spec: BaseSpec) -> None:
    base, wrapper = load_base(spec, CPU), tiny_wrapper(family, torch.float32)
    with torch.no_grad():
        want = torch.cat([wrapper(input_ids=one[None]).logits[0] for one in random_samples()])
    torch.testing.assert_close(
        base.head().logits(base.hidden(MICROBATCH)), want.detach(), rtol=1e-5, atol=1e-5
    )


def test_its_sites_are_linears_of_the_wrapper_by_their_names_there(family: str, spec: BaseSpec) -> None:
    wrapper = dict(tiny_wrapper(family, torch.float32).named_modules())
    base = load_base(spec, CPU)
    assert {site.name.split(".")[3] for site in base.shape.sites} == set(map(str, range(base.shape.layers)))
    for site in base.shape.sites:
        assert site.name.startswith("model.language_model.layers.")
        assert wrapper[site.name].weight.shape == (site.out_features, site.in_features)
        assert torch.equal(wrapper[site.name].weight, base.sites()[site.name].weight)


def test_its_shape_is_known_from_the_config_alone(spec: BaseSpec) -> None:
    shape = load_base(spec, CPU).shape
    assert inspect(spec, CPU) == shape
    assert model_shape(read_config(spec), spec.model, 4) == shape


def test_its_positions_are_scaled_and_so_are_those_of_the_whole_model_that_is_written(
    family: str, spec: BaseSpec, tmp_path: Path
) -> None:
    scaled = replace(spec, rope_scaling=RopeScaling(rope_type="linear", factor=2.0))
    base = load_base(scaled, CPU)
    assert base.shape.context == 2 * CONTEXT
    assert inspect(scaled, CPU) == spec_shape(scaled, read_config(scaled), 4) == base.shape
    write_wrapper(load_plain(scaled, CPU), scaled, model_source(scaled), tmp_path)
    written = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = torch.cat([written(input_ids=one[None]).logits[0] for one in random_samples()])
    logits = base.head().logits(base.hidden(MICROBATCH))
    torch.testing.assert_close(logits, found, rtol=1e-5, atol=1e-5)
    plain = load_base(spec, CPU)
    assert (plain.head().logits(plain.hidden(MICROBATCH)) - logits).abs().max() > 1e-3


def test_other_weights_than_its_own_are_never_read(spec: BaseSpec, tmp_path: Path) -> None:
    """They need not even be there."""
    weights = load_file(Path(spec.model) / "model.safetensors")
    own = {name: value for name, value in weights.items() if "language_model" in name or "lm_head" in name}
    assert len(own) < len(weights)
    save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((Path(spec.model) / "config.json").read_bytes())
    alone = load_base(BaseSpec(model=str(tmp_path), dtype="float32"), CPU)
    assert torch.equal(alone.hidden(MICROBATCH), load_base(spec, CPU).hidden(MICROBATCH))
    missing = next(name for name in own if "layers.1.mlp.up_proj" in name)
    save_file({name: value for name, value in own.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(
        BaseModelError, match=r"lack 1 weights of a \w+ model, model\.language_model\.layers\.1\.mlp\.up_proj"
    ):
        load_base(BaseSpec(model=str(tmp_path), dtype="float32"), CPU)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")),
        (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ],
    ids=["newer", "older"],
)
def test_files_of_either_age_are_read(
    old: tuple[str, str], new: tuple[str, str], spec: BaseSpec, tmp_path: Path
) -> None:
    def renamed(name: str) -> str:
        pair = next((one for one in (old, new) if name.startswith(one[0])), ("", ""))
        return pair[1] + name.removeprefix(pair[0])

    weights = load_file(Path(spec.model) / "model.safetensors")
    save_file({renamed(name): value for name, value in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((Path(spec.model) / "config.json").read_bytes())
    other = load_base(BaseSpec(model=str(tmp_path), dtype="float32"), CPU)
    assert torch.equal(other.hidden(MICROBATCH), load_base(spec, CPU).hidden(MICROBATCH))


@pytest.mark.parametrize("tied", [True, False])
def test_where_the_configs_disagree_the_files_say_whether_the_head_is_tied(
    tied: bool, tmp_path: Path
) -> None:
    """Wrappers of Mistral have `tie_word_embeddings` by default, and their checkpoints an output layer."""
    folder = wrapper_folder(tmp_path, "mistral3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    if tied:
        weights.pop("language_model.lm_head.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    base = load_base(BaseSpec(model=str(folder), dtype="float32"), CPU)
    embedding, head = base.model.get_input_embeddings().weight, base.model.get_output_embeddings().weight
    assert (embedding is head) == tied
    assert inspect(base.spec, CPU) == base.shape


def test_in_stages_streamed_or_mapped_it_gives_the_bits_of_the_whole_tower(spec: BaseSpec) -> None:
    whole = load_base(spec, CPU)
    layers = whole.shape.layers
    cuts = [LayerRange(0, 1, layers), LayerRange(1, layers, layers)]
    first, last = (load_stage(spec, CPU, held) for held in cuts)
    h_TD = last.hidden(MICROBATCH, input_TD=first.hidden(MICROBATCH))
    assert torch.equal(h_TD, whole.hidden(MICROBATCH))
    assert first.whole_sites == whole.shape.sites
    layout = Layout(tuple(StageLayers(n, n + 1, n == 1) for n in range(layers)), slot_counts=(1,))
    for mapped in (False, True):
        streamed, given_TD = load_streamed(spec, CPU, layout, mapped), None
        for number, stage in enumerate(streamed.stages):
            if number in streamed.sources:
                streamed.sources[number].copy_to(streamed.slot(number))
            given_TD = stage.hidden(MICROBATCH, input_TD=given_TD)
        assert torch.equal(given_TD, whole.hidden(MICROBATCH))
    in_files = set().union(*weights_in_files(spec, CPU).values())
    assert in_files >= {name for name, _ in whole.model.named_parameters()}


def test_its_layers_are_fused_like_those_of_the_text_model(family: str, spec: BaseSpec) -> None:
    base = load_base(spec, CPU)
    if family == "qwen3_5":
        assert not Layers(base).modules, "layers of two kinds run as in transformers"
        return
    layers = Layers(base)
    assert len(layers.modules) == base.shape.layers
    assert {site for group in layers.groups for site in group} < {site.name for site in base.shape.sites}


PUBLISHED = {
    "gemma-3-4b": (
        "gemma3",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
        3.88,
    ),
    "Mistral-Small-3.1-24B": (
        "mistral3",
        {"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128}
        | {"vocab_size": 131072, "model_type": "mistral", "sliding_window": None},
        23.57,
    ),
    "Qwen3-VL-4B": (
        "qwen3_vl",
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8}
        | {"rope_theta": 5000000, "max_position_embeddings": 262144, "tie_word_embeddings": True}
        | {
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
        },
        4.02,
    ),
    "Qwen3.5-4B": (
        "qwen3_5",
        {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
        4.21,
    ),
}
"""Wrapper, text config without what is the default, and billions of parameters of the tower."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_like_those_on_the_hub_are_read_alike_with_and_without_torch(
    name: str, tmp_path: Path
) -> None:
    wrapper, text, billions = PUBLISHED[name]
    config = {"model_type": wrapper, "text_config": text, "vision_config": {}}
    if "tie_word_embeddings" in text:
        config["tie_word_embeddings"] = text["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = BaseSpec(model=str(tmp_path), dtype="bfloat16")
    shape = inspect(spec, CPU)
    assert model_shape(read_config(spec), name, 2) == shape
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.006)
