"""Supervised fine-tuning: the mean negative log-probability of a job's supervised tokens.

Shapes: S supervised rows of a microbatch, in row order.
"""

from __future__ import annotations

from torch import Tensor


def loss(logprobs_S: Tensor, supervised: int) -> Tensor:
    """A segment's share of its job's loss; `supervised` counts the tokens of the whole global batch."""
    return -logprobs_S.sum() / supervised
