from __future__ import annotations

import pytest

from weftune.adapters.lora.spec import LoraSpec
from weftune.bench.sizes import SIZES, build
from weftune.bench.timing import bench_hardware
from weftune.bench.weftune_side import AttachedJobs, random_samples, resident_jobs, useful_rows


@pytest.fixture
def together() -> AttachedJobs:
    hardware = bench_hardware(toy=True)
    assert hardware is not None
    return resident_jobs(build(SIZES["toy"], hardware), hardware.device)


def test_jobs_train_on_the_lengths_they_were_given_and_begin_again_at_the_end(
    together: AttachedJobs,
) -> None:
    together.join("a", LoraSpec(rank=2), [[5, 7], [9]], seed=0)
    together.join("b", LoraSpec(rank=3), [[4]], seed=1)
    before = together.executor.attached["a"].master.clone()
    program = together.plan(3, capacity=64)
    batches = {(batch.job, batch.step): batch for batch in program.batches}
    assert [batches["a", step].tokens for step in (1, 2, 3)] == [12, 9, 12]
    assert batches["a", 3].samples == batches["a", 1].samples
    assert batches["a", 1].supervised_tokens == 10
    passes = together.run(program)
    assert useful_rows(passes) == 12 + 9 + 12 + 3 * 4
    assert together.executor.attached["a"].progress.step == 3
    assert not together.executor.attached["a"].master.equal(before)
    assert together.plan(1, capacity=64).batches[0].step == 4


def test_one_leaves_and_the_others_go_on(together: AttachedJobs) -> None:
    for seed, job in enumerate("abc"):
        together.join(job, LoraSpec(rank=2), [[6]], seed)
    together.run(together.plan(1, capacity=64))
    together.leave("b")
    together.run(together.plan(1, capacity=64))
    assert {job: training.progress.step for job, training in together.executor.attached.items()} == {
        "a": 2,
        "c": 2,
    }


def test_random_samples_are_all_supervised_and_hang_on_their_seed() -> None:
    first, again, other = (random_samples([3, 200], 256, seed) for seed in (0, 0, 1))
    assert first.mask(1).all()
    assert first.supervised.tolist() == [2, 199]
    assert (first.tokens(1) == again.tokens(1)).all()
    assert not (first.tokens(1) == other.tokens(1)).all()
