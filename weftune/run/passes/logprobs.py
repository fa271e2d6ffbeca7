"""From last hidden states to what a job's supervised rows are worth.

Shapes: T rows of a microbatch, D hidden width, S supervised rows among them.
"""

from __future__ import annotations

from torch import Tensor

from weftune.core.head import Head
from weftune.ops.logprobs import target_logprobs
from weftune.run.passes.rows import Laid


def segment_logprobs(h_TD: Tensor, laid: Laid, head: Head | None) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of the supervised targets, and which were the likeliest, segment by segment."""
    assert head is not None, "only the last stage has a head"
    h_SD = h_TD.index_select(0, laid.rows_S)
    targets_S = laid.microbatch.targets_T.index_select(0, laid.rows_S)
    logprobs_S, hits_S = target_logprobs(h_SD, targets_S, head)
    return list(logprobs_S.tensor_split(laid.sections)), list(hits_S.tensor_split(laid.sections))
