"""The same core on a CUDA device: run with `pytest -m gpu`."""

import gc
import math

import pytest
import torch

from tests import bench
from tests.run import executors
from weftune import JobSpec, Options, Trainer
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import NOTHING, Recompute
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Failed, Stepped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

TEXTS = [
    {
        "prompt": f"Once upon a time there were {n} cats.",
        "completion": f" The {n} cats had {2 * n} red hats. " * 4,
    }
    for n in range(2, 34)
]


GATHERED_CLOSE = 0.1
"""Of what weights have moved by in twenty steps in bfloat16, where some are added up in another order."""


def job(name, index, **changes):
    settings = dict(steps=8, batch_size=4, learning_rate=1e-3, seed=index)
    settings["adapter"] = dict(rank=4 * (index + 1), alpha=16.0, dropout=0.1 * (index % 2))
    return JobSpec(name=name, data=TEXTS, **(settings | changes))


def train(output, dtype, device, jobs=None, **options):
    trainer = Trainer(
        {"model": str(bench.STORIES), "dtype": dtype},
        output=output,
        options=Options(device=device, **options),
    )
    for spec in jobs or [job(f"job{i}", i) for i in range(4)]:
        trainer.add(spec)
    return trainer


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    output = tmp_path_factory.mktemp("cpu") / "output"
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, 4))
    try:
        train(output, "float32", "cpu").run()
    finally:
        torch.set_num_threads(threads)
    return output


def test_float32_on_the_gpu_gives_the_losses_of_the_cpu(on_the_cpu, tmp_path):
    train(tmp_path / "gpu", "float32", "cuda").run()
    for i in range(4):
        cpu, gpu = bench.losses(on_the_cpu, f"job{i}"), bench.losses(tmp_path / "gpu", f"job{i}")
        assert gpu == pytest.approx(cpu, rel=2e-3)
        assert gpu[0] == pytest.approx(cpu[0], rel=1e-5)


def test_bfloat16_on_the_gpu_stays_near_the_cpu_and_learns(on_the_cpu, tmp_path):
    train(tmp_path / "gpu", "bfloat16", "cuda").run()
    for i in range(4):
        cpu, gpu = bench.losses(on_the_cpu, f"job{i}"), bench.losses(tmp_path / "gpu", f"job{i}")
        assert gpu == pytest.approx(cpu, rel=0.05)
        assert gpu[-1] < 0.6 * gpu[0]


@pytest.fixture(scope="module")
def base():
    spec = BaseSpec(model=str(bench.STORIES), dtype="bfloat16")
    return load_base(spec, torch.device("cuda", 0))


def ready(base, name, index, **changes):
    keys = dict(
        steps=6, batch_size=4, seed=index, adapter={"rank": 4 * index + 4, "dropout": 0.1 * (index % 2)}
    )
    rows = bench.rows(bench.samples(16, seed=index, longest=90))
    return executors.prepare(base, name, data=rows, **(keys | changes))


def trained(
    base,
    jobs,
    rounds=6,
    capacity=512,
    recompute=NOTHING,
    route=None,
    graphs=True,
    spoilt=(),
    captures_early=True,
):
    """How far each job moved in so many rounds, windows of two; the spoilt turn NaN after the first."""
    executor = resident_executor(base, route, graphs, captures_early=captures_early)
    for one in jobs:
        executor.attach(executors.job_training(base, one))
    starts = {name: training.master.clone() for name, training in executor.attached.items()}
    failed = {}
    for step in range(0, rounds, 2):
        alive = [one for one in jobs if one.name not in failed]
        courses = [one.job_window(step, 2, False) for one in alive]
        program = plan_window(
            courses, one_device_layout(), capacity, pads_to_ladder=True, recompute=recompute
        )
        for event in executors.run_program(executor, program, jobs):
            if isinstance(event, Failed):
                failed[event.job] = event.reason
        for name in spoilt if step == 0 else ():
            executor.banks.attached[name].weights.copy_(
                torch.full_like(executor.attached[name].master, math.nan)
            )
    moved = {name: training.master - starts[name] for name, training in executor.attached.items()}
    captures = executor.captures
    executor.restore_base()
    return moved, failed, captures


def test_a_captured_pass_gives_the_very_bits_of_a_plain_one(base):
    jobs = [ready(base, f"job{i}", i) for i in range(4)]
    plain, _, none = trained(base, jobs, graphs=False)
    captured, _, captures = trained(base, jobs)
    assert none is None
    assert captures > 0
    assert all(torch.equal(captured[name], plain[name]) for name in plain)


