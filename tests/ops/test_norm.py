"""RMSNorm, alone and beside what goes around it: in float32 here, in half precision on a GPU.

Shapes: C draws, T rows, D width.
"""

from functools import partial
from itertools import product

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.cases import call_side_by_side, slow_but, some_of
from tests.ops.earned import assert_earned, outcomes, saved_bytes
from tests.ops.launches import noted
from weftune.ops.norm import (
    rms_norm,
    rms_norm_onto,
    rms_norm_onto_reference,
    rms_norm_reference,
    skip_rms_norm,
)

EPS = 1e-5
ROWS = [1, 7, 33]
WIDTHS = [40, 64, 576]
GIVEN = [(1.0, 0.5), (0.0, 1.0), (1.0, 0.0)]
"""How large the gradients of the two outputs are; 0 where one is None."""
HALVES = [torch.bfloat16, torch.float16]
SIZES = [(1, 40), (7, 64), (33, 576), (5000, 128), (257, 4096), (9, 16384)]
"""Rows and their width."""
DRAWS = 8
"""One rounded factor serves all values of a row, so that the error of a few rows is a matter of luck: in one
draw of seven rows the one or the other is twice as exact as it is in many."""


def drawn(*shape, dtype=torch.float32, device="cpu", draw=0):
    """Values whose rows differ in size, so that no row can stand in for another."""
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * draw)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.linspace(0.5, 2.0, shape[0])[:, None]).to(device, dtype)


def draws(*shape, dtype, device):
    """Several draws, the first of which is that of `drawn`."""
    return torch.stack([drawn(*shape, dtype=dtype, device=device, draw=draw) for draw in range(DRAWS)])


def weight_of(width, dtype, device):
    return drawn(1, width, dtype=dtype, device=device)[0]


def gradients_of(rows, width, given, dtype, device):
    """One a size, None for 0; each a view whose rows lie further apart than they are wide."""
    return [
        (size * draws(rows, width + gap, dtype=dtype, device=device))[..., gap:] if size else None
        for size, gap in zip(given, (8, 24), strict=True)
    ]


def theirs(weight_D, offset):
    """The norm as transformers writes it."""
    kind = LlamaRMSNorm if offset == 0.0 else Gemma3RMSNorm
    norm = kind(weight_D.shape[0], eps=EPS).to(weight_D.device, weight_D.dtype).requires_grad_(False)
    norm.weight.copy_(weight_D)
    return norm


def check_rms_norm(rows, width, offset, dtype, device):
    x_CTD = draws(rows, 2 * width + 8, dtype=dtype, device=device)[..., 8 : 8 + width]
    weight_D = weight_of(width, dtype, device)
    dn_CTD = draws(rows, width, dtype=dtype, device=device).flip(1)
    assert_earned(
        lambda x: torch.stack([rms_norm(x_TD, weight_D, EPS, offset) for x_TD in x]),
        theirs(weight_D, offset),
        lambda x: rms_norm_reference(x, weight_D.double(), EPS, offset),
        [x_CTD],
        [dn_CTD],
    )


def check_skip_rms_norm(rows, width, given, dtype, device):
    h_CTD = draws(rows, 2 * width, dtype=dtype, device=device)[..., :width]
    weight_D = weight_of(width, dtype, device)
    norm = theirs(weight_D, 0.0)
    gradients = gradients_of(rows, width, given, dtype, device)
    assert_earned(
        lambda h: tuple(
            map(torch.stack, zip(*(skip_rms_norm(h_TD, weight_D, EPS) for h_TD in h), strict=True))
        ),
        lambda h: (h, norm(h)),
        lambda h: (h, rms_norm_reference(h, weight_D.double(), EPS)),
        [h_CTD],
        gradients,
    )


