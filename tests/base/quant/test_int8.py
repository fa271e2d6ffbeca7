"""Weights of a byte a value and a scale a row."""

from __future__ import annotations

import pytest
import torch

from tests.base.quant.test_nf4 import dequantised, matrix
from weftune.base.quant.formats import PIECE_VALUES, Int8
from weftune.base.quant.stored import stored_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_value_is_off_by_more_than_half_a_step_of_its_row(dtype):
    weight_NK, form = matrix((300, 100), dtype), Int8()
    parts = form.quantise(weight_NK)
    announced = form.parts(300, 100)
    assert {name: (tuple(value.shape), value.dtype) for name, value in parts.items()} == {
        name: (part.shape, part.dtype) for name, part in announced.items()
    }
    assert sum(value.nbytes for value in parts.values()) == stored_bytes("int8", 300, 100)
    off_NK = (dequantised(form, parts, (300, 100)) - weight_NK.float()).abs()
    assert (off_NK.amax(dim=1) <= 0.501 * parts["scale"]).all()


def test_every_row_reaches_its_largest_value_exactly_enough():
    weight_NK, form = matrix((3, 8)), Int8()
    found = dequantised(form, form.quantise(weight_NK), (3, 8))
    torch.testing.assert_close(found.abs().amax(dim=1), weight_NK.abs().amax(dim=1))


def test_rows_of_zeros_stay_zeros_and_a_nan_is_not_hidden():
    weight_NK, form = matrix((3, 8)), Int8()
    weight_NK[1] = 0
    weight_NK[2, 3] = torch.nan
    found_NK = dequantised(form, form.quantise(weight_NK), (3, 8))
    assert torch.equal(found_NK[1], torch.zeros(8))
    assert found_NK[2].isnan().any()
    assert found_NK[0].isfinite().all()


def test_a_matrix_of_many_pieces_is_that_of_one(monkeypatch):
    form = Int8()
    parts = form.quantise(matrix((50, 10)))
    whole_NK = dequantised(form, parts, (50, 10))
    monkeypatch.setitem(PIECE_VALUES, "cpu", 70)
    assert torch.equal(dequantised(form, parts, (50, 10)), whole_NK)


def test_a_matrix_that_is_quantised_in_pieces_has_the_bits_of_one(monkeypatch):
    weight_NK, form = matrix((300, 128)), Int8()
    whole = form.quantise(weight_NK)
    monkeypatch.setattr("weftune.base.quant.formats.READ_VALUES", 100)
    pieces = form.quantise(weight_NK)
    assert all(torch.equal(pieces[part], value) for part, value in whole.items())
