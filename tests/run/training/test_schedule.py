"""Learning rates against transformers' own schedules."""

import pytest
import torch
from transformers import get_scheduler

from weftune.run.training.schedule import Recipe, learning_rate


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(20, 0), (20, 6), (7, 7), (1, 0), (5, 9)])
def test_every_step_has_the_rate_that_transformers_gives_it(schedule, steps, warmup):
    theirs = {"constant": "constant_with_warmup"}.get(schedule, schedule) if warmup else schedule
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-4)
    scheduler = get_scheduler(theirs, optimizer, warmup, steps)
    recipe = Recipe(steps=steps, learning_rate=3e-4, schedule=schedule, warmup=warmup)
    for step in range(1, steps + 1):
        assert learning_rate(recipe, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()
