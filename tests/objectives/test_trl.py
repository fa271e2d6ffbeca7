"""Losses, metrics and gradient of every preference objective equal TRL's on the same pairs. The quick tests
use the numbers in trl.json, the slow ones TRL itself."""

from __future__ import annotations

import json

import pytest
import torch

from tests.families import tiny
from tests.objectives.pair_cases import CASES, reference_sums, samples
from tests.objectives.test_objective import ScoredJobs
from tests.objectives.trl_oracle import FILE, lora_weights, projections, trl_numbers
from weftune.data.collate import Part, collate
from weftune.objectives.registry import make_objective
from weftune.objectives.spec import PAIR_METRICS
from weftune.ops.lora.routes import Route
from weftune.run.passes.rows import to_device_microbatch

CLOSE = 1e-5
"""TRL computes some parts in float32."""


def laid(pairs, chosen):
    parts = [Part("job", 1, pairs, index, int(pairs.lengths[:index].sum())) for index in chosen]
    microbatch = collate(parts)
    return to_device_microbatch(microbatch, microbatch.rows, torch.device("cpu"))


def own_numbers(spec):
    """The same numbers as `trl_numbers`, with the global batch in two microbatches."""
    scored = ScoredJobs()
    assert torch.equal(scored.weights["job"], lora_weights())
    scored.scorer.objectives["job"] = make_objective(spec)
    pairs = samples()
    if spec.supervises_prompts:
        pairs = pairs.supervise_prompts()
    if spec.needs_reference:
        pairs = pairs.with_references(reference_sums(tiny("llama")).numpy())
    counts = tuple(pairs.supervised.tolist())
    losses, metrics = [], torch.zeros(len(PAIR_METRICS), dtype=torch.float64)
    for chosen in (range(2), range(2, len(pairs))):
        part = laid(pairs, chosen)
        with scored.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD = scored.base.hidden(part.microbatch)
        leaf_TD = h_TD.detach().requires_grad_()
        scores = scored.scorer.score(leaf_TD, part, lambda segment: sum(counts), lambda segment: counts)
        with scored.banks.bind(part.microbatch, Route.segmented, training=True):
            h_TD.backward(scores.gradient_TD())
        losses += [loss.item() for loss in scores.losses]
        metrics += scores.metrics[0]
    named = dict(zip(PAIR_METRICS, metrics.tolist(), strict=True))
    whole = laid(pairs, range(len(pairs)))
    (held_out,) = scored.scorer.evaluate(scored.hidden(whole), whole)
    assert [one / held_out.count for one in held_out.metrics] == pytest.approx(metrics.tolist(), rel=1e-9)
    return {
        "loss": sum(losses),
        "metrics": named,
        "gradient": projections(scored.gradient("job")),
        "eval_loss": held_out.loss / held_out.count,
    }


def assert_equal(found, wanted):
    assert found["loss"] == pytest.approx(wanted["loss"], rel=CLOSE)
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=CLOSE)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=CLOSE, abs=CLOSE)
    scale = wanted["gradient"][0]
    assert scale > 1e-3
    assert found["gradient"] == pytest.approx(wanted["gradient"], rel=CLOSE, abs=CLOSE * scale)


@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_those_that_trl_computed(name):
    assert_equal(own_numbers(CASES[name]), json.loads(FILE.read_text())[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_those_of_trl(name, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    assert_equal(own_numbers(CASES[name]), trl_numbers(CASES[name], lora_weights()))
