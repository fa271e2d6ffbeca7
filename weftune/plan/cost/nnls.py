"""Non-negative least squares in NumPy alone, since no other part of the package needs scipy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SWEEPS = 10
"""Maximum number of iterations of non-negative least squares, per column of the matrix. A column usually
becomes active once or twice."""
TOLERANCE = 1e-12


def solve_nnls(matrix: Array, target: Array) -> Array:
    """Return the non-negative least-squares solution by Lawson and Hanson's active-set method.

    The method begins with all columns in the active set, which usually gives the solution at once. The method
    then repeatedly removes columns whose value would become negative, and adds the column with the steepest
    descent.

    Coordinate descent would be shorter code, but needs thousands of iterations if columns are nearly
    collinear, such as the counts of jobs and of parameters if all jobs have the same size.
    """
    sizes = np.linalg.norm(matrix, axis=0)
    columns = matrix / np.where(sizes > 0, sizes, 1.0)
    inside = sizes > 0
    found = _solve_active(columns, target, np.zeros(len(sizes)), inside)
    for _ in range(SWEEPS * len(sizes)):
        gain = np.where(inside, 0.0, columns.T @ (target - columns @ found))
        if gain.max() <= TOLERANCE * np.linalg.norm(target):
            break
        inside[gain.argmax()] = True
        found = _solve_active(columns, target, found, inside)
    return found / np.where(sizes > 0, sizes, 1.0)


def _solve_active(columns: Array, target: Array, solution: Array, active: NDArray[np.bool_]) -> Array:
    """Return the least-squares solution over the active columns. Columns whose value would become negative
    are removed from `active` in place."""
    while True:
        best = np.zeros(len(solution))
        best[active] = np.linalg.lstsq(columns[:, active], target, rcond=None)[0]
        below = np.flatnonzero(active & (best <= 0))
        if not len(below):
            return best
        # Move as far as no value is negative; the column that reaches 0 there leaves.
        shares = solution[below] / np.maximum(solution[below] - best[below], np.finfo(float).tiny)
        solution = solution + shares.min() * (best - solution)
        active[below[shares.argmin()]] = False
        solution = np.where(active, np.maximum(solution, 0.0), 0.0)
