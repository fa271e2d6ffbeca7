"""Frozen weights of the base that are not plain matrices, their products, and the output layer.

A linear of the base whose weight is not a plain matrix, for example because it is quantised, returns the
weight from its method `frozen_weight`.

A coded weight is stored as 8-bit floats (e4m3), its codes, and multiplied in this form by fp8 tensor cores.
Both operands have a scale per row, so that a row's codes and products depend on that row alone, and a NaN
does not reach other rows. Gradients are e4m3, too: with a scale per row they do not need the larger range of
e5m2, which has half as many digits.

Shapes: T rows, M columns that are summed over, L rows of the frozen operand, K inputs, N outputs; for the
head S rows, D hidden width, V vocabulary, n tokens whose rows a job replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear

from weftune.core.shards import VocabularyShard

CODES = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest finite value of the 8-bit float format e4m3."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale of a row. A row with a smaller scale counts as zero, since the inverse of the scale would be
infinite."""
CODED_PARAMETERS = {"weight": 0, "scale": 0, "turned": 1}
"""Maps the name of each tensor in a linear with an 8-bit weight to the index of the tensor's dimension that
counts the outputs."""

WholeMaxima = Callable[[Tensor], Tensor]
"""Function that returns the largest values of whole rows, given the largest values of the parts of the rows
on this shard."""
MultiplyCodes = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype, WholeMaxima | None], Tensor
]
"""Function that multiplies a left operand by a frozen weight in 8-bit floats (codes): ((left_TM ⊙ scale_M) ·
codes_LMᵀ) ⊙ scale_L. The left operand is rounded to 8-bit floats, the sum is at least float32, and the result
is rounded once to the dtype. The last argument, which returns the maxima of whole rows, is given if the left
operand has only a part of each row."""


@runtime_checkable
class CodedWeight(Protocol):
    """A frozen weight W = codes · scale, with a scale per output, which is multiplied without being
    dequantised.

    In the forward xWᵀ, the scales are applied after the sum; in the backward dyW, the output's gradient dy is
    multiplied by them before the sum. The tensor cores read both operands along the summed dimension, so the
    codes are stored in both orders.
    """

    def codes(self) -> Tensor:
        """Return the codes (8-bit floats) of the weight, [N, K]."""

    def transposed_codes(self) -> Tensor:
        """Return the transposed codes (8-bit floats) of the weight, [K, N]."""

    def scale(self) -> Tensor:
        """Return the scale of each output, float32 [N]."""

    @property
    def multiply(self) -> MultiplyCodes: ...

    @property
    def input_maxima(self) -> WholeMaxima | None:
        """Function that returns the maxima of whole rows of the input, given the maxima of the parts on this
        shard. None if the weight has all inputs."""

    @property
    def output_maxima(self) -> WholeMaxima | None:
        """Function that returns the maxima of whole rows of the output's gradient, given the maxima of the
        parts on this shard. None if the weight has all outputs."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A weight in 8-bit floats, as three tensors: codes, transposed codes and scales."""

    codes_NK: Tensor
    transposed_codes_KN: Tensor
    scale_N: Tensor
    input_maxima: WholeMaxima | None = None
    output_maxima: WholeMaxima | None = None

    @classmethod
    def quantise(cls, weight_NK: Tensor) -> CodedMatrix:
        codes_NK, scale_N = quantise_rows(weight_NK.float())
        return cls(codes_NK, codes_NK.T.contiguous(), scale_N)

    def codes(self) -> Tensor:
        return self.codes_NK

    def transposed_codes(self) -> Tensor:
        return self.transposed_codes_KN

    def scale(self) -> Tensor:
        return self.scale_N

    @property
    def multiply(self) -> MultiplyCodes:
        return multiply_codes


