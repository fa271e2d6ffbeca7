"""The gated activation: in float32 here, in half precision on a GPU."""

from itertools import product

import pytest
import torch
from transformers.activations import ACT2FN

from tests.cases import some_of
from tests.ops.earned import assert_earned, outcomes, saved_bytes
from weftune.ops.swiglu import swiglu, swiglu_reference

SIZES = [(1, 20), (7, 64), (33, 1536), (300, 14336)]
"""Rows and their width."""


def drawn(*shape, dtype=torch.float32, device="cpu"):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(device, dtype)


def theirs(gate_up_TF):
    gate_TI, up_TI = gate_up_TF.chunk(2, dim=-1)
    return ACT2FN["silu"](gate_TI) * up_TI


def check(rows, width, dtype, device):
    gate_up_TF = drawn(rows, 2 * width + 16, dtype=dtype, device=device)[:, 8 : 8 + 2 * width]
    dact_TI = drawn(rows, 2 * width, dtype=dtype, device=device)[:, width:]
    assert_earned(
        swiglu,
        theirs,
        swiglu_reference,
        [gate_up_TF],
        [dact_TI],
    )


def test_the_reference_is_the_activation_of_transformers():
    gate_up_TF, dact_TI = drawn(9, 64), drawn(9, 32)
    ours = outcomes(swiglu_reference, [gate_up_TF], [dact_TI])
    wanted = outcomes(theirs, [gate_up_TF], [dact_TI])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [20, 64, 1536])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_swiglu_is_as_exact_as_that_of_transformers(rows, width, device):
    check(rows, width, torch.float32, device)


def test_gates_of_any_size_give_finite_values_and_gradients(device):
    gate_I = torch.tensor([-1e4, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e4], device=device)
    gate_up_TF = torch.cat((gate_I, torch.full_like(gate_I, 0.5)))[None]
    given = [torch.ones(1, len(gate_I), device=device)]
    ours = outcomes(swiglu, [gate_up_TF], given)
    wanted = outcomes(swiglu_reference, [gate_up_TF.double()], [given[0].double()])
    for got, truth in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, truth.float(), rtol=1e-5, atol=1e-30)


def test_nothing_but_the_input_is_kept(device):
    assert saved_bytes(swiglu, drawn(7, 40, device=device).requires_grad_()) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    some_of(
        ((*size, dtype) for size, dtype in product(SIZES, (torch.bfloat16, torch.float16))),
        [*((*size, torch.bfloat16) for size in SIZES), (33, 1536, torch.float16)],
    ),
)
def test_in_half_precision_swiglu_is_as_exact_as_that_of_transformers(rows, width, dtype):
    check(rows, width, dtype, "cuda")
