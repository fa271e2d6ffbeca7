"""Our own solver finds the best there is, whatever the columns are like."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftune.plan.cost.nnls import solve_nnls


def least(matrix: np.ndarray, wanted: np.ndarray) -> float:
    """The smallest error of all sets of columns whose own best is nowhere negative."""
    errors = [np.linalg.norm(wanted)]
    for count in range(1, matrix.shape[1] + 1):
        for some in combinations(range(matrix.shape[1]), count):
            best = np.linalg.lstsq(matrix[:, some], wanted, rcond=None)[0]
            if (best >= 0).all():
                errors.append(np.linalg.norm(matrix[:, some] @ best - wanted))
    return float(min(errors))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 12), st.booleans(), st.booleans())
def test_no_other_choice_of_columns_is_better_and_nothing_is_negative(
    seed: int, columns: int, rows: int, alike: bool, ridge: bool
) -> None:
    rng = np.random.default_rng(seed)
    matrix, wanted = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    matrix *= 10.0 ** rng.integers(-6, 6, size=columns)
    if alike:
        matrix[:, -1] = matrix[:, 0] * (1 + 1e-9)
    if ridge:
        matrix, wanted = np.vstack([matrix, np.eye(columns)]), np.concatenate([wanted, np.zeros(columns)])
    found = solve_nnls(matrix, wanted)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - wanted) <= least(matrix, wanted) + 1e-9 * np.linalg.norm(wanted)


def test_a_column_of_nothing_stays_nothing() -> None:
    matrix = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert solve_nnls(matrix, np.array([3.0, 6.0])).tolist() == pytest.approx([3.0, 0.0])


def test_what_would_be_negative_is_zero() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0]])
    found = solve_nnls(matrix, np.array([3.0, 1.0]))
    assert found.tolist() == pytest.approx([2.0, 0.0])