def test_passes_are_captured_although_jobs_change_outputs_or_put_keys_before_samples(base):
    """Their rows are gathered by the graph, and lie elsewhere in every microbatch."""
    adapters = [{"rank": 8}, {"kind": "bottleneck", "size": 16}, {"kind": "prefix", "num_virtual_tokens": 5}]
    adapters.append(
        {"kind": "bottleneck", "size": 8, "activation": "gelu", "targets": ["gate_proj", "o_proj"]}
    )
    jobs = [ready(base, f"job{i}", i, steps=20, adapter=adapter) for i, adapter in enumerate(adapters)]
    plain, _, _ = trained(base, jobs, graphs=False, rounds=20)
    captured, failed, captures = trained(base, jobs, rounds=20)
    assert captures > 0
    assert not failed
    for name, moved in plain.items():
        assert (captured[name] - moved).norm() <= GATHERED_CLOSE * moved.norm(), name


def test_captured_where_that_pays_passes_give_the_very_bits_of_plain_ones(base):
    jobs = [ready(base, f"job{i}", i, steps=20) for i in range(3)]
    plain, _, _ = trained(base, jobs, graphs=False, rounds=20)
    thrifty, _, captures = trained(base, jobs, rounds=20, captures_early=False)
    assert captures > 0
    assert all(torch.equal(thrifty[name], plain[name]) for name in plain)


@pytest.mark.parametrize("recompute", [Recompute(True), Recompute(False, 3), Recompute(True, 6)])
@pytest.mark.parametrize("graphs", [False, True])
def test_recomputation_changes_no_bit(base, recompute, graphs):
    jobs = [ready(base, f"job{i}", i) for i in range(2)]
    kept, _, _ = trained(base, jobs, graphs=graphs)
    again, _, _ = trained(base, jobs, graphs=graphs, recompute=recompute)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_two_runs_give_the_same_bits(base):
    jobs = [ready(base, f"job{i}", i) for i in range(3)]
    first, second = (trained(base, jobs)[0] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("route", [Route.segmented, Route.tiled])
def test_a_nan_in_one_job_does_not_reach_the_others_by_any_route(base, route):
    """Bits differ with the jobs aboard, and Adam makes whole steps of that: within what other jobs change."""
    jobs = [ready(base, f"job{i}", i) for i in range(4)]
    with_it, _, _ = trained(base, jobs, rounds=4, route=route)
    without, _, _ = trained(base, jobs[:2] + jobs[3:], rounds=4, route=route)
    spoilt, failed, _ = trained(base, jobs, rounds=4, route=route, spoilt=["job2"])
    assert set(failed) == {"job2"}
    for name in without:
        assert spoilt[name].isfinite().all()
        drift = (with_it[name] - without[name]).norm()
        assert (spoilt[name] - without[name]).norm() <= 2 * drift + 1e-6, name


def test_a_nan_in_one_job_does_not_reach_the_others_on_the_gpu(tmp_path):
    train(tmp_path / "without", "bfloat16", "cuda").run()
    trainer = train(tmp_path / "with", "bfloat16", "cuda")
    trainer.add(job("poisoned", 4, adapter={"rank": 12}))

    def spoil(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("poisoned", 3):
            # The device may be at the next step already, which writes the weights that passes read.
            executor = trainer.loop.executor
            master = executor.attached["poisoned"].master.fill_(math.nan)
            executor.banks.attached["poisoned"].weights.copy_(master)

    results = trainer.run(spoil)
    assert results["poisoned"].state == "failed"
    assert results["poisoned"].metrics["step"] == 3
    for i in range(4):
        assert results[f"job{i}"].state == "succeeded"
        assert bench.losses(tmp_path / "with", f"job{i}") == pytest.approx(
            bench.losses(tmp_path / "without", f"job{i}"), rel=0.03
        )


def test_out_of_memory_halves_the_capacity_and_loses_no_job(tmp_path):
    """The allocator itself is capped, so that the first capacity cannot fit and a smaller one does."""
    train(tmp_path / "free", "float32", "cuda", [job("first", 0, steps=2)]).run()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (700 << 20)) / total)
    try:
        adapter = {"rank": 8, "targets": ["q_proj", "v_proj"]}  # Few kernels to compile for every capacity.
        jobs = [job(f"job{i}", i, batch_size=32, steps=4, adapter=adapter) for i in range(4)]
        trainer = train(tmp_path / "capped", "float32", "cuda", jobs, capacity=16384, memory=8 << 30)
        results = trainer.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(result.state == "succeeded" for result in results.values())
    assert "Out of memory" in (tmp_path / "capped" / "status.json").read_text()
    train(tmp_path / "whole", "float32", "cuda", jobs).run()
    for i in range(4):
        capped, whole = (bench.losses(tmp_path / name, f"job{i}") for name in ("capped", "whole"))
        assert capped == pytest.approx(whole, rel=1e-3)
