"""Least squares whose solution may not be negative: scipy's where it is installed, else our own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROUNDS = 10_000
ENOUGH = 1e-12


def non_negative(matrix: Array, wanted: Array) -> Array:
    """The x ≥ 0 of least |matrix · x − wanted|."""
    try:
        from scipy.optimize import nnls
    except ImportError:
        return by_coordinates(matrix, wanted)
    found: Array = nnls(matrix, wanted)[0]
    return found


def by_coordinates(matrix: Array, wanted: Array) -> Array:
    """One coordinate after another to its best value, until none moves; the problem is convex."""
    square, side = matrix.T @ matrix, matrix.T @ wanted
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        moved = 0.0
        for place in np.flatnonzero(square.diagonal() > 0):
            slope = square[place] @ found - side[place]
            better = max(0.0, found[place] - slope / square[place, place])
            moved = max(moved, abs(better - found[place]) / (abs(better) + ENOUGH))
            found[place] = better
        if moved < ENOUGH:
            break
    return found
