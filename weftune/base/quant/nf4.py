"""NF4 as bitsandbytes stores it: four bits per value, blocks of 64 with one maximum each, and the maxima
quantised in turn (double quantisation).

W = code[bits] · maximum of the block, which is nested_code[absmax] · nested_absmax + offset; all of it is
computed in float32 and rounded once.

Shapes: K inputs, N outputs, B blocks of 64 values, M blocks of 256 maxima.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from weftune.base.quant.format import StoredPart, piece_values
from weftune.base.quant.sizes import NESTED_BLOCK, NESTED_CODES, NF4_BLOCK, NF4_CODES
from weftune.base.spec import Quantize

CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The values of NF4: quantiles of the normal distribution (Dettmers et al. 2023), as its authors round
them."""
READ_VALUES = 1 << 24
"""Number of values that are quantised at a time: whole blocks of either kind."""
LEAST = 1e-38
"""Lower limit of a maximum when values are divided by it: a block may be all zeros."""


@dataclass(frozen=True, slots=True)
class Nf4:
    nested: bool = True
    """Whether the maxima are quantised too; weights that are stored without this are read as they are."""

    @property
    def name(self) -> Quantize:
        return "nf4"

    def parts(self, outputs: int, inputs: int) -> Mapping[str, StoredPart]:
        values = outputs * inputs
        blocks = -(-values // NF4_BLOCK)
        found = {
            "weight": StoredPart((-(-values // 2), 1), torch.uint8),
            "absmax": StoredPart((blocks,), torch.uint8 if self.nested else torch.float32),
            "code": StoredPart((NF4_CODES,), torch.float32),
        }
        if self.nested:
            found["nested_absmax"] = StoredPart((-(-blocks // NESTED_BLOCK),), torch.float32)
            found["nested_code"] = StoredPart((NESTED_CODES,), torch.float32)
            found["offset"] = StoredPart((), torch.float32)
        return found

    def quantise(self, weight_NK: Tensor) -> dict[str, Tensor]:
        code = torch.tensor(CODE, device=weight_NK.device)
        absmax_B, codes = _in_blocks(weight_NK.flatten(), code, NF4_BLOCK)
        if len(codes) % 2:
            # The last byte is filled with the code of zero.
            codes = pad(codes, (0, 1), value=CODE.index(0.0))
        found = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "code": code}
        if not self.nested:
            return {**found, "absmax": absmax_B}
        offset, nested_code = absmax_B.mean(), dynamic_code().to(weight_NK.device, copy=True)
        nested_absmax_M, nested_B = _in_blocks(absmax_B - offset, nested_code, NESTED_BLOCK)
        return {
            **found,
            "absmax": nested_B,
            "nested_absmax": nested_absmax_M,
            "nested_code": nested_code,
            "offset": offset,
        }

    def write(self, parts: Mapping[str, Tensor], out_NK: Tensor) -> None:
        absmax_B = self._absmax(parts)
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
            out[start:stop].copy_(_scaled(values, scale_B, NF4_BLOCK))

    def _absmax(self, parts: Mapping[str, Tensor]) -> Tensor:
        if not self.nested:
            return parts["absmax"]
        values_B = parts["nested_code"].index_select(0, parts["absmax"].int())
        return _scaled(values_B, parts["nested_absmax"], NESTED_BLOCK) + parts["offset"]


def _in_blocks(values: Tensor, code: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the largest absolute value of each block, and the nearest code of each value as a byte. Values
    are processed in pieces, since they may be a matrix that fills much of the memory."""
    pieces = [_piece_in_blocks(piece, code, block) for piece in values.split(READ_VALUES)]
    return torch.cat([absmax for absmax, _ in pieces]), torch.cat([codes for _, codes in pieces])


def _piece_in_blocks(values: Tensor, code: Tensor, block: int) -> tuple[Tensor, Tensor]:
    values = values.float()
    blocks = -(-len(values) // block)
    whole = pad(values, (0, blocks * block - len(values))).view(blocks, block)
    absmax = whole.abs().amax(dim=1)
    scaled = (whole * (1 / absmax.clamp(min=LEAST))[:, None]).clamp_(-1, 1).view(-1)[: len(values)]
    nearest = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True)
    return absmax, nearest.to(torch.uint8)


def _scaled(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """Multiply every block of the values by its scale; the last block may be shorter."""
    rest = len(values) % block
    if not rest:
        return (values.view(-1, block) * scale[:, None]).view(-1)
    whole = values[: len(values) - rest].view(-1, block) * scale[:-1, None]
    return torch.cat((whole.view(-1), values[-rest:] * scale[-1]))


@cache
def dynamic_code() -> Tensor:
    """Return the 8-bit code of the maxima: 0, 1, and in every decade from 1e-6 up twice as many values as in
    the one below, of either sign (Dettmers 2016)."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        found += [sign * value for value in ((10 ** (decade - 6)) * middles).tolist() for sign in (1, -1)]
    return torch.tensor(sorted(found), dtype=torch.float32)
