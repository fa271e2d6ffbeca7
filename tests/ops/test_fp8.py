"""Rows rounded to 8-bit floats by one kernel, and their products on a GPU: what plain torch gives."""

import pytest
import torch

from weftune.core.weights import CODES, CodedMatrix, multiply_codes
from weftune.core.weights import quantise_rows as plain_codes
from weftune.ops.fp8 import launch_row_codes, multiply, unscaled_code_product

SHAPES = [(1, 16), (7, 48), (33, 200), (5, 1024)]
GPU = torch.device("cuda")
on_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no fp8 tensor cores"
)


def drawn(shape, device, dtype=torch.float32, seed=0, spread=3):
    """Rows of very different sizes, at most of 10 to the power of `spread`."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made * torch.logspace(-3, spread, shape[0])[:, None]).to(device, dtype)


def check_codes(shape, dtype, device, scaled):
    x_TM = drawn(shape, device, dtype)
    scale_M = torch.rand(shape[1], generator=torch.Generator().manual_seed(1)).to(device) if scaled else None
    if shape[0] > 4:
        x_TM[1], x_TM[2, 3], x_TM[3, 5] = 0.0, torch.nan, -torch.inf
    got, want = launch_row_codes(x_TM, scale_M), plain_codes(x_TM, scale_M)
    lost_T = ~want[1].isfinite()
    assert lost_T.sum() == (2 if shape[0] > 4 else 0)
    assert got[1][lost_T].isnan().all()
    assert torch.equal(got[1][~lost_T], want[1][~lost_T])
    assert got[0].dtype is CODES
    assert torch.equal(*(codes[~lost_T].view(torch.uint8) for codes, _ in (got, want)))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_bits_of_plain_torch(shape, scaled, device):
    check_codes(shape, torch.float32, device, scaled)


@pytest.mark.gpu
@on_fp8
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (777, 4096), (300, 14336), (100, 28672), (9, 57344)])
def test_on_a_gpu_too(shape, dtype, scaled):
    check_codes(shape, dtype, GPU, scaled)


def check_product(rows, outputs, inputs, dtype, bound):
    # No sum may be larger than float16 has numbers.
    spread = -1 if dtype is torch.float16 else 3
    weight = CodedMatrix.quantise(drawn((outputs, inputs), GPU, seed=1, spread=spread))
    x_TK = drawn((rows, inputs), GPU, dtype, 2, max(spread, 0))
    dy_TN = drawn((rows, outputs), GPU, dtype, 3, max(spread, 0))
    cases = (
        (x_TK, weight.codes(), None, weight.scale()),
        (dy_TN, weight.transposed_codes(), weight.scale(), None),
    )
    for operands in cases:
        got, want = multiply(*operands, dtype), multiply_codes(*operands, torch.float32)
        assert got.dtype is dtype
        off_T = (got.float() - want).square().mean(dim=1).sqrt() / want.square().mean(dim=1).sqrt()
        assert off_T.max() < bound


@pytest.mark.gpu
@on_fp8
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 2e-3), (torch.float32, 2e-3)]
)
@pytest.mark.parametrize("shape", [(1, 64, 16), (77, 4096, 4096), (130, 48, 14336), (33, 20, 36)])
def test_a_product_is_that_of_the_codes(shape, dtype, bound):
    check_product(*shape, dtype, bound)


@pytest.mark.gpu
@on_fp8
def test_a_nan_stays_in_its_row_on_a_gpu():
    weight = CodedMatrix.quantise(drawn((64, 128), GPU, seed=1))
    x_TK = drawn((40, 128), GPU, torch.bfloat16)
    clean_TN = multiply(x_TK, weight.codes(), None, weight.scale(), torch.bfloat16)
    x_TK[7, 9] = torch.nan
    got_TN = multiply(x_TK, weight.codes(), None, weight.scale(), torch.bfloat16)
    assert got_TN[7].isnan().all()
    others = torch.arange(40, device=GPU) != 7
    assert torch.equal(got_TN[others], clean_TN[others])


@pytest.mark.gpu
@on_fp8
def test_a_sum_comes_in_float32_from_the_library():
    weight = CodedMatrix.quantise(drawn((64, 128), GPU, seed=1))
    codes_TK, _ = plain_codes(drawn((40, 128), GPU))
    sum_TN = unscaled_code_product(codes_TK, weight.codes())
    assert sum_TN.dtype is torch.float32
    want_TN = codes_TK.double() @ weight.codes().double().T
    assert (sum_TN - want_TN).abs().max() < 1e-3 * want_TN.abs().max()
