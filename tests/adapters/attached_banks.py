"""Adapters attached to a tiny base, and the logits that the base then computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tests.base.packs import packed
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter, NewAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.base.model import Base
from weftune.core.batch import Microbatch, Segment
from weftune.ops.lora.routes import Route
from weftune.run.training.state import master_dtype


def empty_banks(base: Base) -> Banks:
    return Banks(base.sites(), base.shape.sites, next(base.model.parameters()))


def weights_of(base: Base, job: str, spec: LoraSpec, seed: int = 0) -> Tensor:
    """The flat vector of a new adapter, as the loop would make it."""
    kind = get_kind(spec.kind)
    layout = kind.layout(spec, base.shape.sites)
    flat = torch.zeros(layout.size, dtype=base.dtype)
    kind.initialise(NewAdapter(JobAdapter(job, spec, seed), layout.parameter_views(flat)), base.shape.sites)
    return flat


def attach(banks: Banks, base: Base, job: str, spec: LoraSpec, weights: Tensor) -> None:
    layout = get_kind(spec.kind).layout(spec, base.shape.sites)
    gradient = torch.zeros(layout.size, dtype=master_dtype(base.dtype))
    banks.attach(JobAdapter(job, spec, seed=0), layout, weights, gradient)


def banks_with(base: Base, specs: Mapping[str, LoraSpec]) -> Banks:
    banks = empty_banks(base)
    for job, spec in specs.items():
        attach(banks, base, job, spec, weights_of(base, job, spec))
    return banks


def together(jobs: Sequence[str], samples: Sequence[Tensor]) -> Microbatch:
    """The samples in one microbatch, each of them a segment of the job beside it."""
    segments, row = [], 0
    for job, tokens_L in zip(jobs, samples, strict=True):
        segments.append(Segment(job, 1, row, row + len(tokens_L)))
        row += len(tokens_L)
    return replace(packed(samples), segments=tuple(segments))


def logits(base: Base, banks: Banks, microbatch: Microbatch, route: Route = Route.segmented) -> list[Tensor]:
    """Return the logits of each sample from a packed pass with the attached adapters."""
    with torch.no_grad(), banks.bind(microbatch, route, training=False):
        logits_TV = base.head().logits(base.hidden(microbatch))
    return list(logits_TV.split(microbatch.sample_lengths))
