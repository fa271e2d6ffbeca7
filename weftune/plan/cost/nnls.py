"""Least squares whose solution may not be negative: scipy's where it is installed, else our own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SWEEPS = 10
"""For each column: it enters once or twice, where rounding does not send it in and out."""
ENOUGH = 1e-12


def non_negative(matrix: Array, wanted: Array) -> Array:
    """The x ≥ 0 of least |matrix · x − wanted|."""
    try:
        from scipy.optimize import nnls
    except ImportError:
        return by_active_set(matrix, wanted)
    found: Array = nnls(matrix, wanted)[0]
    return found


def by_active_set(matrix: Array, wanted: Array) -> Array:
    """Lawson and Hanson's way: columns enter where they help most, and leave where they would be negative.

    One coordinate after another would be shorter, and takes thousands of rounds where columns are nearly
    alike: jobs and their parameters are, while all jobs are of one size.
    """
    sizes = np.linalg.norm(matrix, axis=0)
    columns = matrix / np.where(sizes > 0, sizes, 1.0)
    found, inside = np.zeros(len(sizes)), np.zeros(len(sizes), dtype=bool)
    for _ in range(SWEEPS * len(sizes)):
        gain = np.where(inside, 0.0, columns.T @ (wanted - columns @ found))
        if gain.max() <= ENOUGH * np.linalg.norm(wanted):
            break
        inside[gain.argmax()] = True
        found = _settle(columns, wanted, found, inside)
    return found / np.where(sizes > 0, sizes, 1.0)


def _settle(columns: Array, wanted: Array, found: Array, inside: NDArray[np.bool_]) -> Array:
    """The best of the columns inside; those that it would make negative are put outside on the way."""
    while True:
        best = np.zeros(len(found))
        best[inside] = np.linalg.lstsq(columns[:, inside], wanted, rcond=None)[0]
        below = np.flatnonzero(inside & (best <= 0))
        if not len(below):
            return best
        # As far as nobody is negative yet; whoever comes to nothing there leaves.
        shares = found[below] / np.maximum(found[below] - best[below], np.finfo(float).tiny)
        found = found + shares.min() * (best - found)
        inside[below[shares.argmin()]] = False
        found = np.where(inside, np.maximum(found, 0.0), 0.0)
