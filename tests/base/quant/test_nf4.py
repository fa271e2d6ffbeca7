"""NF4 in plain torch, with bitsandbytes as the oracle where it is installed.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import pytest
import torch

from weftune.base.quant.formats import PIECE_VALUES, Nf4
from weftune.base.quant.stored import stored_bytes

SHAPES = [(96, 64), (48, 32), (300, 128), (7, 10), (512, 320)]
"""Whole blocks, and rests of both kinds."""


def matrix(shape, dtype=torch.float32):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    drawn[0] *= 30
    return drawn.to(dtype)


def dequantised(form, parts, shape, dtype=torch.float32):
    out_NK = torch.empty(shape, dtype=dtype)
    form.write(parts, out_NK)
    return out_NK


def nearest_kernels(functional, monkeypatch):
    """On a CPU bitsandbytes looks the nearest code of a maximum up in a table of 2¹⁶ places, which misses by
    one where two codes are about equally near. Its kernels for other devices, ours among them, do not."""
    op = torch.ops.bitsandbytes.quantize_blockwise.default
    exact = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)

    def read_quantisation(values, blocksize):
        code = functional.create_dynamic_map()
        found, absmax = op.redispatch(exact, values, code, blocksize)
        return found, functional.QuantState(absmax=absmax, code=code, blocksize=blocksize, dtype=values.dtype)

    monkeypatch.setattr(functional, "quantize_blockwise", read_quantisation)


def by_bitsandbytes(functional, weight_NK, nested):
    """The tensors, under our names, and the matrix."""
    packed, state = functional.quantize_4bit(weight_NK, compress_statistics=nested, quant_type="nf4")
    found = {"weight": packed, "absmax": state.absmax, "code": state.code}
    if nested:
        found["nested_absmax"], found["nested_code"] = state.state2.absmax, state.state2.code
        found["offset"] = state.offset
    return found, functional.dequantize_4bit(packed, state)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_and_matrix_are_those_of_bitsandbytes(shape, dtype, nested, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    nearest_kernels(functional, monkeypatch)
    weight_NK, form = matrix(shape, dtype), Nf4(nested)
    wanted, made_NK = by_bitsandbytes(functional, weight_NK, nested)
    found = form.quantise(weight_NK)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(dequantised(form, found, shape, dtype), made_NK)


def test_what_its_cpu_kernels_make_differs_by_one_place_at_most_and_is_read_as_they_read_it():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight_NK, form = torch.randn(1200, 512, generator=torch.Generator().manual_seed(0)), Nf4()
    theirs, made_NK = by_bitsandbytes(functional, weight_NK, True)
    ours = form.quantise(weight_NK)
    off = (ours["absmax"].int() - theirs["absmax"].int()).abs()
    assert off.max() <= 1
    assert off.float().mean() < 0.01
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "absmax")
    assert torch.equal(dequantised(form, theirs, (1200, 512)), made_NK)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 64), (7, 9)])
def test_the_parts_have_the_shapes_that_they_are_announced_with(shape, nested):
    form = Nf4(nested)
    found = form.quantise(matrix(shape))
    announced = form.parts(*shape)
    assert {name: (tuple(value.shape), value.dtype) for name, value in found.items()} == {
        name: (part.shape, part.dtype) for name, part in announced.items()
    }
    stored = sum(value.nbytes for value in found.values())
    assert stored == stored_bytes("nf4", *shape, nested)
    assert dequantised(form, found, shape).isfinite().all()


def test_no_value_is_off_by_more_than_half_the_widest_gap_of_its_block():
    weight_NK, form = matrix((300, 128)), Nf4(is_nested=False)
    off = (dequantised(form, form.quantise(weight_NK), weight_NK.shape) - weight_NK).view(-1, 64).abs()
    assert (off.amax(dim=1) <= 0.16 * weight_NK.view(-1, 64).abs().amax(dim=1)).all()


def test_a_matrix_of_zeros_stays_one():
    form, weight_NK = Nf4(), torch.zeros(4, 64)
    assert torch.equal(dequantised(form, form.quantise(weight_NK), weight_NK.shape), weight_NK)


def test_a_matrix_of_many_pieces_is_that_of_one(monkeypatch):
    form, shape = Nf4(), (50, 100)
    parts = form.quantise(matrix(shape))
    whole_NK = dequantised(form, parts, shape)
    monkeypatch.setitem(PIECE_VALUES, "cpu", 128)
    assert torch.equal(dequantised(form, parts, shape), whole_NK)


def test_a_matrix_that_is_quantised_in_pieces_has_the_bits_of_one(monkeypatch):
    weight_NK, form = matrix((300, 128)), Nf4()
    whole = form.quantise(weight_NK)
    monkeypatch.setattr("weftune.base.quant.formats.READ_VALUES", 16384)
    pieces = form.quantise(weight_NK)
    assert all(torch.equal(pieces[part], value) for part, value in whole.items())
