"""The limit on microbatches while sequences are decoded between training passes."""

from __future__ import annotations

import pytest

from tests import bench, oracle
from weftune import JobSpec, Options
from weftune.plan.cost.fitted import FittedModels
from weftune.run.events import Stepped

LONGEST = 20


def trained(output, monkeypatch, limits, **options):
    """Train a job. After step n, passes of `limits[n]` tokens take as long as a decoder may wait; with None,
    nothing is decoded. Return the largest microbatch of every window by the step at which it begins, and the
    losses and weights."""
    rows = bench.rows(bench.samples(64, shortest=LONGEST, longest=LONGEST))
    job = JobSpec(name="a", data=rows, steps=24, batch_size=8, learning_rate=1e-2)
    trainer = bench.trainer(bench.base(), output, [job], options=Options(capacity=200, **options))

    limit = None
    monkeypatch.setattr(FittedModels, "tokens_within", lambda self, seconds: limit)

    def change(event):
        nonlocal limit
        if isinstance(event, Stepped) and event.step in limits:
            limit = limits[event.step]
            trainer.loop.windows.is_decoding = lambda: limit is not None

    trainer.run(change)
    largest = {}
    for program in trainer.programs:
        first = min(batch.step for batch in program.batches) - 1
        largest[first] = max(one.tokens for one in program.microbatches)
    return largest, bench.losses(output, "a"), bench.adapter(output / "a")


def test_microbatches_are_smaller_while_sequences_decode_and_results_are_equal(tmp_path, monkeypatch):
    # A limit that changes by less than a quarter is kept.
    limits = {2: 3 * LONGEST, 6: 70, 10: 5, 14: None}
    largest, losses, weights = trained(tmp_path / "out", monkeypatch, limits)
    assert largest == {0: 160, 4: 60, 8: 60, 12: LONGEST, 16: 160, 20: 160}, "one sample is always whole"
    undisturbed, same_losses, same = trained(tmp_path / "undisturbed", monkeypatch, {})
    assert set(undisturbed.values()) == {160}
    assert losses == pytest.approx(same_losses, rel=1e-9)
    assert oracle.distance(weights, same) <= 1e-8


def test_a_deterministic_run_keeps_its_microbatches(tmp_path, monkeypatch):
    largest, _, _ = trained(tmp_path / "out", monkeypatch, {2: 60}, deterministic=True)
    assert set(largest.values()) == {160}
