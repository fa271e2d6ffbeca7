"""Bottleneck adapters: what a sublayer puts out goes through a narrow layer beside itself.

U and u start at zero, so that a new adapter changes nothing. Shapes: N outputs of a site, b the bottleneck, L
rows of one job.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from weftune.adapters.bottleneck.spec import DOWN, DOWN_BIAS, UP, UP_BIAS, Activation
from weftune.adapters.kind import NewAdapter
from weftune.adapters.plain import JobAt, JobPart
from weftune.adapters.plain_kind import PlainKind
from weftune.ops.draw import fill_uniform

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": gelu, "silu": silu}


class Bottleneck(PlainKind):
    name = "bottleneck"

    def part(self, at: JobAt) -> JobPart:
        activate = ACTIVATIONS[at.member.spec.activation]
        down_bN, down_b = at.trained(DOWN), at.trained(DOWN_BIAS)
        up_Nb, up_N = at.trained(UP), at.trained(UP_BIAS)

        def after(y_LN: Tensor) -> Tensor:
            narrow_Lb = activate(linear(y_LN.to(down_bN.dtype), down_bN, down_b))
            return y_LN + linear(narrow_Lb, up_Nb, up_N)

        return JobPart(after=after)

    def start(self, new: NewAdapter) -> None:
        """D uniform within ±1/√N, as linears of torch begin."""
        for (site, name), value in new.parameters.items():
            if name == DOWN:
                fill_uniform(value, new.key(site, name), value.shape[1] ** -0.5, drawn_on=new.drawn_on)
            else:
                value.zero_()
