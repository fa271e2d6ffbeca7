"""LoRA on the experts of a mixture: every job's A and B for every expert, and how PEFT stores them.

PEFT calls it `target_parameters`: one A [E · r, K] and one B [N, r · E] for all experts of a layer. Rows of A
go expert by expert; columns of B rank by rank, and for each rank expert by expert.

Shapes: E experts, r ranks of one of them, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from weftune.adapters.kind import Member, Parameters, Pass
from weftune.adapters.lora.spec import A, B
from weftune.core.shapes import SiteShape
from weftune.ops.accumulate import accumulated
from weftune.ops.experts import ExpertPart


def stacked(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A [E, r, K] and B [E, r, N] from PEFT's."""
    a_ErK = a.view(experts, -1, a.shape[1])
    return a_ErK, b.view(b.shape[0], -1, experts).permute(2, 1, 0)


def flattened(a_ErK: Tensor, b_ErN: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's A and B."""
    return a_ErK.flatten(0, 1), b_ErN.permute(2, 1, 0).flatten(1)


class LoraExperts:
    """At the experts of a layer, the adapters of all jobs aboard that have one there."""

    tiled = False

    def __init__(self, sites: Sequence[SiteShape]) -> None:
        self._names = tuple(site.name for site in sites)
        self._aboard: dict[str, tuple[Member, Parameters]] = {}

    def attach(self, member: Member, slot: int, weights: Parameters, totals: Parameters) -> None:
        own = {key: value for key, value in weights.items() if key[0] in self._names}
        self._aboard[member.job] = member, own

    def detach(self, job: str) -> None:
        del self._aboard[job]

    def present(self, bound: Pass) -> bool:
        return any(segment.through in self._aboard for segment in bound.microbatch.segments)

    def parts(self, site: str, bound: Pass) -> Iterator[ExpertPart]:
        """What every job adds at one of the sites, with the gradients of its weights accumulated."""
        for segment in bound.microbatch.segments:
            member, weights = self._aboard.get(segment.through or "", (None, {}))
            if member is None or (site, A) not in weights:
                continue
            totals = bound.totals[member.job]
            a_ErK, b_ErN = (
                accumulated(weights[site, name], totals[site, name], bound.anchor) for name in (A, B)
            )
            yield ExpertPart(segment.start, segment.stop, a_ErK, b_ErN, member.spec.scale_at(site))
