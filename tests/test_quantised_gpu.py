"""Quantised bases on a GPU: what they take of its memory, and what jobs learn there."""

import pytest
import torch
from transformers import LlamaConfig

from tests import bench
from tests.base.quant.bases import plain_folder, quantised_base, stood_for
from tests.families import COMMON, randomised
from weftune import JobSpec
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.plan.cost.memory import MemoryModel

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8}


def model(dtype=torch.bfloat16):
    return randomised(LlamaConfig(**COMMON, **SIZES, num_key_value_heads=4), dtype)


def spec_of(folder, quantize):
    return BaseSpec(model=str(folder), dtype="bfloat16", quantize=quantize)


def jobs():
    return [
        JobSpec(
            name=name, data=bench.rows(bench.samples(16, seed=seed, longest=60)), steps=6, batch_size=8,
            learning_rate=1e-3, adapter={"rank": 8, "targets": targets}, seed=seed,
        )
        for seed, (name, targets) in enumerate((("a", "all-linear"), ("b", ["q_proj", "down_proj"])))
    ]  # fmt: skip


FP8 = pytest.param(
    "fp8",
    marks=pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="no fp8 tensor cores",
    ),
)


@pytest.mark.parametrize("quantize", ["nf4", "int8", FP8])
def test_the_base_takes_the_bytes_that_were_foretold(quantize, tmp_path):
    device = torch.device("cuda", 0)
    folder = plain_folder(tmp_path, model())
    base = load_base(spec_of(folder, quantize), device)
    # Not what the allocator counts: it does not split off less than 1 MiB of a block.
    held = [value.untyped_storage() for value in base.model.parameters()]
    taken = sum({one.data_ptr(): one.nbytes() for one in held if one.device.type == "cuda"}.values())
    assert taken == pytest.approx(base.shape.base_bytes, rel=0.02)
    torch.cuda.reset_peak_memory_stats()
    begun = torch.cuda.memory_allocated()
    base.model.model.layers[0].mlp.up_proj(torch.randn(64, 1024, device=device, dtype=torch.bfloat16))
    beside = torch.cuda.max_memory_allocated() - begun
    assert beside >= base.shape.matrix_bytes
    assert MemoryModel(base.shape, 0, uses_fused_ops=True).predict_need([], 0).resident_bytes >= taken


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_jobs_learn_what_they_learn_on_the_matrices(quantize, tmp_path):
    device = torch.device("cuda", 0)
    folder = plain_folder(tmp_path / "model", model())
    base = load_base(spec_of(folder, quantize), device)
    bench.train(base, tmp_path / "out", jobs(), device="cuda")
    plain = Base.from_model(stood_for(model(), quantize), spec_of("tiny/plain", None), device)
    bench.train(plain, tmp_path / "plain", jobs(), device="cuda")
    for name in ("a", "b"):
        mine, wanted = (bench.losses(tmp_path / output, name) for output in ("out", "plain"))
        assert mine == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("quantize", [FP8])
def test_jobs_learn_on_the_tensor_cores_what_they_learn_where_fp8_is_emulated(quantize, tmp_path):
    folder = plain_folder(tmp_path / "model", model())
    trained = bench.train(
        load_base(spec_of(folder, quantize), torch.device("cuda", 0)), tmp_path / "out", jobs(), device="cuda"
    )
    assert all(result.state == "succeeded" for result in trained.values())
    bench.train(quantised_base(model(), "fp8"), tmp_path / "emulated", jobs())
    for name in ("a", "b"):
        mine, wanted = (bench.losses(tmp_path / output, name) for output in ("out", "emulated"))
        assert mine == pytest.approx(wanted, rel=2e-2)
