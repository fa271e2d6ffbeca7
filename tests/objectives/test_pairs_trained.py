"""Pairs planned, scored by the base and by another adapter, and trained by the executor beside other jobs:
losses and weights are those of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests import bench
from tests.adapters.toys import plain_model
from tests.families import tiny
from tests.objectives.toys import Preference
from tests.run import aboard
from weftune.adapters.kind import JobAdapter
from weftune.core.batch import IGNORED
from weftune.plan.pack.segments import pack_segments
from weftune.plan.program.layout import one_device
from weftune.plan.program.program import SegmentPlan, group_samples
from weftune.plan.window.window import plan_window
from weftune.run.events import Stepped
from weftune.run.passes.rows import StageVisit, lay
from weftune.trainer.job import collate_plan

STEPS, CAPACITY = 3, 44
EXACT = 1e-8


def scored(executor, batch, jobs, adapter):
    """What a pass does that scores the samples of a batch by another adapter than their own."""
    for plan in pack_segments([SegmentPlan(batch.job, batch.step, batch.samples)], CAPACITY):
        microbatch = collate_plan(plan, False, jobs)
        segments = tuple(replace(segment, adapter=adapter) for segment in microbatch.segments)
        laid = lay(replace(microbatch, segments=segments), microbatch.rows, bench.CPU)
        h_TD = executor.passes.evaluate(StageVisit(-1, 0), aboard.in_flight(laid), None)
        executor.scorer.refer(h_TD, laid)


def test_pairs_are_planned_scored_and_trained_as_plain_torch_trains_them():
    base = bench.base("llama")
    pairs = aboard.ready(base, "pairs", steps=STEPS, batch_size=4)
    plain = aboard.ready(base, "plain", steps=STEPS, seed=2)
    other = aboard.ready(base, "other", steps=STEPS, seed=3)
    jobs = {job.name: job for job in (pairs, plain)}
    executor = aboard.executor(base, [pairs, plain, other])
    executor.scorer.objectives["pairs"] = objective = Preference()
    for seed, training in enumerate(executor.attached.values()):
        noise = torch.randn(len(training.master), generator=torch.Generator().manual_seed(seed))
        training.master.add_(0.1 * noise)
        training.state.weights.copy_(training.master)
    start = {job: training.master.clone() for job, training in executor.attached.items()}
    losses, widths = [], set()
    for step in range(STEPS):
        course = pairs.job_window(step, 1, False)
        (batch,) = course.batches
        batch = replace(batch, samples=group_samples(batch.samples, objective.needs.together))
        courses = [replace(course, batches=(batch,)), plain.job_window(step, 1, False)]
        for adapter in objective.needs.references:
            scored(executor, batch, jobs, adapter)
        program = plan_window(courses, one_device(), CAPACITY)
        widths |= {len(s.samples) for m in program.microbatches for s in m.segments if s.job == "pairs"}
        events = list(aboard.events(executor, program, [pairs, plain]))
        losses += [e.outcome.loss for e in events if isinstance(e, Stepped) and e.job == "pairs"]
    assert widths <= {2, 4}
    wanted, final = plain_run(pairs, start)
    assert losses == pytest.approx(wanted, rel=EXACT)
    found = executor.attached["pairs"].master
    assert (found - final).norm() <= EXACT * final.norm()
    assert (final - start["pairs"]).norm() > 1e-2
    assert torch.equal(executor.attached["other"].master, start["other"])


def plain_run(job, start):
    spec, recipe = job.spec.adapter, job.recipe
    flat = start["pairs"].clone().requires_grad_()
    optimizer = torch.optim.AdamW([flat], lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda past: 1 - past / recipe.steps)
    bare = tiny("llama"), plain_model("llama", JobAdapter("other", spec, 0), start["other"])
    losses = []
    for step in range(STEPS):
        chosen = [placed.sample for placed in job.job_window(step, 1, False).batches[0].samples]
        with torch.no_grad():
            base_B, other_B = (sums(model, job.data.train, chosen) for model in bare)
        own_B = sums(plain_model("llama", JobAdapter("pairs", spec, 0), flat), job.data.train, chosen)
        margin_B = own_B - 0.75 * base_B - 0.25 * other_B
        loss = -logsigmoid(0.3 * (margin_B[0::2] - margin_B[1::2])).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([flat], recipe.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, flat.detach()


def sums(model, data, chosen):
    """The log-probability of each sample's supervised tokens."""
    found = []
    for index in chosen:
        tokens, mask = (
            torch.from_numpy(data.tokens(index).copy()).long(),
            torch.from_numpy(data.mask(index).copy()),
        )
        targets = torch.where(mask, tokens, IGNORED)[1:]
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        wanted = targets != IGNORED
        found.append(logprobs[wanted, targets[wanted]].sum())
    return torch.stack(found)
