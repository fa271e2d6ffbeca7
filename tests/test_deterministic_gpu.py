"""Two runs on one GPU give the same bits: run with `pytest -m gpu`."""

import pytest
import torch

from tests import bench
from tests.run import executors
from tests.test_gpu import trained
from weftune import JobSpec, Options
from weftune.base.attention import Rule, attend_packed, pack
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.core.deterministic import deterministic_kernels
from weftune.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

UNEVEN = (700, 31, 512, 129, 64, 333)
STEPS = 12


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [UNEVEN, (512,) * 4])
def test_the_backward_of_the_attention_gives_the_same_bits_each_time(lengths, window):
    device = torch.device("cuda", 0)
    drawn = torch.Generator(device).manual_seed(0)
    packed, rule = pack(lengths, device), Rule(None, window, None)
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device=device, dtype=torch.bfloat16, generator=drawn)
        for heads in (6, 2, 2)
    )
    dy = torch.randn(q.shape, device=device, dtype=torch.bfloat16, generator=drawn)

    def gradients():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        attend_packed(*inputs, packed, rule).backward(dy)
        return [x.grad for x in inputs]

    with deterministic_kernels():
        first = gradients()
        for _ in range(10):
            assert all(map(torch.equal, gradients(), first))


def job(number):
    rows = bench.rows(bench.samples(24, seed=number, shortest=8, longest=250))
    keys = {"steps": STEPS, "batch_size": 5, "learning_rate": 1e-3, "seed": number}
    return JobSpec(name=f"job{number}", data=rows, adapter={"rank": 4 * number + 4, "dropout": 0.1}, **keys)


def test_two_runs_give_the_same_losses_and_adapters(tmp_path):
    for name in ("one", "other"):
        trainer = Trainer(
            {"model": str(bench.STORIES), "dtype": "bfloat16"},
            output=tmp_path / name,
            options=Options(device="cuda", deterministic=True),
        )
        for number in range(4):
            trainer.add(job(number))
        assert all(result.state == "succeeded" for result in trainer.run().values())
    for number in range(4):
        one, other = (tmp_path / name for name in ("one", "other"))
        assert len(bench.losses(one, f"job{number}")) == STEPS
        assert bench.losses(one, f"job{number}") == bench.losses(other, f"job{number}")
        adapter, twin = (bench.adapter(folder / f"job{number}") for folder in (one, other))
        assert all(torch.equal(adapter[site], twin[site]) for site in adapter)
    assert not torch.are_deterministic_algorithms_enabled()


def test_captured_where_that_pays_passes_give_the_very_bits_of_plain_ones():
    """Of few, long samples, over which a deterministic backward splits its sums by their number."""
    base = load_base(BaseSpec(model=str(bench.STORIES), dtype="bfloat16"), torch.device("cuda", 0))
    rows = [bench.rows(bench.samples(16, seed=seed, shortest=40, longest=250)) for seed in range(3)]
    adapter = {"rank": 8, "dropout": 0.1}
    jobs = [
        executors.prepare(base, f"job{i}", steps=6, seed=i, adapter=adapter, data=made)
        for i, made in enumerate(rows)
    ]
    with deterministic_kernels():
        plain, _, _ = trained(base, jobs, rounds=6, capacity=2048, graphs=False)
        captured, _, captures = trained(base, jobs, rounds=6, capacity=2048)
    assert captures > 0
    assert all(torch.equal(captured[name], plain[name]) for name in plain)
