"""Objectives over pairs, over reference scores and over a scalar head: gradients are those of plain autograd
over the whole global batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.adapters.attached_banks import attach, empty_banks
from tests.adapters.toys import plain_model
from tests.bench import base as tiny_base
from tests.families import tiny
from tests.objectives.toys import Preference, Value, global_batch, microbatch, plain_sums
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.core.batch import IGNORED, OWN_ADAPTER
from weftune.objectives.objective import ScalarHead
from weftune.ops.lora.routes import Route
from weftune.run.passes.scorer import Scorer

SPEC = LoraSpec(rank=2, alpha=4.0)
EXACT = 1e-9


class ScoredJobs:
    """A tiny base with three LoRA jobs aboard, and what scores them."""

    def __init__(self) -> None:
        self.base = tiny_base("llama")
        self.banks = empty_banks(self.base)
        self.scorer = Scorer(self.base.head())
        size = get_kind("lora").layout(SPEC, self.base.shape.sites).size
        self.weights = {}
        for seed, job in enumerate(("job", "other", "sft")):
            generator = torch.Generator().manual_seed(seed)
            self.weights[job] = torch.randn(size, generator=generator, dtype=torch.float64) * 0.2
            attach(self.banks, self.base, job, SPEC, self.weights[job])

    @torch.no_grad()
    def hidden(self, laid):
        with self.banks.bind(laid.microbatch, Route.segmented, training=False):
            return self.base.hidden(laid.microbatch)

    def train(self, laid, supervised, samples) -> list[float]:
        with self.banks.bind(laid.microbatch, Route.segmented, training=True):
            h_TD = self.base.hidden(laid.microbatch)
        leaf_TD = h_TD.detach().requires_grad_()
        scores = self.scorer.score(
            leaf_TD,
            laid,
            lambda segment: supervised[segment.job],
            lambda segment: (1,) * samples[segment.job],
        )
        with self.banks.bind(laid.microbatch, Route.segmented, training=True):
            h_TD.backward(scores.gradient_TD())
        return [loss.item() for loss in scores.losses]

    def plain(self, job):
        flat = self.weights[job].clone().requires_grad_()
        return plain_model("llama", JobAdapter(job, SPEC, 0), flat), flat

    def gradient(self, job):
        return self.banks.attached[job].gradient


def close(found, wanted) -> None:
    assert wanted.norm() > 1e-3
    assert (found - wanted).norm() <= EXACT * wanted.norm()


def supervised(samples) -> int:
    return sum(int((sample.targets_L != IGNORED).sum()) for sample in samples)


def test_pairs_are_trained_against_their_reference_scores_among_other_jobs():
    scored = ScoredJobs()
    scored.scorer.objectives["job"] = Preference()
    pairs, plain = global_batch((7, 5, 6, 9), 1), global_batch((8, 6), 2)
    with torch.no_grad():
        bare, none = plain_sums(tiny("llama"), pairs), torch.zeros(1, dtype=torch.float64)
    counts = {"job": supervised(pairs), "sft": supervised(plain)}, {"job": 4, "sft": 2}
    given = torch.cat([bare[2:], none]), torch.cat([none, bare[:2]])
    losses = scored.train(
        microbatch([("job", pairs[2:]), ("sft", plain[:1])], references_S=given[0]), *counts
    )
    losses += scored.train(
        microbatch([("sft", plain[1:]), ("job", pairs[:2])], references_S=given[1]), *counts
    )

    model, flat = scored.plain("job")
    margin = plain_sums(model, pairs) - bare
    want = -logsigmoid(0.3 * (margin[0::2] - margin[1::2])).mean()
    want.backward()
    assert losses[0] + losses[3] == pytest.approx(want.item(), rel=EXACT)
    close(scored.gradient("job"), flat.grad)

    model, flat = scored.plain("sft")
    want = -plain_sums(model, plain).sum() / supervised(plain)
    want.backward()
    assert losses[1] + losses[2] == pytest.approx(want.item(), rel=EXACT)
    close(scored.gradient("sft"), flat.grad)
    assert not scored.gradient("other").any()


def test_a_scalar_head_learns_with_its_adapter():
    scored = ScoredJobs()
    scored.scorer.objectives["job"] = Value()
    w_D = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total_D = torch.zeros_like(w_D)
    scored.scorer.scalar_heads["job"] = ScalarHead(w_D, total_D, torch.zeros((), requires_grad=True))
    samples, others = global_batch((7, 5, 9), 4), global_batch((6,), 5)
    counts = {"job": supervised(samples), "sft": supervised(others)}, {"job": 3, "sft": 1}
    scored.train(microbatch([("sft", others), ("job", samples[:2])]), *counts)
    scored.train(microbatch([("job", samples[2:])]), *counts)

    model, flat = scored.plain("job")
    w = w_D.clone().requires_grad_()
    decoder = model.base_model
    values = [decoder(input_ids=sample.tokens_L[None]).last_hidden_state[0, -1] @ w for sample in samples]
    lengths = torch.tensor([supervised([sample]) for sample in samples])
    (torch.stack(values) - lengths).pow(2).mean().backward()
    close(scored.gradient("job"), flat.grad)
    close(total_D, w.grad)


def test_held_out_pairs_are_evaluated_against_their_reference_scores_and_counted_as_pairs():
    scored = ScoredJobs()
    scored.scorer.objectives["job"] = Preference()
    pairs, plain = global_batch((7, 5, 6, 9), 6), global_batch((8,), 7)
    with torch.no_grad():
        bare = plain_sums(tiny("llama"), pairs)
    given = torch.cat([bare, torch.zeros(1, dtype=torch.float64)])
    laid = microbatch([("job", pairs), ("sft", plain)], references_S=given)
    found, others = scored.scorer.evaluate(scored.hidden(laid), laid)
    with torch.no_grad():
        margin = plain_sums(scored.plain("job")[0], pairs) - bare
        gap = margin[0::2] - margin[1::2]
        nll = -plain_sums(scored.plain("sft")[0], plain).sum()
    assert found.loss == pytest.approx(-logsigmoid(0.3 * gap).sum().item(), rel=EXACT)
    assert (found.metrics, found.count) == ((float((gap > 0).sum()),), 2)
    assert others.loss == pytest.approx(nll.item(), rel=EXACT)
    assert others.tokens == supervised(plain)


def test_a_job_without_its_reference_scores_is_not_trained():
    scored = ScoredJobs()
    scored.scorer.objectives["job"] = Preference()
    with pytest.raises(AssertionError, match="no reference scores"):
        scored.train(microbatch([("job", global_batch((5, 6), 1))]), {"job": 1}, {"job": 2})


def test_rows_are_never_trained_through_another_jobs_adapter():
    scored = ScoredJobs()
    laid = microbatch([("job", global_batch((5,), 1))], "other")
    with pytest.raises(AssertionError, match="through their own adapter"):
        scored.train(laid, {"job": 1}, {"job": 1})


@pytest.mark.parametrize("adapter", [None, OWN_ADAPTER, "other"])
def test_on_the_tiled_route_too_rows_pass_through_the_adapter_that_is_named(adapter):
    """Rows of two jobs through one adapter are one run of its slot."""
    scored = ScoredJobs()
    laid = microbatch(
        [("job", global_batch((5, 4), 1)), ("sft", global_batch((6,), 2)), ("x", global_batch((3,), 3))],
        adapter,
    )
    seats = {OWN_ADAPTER: [(0, 9, 0), (9, 15, 2)], None: [], "other": [(0, 18, 1)]}[adapter]
    assert [(seat.start, seat.stop, seat.slot) for seat in scored.banks.slot_rows(laid.microbatch)] == seats
