"""Long samples on a GPU: in tiles, with layers recomputed or in host memory, and apart in attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.attention import Rule, attend_by_sample, attend_with_kernel, pack
from weftune.bench.sizes import SIZES, build
from weftune.bench.timing import bench_hardware
from weftune.bench.weftune_side import resident_jobs
from weftune.plan.program.program import NOTHING, Recompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

SIZE = replace(SIZES["1b"], layers=3, vocabulary=4096, context=4096)
TILE, LENGTHS = 1024, (3001, 2500)
MODES = {
    "kept": Recompute(True, 0, TILE),
    "recomputed": Recompute(True, 3, TILE),
    "attention kept": Recompute(True, 3, TILE, keeps_attention=True),
    "offloaded": Recompute(True, 3, TILE, keeps_attention=True, offloaded_layers=2),
}


def trained(recompute, steps=3):
    """Losses and moments of two jobs in shared microbatches."""
    hardware = bench_hardware(toy=False)
    torch.manual_seed(0)
    together = resident_jobs(build(SIZE, hardware), hardware.device)
    for seed, length in enumerate(LENGTHS):
        together.join(f"job{seed}", LoraSpec(rank=8, dropout=0.1 * seed), [[length]], seed)
    together.recompute = recompute
    together.run(together.plan(steps, sum(LENGTHS)))
    moments = {name: one.state.exp_avg.clone() for name, one in together.executor.attached.items()}
    losses = together.losses
    together.executor.restore_base()
    return losses, moments


@pytest.fixture(scope="module")
def untiled():
    return trained(NOTHING)


@pytest.mark.parametrize("mode", MODES)
def test_jobs_learn_in_tiles_what_they_learn_untiled(mode, untiled):
    (losses, moments), (want, want_moments) = trained(MODES[mode]), untiled
    for job, own in want.items():
        assert losses[job] == pytest.approx(own, rel=2e-3)
        difference = (moments[job] - want_moments[job]).norm() / want_moments[job].norm()
        assert difference <= 0.03, job


def test_samples_apart_have_the_attention_of_one_kernel_for_all():
    device, lengths = torch.device("cuda", 0), (5000, 4100)
    packed = pack(lengths, device)
    assert packed.is_separated
    assert not pack((5000, 100), device).is_separated
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    rule = Rule(None, None, None)
    together = attend_with_kernel(q, k, v, packed, rule)
    apart = attend_by_sample(*(x.transpose(0, 1)[None] for x in (q, k, v)), packed, rule)[0]
    assert (together.float() - apart.float()).norm() <= 0.01 * together.float().norm()
