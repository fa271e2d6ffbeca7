"""Sums over consecutive runs of a vector, with a few launches for all of them instead of some for each.

Shapes: S values, J runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weftune.core.batch import to_device


def run_sums(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sum of each run, [J], given their lengths. It is differentiable, and no sum crosses a
    run."""
    lengths_J = to_device(torch.tensor(lengths), values_S.device)
    # Unsafe, since otherwise the lengths are checked on the device and the host waits for it.
    return torch.segment_reduce(values_S, "sum", lengths=lengths_J, unsafe=True)


def run_counts(found_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the exact number of True values in each run, [J]."""
    stops_J = to_device(torch.tensor(lengths).cumsum(0), found_S.device)
    counted = torch.nn.functional.pad(found_S.cumsum(0), (1, 0))
    ends_J = counted.index_select(0, stops_J)
    return torch.diff(ends_J, prepend=ends_J.new_zeros(1))
