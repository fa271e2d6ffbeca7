"""The part of an adapter's parameters that passes over one shard of a base use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weftune.adapters.vector import VectorLayout
from weftune.core.shapes import SiteSlice


def shard_positions(whole: VectorLayout, local: VectorLayout, slices: Mapping[str, SiteSlice]) -> Tensor:
    """Return the position in a flat vector of the layout `whole` of every value of the shard's flat vector,
    whose layout is `local`. `slices` maps each site to its local part."""
    position = whole.views(torch.arange(whole.size))
    found = []
    for parameter in local.parameters:
        own = position[parameter.site, parameter.name]
        for dim, size in enumerate(parameter.shape):
            if own.shape[dim] != size:
                ranges = slices[parameter.site].ranges
                kept = torch.cat([torch.arange(start, stop) for start, stop in ranges])
                assert len(kept) == size, f"{parameter.site}.{parameter.name} is not cut as its site is"
                own = own.index_select(dim, kept)
        found.append(own.flatten())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
