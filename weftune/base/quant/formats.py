"""Formats of quantised weights: the tensors of a quantised matrix, quantisation and dequantisation.

nf4 is stored as bitsandbytes stores it: four bits per value, blocks of 64 with one maximum each, and the
maxima quantised in turn (double quantisation). W = code[bits] · maximum of the block, which is
nested_code[absmax] · nested_absmax + offset; all of it is computed in float32 and rounded once.

int8 and fp8 (e4m3) have one scale per row: W = weight · scale. In int8 only weights are quantised:
activations are not rounded, so the result of a row of a microbatch does not depend on its neighbours, as it
would if outlier columns were split off. Matrix products use the codes of fp8 directly. The codes are also
stored transposed, as `turned` [K, N], since tensor cores read both operands along the summed dimension, which
is the outputs in the backward.

Shapes: K inputs, N outputs, B blocks of 64 values, M blocks of 256 maxima.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from weftune.base.quant.stored import NESTED_BLOCK, NESTED_CODES, NF4_BLOCK, NF4_CODES
from weftune.base.spec import BaseSpec, Quantize
from weftune.core.device_class import get_device_class
from weftune.core.shapes import SiteSlice
from weftune.core.shards import indices_in_whole
from weftune.core.weights import CODES, quantise_rows
from weftune.errors import BaseModelError

CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The values of NF4: quantiles of the normal distribution, rounded as in Dettmers et al. (2023)."""
READ_VALUES = 1 << 24
"""Number of values that are quantised at a time: a multiple of both block sizes, or, for formats with one
scale per row, whole rows."""
PIECE_VALUES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Maps a device type to the number of values that plain torch dequantises at a time: the intermediate values
fit a CPU's caches, or keep a GPU busy, and are small compared to the matrix."""
MIN_DIVISOR = 1e-38
"""Lower limit of a divisor, since the maximum of a block of zeros is 0."""
MAX_CODE = 127


def _meta_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def piece_values(device: torch.device) -> int:
    return PIECE_VALUES.get(device.type, PIECE_VALUES["cpu"])


