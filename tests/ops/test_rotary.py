"""The parted and rotated queries, keys and values: in float32 here, in half precision on a GPU."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.cases import call_side_by_side, slow_but, some_of
from tests.ops.earned import assert_earned, outcomes, saved_bytes
from tests.ops.launches import noted
from weftune.ops.rotary import HeadNorms, rotary_split, rotary_split_reference

HEADS_AND_GROUPS = [(1, 1), (4, 2), (9, 3), (32, 8)]
WIDTHS = [(40, 40), (64, 64), (64, 16), (24, 20)]


def drawn(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def angles(rows, width, dtype=torch.float32, device="cpu"):
    """(cosines, sines) as Llama has them, both halves filled, times a factor such as yarn's."""
    frequency_E = 10000.0 ** -torch.linspace(0.0, 1.0, width // 2).repeat(2)
    angle_TE = torch.arange(3, rows + 3)[:, None] * frequency_E
    return tuple((1.2 * x_TE).to(device, dtype) for x_TE in (angle_TE.cos(), angle_TE.sin()))


def norms_of(width, dtype=torch.float32, device="cpu", offset=0.0):
    q_D, k_D = (1.0 - offset + 0.3 * drawn(seed, width) for seed in (1, 2))
    return HeadNorms(q_D[0].to(device, dtype), k_D[1].to(device, dtype), 1e-6, offset)


def wide(norms):
    return norms and replace(norms, q_D=norms.q_D.double(), k_D=norms.k_D.double())


def normed(x_THD, weight_D, norms):
    """As transformers does it."""
    kind = Gemma3RMSNorm if norms.offset else Qwen3RMSNorm
    norm = kind(len(weight_D), eps=norms.eps).to(x_THD.device, weight_D.dtype).requires_grad_(False)
    norm.weight.copy_(weight_D)
    return norm(x_THD)


def theirs(qkv_TN, cos_TE, sin_TE, heads, groups, norms=None):
    """As transformers does it: part, rotate the first columns of q and k, join with the rest."""
    parts = qkv_TN.unflatten(1, (heads + 2 * groups, -1)).split((heads, groups, groups), dim=1)
    if norms is not None:
        parts = normed(parts[0], norms.q_D, norms), normed(parts[1], norms.k_D, norms), parts[2]
    width = cos_TE.shape[1]
    turning = (part[..., :width] for part in parts[:2])
    q, k = apply_rotary_pos_emb(*turning, cos_TE.to(qkv_TN.dtype), sin_TE.to(qkv_TN.dtype))
    return torch.cat((q, parts[0][..., width:]), -1), torch.cat((k, parts[1][..., width:]), -1), parts[2]


def gradients_of(rows, heads, groups, width, dtype, device):
    """Gradients as attention may leave them: one contiguous, one with heads before rows, one a slice."""
    return [
        drawn(rows, heads, width, dtype=dtype, device=device),
        drawn(groups, rows, width, dtype=dtype, device=device).transpose(0, 1),
        drawn(rows, groups, 2 * width, dtype=dtype, device=device)[..., width:],
    ]


def check(rows, heads, groups, width, rotary, dtype, device, angle_dtype, absent=(), norms=None):
    columns = (heads + 2 * groups) * width
    qkv_TN = drawn(rows, columns + 16, dtype=dtype, device=device)[:, 8 : 8 + columns]
    cos_TE, sin_TE = angles(rows, rotary, angle_dtype, device)
    gradients = gradients_of(rows, heads, groups, width, dtype, device)
    assert_earned(
        lambda x: rotary_split(x, cos_TE, sin_TE, heads, groups, norms),
        lambda x: theirs(x, cos_TE, sin_TE, heads, groups, norms),
        lambda x: rotary_split_reference(x, cos_TE.double(), sin_TE.double(), heads, groups, wide(norms)),
        [qkv_TN],
        [None if place in absent else dy for place, dy in enumerate(gradients)],
    )


@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_the_reference_is_the_rotation_of_transformers(offset):
    qkv_TN, (cos_TE, sin_TE) = drawn(9, 8 * 24), angles(9, 24)
    given = gradients_of(9, 4, 2, 24, torch.float32, "cpu")
    norms = None if offset is None else norms_of(24, offset=offset)
    ours = outcomes(lambda x: rotary_split_reference(x, cos_TE, sin_TE, 4, 2, norms), [qkv_TN], given)
    wanted = outcomes(lambda x: theirs(x, cos_TE, sin_TE, 4, 2, norms), [qkv_TN], given)
    # Norms sum in another order than transformers' do; the rotation alone does not.
    rtol, atol = (1e-6, 1e-6) if norms is None else (1e-5, 2e-6)
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=atol)


