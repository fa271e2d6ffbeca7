"""Rows that an adapter puts before every sample, among samples of others: as plain torch has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import bench
from tests.adapters.attached_banks import attach
from tests.adapters.toys import PromptSpec, plain_model, toys  # noqa: F401 (a fixture)
from tests.families import tiny
from tests.run.executors import prepare
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind
from weftune.core.batch import IGNORED
from weftune.data.collate import Part, collate
from weftune.ops.lora.routes import Route

EXACT = 1e-9
LORA = LoraSpec(rank=2)
SPECS = {"prompt": PromptSpec(3), "lora": LORA, "other": PromptSpec(2)}


def samples(base, lengths, seed):
    rng = np.random.default_rng(seed)
    made = [(rng.integers(4, 97, length).tolist(), [True] * length) for length in lengths]
    return prepare(base, "any", data=bench.rows(made)).data.train


def banks_of(base):
    embedding = base.model.get_input_embeddings()
    return Banks(base.sites(), base.shape.sites, next(base.model.parameters()), embedding=embedding)


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("route", [Route.reference, Route.segmented])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_virtual_tokens_before_each_sample_learn_what_plain_torch_teaches_them(family, route):
    base = bench.base(family)
    banks = banks_of(base)
    weights = {}
    for seed, (job, spec) in enumerate(SPECS.items()):
        size = get_kind(spec.kind).layout(spec, base.shape.sites).size
        generator = torch.Generator().manual_seed(seed)
        weights[job] = torch.randn(size, generator=generator, dtype=torch.float64) * 0.3
        attach(banks, base, job, spec, weights[job])
    data = {job: samples(base, (5, 7), seed) for seed, job in enumerate(SPECS)}
    before = {job: get_kind(spec.kind).rows_before(spec) for job, spec in SPECS.items()}
    parts = [Part(job, 1, data[job], index, 0, before[job]) for job in SPECS for index in (0, 1)]
    microbatch = collate(parts)
    assert microbatch.sample_lengths == (8, 10, 5, 7, 7, 9)
    with banks.bind(microbatch, route, training=True):
        logits_TV = base.head().logits(base.hidden(microbatch))
        rows = microbatch.targets_T != IGNORED
        logprobs_TV = logits_TV[rows].log_softmax(-1)
        logprobs_TV.gather(1, microbatch.targets_T[rows][:, None]).sum().backward()
    for job, spec in SPECS.items():
        want = plain_gradient(family, JobAdapter(job, spec, 0), weights[job], data[job])
        found = banks.attached[job].gradient
        assert want.norm() > 1e-3
        assert (found - want).norm() <= EXACT * want.norm()


def plain_gradient(family, adapter, weights, data):
    flat = weights.clone().requires_grad_()
    prompt = adapter.spec.kind == "prompt"
    model = tiny(family).requires_grad_(False) if prompt else plain_model(family, adapter, flat)
    rows_ID = flat.view(adapter.spec.rows, -1) if prompt else flat.new_zeros(0, 32)
    for index in (0, 1):
        tokens = torch.from_numpy(data.tokens(index).astype(np.int64))
        embedded = model.get_input_embeddings()(tokens)
        logits = model(inputs_embeds=torch.cat([rows_ID, embedded])[None]).logits[0].log_softmax(-1)
        # With rows before it, a sample's first token is predicted, too.
        behind = tokens if prompt else tokens[1:]
        from_row = max(0, len(rows_ID) - 1)
        logits[from_row:-1].gather(1, behind[:, None]).sum().backward()
    return flat.grad


@pytest.mark.usefixtures("toys")
def test_where_no_embedding_is_adapted_such_an_adapter_cannot_come_aboard():
    base = bench.base("llama")
    banks = Banks(base.sites(), base.shape.sites, next(base.model.parameters()))
    with pytest.raises(AssertionError, match="go in at the embedding"):
        attach(banks, base, "prompt", PromptSpec(), torch.zeros(96, dtype=torch.float64))


@pytest.mark.usefixtures("toys")
def test_a_captured_pass_refuses_rows_before_a_sample_and_restoring_takes_them_out():
    base = bench.base("llama")
    banks = banks_of(base)
    attach(banks, base, "prompt", PromptSpec(), torch.zeros(96, dtype=torch.float64))
    microbatch = collate([Part("prompt", 1, samples(base, (5,), 0), 0, 0, 3)])
    assert not banks.is_capturable(microbatch)
    banks.restore_base()
    assert "forward" not in base.model.get_input_embeddings().__dict__
