"""The gated activation: in float32 here, in half precision on a GPU."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from transformers.activations import ACT2FN

from tests.cases import some_of
from tests.ops.earned import assert_earned, outcomes, saved_bytes
from tests.ops.launches import noted
from weftune.ops.swiglu import gated_reference, geglu, swiglu

swiglu_reference, geglu_reference = (partial(gated_reference, gelu=gelu) for gelu in (False, True))

SIZES = [(1, 20), (7, 64), (33, 1536), (300, 14336)]
"""Rows and their width."""


def drawn(*shape, dtype=torch.float32, device="cpu"):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(device, dtype)


def theirs(gate_up_TF, activation="silu"):
    gate_TI, up_TI = gate_up_TF.chunk(2, dim=-1)
    return ACT2FN[activation](gate_TI) * up_TI


def their_geglu(gate_up_TF):
    return theirs(gate_up_TF, "gelu_pytorch_tanh")


SWIGLU, GEGLU = (swiglu, theirs, swiglu_reference), (geglu, their_geglu, geglu_reference)


def check(rows, width, dtype, device, gated=SWIGLU):
    gate_up_TF = drawn(rows, 2 * width + 16, dtype=dtype, device=device)[:, 8 : 8 + 2 * width]
    dact_TI = drawn(rows, 2 * width, dtype=dtype, device=device)[:, width:]
    assert_earned(
        *gated,
        [gate_up_TF],
        [dact_TI],
    )


@pytest.mark.parametrize("gated", [SWIGLU, GEGLU])
def test_the_reference_is_the_activation_of_transformers(gated):
    gate_up_TF, dact_TI = drawn(9, 64), drawn(9, 32)
    _, usual, reference = gated
    ours = outcomes(reference, [gate_up_TF], [dact_TI])
    wanted = outcomes(usual, [gate_up_TF], [dact_TI])
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [20, 64, 1536])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_swiglu_is_as_exact_as_that_of_transformers(rows, width, device):
    check(rows, width, torch.float32, device)


@pytest.mark.parametrize(("rows", "width"), [(1, 20), (7, 64), (33, 1536)])
def test_geglu_is_as_exact_as_that_of_transformers(rows, width, device):
    check(rows, width, torch.float32, device, GEGLU)


@pytest.mark.parametrize(("gated", "reference"), [(swiglu, swiglu_reference), (geglu, geglu_reference)])
def test_gates_of_any_size_give_finite_values_and_gradients(gated, reference, device):
    gate_I = torch.tensor([-1e4, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e4], device=device)
    gate_up_TF = torch.cat((gate_I, torch.full_like(gate_I, 0.5)))[None]
    given = [torch.ones(1, len(gate_I), device=device)]
    ours = outcomes(gated, [gate_up_TF], given)
    wanted = outcomes(reference, [gate_up_TF.double()], [given[0].double()])
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
    check(rows, width, dtype, "cuda", GEGLU)


@pytest.mark.parametrize(
    ("rows", "width", "programs"), [(3, 1, 3), (3, 1024, 3), (3, 1025, 6), (5, 2048, 10), (1, 2049, 3)]
)
def test_a_launch_has_a_program_for_every_block_of_every_row(rows, width, programs, device, monkeypatch):
    from weftune.ops.triton import swiglu as kernels

    launches = noted(monkeypatch, kernels, "swiglu_forward", "swiglu_backward")
    gate_up_TF = torch.zeros(rows, 2 * width + 16, device=device)[:, : 2 * width].requires_grad_()
    swiglu(gate_up_TF).backward(torch.zeros(rows, width + 8, device=device)[:, :width])
    forward, backward = launches
    assert (forward.kernel, backward.kernel) == ("swiglu_forward", "swiglu_backward")
    for one in launches:
        assert one.grid == (programs,)
        assert one.of("WIDTH", "BLOCK", "num_warps") == (width, 1024, 4)
    assert forward.given[2:] == (2 * width + 16,)
    assert backward.given[3:] == (width + 8, 2 * width + 16)


def test_float64_is_left_to_torch_and_float32_to_the_kernels(device):
    gate_up_TF = drawn(3, 12, device=device).requires_grad_()
    wide = gate_up_TF.detach().double()
    assert torch.equal(swiglu(wide), swiglu_reference(wide))
    assert torch.equal(geglu(wide), geglu_reference(wide))
    assert swiglu(gate_up_TF).grad_fn.name() == "_GatedBackward"


def test_the_halves_are_those_of_the_last_dimension():
    rows = [[0.0, 100.0, 2.0, 3.0], [100.0, -2000.0, 5.0, 7.0], [1.0, 0.0, -2.0, 3.0]]
    wanted = [[0.0, 300.0], [500.0, 0.0], [-2 / (1 + math.exp(-1)), 0.0]]
    got = swiglu_reference(torch.tensor([rows], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([wanted], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_second_derivative_is_refused(device):
    gate_up_TF = drawn(2, 8, device=device).requires_grad_()
    dact_TI = torch.ones(2, 4, device=device, requires_grad=True)
    (gradient_TF,) = torch.autograd.grad(swiglu(gate_up_TF), gate_up_TF, dact_TI, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient_TF.sum().backward()


@pytest.mark.parametrize("width", [1, 7, 9])
def test_columns_that_have_no_halves_are_a_bug(width):
    with pytest.raises(AssertionError):
        swiglu(drawn(2, width, dtype=torch.float64))
