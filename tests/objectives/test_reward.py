"""Losses, metrics and gradients of reward models equal TRL's on the same pairs. The quick tests use the
numbers in trl.json, the slow ones TRL itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch

from tests.adapters.attached_banks import attach
from tests.objectives.pair_cases import REWARD_CASES, samples
from tests.objectives.test_objective import SPEC, ScoredJobs
from tests.objectives.test_trl import assert_equal, laid
from tests.objectives.trl_oracle import FILE, head_weights, lora_weights, projections, trl_numbers
from weftune.objectives.registry import make_objective
from weftune.objectives.spec import RewardSpec
from weftune.ops.lora.routes import Route
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import Training

HALVES = (range(2), range(2, 8))


def scored_rewards(spec):
    scored = ScoredJobs()
    scored.banks.detach("job")
    weights = torch.cat([head_weights(), lora_weights()])
    attach(scored.banks, scored.base, "job", replace(SPEC, modules_to_save=("score",)), weights)
    scored.scorer.objectives["job"] = make_objective(spec)
    scored.scorer.attach_head(scored.banks, "job")
    return scored


def own_numbers(spec):
    """The same numbers as `trl_numbers`, with the global batch in two microbatches."""
    scored, pairs = scored_rewards(spec), samples()
    counts = tuple(pairs.supervised.tolist())
    training = Training(None, Recipe(1, objective=spec), None, None)
    losses, evaluations = [], []
    for chosen in HALVES:
        part = laid(pairs, chosen)
        with scored.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD = scored.base.hidden(part.microbatch)
        leaf_TD = h_TD.detach().requires_grad_()
        scores = scored.scorer.score(leaf_TD, part, lambda segment: sum(counts), lambda segment: counts)
        with scored.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD.backward(scores.gradient_TD())
        losses += [loss.item() for loss in scores.losses]
        training.collect(part.microbatch.segments[0], scores.losses[0], scores.correct[0], scores.metrics[0])
        evaluations += scored.scorer.evaluate(scored.hidden(part), part)
    metrics, held_out = spec.named_metrics(training.open_batch.metrics_M.tolist()), reduce(add, evaluations)
    assert spec.named_metrics(held_out.mean_metrics()) == pytest.approx(metrics, rel=1e-9)
    return {
        "loss": sum(losses),
        "metrics": metrics,
        "gradient": projections(scored.gradient("job")),
        "eval_loss": held_out.loss / held_out.count,
    }


@pytest.mark.parametrize("name", REWARD_CASES)
def test_loss_metrics_and_gradient_are_those_that_trl_computed(name):
    assert_equal(own_numbers(REWARD_CASES[name]), json.loads(FILE.read_text())[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REWARD_CASES)
def test_loss_metrics_and_gradient_are_those_of_trl(name):
    pytest.importorskip("trl")
    assert_equal(own_numbers(REWARD_CASES[name]), trl_numbers(REWARD_CASES[name], lora_weights()))


def test_a_reward_model_without_its_head_is_not_trained():
    scored = scored_rewards(RewardSpec())
    scored.scorer.scalar_heads.clear()
    part = laid(samples(), range(2))
    with pytest.raises(AssertionError, match="no scalar head"):
        scored.scorer.evaluate(scored.hidden(part), part)
