"""Fused layers of every family on a CUDA device: exactness in bfloat16, captured passes, recomputation. Run
with `pytest -m gpu`."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.cases import call_side_by_side, some_of
from tests.families import randomised
from tests.test_gpu import ready, trained
from weftune.base.attention import pack
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.sizes import SIZES, config, toy_size
from weftune.ops.lora.routes import Route
from weftune.plan.program.program import Recompute
from weftune.run.passes.adapted import AdaptedBase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = some_of(
    ["8b", "32b", "qwen3-8b", "phi-4-mini", "gemma-3-4b"], ["qwen3-8b", "phi-4-mini", "gemma-3-4b"]
)
"""Llama's and Qwen2's layers are those of `test_gpu.py` too."""
WINDOW = 48
"""Shorter than some samples."""
LAYERS = 3


def small_config(shape):
    size = SIZES[shape]
    small = replace(
        toy_size(size), hidden=512, intermediate=1024, layers=LAYERS, vocabulary=512, head=size.head
    )
    made = config(small)
    if small.family == "gemma3_text":
        made.sliding_window = WINDOW
        made.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return made


@cache
def base_of(shape, dtype):
    spec = BaseSpec(model=f"small/{shape}", dtype=str(dtype).removeprefix("torch."))
    return Base.from_model(randomised(small_config(shape), dtype), spec, torch.device("cuda", 0))


@pytest.fixture(scope="module", autouse=True)
def _compiled_side_by_side():
    """The compiler takes most of the time of these tests."""
    bases = [base_of(shape, torch.bfloat16) for shape in SHAPES]
    call_side_by_side(partial(trained, base, jobs_of(base, 1), rounds=2, graphs=False) for base in bases)
    torch.cuda.synchronize()


def jobs_of(base, count):
    """Without dropout, which is the sites' and no family's: with it they would have twice the kernels."""
    return [ready(base, f"job{i}", i, adapter={"rank": 8}) for i in range(count)]


@pytest.fixture(scope="module", params=SHAPES)
def base(request):
    return base_of(request.param, torch.bfloat16)


def decoded(base, x_TD, lengths, dh_TD):
    """The last hidden states of these embeddings, and the gradient of the embeddings."""
    x_TD = x_TD.to(base.dtype).detach().requires_grad_()
    positions_T = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    h_1TD = base.model.base_model(
        inputs_embeds=x_TD[None],
        position_ids=positions_T[None],
        use_cache=False,
        weftune_pack=pack(lengths, base.device),
    ).last_hidden_state
    h_1TD.backward(dh_TD[None].to(h_1TD.dtype))
    return h_1TD[0].detach().double(), x_TD.grad.double()


@pytest.mark.parametrize("lengths", [(130, 1, 61), (64, 64, 64)], ids=["uneven", "even"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_fused_layers_are_as_near_to_float32_as_those_of_transformers(shape, lengths):
    half, single = base_of(shape, torch.bfloat16), base_of(shape, torch.float32)
    single.model.load_state_dict(half.model.state_dict())
    generator = torch.Generator("cuda").manual_seed(0)
    x_TD, dh_TD = (
        torch.randn(sum(lengths), 512, generator=generator, device="cuda").bfloat16() for _ in range(2)
    )
    truths, plains = decoded(single, x_TD, lengths, dh_TD), decoded(half, x_TD, lengths, dh_TD)
    adapted = AdaptedBase(half, Route.tiled)
    assert adapted.is_fused
    assert adapted.can_capture
    fused = decoded(half, x_TD, lengths, dh_TD)
    adapted.restore_base()
    for got, plain, truth in zip(fused, plains, truths, strict=True):
        assert (got - truth).norm() <= 2 * (plain - truth).norm()


def test_a_captured_pass_gives_the_very_bits_of_a_plain_one(base):
    jobs = jobs_of(base, 3)
    plain, _, none = trained(base, jobs, graphs=False)
    captured, _, captures = trained(base, jobs)
    assert none is None
    assert captures > 0
    assert all(torch.equal(captured[name], plain[name]) for name in plain)


@pytest.mark.parametrize("graphs", some_of([False, True], [True]))
def test_recomputation_changes_no_bit(base, graphs):
    jobs = jobs_of(base, 2)
    kept, _, _ = trained(base, jobs, graphs=graphs)
    again, _, _ = trained(base, jobs, graphs=graphs, recompute=Recompute(True, 1))
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_jobs_learn_what_they_learn_in_the_layers_of_transformers(base):
    """Adam makes whole steps of gradients that are mostly rounding, so the directions are near, not equal."""
    jobs = jobs_of(base, 2)
    fused, failed, _ = trained(base, jobs)
    plain, _, _ = trained(base, jobs, route=Route.segmented)
    assert not failed
    for name in plain:
        assert torch.cosine_similarity(fused[name].flatten(), plain[name].flatten(), dim=0) > 0.8
