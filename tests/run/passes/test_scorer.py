"""Losses of many jobs in a few launches are those of each job by itself."""

from __future__ import annotations

import torch

from tests import bench
from tests.run import executors
from weftune.plan.program.program import Forward
from weftune.run.passes.rows import to_device_microbatch
from weftune.run.passes.scorer import Scorer, Scores
from weftune.trainer.job import collate_plan


def test_losses_of_all_jobs_together_are_those_of_each_alone_and_so_is_the_gradient() -> None:
    base = bench.base(dtype=torch.float64)
    jobs = {f"job{n}": executors.prepare(base, f"job{n}", seed=n, batch_size=2) for n in range(5)}
    program = executors.plan_program(list(jobs.values()), rounds=1, capacity=256)
    (plan,) = program.microbatches
    laid = to_device_microbatch(collate_plan(plan, Forward, jobs), plan.rows + 7, base.device)
    h_TD = torch.randn(plan.rows + 7, base.shape.hidden, dtype=base.dtype)
    scorer = Scorer(base.head())

    def made(together: bool) -> tuple[Scores, torch.Tensor]:
        leaf_TD = h_TD.clone().requires_grad_()
        if together:
            scores = scorer.score_segments_together(leaf_TD, laid, program.supervised_token_count)
        else:
            scores = scorer.score(
                leaf_TD, laid, program.supervised_token_count, program.supervised_tokens_by_sample
            )
        return scores, scores.gradient_TD(failed_jobs={"job3"})

    (together, gradient_TD), (alone, wanted_TD) = made(True), made(False)
    torch.testing.assert_close(torch.stack(together.losses), torch.stack(alone.losses), rtol=1e-12, atol=0)
    assert [one.item() for one in together.correct] == [one.item() for one in alone.correct]
    assert torch.equal(gradient_TD, wanted_TD)
    assert not gradient_TD[laid.microbatch.segments[3].rows].any(), "dead rows weigh nothing"
