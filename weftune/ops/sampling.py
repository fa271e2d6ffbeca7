"""Selection of the next tokens of many sequences by one kernel.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weftune.core.batch import to_device
from weftune.ops import triton as kernels

BLOCK, WARPS = 2048, 16
"""Number of tokens that a program reads at a time, and the number of its warps. There is one program per
sequence, so each program can use a whole multiprocessor."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The settings by which the next token of one sequence is drawn."""

    temperature: float
    """Divisor of the scores. 0 selects the token with the largest score."""
    top_p: float
    key: int
    """Key from which the random numbers are computed, a signed 32-bit integer."""


def sample_rows(scores_BV: Tensor, logits_BV: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return each sequence's next token [B], drawn according to `scores_BV`, and its log-probability
    according to `logits_BV` [B]."""
    count, vocabulary = scores_BV.shape
    host = np.empty((3, count), dtype=np.int32)
    host[0] = np.array([draw.temperature for draw in draws], dtype=np.float32).view(np.int32)
    host[1] = np.array([draw.top_p for draw in draws], dtype=np.float32).view(np.int32)
    host[2] = [draw.key for draw in draws]
    tokens_B = torch.empty(count, dtype=torch.int64, device=scores_BV.device)
    logprobs_B = scores_BV.new_empty(count)
    with torch.cuda.device_of(scores_BV):
        kernels.sampling.sample_row[(count,)](
            scores_BV,
            logits_BV,
            to_device(torch.from_numpy(host), scores_BV.device),
            tokens_B,
            logprobs_B,
            scores_BV.stride(0),
            logits_BV.stride(0),
            vocabulary,
            count,
            C=BLOCK,
            num_warps=WARPS,
        )
    return tokens_B, logprobs_B
