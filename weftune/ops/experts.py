"""The linears of a mixture's experts, with a low-rank part of every job on its own tokens, in plain torch:
for a CPU. `ops/lora/experts.py` has the kernels of a GPU.

Choices (a token and one of its experts) are sorted by expert, those of one expert by token. So every expert's
rows are contiguous, and so are a job's rows at every expert once the other jobs' are left out: rows are
multiplied in groups, and no product ever reads another job's rows.

Shapes: T tokens, k experts of a token, S = T · k choices, s choices of one job, E experts, D hidden width,
K inputs, N outputs of a linear, r ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGNED = 8
"""Number of 16-bit values that a row's width must be a multiple of for grouped products."""
GROUPING = (8, 0)
"""Minimum compute capability of GPUs that group products."""


Tokens = tuple[int, int]
"""Start and stop of a range of tokens."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A job's addition to the outputs of its tokens, `start` to `stop`: scale · xAᵀB per expert."""

    start: int
    stop: int
    a_ErK: Tensor
    b_ErN: Tensor
    scale: float

    @property
    def tokens(self) -> Tokens:
        return self.start, self.stop


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    weight_ENK: Tensor
    parts: Sequence[ExpertPart]


@dataclass(frozen=True, slots=True)
class Groups:
    """Sorted choices: the rows of each expert."""

    experts_S: Tensor
    stops_E: Tensor

    @classmethod
    def of(cls, experts_S: Tensor, count: int) -> Groups:
        every = torch.arange(count, device=experts_S.device, dtype=experts_S.dtype)
        return cls(experts_S, torch.searchsorted(experts_S, every, right=True, out_int32=True))

    def product(self, x_SK: Tensor, w_ENK: Tensor) -> Tensor:
        """Return every row times its expert's matrix, transposed."""
        return grouped_product(x_SK, w_ENK.transpose(1, 2), self.stops_E)

    def low_rank(self, x_SK: Tensor, part: ExpertPart) -> Tensor:
        """Return scale · xAᵀB."""
        s_Sr = self.product(x_SK, part.a_ErK)
        return part.scale * self.product(s_Sr, part.b_ErN.transpose(1, 2))


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The choices of one job's tokens."""

    places_s: Tensor
    """Positions of the job's choices among all sorted choices, in order."""
    groups: Groups


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of every token."""

    groups: Groups
    count: int
    order_S: Tensor
    """Sorted choice → choice."""
    places_Tk: Tensor
    """Choice → sorted choice."""

    @classmethod
    def of(cls, chosen_Tk: Tensor, count: int) -> Routes:
        experts_S, order_S = chosen_Tk.flatten().sort(stable=True)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return cls(Groups.of(experts_S, count), count, order_S, places_S.view(chosen_Tk.shape))

    def rows(self, x_TD: Tensor) -> Tensor:
        """Return the tokens, once for every choice, sorted."""
        return x_TD[self.order_S // self.places_Tk.shape[1]]

    def own(self, tokens: Tokens) -> OwnRows:
        start, stop = tokens
        places_s = self.places_Tk[start:stop].flatten().sort().values
        return OwnRows(places_s, Groups.of(self.groups.experts_S[places_s], self.count))

    def linear(self, x_SK: Tensor, linear: ExpertLinear, own: Mapping[Tokens, OwnRows]) -> Tensor:
        y_SN = self.groups.product(x_SK, linear.weight_ENK)
        for part in linear.parts:
            rows = own[part.tokens]
            added_sN = rows.groups.low_rank(x_SK[rows.places_s], part)
            y_SN = y_SN.index_add(0, rows.places_s, added_sN.to(y_SN.dtype))
        return y_SN

    def gathered(self, y_SD: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the weighted sum over the experts of every token."""
        return (y_SD[self.places_Tk] * weights_Tk[..., None]).sum(dim=1).to(y_SD.dtype)


def experts_output(
    x_TD: Tensor,
    chosen_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return Σ over a token's experts of weight · down(activation(gate) ⊙ up)."""
    routes = Routes.of(chosen_Tk, len(down.weight_ENK))
    own = {tokens: routes.own(tokens) for tokens in {part.tokens for part in (*gate_up.parts, *down.parts)}}
    gate, up = routes.linear(routes.rows(x_TD), gate_up, own).chunk(2, dim=-1)
    return routes.gathered(routes.linear(activation(gate) * up, down, own), weights_Tk)


def experts_output_reference(
    x_TD: Tensor,
    chosen_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up: ExpertLinear,
    down: ExpertLinear,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute `experts_output` token by token, as a reference."""

    def expert(token: int, number: int) -> Tensor:
        gate, up = _one_output(x_TD[token], token, number, gate_up).chunk(2)
        return _one_output(activation(gate) * up, token, number, down)

    def mixed(token: int, chosen: list[int]) -> Tensor:
        outputs_kD = torch.stack([expert(token, number) for number in chosen])
        return (outputs_kD * weights_Tk[token, :, None]).sum(dim=0)

    y_TD = torch.stack([mixed(token, chosen) for token, chosen in enumerate(chosen_Tk.tolist())])
    return y_TD.to(x_TD.dtype)


def _one_output(x_K: Tensor, token: int, expert: int, linear: ExpertLinear) -> Tensor:
    y_N = linear.weight_ENK[expert] @ x_K
    for part in linear.parts:
        if part.start <= token < part.stop:
            y_N = y_N + part.scale * (part.a_ErK[expert] @ x_K) @ part.b_ErN[expert]
    return y_N


def grouped_product(x_SK: Tensor, w_EKN: Tensor, stops_E: Tensor) -> Tensor:
    """Return every row times its expert's matrix. Uses one kernel for all experts if the device has it."""
    if has_kernel(w_EKN):
        return grouped_mm(x_SK, w_EKN, offs=stops_E)
    rows = stops_E.diff(prepend=stops_E.new_zeros(1)).tolist()
    pairs = zip(x_SK.split(rows), w_EKN.unbind(), strict=True)
    return torch.cat([x_sK @ w_KN for x_sK, w_KN in pairs])


def has_kernel(w_EKN: Tensor) -> bool:
    """Return whether one kernel handles all experts. It must not be used for trained matrices: it would leave
    the gradient of an expert without rows unwritten."""
    if not w_EKN.is_cuda or w_EKN.dtype is not torch.bfloat16 or w_EKN.requires_grad:
        return False
    aligned = all(width % ALIGNED == 0 for width in w_EKN.shape[1:])
    return aligned and torch.cuda.get_device_capability(w_EKN.device) >= GROUPING
