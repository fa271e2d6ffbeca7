"""Quantised bases and the plain models that they stand for, for tests."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.base.folders import word_tokenizer
from weftune.base.model import Base
from weftune.base.quant.formats import Nf4
from weftune.base.quant.linear import FORMATS, dequantise_linears, quantise_linears
from weftune.base.quant.read import STATE, STORED_PARTS
from weftune.base.shape import linears
from weftune.base.spec import BaseSpec, Quantize
from weftune.core.shapes import layer_number

CPU = torch.device("cpu")
CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8",
}


def in_layers(model: PreTrainedModel) -> list[str]:
    return [path for path in linears(model) if layer_number(path) is not None]


def quantised_model(model: PreTrainedModel, quantize: Quantize = "nf4") -> PreTrainedModel:
    """The same model, its layers quantised."""
    quantise_linears(model, dict.fromkeys(in_layers(model), FORMATS[quantize]))
    return model


def stood_for(model: PreTrainedModel, quantize: Quantize = "nf4") -> PreTrainedModel:
    """A plain model of the matrices that the quantised ones of `model` stand for."""
    made = quantised_model(copy.deepcopy(model), quantize)
    dequantise_linears(made)
    return made


def quantised_base(model: PreTrainedModel, quantize: Quantize = "nf4") -> Base:
    dtype = str(model.dtype).removeprefix("torch.")
    spec = BaseSpec(model="tiny/quantised", dtype=dtype, quantize=quantize)
    return Base.from_model(quantised_model(model, quantize), spec, CPU)


def plain_folder(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def stored_folder(folder: Path, model: PreTrainedModel, nested: bool = True, theirs: bool = False) -> Path:
    """What transformers writes of a model that bitsandbytes has quantised; `theirs`: by its own hand."""
    plain_folder(folder, model)
    weights = load_file(folder / "model.safetensors")
    for path in in_layers(model):
        name = f"{path}.weight"
        weight = model.get_submodule(path).weight.detach().float()
        for ending, value in (by_theirs if theirs else by_hand)(weight, nested).items():
            weights[name + ending] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIG | {"bnb_4bit_use_double_quant": nested}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_theirs(weight_NK: Tensor, nested: bool) -> dict[str, Tensor]:
    """The tensors of a matrix, by what comes behind its name."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight_NK, compress_statistics=nested, quant_type="nf4")
    return {"": packed, **{f".{key}": value for key, value in state.as_dict(packed=True).items()}}


def by_hand(weight_NK: Tensor, nested: bool) -> dict[str, Tensor]:
    parts = Nf4(nested).quantise(weight_NK)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight_NK.shape)}
    if nested:
        offset = parts.pop("offset").item()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    found = {STORED_PARTS[part]: value for part, value in parts.items()}
    return {**found, f".{STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}