def is_coded(weight: object) -> TypeGuard[CodedWeight]:
    return not isinstance(weight, Tensor) and isinstance(weight, CodedWeight)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of values of `dtype` are accumulated: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def quantise_rows(
    x_TM: Tensor, scale_M: Tensor | None = None, whole_maxima: WholeMaxima | None = None
) -> tuple[Tensor, Tensor]:
    """Round rows to 8-bit floats: return (codes_TM, scale_T) such that x_TM ⊙ scale_M ≈ codes_TM ⊙ scale_T.
    The largest code of each row is `LARGEST`. `whole_maxima` is given if x has only a part of each row."""
    x_TM = x_TM.to(accumulation_dtype(x_TM.dtype))
    if scale_M is not None:
        x_TM = x_TM * scale_M
    # Not a division, which torch replaces by a product on a GPU: this way all devices give the same bits.
    max_T = x_TM.abs().amax(dim=1)
    scale_T = (max_T if whole_maxima is None else whole_maxima(max_T)) * (1.0 / LARGEST)
    inverse_T = torch.where(scale_T < LEAST_SCALE, 0.0, 1.0 / scale_T)
    return (x_TM * inverse_T[:, None]).clamp_(-LARGEST, LARGEST).to(CODES), scale_T


def multiply_codes(
    left_TM: Tensor,
    codes_LM: Tensor,
    scale_M: Tensor | None,
    scale_L: Tensor | None,
    dtype: torch.dtype,
    whole_maxima: WholeMaxima | None = None,
) -> Tensor:
    """Compute ((left_TM ⊙ scale_M) · codes_LMᵀ) ⊙ scale_L on any device, with the left operand rounded to
    8-bit floats and a float32 sum, as fp8 tensor cores compute it."""
    left_TM, scale_T = quantise_rows(left_TM, scale_M, whole_maxima)
    sum_TL = left_TM.to(scale_T.dtype) @ codes_LM.to(scale_T.dtype).T
    sum_TL *= scale_T[:, None]
    if scale_L is not None:
        sum_TL *= scale_L
    return sum_TL.to(dtype)


def multiply_unrounded(
    left_TM: Tensor,
    codes_LM: Tensor,
    scale_M: Tensor | None,
    scale_L: Tensor | None,
    dtype: torch.dtype,
    whole_maxima: WholeMaxima | None = None,
) -> Tensor:
    """Compute ((left_TM ⊙ scale_M) · codes_LMᵀ) ⊙ scale_L without rounding the left operand to 8 bits.
    Rounding would magnify tiny differences, so that two computations of the same result could not be
    compared."""
    left_TM = left_TM.to(accumulation_dtype(left_TM.dtype))
    left_TM = left_TM if scale_M is None else left_TM * scale_M
    sum_TL = left_TM @ codes_LM.to(left_TM.dtype).T
    return (sum_TL if scale_L is None else sum_TL * scale_L).to(dtype)


