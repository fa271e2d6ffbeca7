"""The part of an adapter's parameters that one shard uses, a worker that holds a part of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weftune.adapters.vector import VectorLayout
from weftune.core.shapes import SiteShape, SiteSlice
from weftune.core.shards import indices_in_whole


def shard_positions(
    whole_layout: VectorLayout,
    local_layout: VectorLayout,
    slices: Mapping[str, SiteSlice],
    whole_sites: Sequence[SiteShape],
) -> Tensor:
    """Return, for each value in the flat vector of a shard's parameters, its index in the flat vector of the
    whole adapter. A shard is a worker's part of every layer. `local_layout` and `whole_layout` are the
    layouts of the two vectors, and `slices` maps each linear to its part on this shard."""
    position = whole_layout.parameter_views(torch.arange(whole_layout.size))
    outputs = {site.name: site.out_features for site in whole_sites}
    found = []
    for parameter in local_layout.parameters:
        own = position[parameter.site, parameter.name]
        for dim, size in enumerate(parameter.shape):
            if own.shape[dim] != size:
                part = slices[parameter.site]
                kept = indices_in_whole(part)
                if len(part.ranges) > 1 and len(kept) != size:
                    # A prefix is as wide as the values, which are the last outputs of a fused linear.
                    first_value = outputs[parameter.site] - own.shape[dim]
                    kept = torch.arange(*part.ranges[-1]) - first_value
                assert len(kept) == size, f"{parameter.site}.{parameter.name} is not cut as its site is"
                own = own.index_select(dim, kept)
        found.append(own.flatten())
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
