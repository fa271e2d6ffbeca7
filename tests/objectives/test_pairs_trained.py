"""Pairs with reference scores, planned and trained by the executor beside another job: losses and weights are
those of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests import bench
from tests.adapters.toys import plain_model
from tests.families import tiny
from tests.objectives.toys import Preference
from tests.run import executors
from weftune.adapters.kind import JobAdapter
from weftune.core.batch import IGNORED
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Forward, group_samples
from weftune.plan.window.window import plan_window
from weftune.run.events import Stepped
from weftune.trainer.job import collate_plan

STEPS, CAPACITY = 3, 44
EXACT = 1e-8


def with_references(plan, jobs, reference):
    """Return the planned microbatch with the reference scores of the job `pairs`."""
    found = []
    for segment in plan.segments:
        chosen = [placed.sample for placed in segment.samples]
        if segment.job == "pairs":
            with torch.no_grad():
                found.append(sums(reference, jobs["pairs"].data.train, chosen))
        else:
            found.append(torch.zeros(len(chosen), dtype=torch.float64))
    return replace(collate_plan(plan, Forward, jobs), references_S=torch.cat(found))


def test_pairs_are_planned_and_trained_as_plain_torch_trains_them():
    base = bench.base("llama")
    pairs = executors.prepare(base, "pairs", steps=STEPS, batch_size=4)
    plain = executors.prepare(base, "plain", steps=STEPS, seed=2)
    jobs = {job.name: job for job in (pairs, plain)}
    executor = executors.executor_with(base, [pairs, plain])
    executor.scorer.objectives["pairs"] = objective = Preference()
    for seed, training in enumerate(executor.attached.values()):
        noise = torch.randn(len(training.master), generator=torch.Generator().manual_seed(seed))
        training.master.add_(0.1 * noise)
        training.state.weights.copy_(training.master)
    start = {job: training.master.clone() for job, training in executor.attached.items()}
    losses, widths, reference = [], set(), tiny("llama")
    for step in range(STEPS):
        course = pairs.job_window(step, 1, False)
        (batch,) = course.batches
        batch = replace(batch, samples=group_samples(batch.samples, objective.needs.group_size))
        courses = [replace(course, batches=(batch,)), plain.job_window(step, 1, False)]
        program = plan_window(courses, one_device_layout(), CAPACITY)
        widths |= {len(s.samples) for m in program.microbatches for s in m.segments if s.job == "pairs"}
        fetch = lambda plan, _: with_references(plan, jobs, reference)  # noqa: E731
        events = list(executor.run(program, fetch))
        losses += [e.outcome.loss for e in events if isinstance(e, Stepped) and e.job == "pairs"]
    assert widths <= {2, 4}
    wanted, final = plain_run(pairs, start)
    assert losses == pytest.approx(wanted, rel=EXACT)
    found = executor.attached["pairs"].master
    assert (found - final).norm() <= EXACT * final.norm()
    assert (final - start["pairs"]).norm() > 1e-2


def plain_run(job, start):
    spec, recipe = job.spec.adapter, job.recipe
    flat = start["pairs"].clone().requires_grad_()
    optimizer = torch.optim.AdamW([flat], lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda past: 1 - past / recipe.steps)
    losses = []
    for step in range(STEPS):
        chosen = [placed.sample for placed in job.job_window(step, 1, False).batches[0].samples]
        with torch.no_grad():
            base_B = sums(tiny("llama"), job.data.train, chosen)
        own_B = sums(plain_model("llama", JobAdapter("pairs", spec, 0), flat), job.data.train, chosen)
        margin_B = own_B - base_B
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
