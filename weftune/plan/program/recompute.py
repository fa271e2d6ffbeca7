"""What a backward recomputes because its forward did not keep it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a backward recomputes because its forward did not keep it."""

    outputs: bool = False
    """Outputs of norms and activations, which cost little to make."""
    layers: int = 0
    """Everything inside so many layers, which costs their forward."""


NOTHING = Recompute()
