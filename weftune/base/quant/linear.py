"""Linear layers of the base with quantised weights.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from weftune.base.quant.formats import Fp8, Int8, Nf4, WeightFormat
from weftune.base.spec import Quantize
from weftune.core.shapes import SiteSlice
from weftune.core.shards import indices_in_whole
from weftune.core.weights import (
    FrozenWeight,
    MultiplyCodes,
    WholeMaxima,
    frozen_product,
    multiply_codes,
    multiply_unrounded,
)

FORMATS: Mapping[Quantize, WeightFormat] = {"nf4": Nf4(), "int8": Int8(), "fp8": Fp8()}

Dequantise = Callable[[WeightFormat, Mapping[str, Tensor], Tensor], None]
"""Function that writes a dequantised matrix into a given tensor. Its arguments are the quantisation format,
the tensors of the quantised matrix, and `out_NK`."""


def dequantise_plain(weight_format: WeightFormat, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
    weight_format.write(parts, out_NK)


class QuantLinear(nn.Linear):
    """A linear with a quantised weight. The linear dequantises the weight in every forward and again in the
    backward, unless products are computed from the codes directly."""

    def __init__(
        self,
        shape: tuple[int, int],
        weight_format: WeightFormat,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fan_in_fan_out: bool = False,
    ) -> None:
        """Create the linear without values. `shape` is (outputs, inputs), and `dtype` is the dtype of the
        dequantised matrix; `fan_in_fan_out` says that the original weight was stored as [K, N]."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.form, self.matrix_dtype, self.fan_in_fan_out = weight_format, dtype, fan_in_fan_out
        self.dequantise: Dequantise = dequantise_plain
        self.multiply: MultiplyCodes = multiply_codes
        """Function that computes products with the weight's codes (its quantised values).
        `set_weight_functions` replaces this function and `dequantise` by kernels."""
        self.input_maxima: WholeMaxima | None = None
        self.output_maxima: WholeMaxima | None = None
        """Functions that combine the maxima of rows over all shards (tensor parallelism), one for inputs and
        one for output gradients. None unless shards divide these rows."""
        stored = weight_format.parts(*shape)
        self._parts = tuple(stored)
        for name, part in stored.items():
            value = torch.empty_like(part, device=device)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        made = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if made is None else nn.Parameter(made, requires_grad=False))

    @property
    def parts(self) -> dict[str, Tensor]:
        """Tensors that store the quantised weight, by name."""
        return {
            name: value for name, value in self._parameters.items() if name != "bias" and value is not None
        }

    def frozen_weight(self) -> FrozenWeight:
        return Fp8Weight(self) if isinstance(self.form, Fp8) else QuantWeight(self)

    def forward(self, input: Tensor) -> Tensor:
        return frozen_product(input, self.frozen_weight(), self.bias)

    @torch.no_grad()
    def build_matrix(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the dequantised matrix that the tensors `parts` store, on their device."""
        shape, device = (self.out_features, self.in_features), parts["weight"].device
        out_NK = torch.empty(shape, dtype=self.matrix_dtype, device=device)
        self.form.write(parts, out_NK)
        return out_NK

    def set_parts(self, values: Mapping[str, Tensor]) -> None:
        """Replace the tensors that store the quantised weight."""
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.form.name}"


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """The weight of a `QuantLinear`. This object looks up the module's tensors on every use, since the
    tensors may be replaced."""

    module: QuantLinear

    @property
    def stored_bytes(self) -> int:
        return sum(value.nbytes for value in self.module.parts.values())

    @property
    def empty_rows(self) -> Tensor:
        weight = self.module.weight
        return torch.empty(0, self.module.in_features, dtype=self.module.matrix_dtype, device=weight.device)

    def matrix(self) -> Tensor:
        out_NK = self.empty_rows.new_empty(self.module.out_features, self.module.in_features)
        self.write(out_NK)
        return out_NK

    @torch.no_grad()
    def write(self, out_NK: Tensor) -> None:
        self.module.dequantise(self.module.form, self.module.parts, out_NK)

    def slice_outputs(self, low: int, high: int) -> FrozenWeight:
        assert (low, high) == (0, self.module.out_features), "blocks do not end with rows"
        return self


class Fp8Weight(QuantWeight):
    """An fp8 weight, whose products are computed from its 8-bit codes without dequantising the matrix."""

    def codes(self) -> Tensor:
        return self.module.weight

    def transposed_codes(self) -> Tensor:
        return cast(Tensor, self.module.turned)

    def scale(self) -> Tensor:
        return cast(Tensor, self.module.scale)

    @property
    def multiply(self) -> MultiplyCodes:
        return self.module.multiply

    @property
    def input_maxima(self) -> WholeMaxima | None:
        return self.module.input_maxima

    @property
    def output_maxima(self) -> WholeMaxima | None:
        return self.module.output_maxima


def replace_linears(model: PreTrainedModel, formats: Mapping[str, WeightFormat]) -> None:
    """Replace the linears at the paths in `formats` by quantised linears whose values are not set yet."""
    dtype = model.dtype
    for path, form in formats.items():
        model.set_submodule(path, _empty_linear(model.get_submodule(path), form, dtype))


def _empty_linear(plain_linear: nn.Module, weight_format: WeightFormat, dtype: torch.dtype) -> QuantLinear:
    weight, bias, turned = (
        cast(Tensor, plain_linear.weight),
        plain_linear.bias is not None,
        isinstance(plain_linear, Conv1D),
    )
    outputs, inputs = reversed(weight.shape) if turned else weight.shape
    return QuantLinear((outputs, inputs), weight_format, bias, dtype, weight.device, turned)


def quantise_linears(model: PreTrainedModel, formats: Mapping[str, WeightFormat]) -> None:
    """Quantise the linears at the paths in `formats` of a model in memory, one after another."""
    dtype = model.dtype
    for path, form in formats.items():
        plain = model.get_submodule(path)
        weight = cast(Tensor, plain.weight).detach()
        made = _empty_linear(plain, form, dtype)
        made.set_parts(form.quantise(weight.T if made.fan_in_fan_out else weight))
        made.register_parameter("bias", cast(nn.Parameter | None, plain.bias))
        model.set_submodule(path, made)


def cut_quantised(linear: QuantLinear, parts: Mapping[str, Tensor], part: SiteSlice) -> nn.Linear:
    """Return a linear without a bias for a part of a quantised linear, such as some of its rows. The part's
    weight has the same dequantised values. The new linear is quantised if the part consists of whole blocks,
    and plain otherwise. `parts` are the tensors of the whole weight."""
    shape = (linear.out_features, linear.in_features)
    outputs, inputs = (shape[0], part.size) if part.cuts_inputs else (part.size, shape[1])
    meta = torch.device("meta")
    if (cut := linear.form.cut_part(parts, shape, part)) is None:
        made = nn.Linear(inputs, outputs, bias=False, device=meta)
        matrix_NK = linear.build_matrix(parts)
        kept = indices_in_whole(part, matrix_NK.device)
        weight_NK = matrix_NK.index_select(1 if part.cuts_inputs else 0, kept)
        made.weight = nn.Parameter(weight_NK, requires_grad=False)
        return made
    form, local = cut
    quantised = QuantLinear((outputs, inputs), form, False, linear.matrix_dtype, meta)
    quantised.set_parts(local)
    return quantised


def set_weight_functions(
    model: PreTrainedModel,
    dequantise: Dequantise = dequantise_plain,
    multiply: MultiplyCodes = multiply_codes,
) -> None:
    """Set the functions by which all quantised linears of `model` dequantise their weights and multiply by
    them."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.dequantise, module.multiply = dequantise, multiply


@contextmanager
def unrounded_activations(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, multiply by dequantised fp8 weights without rounding the activations."""
    set_weight_functions(model, multiply=multiply_unrounded)
    try:
        yield
    finally:
        set_weight_functions(model)


def quant_paths(model: PreTrainedModel) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, QuantLinear)]


def dequantise_linears(model: PreTrainedModel) -> None:
    """Replace quantised linears by plain ones, one after another."""
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(path, _plain_linear(module))


def _plain_linear(module: QuantLinear) -> nn.Module:
    matrix_NK, made = module.frozen_weight().matrix(), nn.Module()
    if module.fan_in_fan_out:
        made, matrix_NK = Conv1D(0, 0), matrix_NK.T.contiguous()
        made.nf, made.nx = module.out_features, module.in_features
    else:
        made = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(matrix_NK, requires_grad=False)
    made.register_parameter("bias", module.bias)
    return made


def matrix_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which forward and backward passes of the model compute. Some tensors of quantised
    weights have another dtype, since they are always float32."""
    quantised = (module for module in model.modules() if isinstance(module, QuantLinear))
    return next((module.matrix_dtype for module in quantised), None) or model.dtype
