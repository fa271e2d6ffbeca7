"""The keys of a Diff-Pruning adapter in a jobs file. This module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from weftune.adapters.target import TargetSpec
from weftune.core.bounds import RUN_SHARE, Bound
from weftune.core.shapes import SiteShape

W, ALPHA, GROUP = "w_NK", "alpha_NK", "group_alpha"
"""Names of the adapter's parameters at a linear: the differences to the weight, a gate parameter for each of
them, and a gate parameter for the whole weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSpec(TargetSpec):
    """Diff-Pruning: y = x(W + z ⊙ w)ᵀ, where the difference w and the distribution of the gates z are
    trained. In the second phase of training, the fraction `sparsity` of the gates is fixed at 1, and all
    others at 0."""

    implementation: ClassVar[str] = "weftune.adapters.diff.apply:Diff"
    is_dense: ClassVar[bool] = True

    kind: Literal["diff"] = "diff"
    sparsity: Annotated[float, Bound(above=0, at_most=1)] = 0.005
    """Fraction of the elements of a target's weight that differ from the base after training."""
    l0_weight: Annotated[float, Bound(at_least=0)] = 1.25e-7
    """Penalty added to the loss for each element of a weight that is expected to differ from the base."""
    structured: bool = True
    """Whether each target has a gate for its whole weight in addition to the gates of single elements."""
    relaxed: Annotated[float, RUN_SHARE] = 0.5
    """Length of the first phase of training, in which gates are random: a fraction of the run if below 1,
    otherwise a number of optimizer steps."""
    mask_lr_ratio: Annotated[float, Bound(above=0)] = 100.0
    """Factor by which the job's learning rate is multiplied for gate parameters. It is large, because their
    values must change a lot."""

    def shapes_at(self, site: SiteShape) -> dict[str, tuple[int, ...]]:
        matrix = (site.out_features, site.in_features)
        return {W: matrix, ALPHA: matrix, **({GROUP: (1,)} if self.structured else {})}

    def kept_elements(self, elements: int) -> int:
        """Return how many of a weight's `elements` elements differ from the base after training."""
        return max(1, round(self.sparsity * elements))

    def relaxed_steps(self, total: int) -> int:
        """Return the number of the last optimizer step with random gates in a run of `total` steps."""
        if self.relaxed >= 1:
            return int(self.relaxed)
        return max(1, math.ceil(Fraction(repr(self.relaxed)) * total))
