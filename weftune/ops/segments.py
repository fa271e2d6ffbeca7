"""Sums over consecutive runs of a vector: a few launches for all of them instead of some for each.

Shapes: S values, J runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weftune.core.batch import to_device


def run_sums(values_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """The sum of each run of so many values, [J]; it can be differentiated, and no sum crosses a run."""
    lengths_J = to_device(torch.tensor(lengths), values_S.device)
    # Unsafe: the lengths would be looked at on the device, and the host would wait for it.
    return torch.segment_reduce(values_S, "sum", lengths=lengths_J, unsafe=True)


def run_counts(found_S: Tensor, lengths: Sequence[int]) -> Tensor:
    """How many of each run's values are True, [J], exactly."""
    stops_J = to_device(torch.tensor(lengths).cumsum(0), found_S.device)
    counted = torch.nn.functional.pad(found_S.cumsum(0), (1, 0))
    ends_J = counted.index_select(0, stops_J)
    return torch.diff(ends_J, prepend=ends_J.new_zeros(1))
