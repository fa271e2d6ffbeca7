"""What virtual tokens need beyond their adapter: room in every sample, in the plan and in the context."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from tests import bench, oracle
from tests.adapters.kinds.cases import by_peft, case, job, samples, write_start
from tests.cases import slow_but
from tests.families import tiny
from tests.run.executors import prepare
from tests.run.models import LAYERS, deep
from tests.run.test_streamed import attach_jobs, windows
from tests.run.workers.test_agreed import CAPACITY, whole_base
from weftune import JobSpec
from weftune.adapters.kind import JobAdapter
from weftune.adapters.registry import get_kind
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.core.batch import IGNORED
from weftune.errors import AdapterError, SpecError
from weftune.jobs.spec.checks import check_starts, check_targets, warnings
from weftune.launch.plan_case import outline_jobs
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.program.program import Forward, MicrobatchPlan, SegmentPlan
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.training.state import new_training
from weftune.trainer.export import write_portable
from weftune.trainer.job import collate_plan

KINDS = ("prompt", "prefix")
PROMPTED, PREFIXED = 4, 3
"""Virtual tokens of the cases."""
FAMILIES = ["mistral", "gemma3", "phi3", "opt", "qwen2", "qwen3"]
"""With sliding windows, norms of heads, keys made with the queries, and positions in a table."""
TRAINABLE = {"prompt": 4 * 32, "prefix": 3 * 2 * 2 * 16}
"""Rows as wide as the base; in two layers keys and values as wide as two heads of eight."""


@pytest.fixture(scope="module")
def base():
    return bench.base("llama")


def virtual(base, kind="prompt", **keys):
    adapter = case(kind, "llama").adapter
    return prepare(base, kind, adapter=adapter, data=bench.rows(samples(kind)), **keys)


def test_samples_are_longer_by_the_rows_and_only_their_own_tokens_are_supervised(base):
    made, plain = virtual(base), prepare(base, "plain", data=bench.rows(samples("prompt")))
    assert (made.data.train.lengths - plain.data.train.lengths == PROMPTED).all()
    batch = made.job_window(0, 1, True).batches[0]
    plan = MicrobatchPlan((SegmentPlan("prompt", 1, batch.samples),))
    laid = collate_plan(plan, Forward, {"prompt": made})
    assert laid.sample_lengths == tuple(one.length for one in batch.samples)
    assert int((laid.targets_T != IGNORED).sum()) == batch.supervised_tokens
    chosen = [samples("prompt")[one.sample] for one in batch.samples]
    assert batch.supervised_tokens == sum(sum(mask) for _, mask in chosen)
    tokens, begin = laid.tokens_T.tolist(), 0
    for (own, _), length in zip(chosen, laid.sample_lengths, strict=True):
        assert tokens[begin + PROMPTED : begin + length] == own
        assert laid.positions_T[begin : begin + length].tolist() == list(range(length))
        begin += length


def test_behind_keys_samples_have_later_positions_and_nothing_else_is_other(base):
    data = bench.rows(samples("prefix"))
    jobs = {"prefix": virtual(base, "prefix"), "plain": prepare(base, "plain", data=data)}
    laid = []
    for name, made in jobs.items():
        batch = made.job_window(0, 1, True).batches[0]
        laid.append(collate_plan(MicrobatchPlan((SegmentPlan(name, 1, batch.samples),)), Forward, jobs))
    behind, plain = laid
    assert torch.equal(behind.positions_T, plain.positions_T + PREFIXED)
    assert torch.equal(behind.token_index_T, plain.token_index_T)
    assert torch.equal(behind.targets_T, plain.targets_T)
    assert behind.sample_lengths == plain.sample_lengths


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_knows_its_parameters_and_rows_as_the_run_has_them(kind, base):
    spec = job(kind, "llama")
    (outline_model,) = outline_jobs([spec], bench.tokenizer(), base.shape)
    made = virtual(base, kind, seed=spec.seed)
    assert outline_model.shape == made.shape
    assert outline_model.shape.trainable_parameters == TRAINABLE[kind]
    assert sum(outline_model.shape.parameters_by_layer) == (TRAINABLE[kind] if kind == "prefix" else 0)
    longest = max(len(tokens) for tokens, _ in samples(kind))
    assert outline_model.shape.max_sample_tokens == longest + (PROMPTED if kind == "prompt" else 0)
    assert outline_model.job.batches[0] == tuple(
        one.length for one in made.job_window(0, 1, True).batches[0].samples
    )
    # Master weights, two moments and a gradient, besides the weights that passes read.
    assert MemoryModel(base.shape, 0).state_bytes([outline_model.shape]) >= TRAINABLE[kind] * 4 * 4


@pytest.mark.parametrize(("kind", "count"), [("prompt", PROMPTED), ("prefix", PREFIXED)])
def test_a_sample_is_cut_where_the_context_ends_behind_the_virtual_tokens(kind, count, base):
    long = bench.rows(bench.samples(3, shortest=70, longest=90))
    made = prepare(base, "long", adapter=case(kind, "llama").adapter, data=long)
    assert {len(made.data.train.tokens(n)) for n in range(3)} == {base.shape.context - count}
    (told,) = warnings([replace(made.spec, data=replace(made.spec.data, max_length=99))], base.shape)[1:]
    assert f"over the {base.shape.context - count} that virtual tokens leave" in told


@pytest.mark.parametrize("kind", KINDS)
def test_more_virtual_tokens_than_the_context_has_room_for_are_refused(kind, base):
    rows = bench.rows(samples(kind))
    spec = JobSpec(name="wide", data=rows, adapter={"kind": kind, "num_virtual_tokens": 63})
    (mistake,) = check_targets([spec], base.shape)
    assert mistake.location.endswith("adapter.num_virtual_tokens")
    assert "63 leave no room for a sample in the base's context of 64 tokens" in mistake.sentence
    assert check_targets([job(kind, "llama")], base.shape) == []


def test_rows_that_would_not_go_into_the_first_layer_are_refused():
    (mistake,) = check_targets([job("prompt", "opt")], bench.base("opt").shape)
    assert mistake.location.endswith("adapter.kind")
    assert "the base has model.decoder.project_" in mistake.sentence


def test_a_base_without_keys_in_every_layer_has_no_prefix(base):
    less = replace(base.shape, sites=tuple(site for site in base.shape.sites if ".1." not in site.name))
    (mistake,) = check_targets([job("prefix", "llama")], less)
    assert mistake.location.endswith("adapter.kind")
    assert "prefix needs the keys and values of every layer, and the base has them in 1 of 2" in str(mistake)


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ({"kind": "prompt", "targets": ["q_proj"]}, "adapter.targets: is not a key of prompt adapters"),
        ({"kind": "prompt", "layers": "0-1"}, "adapter.layers: is not a key of prompt adapters"),
        ({"kind": "prompt", "rank": 4}, "adapter.rank: is not a key of prompt adapters"),
        ({"num_virtual_tokens": 4}, "adapter.num_virtual_tokens: is not a key of lora adapters"),
        ({"kind": "prompt", "prompt_tuning_init": "TEXT"}, "write init (random, vocabulary for SAMPLE_VOCAB"),
        ({"kind": "prompt", "init": "text"}, "adapter.init: text needs init_text"),
        ({"kind": "prompt", "init_text": "Sort it."}, "adapter.init_text: is what init: text starts from"),
        ({"kind": "prompt", "init": "words"}, "must be random, vocabulary or text"),
        ({"kind": "prefix", "init": "text"}, "adapter.init: is not a key of prefix adapters"),
        ({"kind": "prompt", "num_virtual_tokens": 0}, "must be at least 1"),
        ({"kind": "prefix", "targets": ["q_proj"]}, "adapter.targets: is not a key of prefix adapters"),
        ({"kind": "prefix", "prefix_projection": True}, "keys and values are trained themselves"),
    ],
)
def test_a_key_that_it_has_not_is_answered_with_one_sentence(adapter, sentence):
    with pytest.raises(SpecError) as caught:
        JobSpec(name="a", data=bench.rows(samples("prompt")), adapter=adapter)
    (mistake,) = caught.value.mistakes
    assert sentence in str(mistake)


TEXT = "w5 w11 w90"


def started(base, **keys):
    """The virtual tokens of a job that has not made a step."""
    spec = {"kind": "prompt", "num_virtual_tokens": 7, **keys}
    made = prepare(base, "prompt", adapter=spec, data=bench.rows(samples("prompt")))
    adapter = JobAdapter("prompt", made.spec.adapter, made.spec.seed, start_tokens=made.start_tokens)
    training = new_training(
        adapter, made.recipe, base.shape.sites, base.dtype, base.device, frozen=base.weight_reader()
    )
    return training.master.view(7, -1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("text", [TEXT, " ".join(f"w{n}" for n in range(10, 30))])
def test_from_a_text_they_start_as_in_peft(family, text, tmp_path):
    """A shorter text is repeated, a longer one cut; Gemma scales embeddings as it reads them."""
    bench.tokenizer().save_pretrained(tmp_path)
    model = tiny(family)
    config = PromptTuningConfig(
        num_virtual_tokens=7,
        task_type="CAUSAL_LM",
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=text,
        tokenizer_name_or_path=str(tmp_path),
    )
    want = get_peft_model(model, config).prompt_encoder["default"].embedding.weight
    found = started(bench.base(family), init="text", init_text=text)
    torch.testing.assert_close(found.float(), want.detach().float(), rtol=1e-6, atol=0.0)


def test_from_the_vocabulary_they_start_at_embeddings_that_the_seed_draws():
    base = bench.base("gemma3")
    embedding = base.model.get_input_embeddings()
    known = embedding(torch.arange(97)).detach()
    found = started(base, init="vocabulary")
    ids = [(known == row).all(1).nonzero().flatten().tolist() for row in found]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) > 3
    assert torch.equal(found, started(base, init="vocabulary"))


def test_a_text_is_the_start_of_a_job_in_a_run_and_on_resumption(base, tmp_path):
    adapter = {"kind": "prompt", "num_virtual_tokens": 3, "init": "text", "init_text": TEXT}
    spec = JobSpec(
        name="a", data=bench.rows(samples("prompt")), adapter=adapter, steps=1, learning_rate=1e-30
    )
    bench.train(base, tmp_path / "out", [spec])
    (rows,) = bench.adapter(tmp_path / "out" / "a").values()
    assert torch.equal(rows, base.model.get_input_embeddings().weight[torch.tensor([5, 11, 90])])


def test_a_text_without_tokens_is_refused(base):
    adapter = {"kind": "prompt", "init": "text", "init_text": " "}
    with pytest.raises(AdapterError, match=r"adapter.init_text: the tokenizer makes no tokens of it"):
        prepare(base, "a", adapter=adapter)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("prompt", r"prompt_embeddings is \[4, 32\], and the adapter has \[5, 32\]"),
        ("prefix", r"it has prompt_embeddings \[3, 64\], and the adapter is prompt_embeddings \[5, 64\]"),
    ],
)
def test_another_number_of_virtual_tokens_is_no_start(kind, sentence, base, tmp_path):
    first = job(kind, "llama", steps=1)
    adapter = {"kind": kind, "num_virtual_tokens": 5, "init_from": {"job": kind}}
    second = JobSpec(name="second", data=first.data, adapter=adapter)
    (mistake,) = check_starts([first, second], base.shape)
    assert f"{kind} has weights of other shapes" in mistake.sentence
    bench.train(base, tmp_path / "out", [first])
    spec = replace(second.adapter, init_from=str(tmp_path / "out" / kind))
    with pytest.raises(AdapterError, match=sentence):
        get_kind(kind).check_start(spec, base.shape.sites)


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_neither_be_merged_nor_served_and_says_so(kind, base, tmp_path):
    spec = job(kind, "llama", steps=1)
    (warning,) = [one for one in warnings([spec], base.shape) if "vLLM" in one]
    assert f"vLLM does not load {kind} adapters; nor can they be merged" in warning
    bench.train(base, tmp_path / "out", [spec])
    folder = tmp_path / "out" / kind
    with pytest.raises(AdapterError, match=f"a {kind} adapter cannot be merged"):
        get_kind(kind).merge(folder, base.sites(), base.shape.sites)
    with pytest.raises(AdapterError, match=f"is a {kind} adapter, which servers do not load"):
        write_portable(folder, tmp_path / "portable")


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_count_the_tokens_of_the_data_alone(kind, base, tmp_path):
    bench.train(base, tmp_path / "out", [job(kind, "llama", steps=2)])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = [line["tokens"] for line in lines if line.get("job") == kind and "loss" in line]
    batches = bench.batches(samples(kind), 3, 2, 2)
    assert found == [sum(len(tokens) for tokens, _ in batch) for batch in batches]


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["mistral", "phi3"]))
def test_in_other_families_they_learn_what_peft_teaches_them(family, tmp_path):
    model = tiny(family, torch.float64)
    # The embeddings of this OPT are narrower than its layers, which PEFT's rows do not fit.
    kinds = KINDS if family != "opt" else ("prefix",)
    starts = {kind: write_start(tmp_path / f"start-{kind}", model, kind, family) for kind in kinds}
    jobs = [job(kind, family, starts[kind]) for kind in kinds]
    bench.train(bench.base(family), tmp_path / "out", jobs, capacity=256)
    for kind in kinds:
        got = bench.trained(tmp_path / "out", kind, bench.adapter(starts[kind]))
        oracle.assert_equal_float64(got, by_peft(kind, family, starts[kind]))


@pytest.mark.parametrize("travels", [False, True])
def test_they_learn_the_same_where_stages_take_turns_and_adapters_travel(travels):
    stages = tuple(StageLayers(n, n + 1, is_resident=n == 1) for n in range(LAYERS))
    cut = Layout(stages, (2,), adapters_travel=travels)
    streamed = streamed_executor(
        stream_model(deep("llama", torch.float64), BaseSpec(model="tiny"), bench.CPU, cut)
    )
    resident = resident_executor(whole_base("llama", torch.float64))
    found = []
    for executor, layout in ((streamed, cut), (resident, one_device_layout())):
        jobs = [*(virtual(executor.base, kind) for kind in KINDS), prepare(executor.base, "lora")]
        attach_jobs(executor, jobs)
        _, masters = windows(executor, jobs, lambda courses, at=layout: plan_window(courses, at, CAPACITY))
        found.append(masters)
    for name, master in found[1].items():
        assert (found[0][name] - master).norm() <= 1e-8 * master.norm()
