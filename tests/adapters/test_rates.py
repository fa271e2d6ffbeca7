"""A job of another kind than LoRA, with two learning rates, in the executor: as plain torch trains it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests import bench
from tests.adapters.toys import GateSpec, plain_model, toys  # noqa: F401 (a fixture)
from tests.run import executors
from weftune.adapters.kind import JobAdapter
from weftune.run.events import Stepped
from weftune.run.training.state import new_training

STEPS = 3
SPEC = GateSpec(("q_proj", "down_proj"), u_rate=8.0)
EXACT = 1e-8


@pytest.mark.usefixtures("toys")
def test_a_kind_with_two_learning_rates_trains_beside_lora_as_torchs_adamw_with_two_groups():
    base, rows = bench.base("llama"), bench.samples(12, seed=1)
    job, other = (
        executors.prepare(base, "gate", steps=STEPS),
        executors.prepare(base, "lora", steps=STEPS, seed=2),
    )
    adapter = JobAdapter("gate", SPEC, 0)
    training = new_training(adapter, job.recipe, base.shape.sites, base.dtype, base.device)
    training.master.mul_(0.2).add_(0.8)
    training.state.weights.copy_(training.master)
    start = training.master.clone()
    executor = executors.executor_with(base, [other])
    executor.attach(training)
    events = executors.run_program(executor, executors.plan_program([job, other], STEPS), [job, other])
    losses = [event.outcome.loss for event in events if isinstance(event, Stepped) and event.job == "gate"]
    wanted, final = plain_run(training.layout, adapter, job.recipe, start, bench.batches(rows, 3, 1, STEPS))
    assert losses == pytest.approx(wanted, rel=EXACT)
    assert (training.master - final).norm() <= EXACT * final.norm()
    assert (final - start).norm() > 1e-2


def plain_run(layout, adapter, recipe, start, batches):
    leaves = [view.clone().requires_grad_() for view in layout.parameter_views(start).values()]
    groups = [
        {"params": [leaf], "lr": recipe.learning_rate * shape.rate}
        for leaf, shape in zip(leaves, layout.parameters, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda past: 1 - past / recipe.steps)
    losses = []
    for batch in batches:
        model = plain_model("llama", adapter, torch.cat([leaf.flatten() for leaf in leaves]))
        total, supervised = torch.zeros((), dtype=torch.float64), 0
        for tokens, mask in batch:
            logprobs = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
            chosen = [(at, after) for at, after in pairwise(range(len(tokens))) if mask[after]]
            total = total - sum(logprobs[at, tokens[after]] for at, after in chosen)
            supervised += len(chosen)
        loss = total / supervised
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, recipe.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, torch.cat([leaf.detach().flatten() for leaf in leaves])
