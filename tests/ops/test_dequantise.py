"""The matrix of a quantised weight by one kernel: the bits of plain torch, in float32 here, in half precision
on a GPU."""

import pytest
import torch

from tests.base.packs import packed, random_samples
from tests.base.quant.bases import quantised_base
from tests.families import tiny
from weftune.base.quant.formats import Fp8, Int8, Nf4
from weftune.base.quant.linear import QuantLinear, dequantise_plain
from weftune.core.weights import CODED_PARAMETERS, adjacent_view, multiply_codes
from weftune.ops.dequantise import KERNELS
from weftune.ops.fp8 import multiply
from weftune.ops.lora.routes import Route
from weftune.run.passes.adapted import AdaptedBase

SHAPES = [(1, 64), (7, 9), (33, 130), (300, 72)]
FORMS = [Nf4(), Nf4(is_nested=False), Int8(), Fp8()]


def check(form, shape, dtype, device):
    weight_NK = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(device)
    parts = form.quantise(weight_NK)
    want_NK, got_NK = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    form.write(parts, want_NK)
    KERNELS[form.name](parts, got_NK)
    assert torch.equal(got_NK, want_NK)
    assert (got_NK.float() - weight_NK).abs().max() < 0.16 * weight_NK.abs().max()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_has_the_bits_of_plain_torch(shape, form, device):
    check(form, shape, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 4096), (14336, 4096), (4096, 14336)])
def test_on_a_gpu_too(shape, form, dtype):
    check(form, shape, dtype, torch.device("cuda"))


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_on_the_tiled_route_weights_are_dequantised_by_kernels_and_plainly_afterwards(
    quantize, device, monkeypatch
):
    if device.type == "cuda":
        pytest.skip("the base is on the CPU")
    base = quantised_base(tiny("llama", torch.float32), quantize)
    linears = [module for module in base.model.modules() if isinstance(module, QuantLinear)]
    with torch.no_grad():
        want = base.hidden(packed(random_samples()))
    asked = []
    write = KERNELS[quantize]
    monkeypatch.setattr(
        "weftune.run.passes.adapted.KERNELS", {quantize: lambda *given: asked.append(write(*given))}
    )
    adapted = AdaptedBase(base, Route.tiled)
    with torch.no_grad():
        got = base.hidden(packed(random_samples()))
    assert len(asked) == len(linears)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    adapted.restore_base()
    assert all(module.dequantise is dequantise_plain for module in linears)


def test_on_the_tiled_route_codes_are_multiplied_by_kernels_and_plainly_afterwards(device):
    if device.type == "cuda":
        pytest.skip("the base is on the CPU")
    base = quantised_base(tiny("llama", torch.float32), "fp8")
    linears = [module for module in base.model.modules() if isinstance(module, QuantLinear)]
    with torch.no_grad():
        want = base.hidden(packed(random_samples()))
    adapted = AdaptedBase(base, Route.tiled)
    assert all(module.multiply is multiply for module in linears)
    attention = base.model.model.layers[0].self_attn
    together = (attention.q_proj, attention.k_proj, attention.v_proj)
    for name, dim in CODED_PARAMETERS.items():
        assert adjacent_view([getattr(module, name) for module in together], dim) is not None, name
    with torch.no_grad():
        got = base.hidden(packed(random_samples()))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    adapted.restore_base()
    assert all(module.multiply is multiply_codes for module in linears)
    with torch.no_grad():
        torch.testing.assert_close(base.hidden(packed(random_samples())), want, rtol=1e-5, atol=1e-5)
