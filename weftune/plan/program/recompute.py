"""The parts of a forward that its backward recomputes because they were not kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recompute:
    """The parts of a forward that its backward recomputes because they were not kept."""

    outputs: bool = False
    """Whether outputs of norms and activations are recomputed, which costs little."""
    layers: int = 0
    """Number of layers that are recomputed completely, at the cost of their forward."""


NOTHING = Recompute()
