"""The expert linears of a mixture-of-experts layer with every job's LoRA on its own tokens, in plain torch
for CPUs. `ops/lora/experts.py` has the implementation for GPUs.

A choice is a pair of a token and one of its experts. Choices are sorted by expert, then by token. So the rows
of every expert are contiguous, and among the rows of one job the rows of every expert are contiguous too.
Grouped matrix products can therefore be used, and no product reads rows of two jobs.

Shapes: T tokens, k experts per token, S = T · k choices, s choices of one job, E experts, D hidden width, K
inputs, N outputs of a linear, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from weftune.core.device_class import get_device_class
from weftune.ops.lora.table import Group

ALIGNED = 8
"""Number of 16-bit values of which the width of a row must be a multiple in grouped matrix products."""


Tokens = tuple[int, int]
"""Start and stop of a range of tokens in a microbatch."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One job's LoRA on a linear of every expert. To the outputs for the tokens from `start` to `stop` − 1 it
    adds scale · xAᵀB, with A and B of the expert that computes each output."""

    start: int
    stop: int
    a_ErK: Tensor
    b_ErN: Tensor
    scale: float

    @property
    def tokens(self) -> Tokens:
        return self.start, self.stop


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """The weights of one linear (gate and up together, or down) of all experts of a layer, with the jobs'
    adapters."""

    weight_ENK: Tensor
    group: Group | None = None
    """Adapters in the layout that the GPU kernels expect, or None if no job has an adapter at this linear.
    Entry n · E + e of the group's table holds the n-th adapter at expert e."""
    parts: Sequence[ExpertPart] = ()
    """Adapters in the form that the implementation in plain torch expects. Empty if the GPU kernels are
    used."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routing of a microbatch: its choices (pairs of a token and one of its experts), sorted by
    expert."""

    experts_S: Tensor
    stops_E: Tensor
    """Index after the last row of each expert, among the rows sorted by expert."""
    order_S: Tensor
    """Maps each position in the order by expert to the index of a choice (a pair of a token and one of its k
    experts), which is k times the token plus the number of the expert among the token's."""
    sorted_index_Tk: Tensor
    """Maps each choice (a pair of a token and one of its experts) to its position in the order by expert."""

    @classmethod
    def from_choices(cls, experts_Tk: Tensor, count: int) -> Routes:
        experts_S, order_S = experts_Tk.flatten().sort(stable=True)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return cls(experts_S, _expert_stops(experts_S, count), order_S, places_S.view(experts_Tk.shape))

    def sorted_tokens(self, x_TD: Tensor) -> Tensor:
        """Return, for each choice (a pair of a token and one of its experts) in the order by expert, the row
        of x that belongs to its token, [S, D]."""
        return x_TD[self.order_S // self.sorted_index_Tk.shape[1]]

    def job_choices(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the positions, in the order by expert, of a job's choices (pairs of a token and one of its
        experts), and for each expert the number of the job's choices up to and including that expert, [E]."""
        start, stop = tokens
        places_s = self.sorted_index_Tk[start:stop].flatten().sort().values
        return places_s, _expert_stops(self.experts_S[places_s], len(self.stops_E))

    def linear(
        self, x_SK: Tensor, site: ExpertSite, job_choices: Mapping[Tokens, tuple[Tensor, Tensor]]
    ) -> Tensor:
        y_SN = grouped_product(x_SK, site.weight_ENK.transpose(1, 2), self.stops_E)
        for part in site.parts:
            places_s, stops_E = job_choices[part.tokens]
            s_sr = grouped_product(x_SK[places_s], part.a_ErK.transpose(1, 2), stops_E)
            added_sN = part.scale * grouped_product(s_sr, part.b_ErN, stops_E)
            y_SN = y_SN.index_add(0, places_s, added_sN.to(y_SN.dtype))
        return y_SN

    def gather_outputs(self, y_SD: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return for each token the sum of its experts' outputs, each multiplied by the router's weight for
        that expert."""
        return (y_SD[self.sorted_index_Tk] * weights_Tk[..., None]).sum(dim=1).to(y_SD.dtype)


def _expert_stops(experts_S: Tensor, count: int) -> Tensor:
    every = torch.arange(count, device=experts_S.device, dtype=experts_S.dtype)
    return torch.searchsorted(experts_S, every, right=True, out_int32=True)


def experts_output(
    x_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up: ExpertSite,
    down: ExpertSite,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return for each token the sum over its experts of weight · down(activation(gate) ⊙ up), [T, D].
    `experts_Tk` are the indices of the experts, and `weights_Tk` the router's weights."""
    routes = Routes.from_choices(experts_Tk, len(down.weight_ENK))
    own = {
        tokens: routes.job_choices(tokens)
        for tokens in {part.tokens for part in (*gate_up.parts, *down.parts)}
    }
    gate, up = routes.linear(routes.sorted_tokens(x_TD), gate_up, own).chunk(2, dim=-1)
    return routes.gather_outputs(routes.linear(activation(gate) * up, down, own), weights_Tk)


def experts_output_reference(
    x_TD: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up: ExpertSite,
    down: ExpertSite,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute the result of `experts_output` token by token, as a reference for tests."""

    def expert_output(token: int, number: int) -> Tensor:
        gate, up = _token_output(x_TD[token], token, number, gate_up).chunk(2)
        return _token_output(activation(gate) * up, token, number, down)

    def weighted_output(token: int, chosen: list[int]) -> Tensor:
        outputs_kD = torch.stack([expert_output(token, number) for number in chosen])
        return (outputs_kD * weights_Tk[token, :, None]).sum(dim=0)

    y_TD = torch.stack([weighted_output(token, chosen) for token, chosen in enumerate(experts_Tk.tolist())])
    return y_TD.to(x_TD.dtype)


def _token_output(x_K: Tensor, token: int, expert_index: int, site: ExpertSite) -> Tensor:
    y_N = site.weight_ENK[expert_index] @ x_K
    for part in site.parts:
        if part.start <= token < part.stop:
            y_N = y_N + part.scale * (part.a_ErK[expert_index] @ x_K) @ part.b_ErN[expert_index]
    return y_N


def grouped_product(x_SK: Tensor, w_EKN: Tensor, stops_E: Tensor) -> Tensor:
    """Return each row of x times the matrix of its expert. Where `supports_grouped_mm` allows it, a single
    kernel multiplies by the matrices of all experts."""
    if supports_grouped_mm(w_EKN):
        return grouped_mm(x_SK, w_EKN, offs=stops_E)
    rows = stops_E.diff(prepend=stops_E.new_zeros(1)).tolist()
    pairs = zip(x_SK.split(rows), w_EKN.unbind(), strict=True)
    return torch.cat([x_sK @ w_KN for x_sK, w_KN in pairs])


def supports_grouped_mm(w_EKN: Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` can multiply by these matrices of experts. False for
    trained matrices, since that function leaves the gradient of an expert without rows uninitialised."""
    if not w_EKN.is_cuda or w_EKN.dtype is not torch.bfloat16 or w_EKN.requires_grad:
        return False
    aligned = all(width % ALIGNED == 0 for width in w_EKN.shape[1:])
    return aligned and get_device_class(w_EKN.device).has_grouped_mm
