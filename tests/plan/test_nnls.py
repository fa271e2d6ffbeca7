"""Our own solver finds what scipy's finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.nnls import by_coordinates, non_negative


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(5, 12))
def test_both_solvers_agree_and_nothing_is_negative(seed: int, columns: int, rows: int) -> None:
    pytest.importorskip("scipy")
    rng = np.random.default_rng(seed)
    matrix, wanted = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    # A ridge, as every fit here has one, makes the solution the only one.
    matrix, wanted = np.vstack([matrix, np.eye(columns)]), np.concatenate([wanted, np.zeros(columns)])
    ours, theirs = by_coordinates(matrix, wanted), non_negative(matrix, wanted)
    assert (ours >= 0).all()
    assert ours == pytest.approx(theirs, abs=1e-8)


def test_a_column_of_nothing_stays_nothing() -> None:
    matrix = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert by_coordinates(matrix, np.array([3.0, 6.0])).tolist() == pytest.approx([3.0, 0.0])


def test_what_would_be_negative_is_zero() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0]])
    found = by_coordinates(matrix, np.array([3.0, 1.0]))
    assert found.tolist() == pytest.approx([2.0, 0.0])
