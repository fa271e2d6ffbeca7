"""The limit on microbatches while sequences are decoded between training passes."""

from __future__ import annotations

import torch

from tests import bench
from weftune import JobSpec, Options
from weftune.run.events import Stepped

LONGEST = 20


def trained(output, limits, **options):
    """Train a job; before the window after step n, the limit becomes `limits[n]`. Return the largest
    microbatch of every window by the step at which it begins, and the weights."""
    rows = bench.rows(bench.samples(64, shortest=LONGEST, longest=LONGEST))
    job = JobSpec(name="a", data=rows, steps=24, batch_size=8, learning_rate=1e-2)
    trainer = bench.trainer(bench.base(), output, [job], options=Options(capacity=200, **options))

    def limit(event):
        if isinstance(event, Stepped) and event.step in limits:
            trainer.loop.windows.max_tokens_while_decoding = limits[event.step]

    trainer.run(limit)
    largest = {}
    for program in trainer.programs:
        first = min(batch.step for batch in program.batches) - 1
        largest[first] = max(one.tokens for one in program.microbatches)
    return largest, bench.adapter(output / "a")


def test_microbatches_are_smaller_while_sequences_decode(tmp_path):
    limits = {2: 3 * LONGEST, 10: 5, 14: None}
    largest, weights = trained(tmp_path / "out", limits)
    assert largest == {0: 160, 4: 60, 8: 60, 12: LONGEST, 16: 160, 20: 160}, "one sample is always whole"
    undisturbed, same = trained(tmp_path / "undisturbed", {})
    assert set(undisturbed.values()) == {160}
    for name, value in weights.items():
        torch.testing.assert_close(value, same[name], rtol=1e-9, atol=1e-12)


def test_a_deterministic_run_keeps_its_microbatches(tmp_path):
    largest, _ = trained(tmp_path / "out", {2: 60}, deterministic=True)
    assert set(largest.values()) == {160}
