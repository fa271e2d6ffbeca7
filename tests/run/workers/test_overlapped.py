"""Shards whose microbatches overlap, as processes with NCCL's rules, train as one process does."""

import pytest
import torch

from tests import bench
from tests.adapters.kinds.cases import case
from tests.cases import slow_but
from tests.run import executors
from tests.run.workers.test_agreed import STEPS, alone, assert_equal, losses_of, make_jobs
from tests.run.workers.test_shards import (
    assert_equal_to_one_process,
    assert_same_bits,
    preference_jobs,
    token_jobs,
    train,
    whole_weights,
)
from weftune.run.events import Failed


def kinds_jobs(base):
    """Jobs of several kinds that share microbatches, some of them with dropout 0.5."""
    adapters = [{"rank": 4, "dropout": 0.5}, {"kind": "dora", "rank": 3, "dropout": 0.5}]
    adapters += [case(kind, "llama").adapter for kind in ("vera", "ia3", "prefix", "prompt")]
    return [
        executors.prepare(
            base, f"job{seed}", seed=seed, steps=3, adapter=adapter, data=bench.rows(bench.samples(12, seed))
        )
        for seed, adapter in enumerate(adapters)
    ]


def tokens_and_others(base):
    return [*make_jobs(base), *token_jobs(base)]


def preferences_and_others(base):
    return [*make_jobs(base), *preference_jobs(base)]


@pytest.mark.parametrize(
    ("family", "shards"), slow_but([("llama", 2), ("gemma3", 2), ("phi3", 2), ("qwen2", 4)], [("gemma3", 2)])
)
def test_losses_and_adapters_equal_one_process_in_float64(family, shards):
    answers = train(family, shards, overlaps=True)
    assert_equal((losses_of(answers[0][0]), answers[0][1]), alone(family, torch.float64), 1e-9, 1e-8)
    assert all(steps == STEPS for _, _, steps in answers)
    assert_same_bits(answers, shards=shards)


@pytest.mark.slow
def test_jobs_of_all_kinds_with_dropout_equal_one_process():
    assert_equal_to_one_process("llama", 2, kinds_jobs, overlaps=True)


@pytest.mark.slow
@pytest.mark.parametrize("jobs_of", [tokens_and_others, preferences_and_others])
def test_trained_tokens_and_preferences_equal_one_process(jobs_of):
    assert_equal_to_one_process("llama", 2, jobs_of, overlaps=True)


def test_a_nan_on_one_shard_kills_its_job_on_all_and_the_others_equal_a_run_without_it():
    answers = train("llama", 2, poison="a", overlaps=True)
    (failed,) = (event for event in answers[0][0] if isinstance(event, Failed))
    assert (failed.job, failed.reason) == ("a", "its loss at step 1 is nan")
    assert all(steps == {"a": 0, "b": 3, "c": 4} for _, _, steps in answers)
    found = losses_of(answers[0][0]), whole_weights(answers, without="a")
    assert_equal(found, alone("llama", torch.float64, "bc"), 1e-9, 1e-8)
