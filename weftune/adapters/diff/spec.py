"""The adapter keys of a Diff-Pruning job. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import TargetSpec
from weftune.core.bounds import RUN_SHARE, Bound
from weftune.core.shapes import SiteShape

W, ALPHA, GROUP = "w_NK", "alpha_NK", "group_alpha"
"""The values, the parameters of their gates, and that of the gate of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSpec(TargetSpec):
    """y = x(W + z ⊙ w)ᵀ with w and the distribution of the gates z trained; then, for the rest of the run,
    with a fixed share of the elements open."""

    implementation: ClassVar[str] = "weftune.adapters.diff.apply:Diff"
    dense: ClassVar[bool] = True

    kind: Literal["diff"] = "diff"
    sparsity: Annotated[float, Bound(above=0, at_most=1)] = 0.005
    """Share of a target's elements that finally differ from the base."""
    l0_weight: Annotated[float, Bound(at_least=0)] = 1.25e-7
    """Penalty added to the loss for every element that is expected to differ."""
    structured: bool = True
    """Whether each target has a gate of its own besides those of its elements."""
    relaxed: Annotated[float, RUN_SHARE] = 0.5
    """Duration of the phase with drawn gates: below 1 a share of the run, otherwise a number of steps."""
    mask_lr_ratio: Annotated[float, Bound(above=0)] = 100.0
    """Factor of the job's learning rate for gates, which have to move far."""

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        matrix = (site.out_features, site.in_features)
        return {W: matrix, ALPHA: matrix, **({GROUP: (1,)} if self.structured else {})}

    def kept_at(self, elements: int) -> int:
        """Return the number of a target's elements that finally differ."""
        return max(1, round(self.sparsity * elements))

    def relaxed_steps(self, total: int) -> int:
        """Return the last step with drawn gates in a run of `total` steps."""
        if self.relaxed >= 1:
            return int(self.relaxed)
        return max(1, math.ceil(Fraction(repr(self.relaxed)) * total))
