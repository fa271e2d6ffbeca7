"""A model whose linears multiply as fp8 tensor cores do, written down plainly: the oracle of fp8."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.base.quant.bases import in_layers


def rounded(x_TM):
    """(x rounded to e4m3 with a scale a row, in the dtype of x): the values that are multiplied."""
    scale_T1 = x_TM.abs().amax(dim=-1, keepdim=True) * (1 / 448)
    return (x_TM / scale_T1.where(scale_T1 > 0, 1)).clamp(-448, 448).to(torch.float8_e4m3fn).to(
        x_TM
    ) * scale_T1


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, codes_NK, scale_N):
        ctx.save_for_backward(codes_NK, scale_N)
        return rounded(x) @ (codes_NK * scale_N[:, None]).T

    @staticmethod
    def backward(ctx, dy):
        codes_NK, scale_N = ctx.saved_tensors
        return rounded(dy * scale_N) @ codes_NK, None, None


class EmulatedLinear(nn.Linear):
    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        weight_NK = plain.weight.detach().float()
        scale_N = weight_NK.abs().amax(dim=1) * (1 / 448)
        codes_NK = (weight_NK / scale_N[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        self.codes_NK, self.scale_N = codes_NK.to(plain.weight), scale_N.to(plain.weight)

    def forward(self, x):
        y = Multiplied.apply(x, self.codes_NK, self.scale_N)
        return y if self.bias is None else y + self.bias


def emulated(model):
    made = copy.deepcopy(model)
    for path in in_layers(model):
        made.set_submodule(path, EmulatedLinear(made.get_submodule(path)))
    return made
