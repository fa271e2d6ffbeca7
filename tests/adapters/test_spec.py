"""Which modules a LoRA spec means, with which rank and scale: PEFT decides."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer

from tests.families import EVERY, FAMILIES, tiny
from tests.oracle import lora_config
from weftune.adapters.bottleneck.spec import BottleneckSpec
from weftune.adapters.dora.spec import DoraSpec
from weftune.adapters.ia3.spec import Ia3Spec
from weftune.adapters.lora.spec import LoraSpec, site_of_weight, weight_names
from weftune.adapters.prefix.spec import PrefixSpec
from weftune.adapters.target import embedding_path, embedding_width
from weftune.base.shape import linears, model_sites
from weftune.core.shapes import SiteShape


def by_peft(model, spec):
    """Module path → (rank, scale), for every module that PEFT gives an adapter."""
    targets = spec.targets if isinstance(spec.targets, str) else list(spec.targets)
    config = lora_config(
        model,
        spec.rank,
        spec.alpha,
        targets,
        use_rslora=spec.rslora,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
    )
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in get_peft_model(model, config).named_modules()
        if isinstance(module, LoraLayer)
    }


def by_spec(sites, spec):
    return {name: (spec.rank_at(name), spec.scale_at(name)) for name in sites if spec.targets_site(name)}


def specs(sites):
    """Every way to write targets and patterns, in the names that this family has."""
    first, last = sites[0], sites[-1]
    ending, other = first.rpartition(".")[2], last.rpartition(".")[2]
    two_deep = ".".join(last.split(".")[-2:])
    return {
        "all-linear": LoraSpec(rank=3, alpha=7.0),
        "all-linear in capitals": LoraSpec(rank=3, alpha=7.0, targets="ALL-LINEAR"),
        "endings": LoraSpec(rank=4, alpha=2.0, targets=(ending, other)),
        "two components": LoraSpec(rank=4, alpha=2.0, targets=(two_deep,)),
        "one whole path": LoraSpec(rank=4, alpha=2.0, targets=(first,)),
        "half a component": LoraSpec(rank=4, alpha=2.0, targets=(ending, other[1:])),
        "regex": LoraSpec(rank=5, alpha=9.0, targets=rf".*\.1\.(.*\.)?({ending}|{other})"),
        "rslora": LoraSpec(rank=5, alpha=9.0, rslora=True),
        "patterns": LoraSpec(
            rank=6,
            alpha=12.0,
            rank_pattern={ending: 2, last: 9, r".*\.0\..*": 4},
            alpha_pattern={rf"^{last}": 3.0, two_deep: 5.0, other: 1.5},
        ),
        "patterns and rslora": LoraSpec(
            rank=6, alpha=12.0, rslora=True, rank_pattern={r"\w+\.1\..*": 3}, alpha_pattern={other: 4.5}
        ),
        "a pattern of half a component": LoraSpec(rank=6, rank_pattern={ending[1:]: 2}),
    }


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_sites_ranks_and_scales_are_those_of_peft(family):
    sites = list(linears(tiny(family, torch.float32)))
    for name, spec in specs(sites).items():
        want = by_peft(tiny(family, torch.float32), spec)
        assert want, name
        assert by_spec(sites, spec) == want, name


def test_the_cases_above_are_not_all_the_same():
    sites = list(linears(tiny("llama", torch.float32)))
    meant = [by_spec(sites, spec) for spec in specs(sites).values()]
    assert len({frozenset(found.items()) for found in meant}) == len(meant) - 1, "only the capitals repeat"
    assert len({rank for rank, _ in by_spec(sites, specs(sites)["patterns"]).values()}) >= 3


def test_a_weights_name_gives_its_site_back_and_any_other_name_does_not():
    assert {site_of_weight(name) for name in weight_names("model.layers.0.mlp.up_proj")} == {
        "model.layers.0.mlp.up_proj"
    }
    for name in (
        "base_model.model.x.lora_embedding_A",
        "base_model.model.x.lora_magnitude_vector",
        "base_model.model.x.lora_B.bias",
        "base_model.model.x.lora_A.default.weight",
        "x.lora_A.weight",
    ):
        assert site_of_weight(name) is None


def test_outputs_that_are_kept_are_those_of_sites_beside_one_that_scales_its_own() -> None:
    layers = range(2)
    widths = {"q_proj": 64, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    sites = [
        SiteShape(f"model.layers.{layer}.self_attn.{name}", 64 if name == "o_proj" else 32, width)
        for layer in layers
        for name, width in widths.items()
    ]
    sites += [SiteShape(f"model.layers.{layer}.mlp.down_proj", 96, 32) for layer in layers]
    assert LoraSpec().scaled_outputs(sites) == 0
    assert Ia3Spec().scaled_outputs(sites) == 2 * (64 + 16 + 16)
    assert DoraSpec().scaled_outputs(sites) == 2 * (64 + 16 + 16 + 32 + 32)
    assert DoraSpec(layers=1, targets=("down_proj",)).scaled_outputs(sites) == 32
    assert LoraSpec().copied_values(sites) == DoraSpec().copied_values(sites) == 0
    assert BottleneckSpec(size=8).copied_values(sites) == 2 * (32 + 8 + 32 + 8)
    assert PrefixSpec().copied_values(sites) == 2 * (64 + 16 + 16 + 2 * 64)


@pytest.mark.parametrize("family", [*(family for family in EVERY if family != "opt"), "qwen3_5"])
def test_path_and_width_of_the_embedding_follow_from_the_sites(family):
    """The first linear of Qwen3.5 is an output projection, whose input is not as wide as the embedding."""
    model = tiny(family)
    sites = list(model_sites(model))
    embedding = model.get_submodule(embedding_path(sites))
    assert embedding is model.get_input_embeddings()
    assert embedding_width(sites) == embedding.embedding_dim
    assert embedding_width([site for site in sites if ".0." not in site.name]) == 0