class Int8:
    name: Quantize = "int8"
    codes = torch.int8

    def parts(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        """Return the tensors that store a quantised [outputs, inputs] matrix, by name, on the meta device.
        The largest is `weight`."""
        return {
            "weight": _meta_tensor(self.codes, outputs, inputs),
            "scale": _meta_tensor(torch.float32, outputs),
        }

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        """Quantise a matrix, and return the tensors that store it, by name, on the matrix's device."""
        codes_NK = torch.empty(weight_NK.shape, dtype=self.codes, device=weight_NK.device)
        scale_N = torch.empty(len(weight_NK), device=weight_NK.device)
        rows = max(1, READ_VALUES // weight_NK.shape[1])
        pieces = (tensor.split(rows) for tensor in (weight_NK, codes_NK, scale_N))
        for piece_RK, codes_RK, scale_R in zip(*pieces, strict=True):
            codes, scale = self._row_codes(piece_RK.float())
            codes_RK.copy_(codes)
            scale_R.copy_(scale)
        return {"weight": codes_NK, "scale": scale_N}

    def _row_codes(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the 8-bit codes of some rows of a matrix, and the scale of each row."""
        scale_N = weight_NK.abs().amax(dim=1) / MAX_CODE
        # A row of zeros has the scale 0, and its codes do not matter.
        codes_NK = (weight_NK / scale_N.where(scale_N != 0, 1)[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
        return codes_NK.to(torch.int8), scale_N

    def cut_part(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], part: SiteSlice
    ) -> tuple[WeightFormat, dict[str, Tensor]]:
        """Cut a part (some rows or columns) out of a quantised matrix of this shape. Return the part's format
        and tensors, which dequantise to the same values as in the whole matrix."""
        kept = indices_in_whole(part, parts["weight"].device)
        # Torch does not select 8-bit floats on every device, but it does select their bytes.
        codes_NK = parts["weight"].view(torch.uint8).index_select(1 if part.cuts_inputs else 0, kept)
        scale_N = parts["scale"] if part.cuts_inputs else parts["scale"].index_select(0, kept)
        return self, {"weight": codes_NK.view(self.codes), "scale": scale_N}

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        """Dequantise the matrix that the tensors `parts` store into `out_NK`, a contiguous tensor, in the
        dtype of `out_NK`."""
        rows = max(1, piece_values(out_NK.device) // out_NK.shape[1])
        pieces = (tensor.split(rows) for tensor in (out_NK, parts["weight"], parts["scale"]))
        for out_RK, codes_RK, scale_R in zip(*pieces, strict=True):
            out_RK.copy_(codes_RK.float().mul_(scale_R[:, None]))


class Fp8(Int8):
    name: Quantize = "fp8"
    codes = CODES

    def parts(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {**super().parts(outputs, inputs), "turned": _meta_tensor(self.codes, inputs, outputs)}

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        found = super().quantise(weight_NK)
        return {**found, "turned": found["weight"].T.contiguous()}

    def _row_codes(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        return quantise_rows(weight_NK)

    def cut_part(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], part: SiteSlice
    ) -> tuple[WeightFormat, dict[str, Tensor]]:
        form, local = super().cut_part(parts, shape, part)
        return form, {**local, "turned": local["weight"].T.contiguous()}


@dataclass(frozen=True, slots=True)
class Nf4:
    is_nested: bool = True
    """Whether the maxima of blocks are quantised too (double quantisation). False for files that store the
    maxima as they are."""

    @property
    def name(self) -> Quantize:
        return "nf4"

    def parts(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        values = outputs * inputs
        blocks = -(-values // NF4_BLOCK)
        found = {
            "weight": _meta_tensor(torch.uint8, -(-values // 2), 1),
            "absmax": _meta_tensor(torch.uint8 if self.is_nested else torch.float32, blocks),
            "code": _meta_tensor(torch.float32, NF4_CODES),
        }
        if self.is_nested:
            found["nested_absmax"] = _meta_tensor(torch.float32, -(-blocks // NESTED_BLOCK))
            found["nested_code"] = _meta_tensor(torch.float32, NESTED_CODES)
            found["offset"] = _meta_tensor(torch.float32)
        return found

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        code = torch.tensor(CODE, device=weight_NK.device)
        absmax_B, codes = _quantise_blocks(weight_NK.flatten(), code, NF4_BLOCK)
        if len(codes) % 2:
            # The last byte is filled with the code of zero.
            codes = pad(codes, (0, 1), value=CODE.index(0.0))
        found = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "code": code}
        if not self.is_nested:
            return {**found, "absmax": absmax_B}
        offset, nested_code = absmax_B.mean(), dynamic_code().to(weight_NK.device, copy=True)
        nested_absmax_M, nested_B = _quantise_blocks(absmax_B - offset, nested_code, NESTED_BLOCK)
        return {
            **found,
            "absmax": nested_B,
            "nested_absmax": nested_absmax_M,
            "nested_code": nested_code,
            "offset": offset,
        }

    def cut_part(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], part: SiteSlice
    ) -> tuple[WeightFormat, dict[str, Tensor]] | None:
        """Cut a part (some rows or columns) out of a quantised matrix of this shape. Return the part's format
        and tensors, which dequantise to the same values as in the whole matrix. None if the part is not made
        of whole blocks. The maxima of a part are not quantised, since their own blocks do not end where the
        part does."""
        outputs, inputs = shape
        edges = [edge * (1 if part.cuts_inputs else inputs) for one in part.ranges for edge in one]
        if outputs * inputs % NF4_BLOCK or any(edge % NF4_BLOCK for edge in edges):
            return None
        if part.cuts_inputs and inputs % NF4_BLOCK:
            return None
        device = parts["weight"].device
        blocks = [start // NF4_BLOCK for start in edges[::2]], [stop // NF4_BLOCK for stop in edges[1::2]]
        kept = torch.cat([torch.arange(*one, device=device) for one in zip(*blocks, strict=True)])
        if part.cuts_inputs:
            rows = torch.arange(outputs, device=device) * (inputs // NF4_BLOCK)
            kept = (rows[:, None] + kept).flatten()
        return Nf4(is_nested=False), {
            "weight": parts["weight"].view(-1, NF4_BLOCK // 2).index_select(0, kept).view(-1, 1),
            "absmax": self._block_maxima(parts).index_select(0, kept),
            "code": parts["code"].clone(),
        }

    def _block_maxima(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the largest absolute value of each block, dequantised if the maxima are quantised as
        well."""
        if not self.is_nested:
            return parts["absmax"]
        values_B = parts["nested_code"].index_select(0, parts["absmax"].int())
        return _scale_blocks(values_B, parts["nested_absmax"], NESTED_BLOCK) + parts["offset"]

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        absmax_B = self._block_maxima(parts)
        # Both values of a byte are looked up at once.
        pair_C2 = torch.stack(
            (parts["code"].repeat_interleave(NF4_CODES), parts["code"].repeat(NF4_CODES)), dim=1
        )
        out = out_NK.view(-1)
        packed = parts["weight"].view(-1)
        piece = piece_values(out.device)
        for start in range(0, len(out), piece):
            stop = min(start + piece, len(out))
            bits = packed[start // 2 : -(-stop // 2)].int()
            values = pair_C2.index_select(0, bits).view(-1)[: stop - start]
            scale_B = absmax_B[start // NF4_BLOCK : -(-stop // NF4_BLOCK)]
            out[start:stop].copy_(_scale_blocks(values, scale_B, NF4_BLOCK))


WeightFormat = Int8 | Nf4
"""Any quantisation format of a weight: int8, nf4 or fp8, which is a subclass of Int8."""


def _quantise_blocks(values: Tensor, code: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the largest absolute value of each block, and the nearest code of each value as uint8. Values
    are processed in pieces to limit the memory for intermediate results."""
    pieces = [_quantise_piece(piece, code, block_size) for piece in values.split(READ_VALUES)]
    return torch.cat([absmax for absmax, _ in pieces]), torch.cat([codes for _, codes in pieces])


def _quantise_piece(values: Tensor, code: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    values = values.float()
    blocks = -(-len(values) // block_size)
    whole = pad(values, (0, blocks * block_size - len(values))).view(blocks, block_size)
    absmax = whole.abs().amax(dim=1)
    scaled = (whole * (1 / absmax.clamp(min=MIN_DIVISOR))[:, None]).clamp_(-1, 1).view(-1)[: len(values)]
    nearest = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True)
    return absmax, nearest.to(torch.uint8)


def _scale_blocks(values: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """Multiply every block of the values by its scale. The last block may be incomplete."""
    rest = len(values) % block_size
    if not rest:
        return (values.view(-1, block_size) * scale[:, None]).view(-1)
    whole = values[: len(values) - rest].view(-1, block_size) * scale[:-1, None]
    return torch.cat((whole.view(-1), values[-rest:] * scale[-1]))


@cache
def dynamic_code() -> Tensor:
    """Return the 256 values with which the maxima of blocks are quantised to 8 bits: 0, 1, and values of both
    signs in decades from 1e-6 upwards. Each decade has twice as many values as the decade below (Dettmers
    2016)."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        found += [sign * value for value in ((10 ** (decade - 6)) * middles).tolist() for sign in (1, -1)]
    return torch.tensor(sorted(found), dtype=torch.float32)


def refuse_without_fp8(spec: BaseSpec, device: torch.device) -> None:
    """Raise BaseModelError if `spec` requests fp8 but the device has no fp8 tensor cores: emulated fp8 would
    be slower than every other format."""
    if spec.quantize != "fp8" or supports_fp8(device):
        return
    gpu = device.type == "cuda"
    described = torch.cuda.get_device_name(device) if gpu else f"the {device.type.upper()}"
    raise BaseModelError(
        f"base.quantize: fp8 needs a GPU with fp8 tensor cores (Ada, Hopper or later), which {described} "
        "does not have: write nf4 or int8, or leave quantize out."
    )


def supports_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and get_device_class(device).has_fp8
