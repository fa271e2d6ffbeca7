"""Log-probabilities of the target tokens without ever holding the logits of all rows.

Rows are independent and the head is frozen, so the gradient of each row's log-probability with respect to
its hidden state is made in the forward pass, chunk by chunk; the backward only scales it row by row.

Shapes: S supervised rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.head import Head

CHUNK_BYTES = 64 << 20
"""Size of the logits held at a time."""


def target_logprobs(h_SD: Tensor, targets_S: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(log-probability of each row's target, whether the target is the most probable token)."""
    return _TargetLogprobs.apply(h_SD, targets_S, head)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_SD: Tensor, targets_S: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        wants_gradient = ctx.needs_input_grad[0]
        rows = max(1, CHUNK_BYTES // (4 * head.weight_VD.shape[0]))
        logprobs, hits, gradients = [], [], []
        for h, targets in zip(h_SD.split(rows), targets_S.split(rows), strict=True):
            logits = head.logits(h)
            normalised = torch.log_softmax(logits, dim=-1)
            logprobs.append(normalised.gather(1, targets[:, None]).squeeze(1))
            hits.append(logits.argmax(dim=-1) == targets)
            if wants_gradient:
                gradients.append(_hidden_gradient(normalised, logits, targets, head).to(h.dtype))
        if wants_gradient:
            ctx.save_for_backward(torch.cat(gradients))
        hits_S = torch.cat(hits)
        ctx.mark_non_differentiable(hits_S)
        return torch.cat(logprobs), hits_S

    @staticmethod
    def backward(ctx: Any, d_S: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient_SD,) = ctx.saved_tensors
        return (gradient_SD * d_S[:, None]).to(gradient_SD.dtype), None, None


def _hidden_gradient(normalised: Tensor, logits: Tensor, targets: Tensor, head: Head) -> Tensor:
    """d log p(target) / d h = (onehot − softmax) through soft-cap and multiplier, times W."""
    gradient = normalised.exp_().neg_()
    gradient[torch.arange(len(targets), device=targets.device), targets] += 1.0
    if head.softcap is not None:
        gradient *= 1.0 - (logits / head.softcap) ** 2
    if head.multiplier != 1.0:
        gradient *= head.multiplier
    return gradient.to(head.weight_VD.dtype) @ head.weight_VD