LAYOUTS = [(33, 1, 1), (5, 4, 2), (1, 9, 3), (7, 32, 8)]


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "rotary"),
    slow_but(
        ((*layout, *widths) for layout, widths in product(LAYOUTS, WIDTHS)),
        [
            *((5, 4, 2, *widths) for widths in WIDTHS),
            *((*layout, *WIDTHS[0]) for layout in LAYOUTS if layout != (5, 4, 2)),
        ],
    ),
)
def test_the_rotation_is_as_exact_as_that_of_transformers(rows, heads, groups, width, rotary, device):
    check(rows, heads, groups, width, rotary, torch.float32, device, torch.float32)


@pytest.mark.parametrize("absent", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_a_part_without_a_gradient_counts_as_zero(absent, device):
    check(5, 4, 2, 24, 20, torch.float32, device, torch.float32, absent)


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width", "rotary", "offset"),
    [(5, 4, 2, 40, 40, 0.0), (5, 9, 3, 24, 20, 1.0), (33, 1, 1, 64, 64, 1.0)],
)
def test_with_norms_of_heads_it_is_as_exact_as_transformers(
    rows, heads, groups, width, rotary, offset, device
):
    norms = norms_of(width, device=device, offset=offset)
    check(rows, heads, groups, width, rotary, torch.float32, device, torch.float32, norms=norms)


@pytest.mark.parametrize("absent", [(0,), (1, 2)])
def test_with_norms_of_heads_too_a_part_without_a_gradient_counts_as_zero(absent, device):
    norms = norms_of(24, device=device)
    check(5, 4, 2, 24, 20, torch.float32, device, torch.float32, absent, norms)