def check_rms_norm_onto(rows, width, offset, dtype, device):
    h_CTD = draws(rows, width + 8, dtype=dtype, device=device).flip(1)[..., 8:]
    x_CTD = draws(rows, 2 * width, dtype=dtype, device=device)[..., :width]
    weight_D = weight_of(width, dtype, device)
    norm = theirs(weight_D, offset)
    assert_earned(
        lambda h, x: torch.stack(
            [rms_norm_onto(h_TD, x_TD, weight_D, EPS, offset) for h_TD, x_TD in zip(h, x, strict=True)]
        ),
        lambda h, x: h + norm(x),
        lambda h, x: rms_norm_onto_reference(h, x, weight_D.double(), EPS, offset),
        [h_CTD, x_CTD],
        [draws(rows, width, dtype=dtype, device=device).flip(2)],
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_reference_is_the_norm_of_transformers(offset):
    x_TD, weight_D, dn_TD = drawn(9, 64), weight_of(64, torch.float32, "cpu"), drawn(9, 64)
    ours = outcomes(lambda x: rms_norm_reference(x, weight_D, EPS, offset), [x_TD], [dn_TD])
    for got, wanted in zip(ours, outcomes(theirs(weight_D, offset), [x_TD], [dn_TD]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "width", "offset"),
    slow_but(
        product(ROWS, WIDTHS, (0.0, 1.0)),
        [(rows, width, float(at % 2)) for at, (rows, width) in enumerate(product(ROWS, WIDTHS))],
    ),
)
def test_rms_norm_is_as_exact_as_that_of_transformers(rows, width, offset, device):
    check_rms_norm(rows, width, offset, torch.float32, device)


@pytest.mark.parametrize(
    ("rows", "width", "given"),
    slow_but(
        product(ROWS, WIDTHS, GIVEN),
        [(rows, width, GIVEN[(at + at // 3) % 3]) for at, (rows, width) in enumerate(product(ROWS, WIDTHS))],
    ),
)
def test_skip_rms_norm_is_as_exact_whichever_of_its_gradients_are_there(rows, width, given, device):
    check_skip_rms_norm(rows, width, given, torch.float32, device)


@pytest.mark.parametrize(("rows", "width", "offset"), [(1, 64, 1.0), (7, 40, 0.0), (33, 576, 1.0)])
def test_rms_norm_onto_is_as_exact_as_that_of_transformers(rows, width, offset, device):
    check_rms_norm_onto(rows, width, offset, torch.float32, device)


def test_a_gradient_that_is_not_laid_out_in_rows_is_read_rightly(device):
    x_TD, weight_D = drawn(7, 40, device=device), weight_of(40, torch.float32, device)
    for dn_TD in (drawn(40, 7, device=device).T, torch.ones((), device=device).expand(7, 40)):
        ours = outcomes(lambda x: rms_norm(x, weight_D, EPS), [x_TD], [dn_TD])
        wanted = outcomes(lambda x: rms_norm_reference(x, weight_D, EPS), [x_TD], [dn_TD])
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_only_the_input_and_a_float_a_row_are_kept(device):
    x_TD, weight_D = drawn(7, 40, device=device).requires_grad_(), weight_of(40, torch.float32, device)
    assert saved_bytes(rms_norm, x_TD, weight_D, EPS) == 7 * 4
    assert saved_bytes(skip_rms_norm, x_TD, weight_D, EPS) == 7 * 4
    assert saved_bytes(rms_norm_onto, drawn(7, 40, device=device), x_TD, weight_D, EPS) == 7 * 4


def test_a_nan_stays_in_its_row(device):
    x_TD, weight_D = drawn(7, 40, device=device), weight_of(40, torch.float32, device)
    dn_TD = drawn(7, 40, device=device)
    clean = outcomes(lambda x: rms_norm(x, weight_D, EPS), [x_TD], [dn_TD])
    x_TD[3, 5] = torch.nan
    others = [0, 1, 2, 4, 5, 6]
    for got, wanted in zip(
        outcomes(lambda x: rms_norm(x, weight_D, EPS), [x_TD], [dn_TD]), clean, strict=True
    ):
        assert got[3].isnan().all()
        assert torch.equal(got[others], wanted[others])


ON_A_GPU = some_of(
    ((*size, dtype) for size, dtype in product(SIZES, HALVES)),
    [*((*size, torch.bfloat16) for size in SIZES), (33, 576, torch.float16)],
)


def check_all(rows, width, dtype):
    for offset in (0.0, 1.0):
        check_rms_norm(rows, width, offset, dtype, "cuda")
        check_rms_norm_onto(rows, width, offset, dtype, "cuda")
    for given in GIVEN:
        check_skip_rms_norm(rows, width, given, dtype, "cuda")


@pytest.fixture(scope="module")
def compiled():
    call_side_by_side(partial(check_all, *case) for case in ON_A_GPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("rows", "width", "dtype"), ON_A_GPU)
def test_in_half_precision_the_norms_are_as_exact_as_those_of_transformers(rows, width, dtype):
    check_all(rows, width, dtype)


LAUNCHES = [
    (9, 1, 1, (4096, 1, 8)),
    (129, 40, 3, (64, 64, 8)),
    (7, 1024, 2, (4, 1024, 8)),
    (8, 1024, 2, (4, 1024, 8)),
    (5, 1025, 3, (2, 2048, 8)),
    (3, 4096, 3, (1, 4096, 8)),
    (3, 4097, 3, (1, 8192, 16)),
    (2, 16384, 2, (1, 16384, 16)),
]


@pytest.mark.parametrize(("rows", "width", "programs", "tile"), LAUNCHES)
def test_a_launch_has_a_program_for_every_tile_of_rows(rows, width, programs, tile, device, monkeypatch):
    from weftune.ops.triton import norm as kernels

    launches = noted(monkeypatch, kernels, "norm_forward", "norm_backward")
    x_TD = torch.zeros(rows, width + 16, device=device)[:, :width].requires_grad_()
    weight_D = torch.zeros(width, device=device)
    rms_norm(x_TD, weight_D, EPS).backward(torch.zeros(rows, width + 8, device=device)[:, :width])
    h_TD, n_TD = skip_rms_norm(x_TD, weight_D, EPS)
    torch.autograd.backward((h_TD, n_TD), [torch.zeros(rows, width, device=device)] * 2)
    assert [one.kernel for one in launches] == ["norm_forward", "norm_backward"] * 2
    for one in launches:
        assert one.grid == (programs,)
        assert one.of("ROWS", "BLOCK", "num_warps", "WIDTH") == (*tile, width)
    forward, backward, _, beside_a_skip = launches
    assert forward.given[4:] == (width + 16, rows, EPS, 0.0, None, 0)
    assert backward.given[6:] == (width + 8, 0, width + 16, rows, 0.0)
    assert beside_a_skip.given[6:] == (width, width, width + 16, rows, 0.0)


def test_eps_is_added_to_the_mean_square_and_the_offset_to_the_weight():
    x_TD, weight_D = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([1.0, 2.0]).double()
    assert rms_norm_reference(x_TD, weight_D, eps=3.5).tolist() == [[0.75, 2.0]]
    assert rms_norm_reference(x_TD, weight_D, eps=3.5, offset=1.0).tolist() == [[1.5, 3.0]]
    heads_THD = torch.stack((x_TD, 0 * x_TD), dim=1)
    assert rms_norm_reference(heads_THD, weight_D, eps=3.5).tolist() == [[[0.75, 2.0], [0.0, 0.0]]]


def test_float64_is_left_to_torch_and_float32_to_the_kernels(device):
    x_TD, weight_D = drawn(7, 40, device=device), weight_of(40, torch.float32, device)
    wide = x_TD.double()
    wanted = rms_norm_reference(wide, weight_D.double(), EPS, 1.0)
    assert torch.equal(rms_norm(wide, weight_D.double(), EPS, 1.0), wanted)
    around, into = skip_rms_norm(wide, weight_D.double(), EPS, 1.0)
    assert around is wide
    assert torch.equal(into, wanted)
    x_TD.requires_grad_()
    assert rms_norm(x_TD, weight_D, EPS).grad_fn.name() == "_RmsNormBackward"
    assert skip_rms_norm(x_TD, weight_D, EPS)[1].grad_fn.name() == "_SkipRmsNormBackward"


def test_what_goes_around_passes_its_gradient_alone_where_nothing_comes_back_from_the_norm(device):
    """Not as the sum with a norm's gradient of zero, which a NaN in the row would spoil."""
    h_TD, weight_D = drawn(3, 40, device=device), weight_of(40, torch.float32, device)
    h_TD[1] = torch.nan
    dskip_TD = drawn(3, 40, device=device)
    h_TD.requires_grad_()
    around, _ = skip_rms_norm(h_TD, weight_D, EPS)
    assert torch.equal(torch.autograd.grad(around, h_TD, dskip_TD)[0], dskip_TD)


@pytest.mark.parametrize("norm", [rms_norm, lambda *given: skip_rms_norm(*given)[1]])
def test_a_second_derivative_is_refused(norm, device):
    x_TD, weight_D = drawn(2, 8, device=device).requires_grad_(), weight_of(8, torch.float32, device)
    dn_TD = torch.ones_like(x_TD).requires_grad_()
    (dx_TD,) = torch.autograd.grad(norm(x_TD, weight_D, EPS), x_TD, dn_TD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx_TD.sum().backward()


def test_what_a_norm_goes_onto_is_as_large_as_its_input(device):
    x_TD, weight_D = drawn(2, 8, device=device), weight_of(8, torch.float32, device)
    with pytest.raises(AssertionError):
        rms_norm_onto(x_TD[:1], x_TD, weight_D, EPS)


@pytest.mark.parametrize("weight_D", [torch.zeros(16)[::2], torch.zeros(1), torch.zeros(8, 1)])
def test_a_weight_of_another_shape_or_with_gaps_is_a_bug(weight_D, device):
    with pytest.raises(AssertionError):
        rms_norm(drawn(2, 8, device=device), weight_D.to(device), EPS)
