"""Functions that attach finished adapters to a base model for inference, without training them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weftune.adapters.folder import check_adapter_folder, refuse_slow_patterns, wrap_config_errors
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import adapter_layout, kind_of_folder
from weftune.adapters.vector import VectorLayout
from weftune.errors import AdapterError
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.training.state import master_dtype


def attach_adapter_folder(adapted_base: AdaptedBase, name: str, folder: Path) -> None:
    """Attach the adapter in `folder` under `name`. Raise AdapterError if the adapter belongs to another base
    model."""
    check_adapter_folder(folder)
    kind, sites = kind_of_folder(folder), adapted_base.base.shape.sites
    spec = kind.spec_of(folder)
    refuse_slow_patterns(folder, spec, [site.name for site in sites])
    with wrap_config_errors(folder):
        layout = adapter_layout(spec, sites)
    if not layout.parameters:
        raise AdapterError(f"{folder} is for another base: it adapts no module of this one")
    parameters = kind.read_start(replace(spec, init_from=str(folder)), sites)
    weights = torch.empty(layout.size, dtype=adapted_base.base.dtype)
    for site_and_name, view in layout.parameter_views(weights).items():
        view.copy_(parameters[site_and_name])
    weights = weights.to(adapted_base.base.device)
    attach_frozen_adapter(adapted_base, JobAdapter(name, spec, seed=0), layout, weights)


def attach_frozen_adapter(
    adapted_base: AdaptedBase, adapter: JobAdapter, layout: VectorLayout, weights: Tensor
) -> None:
    """Attach an adapter without gradients, for inference only, so that gradients take no memory."""
    gradient = torch.empty(layout.size, dtype=master_dtype(weights.dtype), device="meta")
    with adapted_base.on_stream():
        adapted_base.banks.attach(adapter, layout, weights, gradient)
