"""A job's losses and weights depend on its own spec and seed only, never on other jobs or packing."""

from functools import cache

import pytest
import torch

from tests import bench, oracle
from tests.cases import slow_but
from tests.families import tiny
from weftune import JobSpec, Options

STEPS = 12


def job(name, index, rows=None, **changes):
    """Jobs of different rank, targets, length, batch size and schedule, all with dropout 0.1."""
    targets = ["all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*", ["o_proj", "down_proj"]][index % 4]
    return JobSpec(
        name=name,
        data=rows or bench.rows(bench.samples(30, seed=index, longest=12 + 4 * index)),
        adapter=dict(rank=[4, 7, 1, 16, 8, 3, 12, 2][index], alpha=8.0, dropout=0.1, targets=targets),
        steps=STEPS if index == 0 else 6 + 2 * index,
        batch_size=4 + index % 3,
        learning_rate=1e-3,
        schedule=["linear", "cosine", "constant"][index % 3],
        seed=index,
        **changes,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`train`, for each case once."""
    return cache(lambda *case: train(tmp_path_factory.mktemp("run"), *case))


def train(output, dtype, others, capacity):
    """Job a among `others` other jobs: what became of it, and the executed Programs."""
    jobs = [job("a", 0), *(job(f"other{i}", i) for i in range(1, others + 1))]
    base = bench.base("llama", dtype)
    trainer = bench.trainer(base, output, jobs, options=Options(capacity=capacity))
    trainer.run()
    return bench.trained(output, "a", bench.start(base, jobs[0])), trainer.programs


CASES = {"with one other": (1, 64), "with seven others": (7, 96), "with another capacity": (0, 21)}


@pytest.mark.parametrize("case", slow_but(CASES, ["with seven others", "with another capacity"]))
def test_other_jobs_and_capacity_change_nothing_in_float64(case, run):
    alone, _ = run(torch.float64, 0, 64)
    others, capacity = CASES[case]
    together, _ = run(torch.float64, others, capacity)
    oracle.assert_equal_float64(together, alone)


@pytest.mark.slow
def test_other_jobs_and_capacity_change_nothing_in_float32(run):
    """As near to the float64 run as twice what float32 costs the job alone, and losses to 1e-5."""
    exact, _ = run(torch.float64, 0, 64)
    alone, _ = run(torch.float32, 0, 64)
    for others, capacity in CASES.values():
        together, _ = run(torch.float32, others, capacity)
        oracle.assert_equal_float32(together, alone, alone, exact)


def test_another_seed_or_dropout_does_change_the_result(run, tmp_path):
    """The comparison above can fail: it sees one changed bit of randomness."""
    first, _ = run(torch.float64, 0, 64)
    other = job("a", 0, rows=bench.rows(bench.samples(30, seed=0, longest=12)))
    drier = JobSpec(
        name="a",
        data=other.data.rows,
        adapter=dict(rank=4, alpha=8.0, dropout=0.1001, targets="all-linear"),
        steps=STEPS,
        batch_size=4,
        learning_rate=1e-3,
    )
    bench.train(bench.base("llama"), tmp_path / "second", [drier], capacity=64)
    second = bench.trained(tmp_path / "second", "a", first.start)
    with pytest.raises(AssertionError):
        oracle.assert_equal_float64(second, first)


@pytest.mark.slow
def test_at_least_four_in_five_microbatches_hold_two_jobs_or_more(run):
    """Read from the executed Programs of the run with seven others."""
    _, programs = run(torch.float32, 7, 96)
    passes = [plan for program in programs for _, plan in program.forward_passes()]
    shared = [plan for plan in passes if len(set(plan.jobs)) > 1]
    assert len(passes) > 20
    assert len(shared) >= 0.8 * len(passes)


def test_the_same_run_twice_gives_the_same_bits(tmp_path):
    for name in ("first", "second"):
        train(tmp_path / name, torch.float32, 3, 64)
    first, second = (bench.adapter(tmp_path / name / "a") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_dropped_jobs_loss_is_peft_with_the_same_mask(tmp_path):
    """Dropout 0.5 for real: PEFT's own dropout module replaced by one that draws Weftune's bits."""
    model = tiny("llama", torch.float64)
    config = oracle.lora_config(model, 4, 8.0, ["q_proj", "up_proj"], lora_dropout=0.5)
    start = oracle.write_start(tmp_path / "start", model, config, b_scale=0.02)
    made = bench.samples(12, seed=5)
    spec = JobSpec(
        name="a",
        data=bench.rows(made),
        adapter=dict(rank=4, alpha=8.0, dropout=0.5, targets=["q_proj", "up_proj"], init_from=str(start)),
        steps=6,
        batch_size=4,
        learning_rate=1e-3,
        seed=9,
    )
    bench.train(bench.base("llama"), tmp_path / "out", [spec])
    got = bench.trained(tmp_path / "out", "a", bench.adapter(start))
    batches = bench.batches(made, 4, 9, 6)
    want = oracle.train_with_peft(
        model, config, start, batches, oracle.Recipe(6), padded=False, dropout=oracle.HashedDropout(9)
    )
    oracle.assert_equal_float64(got, want)