def test_with_norms_of_heads_a_nan_stays_in_its_head(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(3, 8 * 24, device=device), angles(3, 24, device=device)
    norms, given = norms_of(24, device=device), gradients_of(3, 4, 2, 24, torch.float32, device)

    def split(x):
        return rotary_split(x, cos_TE, sin_TE, 4, 2, norms)

    clean = outcomes(split, [qkv_TN], given)
    qkv_TN[1, 2 * 24 + 5] = torch.nan
    sick = outcomes(split, [qkv_TN], given)
    assert sick[0][1, 2].isnan().all()
    for got, wanted, heads in zip(sick, clean, (4, 2, 2, 8), strict=True):
        got, wanted = got.reshape(3, heads, 24), wanted.reshape(3, heads, 24)
        other = torch.ones(3, heads, dtype=torch.bool)
        if heads != 2:
            other[1, 2] = False
        assert torch.equal(got[other], wanted[other])


def test_angles_whose_halves_differ_are_turned_back_rightly(device):
    """The transpose of what was done, not a rotation by the opposite angle."""
    qkv_TN, cos_TE, sin_TE = (drawn(*shape, device=device) for shape in ((5, 96), (5, 10), (6, 10)))
    given = gradients_of(5, 4, 2, 12, torch.float32, device)
    ours = outcomes(lambda x: rotary_split(x, cos_TE, sin_TE[1:], 4, 2), [qkv_TN], given)
    wanted = outcomes(lambda x: rotary_split_reference(x, cos_TE, sin_TE[1:], 4, 2), [qkv_TN], given)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_values_and_what_does_not_turn_pass_bit_by_bit_and_all_parts_are_contiguous(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(7, 8 * 24, device=device), angles(7, 16, device=device)
    qkv_TN[2, 6 * 24 + 3] = torch.inf
    qkv_TN[4, 7 * 24 + 11] = torch.inf
    q_THD, k_TGD, v_TGD = rotary_split(qkv_TN, cos_TE, sin_TE, 4, 2)
    assert all(part.is_contiguous() for part in (q_THD, k_TGD, v_TGD))
    whole_TLD = qkv_TN.unflatten(1, (8, 24))
    assert torch.equal(v_TGD, whole_TLD[:, 6:])
    assert torch.equal(q_THD[..., 16:], whole_TLD[:, :4, 16:])
    assert torch.equal(k_TGD[..., 16:], whole_TLD[:, 4:6, 16:])


def test_nothing_but_the_angles_is_kept(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(7, 8 * 24, device=device).requires_grad_(), angles(7, 24, device=device)
    assert saved_bytes(rotary_split, qkv_TN, cos_TE, sin_TE, 4, 2) == 0
    q_THD = rotary_split(qkv_TN, cos_TE, sin_TE, 4, 2)[0]
    kept = [saved for saved in q_THD.grad_fn.saved_tensors if saved is not None]
    assert {saved.shape for saved in kept} == {cos_TE.shape}


def test_of_norms_nothing_but_what_they_were_given_is_kept(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(7, 8 * 24, device=device).requires_grad_(), angles(7, 24, device=device)
    norms = norms_of(24, device=device)
    assert saved_bytes(rotary_split, qkv_TN, cos_TE, sin_TE, 4, 2, norms) == 0


HALVES = (torch.bfloat16, torch.float16)


ON_A_GPU = some_of(
    (
        (*heads, *widths, dtype)
        for heads, widths, dtype in product(HEADS_AND_GROUPS, [*WIDTHS, (128, 128)], HALVES)
    ),
    [
        *((*HEADS_AND_GROUPS[-1], *widths, torch.bfloat16) for widths in [*WIDTHS, (128, 128)]),
        (*HEADS_AND_GROUPS[0], 128, 128, torch.bfloat16),
        (*HEADS_AND_GROUPS[0], *WIDTHS[0], torch.float16),
    ],
)
WITH_NORMS = [(32, 8, 128, 128, 0.0), (8, 4, 256, 256, 1.0), (24, 8, 128, 96, 0.0), (9, 3, 24, 20, 1.0)]
"""Qwen 3, Gemma 3, and shapes of no family."""


def check_on_a_gpu(heads, groups, width, rotary, dtype):
    for rows, angle_dtype in ((1, dtype), (33, torch.float32), (500, dtype)):
        check(rows, heads, groups, width, rotary, dtype, "cuda", angle_dtype)


def check_with_norms(heads, groups, width, rotary, offset):
    norms = norms_of(width, torch.bfloat16, "cuda", offset)
    for rows in (1, 33, 500):
        check(rows, heads, groups, width, rotary, torch.bfloat16, "cuda", torch.bfloat16, (), norms)


@pytest.fixture(scope="module")
def compiled():
    call_side_by_side(partial(check_on_a_gpu, *case) for case in ON_A_GPU)
    call_side_by_side(partial(check_with_norms, *case) for case in WITH_NORMS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("heads", "groups", "width", "rotary", "dtype"), ON_A_GPU)
def test_in_half_precision_the_rotation_is_as_exact_as_that_of_transformers(
    heads, groups, width, rotary, dtype
):
    check_on_a_gpu(heads, groups, width, rotary, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("heads", "groups", "width", "rotary", "offset"), WITH_NORMS)
def test_in_half_precision_it_is_as_exact_with_norms_of_heads(heads, groups, width, rotary, offset):
    check_with_norms(heads, groups, width, rotary, offset)


LAUNCHES = [
    (2, 1, 1, 24, 20, 1, (4, 16, 4)),
    (1, 9, 3, 64, 16, 1, (16, 8, 64)),
    (1, 30, 1, 2, 2, 1, (32, 1, 1)),
    (3, 28, 2, 128, 128, 2, (16, 64, 1)),
    (3, 29, 2, 128, 126, 3, (16, 64, 2)),
    (2, 1, 1, 4096, 4096, 3, (1, 2048, 1)),
]
"""Rows, heads, groups, widths of a head and of what turns; programs a row; heads and columns of each."""


@pytest.mark.parametrize(("rows", "heads", "groups", "width", "rotary", "programs", "tile"), LAUNCHES)
def test_a_launch_has_programs_for_all_heads_of_every_row(
    rows, heads, groups, width, rotary, programs, tile, device, monkeypatch
):
    from weftune.ops.triton import rotary as kernels

    launches = noted(monkeypatch, kernels, "rotary_forward", "rotary_backward")
    columns = (heads + 2 * groups) * width
    qkv_TN = torch.zeros(rows, columns + 16, device=device)[:, :columns].requires_grad_()
    cos_TE = torch.zeros(rows, rotary + 2, device=device)[:, :rotary]
    sin_TE = torch.zeros(rows, rotary + 4, device=device)[:, :rotary]
    q_THD, k_TGD, v_TGD = rotary_split(qkv_TN, cos_TE, sin_TE, heads, groups)
    shapes = [tuple(part.shape) for part in (q_THD, k_TGD, v_TGD)]
    assert shapes == [(rows, heads, width), (rows, groups, width), (rows, groups, width)]
    dv_TGD = torch.zeros(rows, groups, 2 * width, device=device)[..., :width]
    torch.autograd.backward((q_THD, v_TGD), (torch.zeros_like(q_THD), dv_TGD))
    forward, backward = launches
    assert (forward.kernel, backward.kernel) == ("rotary_forward", "rotary_backward")
    for one in launches:
        assert one.grid == (rows * programs,)
        assert one.of("CHUNK", "HALF_BLOCK", "REST_BLOCK", "num_warps") == (*tile, 4)
        assert one.of("HEADS", "GROUPS", "WIDTH", "HALF") == (heads, groups, width, rotary // 2)
    assert forward.given[6:] == (columns + 16, rotary + 2, rotary + 4, None, None, 0.0, 0.0)
    strides = (heads * width, width, 0, 0, 2 * groups * width, 2 * width)
    assert backward.given[6:] == (*strides, rotary + 2, rotary + 4, None, None, None, 0, 0.0, 0.0)


def test_a_launch_with_norms_reads_their_weights_and_what_they_were_given(device, monkeypatch):
    from weftune.ops.triton import rotary as kernels

    launches = noted(monkeypatch, kernels, "rotary_forward", "rotary_backward")
    qkv_TN = torch.zeros(3, 4 * 8 + 16, device=device)[:, : 4 * 8].requires_grad_()
    norms = HeadNorms(torch.zeros(8, device=device), torch.ones(8, device=device), 1e-6, 1.0)
    q_THD = rotary_split(qkv_TN, *angles(3, 8, device=device), 2, 1, norms)[0]
    q_THD.backward(torch.zeros_like(q_THD))
    forward, backward = launches
    assert forward.given[9] is norms.q_D
    assert forward.given[10] is norms.k_D
    assert forward.given[11:] == (1e-6, 1.0)
    assert backward.given[14].data_ptr() == qkv_TN.data_ptr()
    assert backward.given[15] is norms.q_D
    assert backward.given[16] is norms.k_D
    assert backward.given[17:] == (4 * 8 + 16, 1e-6, 1.0)


def test_float64_is_left_to_torch_and_float32_to_the_kernels(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(3, 8 * 12, device=device), angles(3, 12, torch.float64, device)
    for got, wanted in zip(
        rotary_split(qkv_TN.double(), cos_TE, sin_TE, 4, 2),
        rotary_split_reference(qkv_TN.double(), cos_TE, sin_TE, 4, 2),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    q_THD = rotary_split(qkv_TN.requires_grad_(), cos_TE.float(), sin_TE.float(), 4, 2)[0]
    assert q_THD.grad_fn.name() == "_RotarySplitBackward"


def test_a_second_derivative_is_refused(device):
    qkv_TN, (cos_TE, sin_TE) = drawn(3, 4 * 8, device=device).requires_grad_(), angles(3, 8, device=device)
    q_THD = rotary_split(qkv_TN, cos_TE, sin_TE, 2, 1)[0]
    dq_THD = torch.ones_like(q_THD).requires_grad_()
    (gradient_TN,) = torch.autograd.grad(q_THD, qkv_TN, dq_THD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient_TN.sum().backward()


MISSHAPEN = {
    "columns that the heads do not share": (25, (5, 8), (5, 8)),
    "sines of another width": (24, (5, 8), (5, 6)),
    "angles of other rows": (24, (4, 8), (4, 8)),
    "sines of other rows": (24, (5, 8), (4, 8)),
    "angles wider than a head": (24, (5, 10), (5, 10)),
    "an odd number of angles": (24, (5, 7), (5, 7)),
}


@pytest.mark.parametrize("what", MISSHAPEN)
def test_shapes_that_do_not_fit_are_a_bug(what):
    columns, cosines, sines = MISSHAPEN[what]
    qkv_TN, cos_TE, sin_TE = (drawn(*shape, dtype=torch.float64) for shape in ((5, columns), cosines, sines))
    with pytest.raises(AssertionError):
        rotary_split(qkv_TN, cos_TE, sin_TE, 1, 1)


def test_norms_of_another_width_are_a_bug():
    qkv_TN, (cos_TE, sin_TE) = drawn(5, 24, dtype=torch.float64), angles(5, 8, torch.float64)
    with pytest.raises(AssertionError):
        rotary_split(qkv_TN, cos_TE, sin_TE, 1, 1, norms_of(7, torch.float64))
