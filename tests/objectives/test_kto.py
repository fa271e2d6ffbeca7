"""Losses, metrics and gradients of KTO equal TRL's on the same rows, with the KL term of the whole batch. The
quick tests use the numbers in trl.json, the slow ones TRL itself."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.families import tiny
from tests.objectives.pair_cases import (
    KTO_CASES,
    LABELS,
    labelled_samples,
    mismatched_tokens,
    reference_sums,
    tokens_and_prompts,
)
from tests.objectives.test_objective import ScoredJobs
from tests.objectives.test_trl import assert_equal, laid
from tests.objectives.trl_oracle import FILE, projections, trl_numbers
from weftune.objectives.registry import make_objective
from weftune.objectives.spec import KtoSpec
from weftune.ops.lora.routes import Route

HALVES = (range(3), range(3, len(LABELS)))


def referenced():
    """The labelled samples with the reference scores of themselves and of their mismatched samples."""
    rows = [*tokens_and_prompts(), *mismatched_tokens()]
    return labelled_samples().with_references(reference_sums(tiny("llama"), rows=rows).numpy())


def score_mismatched(aboard, samples, kl_purpose, step):
    """Score the mismatched samples in two microbatches, as Score actions do."""
    for chosen in HALVES:
        part = laid(samples.mismatched_samples, chosen)
        segments = [replace(one, kl_purpose=kl_purpose, step=step) for one in part.microbatch.segments]
        part = replace(part, microbatch=replace(part.microbatch, segments=tuple(segments)))
        aboard.scorer.record_mismatched_scores(aboard.scorer.sample_logprobs(aboard.hidden(part), part), part)


def own_numbers(spec):
    """The same numbers as `trl_numbers`, with the global batch in two microbatches."""
    aboard, samples = ScoredJobs(), referenced()
    aboard.scorer.objectives["job"] = make_objective(spec)
    counts = tuple(samples.supervised.tolist())
    losses, sums = [], 0
    if spec.mismatched_samples:
        score_mismatched(aboard, samples, "batch", 0)
        score_mismatched(aboard, samples, "held_out", 1)
    for chosen in HALVES:
        part = laid(samples, chosen)
        with aboard.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD = aboard.base.hidden(part.microbatch)
        scores = aboard.scorer.score(
            h_TD.detach().requires_grad_(), part, lambda segment: sum(counts), lambda segment: counts
        )
        with aboard.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD.backward(scores.gradient_TD())
        losses += [loss.item() for loss in scores.losses]
        sums = sums + scores.metrics[0]
    whole = laid(samples, range(len(samples)))
    (held_out,) = aboard.scorer.evaluate(aboard.hidden(whole), whole)
    assert [one / held_out.count for one in held_out.metrics] == pytest.approx(sums.tolist(), rel=1e-9)
    return {
        "loss": sum(losses),
        "metrics": spec.named_metrics(sums.tolist()),
        "gradient": projections(aboard.gradient("job")),
        "eval_loss": held_out.loss / held_out.count,
    }


@pytest.mark.parametrize("name", KTO_CASES)
def test_loss_metrics_and_gradient_are_those_that_trl_computed(name):
    wanted = json.loads(FILE.read_text())[name]
    if name == "kto":
        assert wanted["metrics"]["kl"] > 0.01
    assert_equal(own_numbers(KTO_CASES[name]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", KTO_CASES)
def test_loss_metrics_and_gradient_are_those_of_trl(name):
    pytest.importorskip("trl")
    from tests.objectives.trl_oracle import lora_weights

    assert_equal(own_numbers(KTO_CASES[name]), trl_numbers(KTO_CASES[name], lora_weights()))


def test_a_mismatched_sample_has_the_prompt_of_its_row_and_the_answer_of_the_row_before():
    samples = labelled_samples()
    for row, (tokens, prompt) in enumerate(mismatched_tokens()):
        found, mask = samples.mismatched_samples.tokens_and_mask(row)
        assert found.tolist() == tokens.tolist()
        assert mask.tolist() == (np.arange(len(tokens)) >= prompt).tolist()
        assert samples.mismatched_samples.lengths[row] == len(tokens)
        assert samples.mismatched_samples.supervised[row] == mask[1:].sum()


def test_answers_change_places_within_a_batch_of_the_first_epoch_only():
    samples = labelled_samples()
    found = samples.add_mismatched_samples(np.array([4, 2, 7, 0, 1, 3, 6, 5]), 3, 10**6).mismatched_samples
    partners = {4: 7, 2: 4, 7: 2, 0: 3, 1: 0, 3: 1, 6: 5, 5: 6}
    for row, partner in partners.items():
        answer = samples.tokens(partner)[samples.mask(partner)]
        assert found.tokens(row)[found.mask(row)].tolist() == answer.tolist()


def test_mismatched_samples_are_truncated_from_the_right_and_moved_behind_virtual_tokens():
    samples = labelled_samples()
    short = samples.add_mismatched_samples(np.arange(8), 8, 7).add_prefix(2, 0).mismatched_samples
    for row, (tokens, prompt) in enumerate(mismatched_tokens()):
        assert short.tokens(row).tolist() == tokens[:7].tolist()
        assert short.lengths[row] == min(7, len(tokens)) + 2
        assert short.supervised[row] == min(7, len(tokens)) - prompt


def test_a_loss_whose_mismatched_samples_were_not_scored_is_not_a_number():
    aboard, samples = ScoredJobs(), referenced()
    aboard.scorer.objectives["job"] = make_objective(KtoSpec())
    score_mismatched(aboard, samples, "batch", 0)
    aboard.scorer.begin_window()
    part = laid(samples, range(8))
    counts = tuple(samples.supervised.tolist())
    scores = aboard.scorer.score(
        aboard.hidden(part).requires_grad_(), part, lambda segment: sum(counts), lambda segment: counts
    )
    assert math.isnan(scores.losses[0].item())


def test_metrics_of_answers_that_a_batch_does_not_have_are_left_out():
    spec = KtoSpec()
    assert spec.named_metrics([1.0, 0.5, 0.0, -3.0, 0.0, 0.1]) == {
        "rewards/chosen": 0.5, "logps/chosen": -3.0, "kl": 0.1,
    }  # fmt: skip
    assert spec.named_metrics([0.0, 0.0, 0.5, 0.0, -3.0, 0.1]) == {
        "rewards/rejected": 0.5, "logps/rejected": -3.0, "kl": 0.1,
    }  # fmt: skip
    assert spec.named_metrics([0.5, 0.5, -0.5, -3.0, -4.0, 0.1])["rewards/margins"] == 2.0
