"""Bottleneck adapters: y + act(yDᵀ + d)Uᵀ + u, which adds a narrow MLP of a linear's output y to that output.

D and U are the down and up projections, d and u their biases. U and u start at zero, so that a new adapter
changes nothing.

Shapes: N outputs of a site (an adapted linear), b the bottleneck's width, L rows of one job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from weftune.adapters.bottleneck.spec import DOWN, DOWN_BIAS, UP, UP_BIAS, Activation, BottleneckSpec
from weftune.adapters.kind import NewAdapter
from weftune.adapters.plain import JobAt, JobPart, PlainKind
from weftune.ops.draw import fill_uniform

aten = torch.ops.aten

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": gelu, "silu": silu}
GRADIENTS: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, x: aten.threshold_backward(gradient, x, 0),
    "gelu": aten.gelu_backward,
    "silu": aten.silu_backward,
}
"""Maps each activation to its backward, a function of (gradient of the output, input) that returns the
gradient of the input."""


class Bottleneck(PlainKind):
    name = "bottleneck"

    def part(self, job_site: JobAt) -> JobPart:
        return JobPart(after=NarrowLayer(job_site, job_site.adapter.spec.activation))

    def gathers(self, spec: BottleneckSpec) -> bool:
        return True

    def start(self, new_adapter: NewAdapter) -> None:
        """Draw the down projection D uniformly between −1/√N and 1/√N, torch's range for linears, and set all
        other parameters to zero."""
        for (site, name), value in new_adapter.parameters.items():
            if name == DOWN:
                fill_uniform(
                    value,
                    new_adapter.key(site, name),
                    value.shape[1] ** -0.5,
                    draw_device=new_adapter.draw_device,
                )
            else:
                value.zero_()


@dataclass(frozen=True, slots=True)
class NarrowLayer:
    """The function y + act(yDᵀ + d)Uᵀ + u that one job applies to its outputs y of a linear, with down
    projection D, up projection U and biases d and u. It implements `ops.site.RowChange`."""

    job_site: JobAt
    activation: Activation

    def __call__(self, y_LN: Tensor) -> Tensor:
        return self._activate_bottleneck(
            y_LN, *(self.job_site.trained(name) for name in (DOWN, DOWN_BIAS, UP, UP_BIAS))
        )

    def forward(self, y_LN: Tensor) -> Tensor:
        return self._activate_bottleneck(
            y_LN, *(self.job_site.detached_parameter(name) for name in (DOWN, DOWN_BIAS, UP, UP_BIAS))
        )

    def _activate_bottleneck(
        self, y_LN: Tensor, down_bN: Tensor, down_b: Tensor, up_Nb: Tensor, up_N: Tensor
    ) -> Tensor:
        narrow_Lb = ACTIVATIONS[self.activation](linear(y_LN.to(down_bN.dtype), down_bN, down_b))
        return y_LN + linear(narrow_Lb, up_Nb, up_N)

    def backward(self, y_LN: Tensor, dy_LN: Tensor) -> Tensor:
        down_bN, up_Nb = self.job_site.detached_parameter(DOWN), self.job_site.detached_parameter(UP)
        y_LN, d_LN = y_LN.to(down_bN.dtype), dy_LN.to(down_bN.dtype)
        before_Lb = linear(y_LN, down_bN, self.job_site.detached_parameter(DOWN_BIAS))
        narrow_Lb = ACTIVATIONS[self.activation](before_Lb)
        d_Lb = GRADIENTS[self.activation](d_LN @ up_Nb, before_Lb)
        self.job_site.add_gradient(UP, d_LN.T @ narrow_Lb)
        self.job_site.add_gradient(UP_BIAS, d_LN.sum(0))
        self.job_site.add_gradient(DOWN, d_Lb.T @ y_LN)
        self.job_site.add_gradient(DOWN_BIAS, d_Lb.sum(0))
        return dy_LN + d_Lb @ down_bN
