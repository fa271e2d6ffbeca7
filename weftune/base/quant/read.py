"""Reading of a base's quantised weights: plain files are quantised one matrix at a time, and bitsandbytes
files are read as they are.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weftune.base.quant.formats import Nf4, WeightFormat
from weftune.base.quant.linear import QuantLinear
from weftune.base.quant.stored import NESTED_BLOCK, NF4_BLOCK

STATE = "quant_state.bitsandbytes__nf4"
STORED_PARTS = {
    "weight": "",
    "absmax": ".absmax",
    "code": ".quant_map",
    "nested_absmax": ".nested_absmax",
    "nested_code": ".nested_quant_map",
}
"""Maps Weftune's name of each tensor of a quantised matrix to the suffix that bitsandbytes appends to the
name of the matrix."""

ReadTensor = Callable[[str], Tensor]
"""Function that returns a tensor of a base's weight files by the tensor's name."""


def is_stored_weight(name: str, stored: Collection[str]) -> bool:
    """Return whether the files hold the matrix of this name in the quantised form of bitsandbytes."""
    return f"{name}.{STATE}" in stored


def is_stored_part(name: str, stored: Collection[str]) -> bool:
    """Return whether a tensor in the files belongs to a matrix that bitsandbytes has quantised."""
    endings = (f".{STATE}", *(ending for ending in STORED_PARTS.values() if ending))
    matrix = next((name.removesuffix(ending) for ending in endings if name.endswith(ending)), name)
    return is_stored_weight(matrix, stored)


def weights_by_part(model: PreTrainedModel) -> dict[str, str]:
    """Return a dict from the name of each secondary tensor of a quantised weight, such as its scales, to the
    name of its main tensor, `weight`."""
    return {
        f"{path}.{part}": f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, QuantLinear)
        for part in module.parts
        if part != "weight"
    }


class QuantReader:
    """A callable that writes a parameter of a model, given by its name, into a tensor, and quantises it on
    the way if necessary. The tensors of one quantised weight should be requested consecutively, since only
    those of the latest weight are cached."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: Mapping[str, str],
        stored: Collection[str],
        read: ReadTensor,
        device: torch.device,
    ) -> None:
        """Create a reader. `names` maps the path of each quantised linear to the name of the linear's matrix
        in files. Matrices are quantised on `device` even if they are kept elsewhere, so that the result has
        the same bits."""
        self._linears = {path: module for path, module in model.named_modules() if path in names}
        self._names, self._stored, self._read, self._device = names, stored, read, device
        self._path, self._parts = "", dict[str, Tensor]()

    def has_parameter(self, name: str) -> bool:
        path, _, part = name.rpartition(".")
        return path in self._names and part != "bias"

    def __call__(self, name: str, out: Tensor) -> None:
        path, _, part = name.rpartition(".")
        if path != self._path:
            self._path, self._parts = "", {}
            self._parts, self._path = self._read_parts(path), path
        out.copy_(self._parts[part])

    def _read_parts(self, path: str) -> dict[str, Tensor]:
        linear, name = self._linears[path], self._names[path]
        assert isinstance(linear, QuantLinear)
        shape = (linear.out_features, linear.in_features)
        if is_stored_weight(name, self._stored):
            return stored_parts(name, self._read, linear.form, shape)
        weight = self._read(name).to(self._device)
        weight_NK = weight.T if linear.fan_in_fan_out else weight
        if weight_NK.shape != shape:
            raise ValueError(
                f"{name} is {list(weight.shape)} in its file, and not the {list(shape)} of its linear"
            )
        return linear.form.quantise(weight_NK)


def stored_format(name: str, stored: Collection[str]) -> Nf4:
    """Return the quantisation format of a matrix that bitsandbytes has quantised, from the names of its
    tensors in files."""
    return Nf4(is_nested=f"{name}{STORED_PARTS['nested_absmax']}" in stored)


def stored_parts(
    name: str, read: ReadTensor, weight_format: WeightFormat, shape: tuple[int, int]
) -> dict[str, Tensor]:
    """Return the tensors of a matrix that bitsandbytes has quantised, after checking its metadata."""
    state = _read_state(name, read(f"{name}.{STATE}"))
    announced = weight_format.parts(*shape)
    nested = "nested_absmax" in announced
    expected = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "shape": list(shape)}
    expected |= {"nested_blocksize": NESTED_BLOCK} if nested else {}
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"{name} is stored with {key} {state.get(key)}, and not {value}")
    found = {part: read(name + ending) for part, ending in STORED_PARTS.items() if part in announced}
    # It may be stored in another dtype, for the sake of sharding.
    found["weight"] = found["weight"].contiguous().view(torch.uint8).view(-1, 1)
    if nested:
        found["offset"] = torch.tensor(float(state["nested_offset"]), dtype=torch.float32)
    for part, value in found.items():
        if (tuple(value.shape), value.dtype) != (announced[part].shape, announced[part].dtype):
            raise ValueError(
                f"{name}: its {part} is {value.dtype} {list(value.shape)}, which fits no such matrix"
            )
    return found


def stored_matrix(name: str, read: ReadTensor, stored: Collection[str]) -> Tensor:
    """Return a matrix that bitsandbytes has quantised, dequantised to float32."""
    shape: Any = _read_state(name, read(f"{name}.{STATE}")).get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"{name} is stored with the shape {shape}")
    form = stored_format(name, stored)
    parts = stored_parts(name, read, form, (shape[0], shape[1]))
    matrix_NK = torch.empty(shape)
    form.write(parts, matrix_NK)
    return matrix_NK


def _read_state(name: str, data: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(data.tolist()))
    except (ValueError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError(f"{name} is stored with a damaged quant_state")
    return state
