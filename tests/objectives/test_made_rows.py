"""Rows made during the run: windows are planned as they come, each batch by the adapter as it stands."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import bench
from tests.adapters.toys import plain_model
from tests.base.packs import packed
from tests.run import executors
from weftune.adapters.kind import JobAdapter
from weftune.core.batch import IGNORED, Microbatch, Segment
from weftune.objectives.objective import BatchFacts, HeldOutSums, Needs, SampleScores
from weftune.ops.lora.routes import Route
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Forward, GlobalBatch, MicrobatchPlan, PlacedSample
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window
from weftune.run.events import Stepped
from weftune.run.training.state import new_training
from weftune.trainer.job import collate_plan

STEPS, MADE = 3, 4
PROMPTS = ([5, 9, 11], [7, 8], [12, 30, 4, 6])
EXACT = 1e-8


class OwnWords:
    """What the adapter says is made likelier the longer its prompt."""

    needs = Needs(generates_rows=True)

    def loss(self, scores: SampleScores, batch: BatchFacts) -> Tensor:
        weights = torch.tensor(scores.counts, dtype=torch.float64)
        return -(scores.logprob_sums() * weights).sum() / batch.supervised_tokens

    def evaluation_sums(self, scores: SampleScores) -> HeldOutSums:
        raise NotImplementedError

    def metrics(self, scores: SampleScores) -> None:
        return None


def greedy(logits_of, prompt):
    """The prompt and the likeliest tokens behind it."""
    tokens = list(prompt)
    for _ in range(MADE):
        tokens.append(int(logits_of(torch.tensor(tokens))[-1].argmax()))
    return tokens


def spoken(executor, job):
    """With the adapter as it stands."""

    @torch.no_grad()
    def logits_of(tokens_L):
        alone = packed([tokens_L])
        microbatch = Microbatch(
            alone.tokens_T,
            alone.positions_T,
            alone.targets_T,
            alone.token_index_T,
            alone.sample_lengths,
            (Segment(job, 1, 0, len(tokens_L)),),
        )
        with executor.banks.bind(microbatch, Route.segmented, training=False):
            return executor.base.head().logits(executor.base.hidden(microbatch))

    return [greedy(logits_of, prompt) for prompt in PROMPTS]


def course(job, step, rows):
    """A window of one batch: the next one's rows are not there yet."""
    offsets = np.cumsum([0, *(len(row) for row in rows[:-1])]).tolist()
    placed = [
        PlacedSample(i, len(row), o, MADE) for i, (row, o) in enumerate(zip(rows, offsets, strict=True))
    ]
    batch = GlobalBatch(job, step + 1, tuple(placed), MADE * len(rows))
    return JobWindow(job, step, (batch,), (), frozenset(), frozenset())


def laid_out(plan: MicrobatchPlan, rows, job, others):
    """The rows of `job` behind those of everybody else."""
    mine = [segment for segment in plan.segments if segment.job == job]
    theirs = plan.without({job})
    parts = [collate_plan(theirs, Forward, others)] if theirs.segments else []
    for segment in mine:
        tokens = [torch.tensor(rows[placed.sample]) for placed in segment.samples]
        made = packed(tokens)
        targets = torch.full_like(made.tokens_T, IGNORED)
        stop = 0
        for row in tokens:
            stop += len(row)
            targets[stop - MADE - 1 : stop - 1] = made.tokens_T[stop - MADE : stop]
        counters = [p.offset + torch.arange(p.length) for p in segment.samples]
        first = parts[0].rows if parts else 0
        own = Segment(job, segment.step, first, first + made.rows)
        parts.append(
            Microbatch(
                made.tokens_T, made.positions_T, targets, torch.cat(counters), made.sample_lengths, (own,)
            )
        )
    tensors = ("tokens_T", "positions_T", "targets_T", "token_index_T")
    joined = [torch.cat([getattr(part, name) for part in parts]) for name in tensors]
    lengths = tuple(length for part in parts for length in part.sample_lengths)
    return Microbatch(*joined, lengths, tuple(segment for part in parts for segment in part.segments))


def test_each_batch_is_made_by_the_adapter_as_it_stands_and_trained_beside_other_jobs():
    base = bench.base("llama")
    other = executors.prepare(base, "other", steps=STEPS)
    maker = executors.prepare(base, "maker", steps=STEPS, seed=4)
    executor = executors.executor_with(base, [other, maker], Route.segmented)
    executor.scorer.objectives["maker"] = OwnWords()
    executor.attached["maker"].master.add_(0.05)
    executor.banks.attached["maker"].weights.copy_(executor.attached["maker"].master)
    start = executor.attached["maker"].master.clone()
    losses, texts = [], []
    for step in range(STEPS):
        texts.append(rows := spoken(executor, "maker"))
        courses = [other.job_window(step, 1, False), course("maker", step, rows)]
        program = plan_window(courses, one_device_layout(), 40)
        fetch = lambda plan, _, rows=rows: laid_out(plan, rows, "maker", {"other": other})  # noqa: E731
        events = list(executor.run(program, fetch, lambda: False))
        losses += [e.outcome.loss for e in events if isinstance(e, Stepped) and e.job == "maker"]
    assert len({tuple(map(tuple, text)) for text in texts}) > 1
    wanted, final = plain_run(base, maker, start)
    assert losses == pytest.approx(wanted, rel=EXACT)
    assert (executor.attached["maker"].master - final).norm() <= EXACT * final.norm()


def _logits(model, tokens_L):
    return model(input_ids=tokens_L[None]).logits[0]


def plain_run(base, job, start):
    """The same in plain torch, with torch's own clipping and AdamW."""
    adapter = JobAdapter(job.name, job.spec.adapter, job.spec.seed)
    flat = start.clone().requires_grad_()
    recipe = job.recipe
    optimizer = torch.optim.AdamW([flat], lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda past: 1 - past / recipe.steps)
    losses = []
    assert recipe.schedule == "linear"
    assert recipe.warmup == 0
    for _ in range(STEPS):
        model = plain_model("llama", adapter, flat)
        with torch.no_grad():
            rows = [greedy(partial(_logits, model), prompt) for prompt in PROMPTS]
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            tokens = torch.tensor(row)
            logprobs = _logits(model, tokens).log_softmax(-1)
            chosen = logprobs[-MADE - 1 : -1].gather(1, tokens[-MADE:, None])
            total = total - MADE * chosen.sum()
        loss = total / (MADE * len(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([flat], recipe.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert new_training(adapter, recipe, base.shape.sites, base.dtype, base.device).layout.size == len(flat)
    return losses, flat.detach()