def adjacent_view(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return a view that joins the parts along a dimension, or None if they are not adjacent in memory."""
    first, shape = parts[0], list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    whole = torch.empty(shape, device="meta")
    address = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        strides = zip(part.shape, part.stride(), whole.stride(), strict=True)
        if not (same and part.data_ptr() == address and all(n == 1 or a == b for n, a, b in strides)):
            return None
        address += part.shape[dim] * whole.stride(dim) * part.element_size()
    return first.as_strided(shape, whole.stride())


def join_tensors(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return the parts as one tensor: a view if they are adjacent in memory, otherwise a copy."""
    if len(parts) == 1:
        return parts[0]
    if (view := adjacent_view(parts, dim)) is not None:
        return view
    # Torch does not concatenate 8-bit floats on every device, but it does concatenate their bytes.
    narrow = parts[0].element_size() == 1
    together = torch.cat([part.view(torch.uint8) if narrow else part for part in parts], dim)
    return together.view(parts[0].dtype)


class FrozenWeight(Protocol):
    @property
    def stored_bytes(self) -> int: ...

    @property
    def empty_rows(self) -> Tensor:
        """Return an empty tensor [0, K] with the dtype and device of the weight matrix."""

    def matrix(self) -> Tensor:
        """Compute the dense weight matrix [N, K], which callers keep only for one product."""

    def write(self, out_NK: Tensor) -> None:
        """Write the dense weight matrix to `out_NK`."""

    def slice_outputs(self, low: int, high: int) -> FrozenWeight:
        """Return the rows of a linear's weight for the outputs `low` to `high` − 1."""


Weight = Tensor | FrozenWeight


@runtime_checkable
class WeightHolder(Protocol):
    """A linear of the base with the method `frozen_weight`, since its weight is not a plain matrix but, for
    example, quantised."""

    def frozen_weight(self) -> FrozenWeight: ...


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """The weights of several linears, stacked along the outputs. Slices must consist of whole linears."""

    parts: tuple[tuple[int, int, Weight], ...]
    """Range of outputs (start, stop) and weight of each linear."""

    @classmethod
    def stack(cls, weights: Sequence[Weight], outputs: Sequence[int]) -> StackedWeight:
        stops = [sum(outputs[: number + 1]) for number in range(len(outputs))]
        return cls(tuple(zip([0, *stops[:-1]], stops, weights, strict=True)))

    @property
    def stored_bytes(self) -> int:
        return sum(stored_bytes(weight) for _, _, weight in self.parts)

    @property
    def empty_rows(self) -> Tensor:
        weight = self.parts[0][2]
        return weight[:0] if isinstance(weight, Tensor) else weight.empty_rows

    def matrix(self) -> Tensor:
        like = self.empty_rows
        out_NK = like.new_empty(self.parts[-1][1], like.shape[1])
        self.write(out_NK)
        return out_NK

    def write(self, out_NK: Tensor) -> None:
        for low, high, weight in self.parts:
            if isinstance(weight, Tensor):
                out_NK[low:high] = weight
            else:
                weight.write(out_NK[low:high])

    def slice_outputs(self, low: int, high: int) -> FrozenWeight:
        found = next(weight for first, end, weight in self.parts if (first, end) == (low, high))
        return stack_weights([found], [high - low])


@dataclass(frozen=True, slots=True)
class CodedStack(StackedWeight):
    """A stack of weights in 8-bit floats. Its codes are a view if they are adjacent in memory, and otherwise
    a copy for each product."""

    @property
    def coded_parts(self) -> list[CodedWeight]:
        return [weight for _, _, weight in self.parts if is_coded(weight)]

    def codes(self) -> Tensor:
        return join_tensors([weight.codes() for weight in self.coded_parts], dim=0)

    def transposed_codes(self) -> Tensor:
        return join_tensors([weight.transposed_codes() for weight in self.coded_parts], dim=1)

    def scale(self) -> Tensor:
        return join_tensors([weight.scale() for weight in self.coded_parts], dim=0)

    @property
    def multiply(self) -> MultiplyCodes:
        return self.coded_parts[0].multiply

    @property
    def input_maxima(self) -> WholeMaxima | None:
        return self.coded_parts[0].input_maxima

    @property
    def output_maxima(self) -> WholeMaxima | None:
        return self.coded_parts[0].output_maxima


def stack_weights(weights: Sequence[Weight], outputs: Sequence[int]) -> StackedWeight:
    return (CodedStack if all(map(is_coded, weights)) else StackedWeight).stack(weights, outputs)


def frozen_product(x_TK: Tensor, weight: Weight, bias_N: Tensor | None) -> Tensor:
    """Return xWᵀ + b for inputs x, a frozen weight W and an optional bias b."""
    if isinstance(weight, Tensor):
        return linear(x_TK, weight, bias_N)
    if not is_coded(weight):
        return frozen_product_by(linear, x_TK, weight, bias_N)
    if bias_N is None:
        return quantised_product(x_TK, weight, x_TK.dtype)
    return (quantised_product(x_TK, weight, accumulation_dtype(x_TK.dtype)) + bias_N).to(x_TK.dtype)


def quantised_product(x_TK: Tensor, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """Return xWᵀ for inputs x and a weight W in 8-bit floats, rounded to the dtype. Forward and backward
    multiply 8-bit floats, and the weight gets no gradient."""
    product: Tensor
    if x_TK.ndim == 2:
        # Never a view, since callers add to the result in place.
        product = _CodedProduct.apply(x_TK, weight, dtype)
    else:
        product = _CodedProduct.apply(x_TK.flatten(0, -2), weight, dtype).view(*x_TK.shape[:-1], -1)
    return product


class _CodedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.dtype = weight, x_TK.dtype
        return weight.multiply(x_TK, weight.codes(), None, weight.scale(), dtype, weight.input_maxima)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None]:
        weight: CodedWeight = ctx.weight
        maxima = weight.output_maxima
        return (
            weight.multiply(dy_TN, weight.transposed_codes(), weight.scale(), None, ctx.dtype, maxima),
            None,
            None,
        )


def frozen_product_by(
    multiply: Callable[..., Tensor], x_TK: Tensor, weight: Weight, bias_N: Tensor | None
) -> Tensor:
    """Return xWᵀ + b for inputs x, a frozen weight W and an optional bias b, computed by the function
    `multiply`. The weight gets no gradient."""
    product: Tensor = _Product.apply(x_TK, weight, bias_N, multiply)
    return product


class _Product(torch.autograd.Function):
    """Autograd function of the product with a frozen weight. A dequantised matrix is not kept for the
    backward, which computes the matrix again."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, weight: Weight, bias_N: Tensor | None, multiply: Callable[..., Tensor]
    ) -> Tensor:
        ctx.weight = weight
        return multiply(x_TK, weight_matrix(weight), bias_N)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, None, None, None]:
        weight_NK = weight_matrix(ctx.weight)
        return dy_TN.to(weight_NK.dtype) @ weight_NK, None, None, None


def weight_matrix(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.matrix()


def slice_weight(weight: Weight, low: int, high: int) -> Weight:
    return weight[low:high] if isinstance(weight, Tensor) else weight.slice_outputs(low, high)


def stored_bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.stored_bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer: logits = softcap · tanh((hWᵀ + b) · multiplier / softcap) for hidden states h and
    weight W. The bias b, the multiplier and the softcap are optional."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    multiplier: float = 1.0
    shard: VocabularyShard | None = None
    """Part of the vocabulary whose rows are in `weight_VD` and `bias_V`, if these are divided among shards. V
    is then the number of tokens in this part."""

    def logits(self, h_SD: Tensor, replaced_rows: HeadRows | None = None) -> Tensor:
        """Return the logits in at least float32. `replaced_rows` are used instead of the head's rows with the
        same indices."""
        logits_SV = float_linear(h_SD, self.weight_VD, self.bias_V)
        if replaced_rows is not None:
            bias_n = None if self.bias_V is None else self.bias_V[replaced_rows.ids_n]
            logits_SV[:, replaced_rows.ids_n] = float_linear(h_SD, replaced_rows.rows_nD, bias_n)
        if self.multiplier != 1.0:
            logits_SV = logits_SV * self.multiplier
        if self.softcap is not None:
            logits_SV = torch.tanh(logits_SV / self.softcap) * self.softcap
        return logits_SV


def float_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return xWᵀ + b for inputs x, weight W and bias b in at least float32. On NVIDIA GPUs the result is not
    rounded to half precision, in which neighbouring values near 20 differ by 0.125."""
    if x_TK.dtype not in (torch.bfloat16, torch.float16):
        return linear(x_TK, weight_NK, bias_N)
    if x_TK.device.type not in ("cuda", "meta") or torch.version.hip is not None:
        return linear(x_TK, weight_NK, bias_N).float()
    y_TN = torch.mm(x_TK, weight_NK.mT, out_dtype=torch.float32)
    return y_TN if bias_N is None else y_TN.add_(bias_N)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of the head (one per token of the vocabulary) that one job replaces by trained rows."""

    ids_n: Tensor
    rows_nD: Tensor
