"""Folders of strangers: what cannot be used in a config is one sentence, for every kind that is merged."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tests import bench
from tests.adapters.kinds import cases
from weftune.adapters.folder import CONFIG
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import get_kind, kind_of_folder
from weftune.errors import AdapterError
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

PLAIN = ("dora", "vera", "ia3", "diff")
SLOW = "(.*.*)*x"


@pytest.fixture(scope="module")
def base():
    return bench.base("llama", torch.float32)


@pytest.fixture
def folder(request, base, tmp_path):
    """A new adapter of the kind, as it is saved."""
    adapter = cases.job(request.param, "llama").adapter
    begun = new_training(
        JobAdapter("a", adapter, 0),
        Recipe(1),
        base.shape.sites,
        base.dtype,
        bench.CPU,
        frozen=base.weight_reader(),
    )
    kind = get_kind(adapter.kind)
    kind.save(tmp_path, adapter, begun.layout.parameter_views(begun.master), base.shape.sites, "some/base")
    return tmp_path


def changed(folder, change) -> None:
    path = folder / CONFIG
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def refused(folder, base) -> str:
    """The sentence with which a merge of the folder is refused."""
    began = time.monotonic()
    with pytest.raises(AdapterError) as caught:
        kind_of_folder(folder).merge(folder, base.sites(), base.shape.sites)
    assert time.monotonic() - began < 20
    assert "\n" not in str(caught.value)
    return str(caught.value)


def key_of(folder, theirs, ours):
    return ours if "weftune_kind" in json.loads((folder / CONFIG).read_text()) else theirs


@pytest.mark.parametrize("folder", PLAIN, indirect=True)
def test_whole_folders_are_merged(folder):
    model = bench.base("llama", torch.float32)
    before = {name: module.weight.clone() for name, module in model.sites().items()}
    kind_of_folder(folder).merge(folder, model.sites(), model.shape.sites)
    for name, module in model.sites().items():
        torch.testing.assert_close(module.weight, before[name])


@pytest.mark.parametrize("folder", PLAIN, indirect=True)
@pytest.mark.parametrize("targets", [7, {"q_proj": 1.5}, "(", None])
def test_targets_that_are_none_are_a_sentence(folder, base, targets):
    key = key_of(folder, "target_modules", "targets")
    changed(folder, lambda config: config.update({key: targets}))
    assert str(folder) in refused(folder, base)


@pytest.mark.parametrize("folder", PLAIN, indirect=True)
def test_a_slow_expression_for_targets_is_not_matched(folder, base):
    key = key_of(folder, "target_modules", "targets")
    changed(folder, lambda config: config.update({key: SLOW}))
    assert "is a regular expression that" in (sentence := refused(folder, base))
    assert f"{folder / CONFIG}: {SLOW!r}" in sentence


@pytest.mark.parametrize("folder", PLAIN, indirect=True)
def test_an_adapter_of_other_modules_is_for_another_base(folder, base):
    key = key_of(folder, "target_modules", "targets")
    changed(folder, lambda config: config.update({key: ["q_proj"]}))
    assert "is for another base, or its adapter_config.json is of another adapter" in refused(folder, base)
    changed(folder, lambda config: config.update({key: ["c_attn"]}))
    assert "is for another base: it adapts no module of this one" in refused(folder, base)


@pytest.mark.parametrize("folder", PLAIN, indirect=True)
@pytest.mark.parametrize("layers", ["one", {"0": 1}, [["x"]], "0-99999999999"])
def test_layers_that_are_none_are_a_sentence(folder, base, layers):
    key = key_of(folder, "layers_to_transform", "layers")
    changed(folder, lambda config: config.update({key: layers}))
    assert "is damaged" in refused(folder, base)


@pytest.mark.parametrize(
    ("folder", "key"),
    [("dora", "r"), ("dora", "lora_alpha"), ("vera", "projection_prng_key"), ("ia3", "target_modules")],
    indirect=["folder"],
)
def test_a_key_that_is_missing_is_named(folder, base, key):
    changed(folder, lambda config: config.pop(key))
    assert f"is damaged: it has no key {key!r}" in refused(folder, base)


@pytest.mark.parametrize(
    ("folder", "keys", "sentence"),
    [
        ("dora", {"r": 0}, "a rank is below 1"),
        ("dora", {"r": "four"}, "is damaged"),
        ("dora", {"rank_pattern": {"q_proj": -1}}, "a rank is below 1"),
        ("dora", {"rank_pattern": {"(": 4}}, "is damaged"),
        ("dora", {"rank_pattern": {SLOW: 4}}, "is a regular expression that"),
        ("dora", {"alpha_pattern": {SLOW: 4}}, "is a regular expression that"),
        ("dora", {"lora_alpha": float("nan")}, "an alpha is no finite number"),
        ("dora", {"bias": "all"}, "is more than plain LoRA: its adapter_config.json sets bias"),
        ("dora", {"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ("dora", {"init_lora_weights": "pissa"}, "belongs to a base that PEFT has changed"),
        ("vera", {"r": 10**15}, "does not fit"),
        ("vera", {"projection_prng_key": 2**80}, "projection_prng_key is no seed"),
        ("vera", {"vera_dropout": "much"}, "is damaged"),
        ("ia3", {"feedforward_modules": 3}, "is damaged"),
        ("diff", {"sparsitty": 0.5}, "is damaged"),
        ("diff", {"weftune_kind": ["diff"]}, "a kind that Weftune does not know"),
    ],
    indirect=["folder"],
)
def test_values_that_are_none_are_a_sentence(folder, base, keys, sentence):
    changed(folder, lambda config: config.update(keys))
    assert sentence in refused(folder, base)
