"""What virtual tokens need beyond their adapter: room in every sample, in the plan and in the context."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests import bench
from tests.adapters.kinds.cases import job, samples
from tests.run.aboard import ready
from tests.run.models import LAYERS, deep
from tests.run.test_streamed import take_aboard, windows
from tests.run.workers.test_agreed import CAPACITY, whole_base
from weftune import JobSpec
from weftune.adapters.registry import kind_named
from weftune.base.host.streamed import stream_model
from weftune.base.spec import BaseSpec
from weftune.cli.plan_jobs import outline_jobs
from weftune.core.batch import IGNORED
from weftune.errors import AdapterError, SpecError
from weftune.jobs.spec.checks import check_targets, warnings
from weftune.jobs.spec.starts import check_starts
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.program.layout import Layout, StageLayers, one_device
from weftune.plan.program.program import MicrobatchPlan, SegmentPlan
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.trainer.export import write_portable
from weftune.trainer.job import lay_out

PROMPT = {"kind": "prompt", "num_virtual_tokens": 4}
PROMPTED = 4
HIDDEN = 32


@pytest.fixture(scope="module")
def base():
    return bench.base("llama")


def prompted(base, **keys):
    return ready(base, "prompted", adapter=PROMPT, data=bench.rows(samples("prompt")), **keys)


def test_samples_are_longer_by_the_rows_and_only_their_own_tokens_are_supervised(base):
    made, plain = prompted(base), ready(base, "plain", data=bench.rows(samples("prompt")))
    assert (made.data.train.lengths - plain.data.train.lengths == PROMPTED).all()
    batch = made.course(0, 1, True).batches[0]
    plan = MicrobatchPlan((SegmentPlan("prompted", 1, batch.samples),))
    laid = lay_out(plan, False, {"prompted": made})
    assert laid.sample_lengths == tuple(one.length for one in batch.samples)
    assert int((laid.targets_T != IGNORED).sum()) == batch.supervised
    chosen = [samples("prompt")[one.sample] for one in batch.samples]
    assert batch.supervised == sum(sum(mask) for _, mask in chosen)
    tokens, begin = laid.tokens_T.tolist(), 0
    for (own, _), length in zip(chosen, laid.sample_lengths, strict=True):
        assert tokens[begin + PROMPTED : begin + length] == own
        assert laid.positions_T[begin : begin + length].tolist() == list(range(length))
        begin += length


def test_the_plan_knows_its_parameters_and_rows_as_the_run_has_them(base):
    spec = job("prompt", "llama")
    (outlined,) = outline_jobs([spec], bench.tokenizer(), base.shape)
    made = prompted(base, seed=spec.seed)
    assert outlined.shape == replace(made.shape, name="prompt")
    assert outlined.shape.trainable == PROMPTED * HIDDEN
    longest = max(len(tokens) for tokens, _ in samples("prompt"))
    assert outlined.shape.longest == longest + PROMPTED
    assert outlined.job.batches[0] == tuple(one.length for one in made.course(0, 1, True).batches[0].samples)
    # Master weights, two moments and a gradient in float32 or wider, and the weights that passes read.
    state = MemoryModel(base.shape, 0).state_bytes([outlined.shape])
    assert state >= PROMPTED * HIDDEN * 4 * 4


def test_a_sample_is_cut_where_the_context_ends_behind_the_rows(base):
    long = bench.rows(bench.samples(3, shortest=70, longest=90))
    made = ready(base, "long", adapter=PROMPT, data=long)
    assert made.shape.longest == base.shape.context
    assert {len(made.data.train.tokens(n)) for n in range(3)} == {base.shape.context - PROMPTED}


def test_more_rows_than_the_context_has_room_for_are_refused(base):
    rows = bench.rows(samples("prompt"))
    spec = JobSpec(name="wide", data=rows, adapter={"kind": "prompt", "num_virtual_tokens": 63})
    (mistake,) = check_targets([spec], base.shape)
    assert mistake.place.endswith("adapter.num_virtual_tokens")
    assert "63 leave no room for a sample in the base's context of 64 tokens" in mistake.sentence
    assert check_targets([job("prompt", "llama")], base.shape) == []


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ({"kind": "prompt", "targets": ["q_proj"]}, "adapter.targets: is not a key of prompt adapters"),
        ({"kind": "prompt", "layers": "0-1"}, "adapter.layers: is not a key of prompt adapters"),
        ({"kind": "prompt", "rank": 4}, "adapter.rank: is not a key of prompt adapters"),
        ({"num_virtual_tokens": 4}, "adapter.num_virtual_tokens: is not a key of lora adapters"),
        ({"kind": "prompt", "prompt_tuning_init": "TEXT"}, "start at random or from init_from"),
        ({"kind": "prompt", "num_virtual_tokens": 0}, "must be at least 1"),
    ],
)
def test_a_key_that_it_has_not_is_answered_with_one_sentence(adapter, sentence):
    with pytest.raises(SpecError) as caught:
        JobSpec(name="a", data=bench.rows(samples("prompt")), adapter=adapter)
    (mistake,) = caught.value.mistakes
    assert sentence in str(mistake)


def test_another_number_of_rows_is_no_start(base, tmp_path):
    first = job("prompt", "llama")
    second = JobSpec(
        name="second",
        data=first.data,
        adapter={"kind": "prompt", "num_virtual_tokens": 3, "init_from": {"job": "prompt"}},
    )
    (mistake,) = check_starts([first, second], base.shape)
    assert "prompt has weights of other shapes" in mistake.sentence
    bench.train(base, tmp_path / "out", [replace(first, steps=1)])
    spec = replace(second.adapter, init_from=str(tmp_path / "out" / "prompt"))
    with pytest.raises(AdapterError, match=r"prompt_embeddings is \[4, 32\], and the adapter has \[3, 32\]"):
        kind_named("prompt").check_start(spec, base.shape.sites)


def test_it_can_neither_be_merged_nor_served_and_says_so(tmp_path):
    base, spec = bench.base("llama"), replace(job("prompt", "llama"), steps=1)
    (warning,) = [one for one in warnings([spec], base.shape) if "vLLM" in one]
    assert "vLLM does not load prompt adapters; nor can they be merged" in warning
    bench.train(base, tmp_path / "out", [spec])
    folder = tmp_path / "out" / "prompt"
    with pytest.raises(AdapterError, match="a prompt adapter cannot be merged"):
        kind_named("prompt").merge(folder, base.sites(), base.shape.sites)
    with pytest.raises(AdapterError, match="is a prompt adapter, which servers do not load"):
        write_portable(folder, tmp_path / "portable")


def test_metrics_count_the_tokens_of_the_data_alone(base, tmp_path):
    spec = job("prompt", "llama", steps=2)
    bench.train(base, tmp_path / "out", [spec])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    found = [line["tokens"] for line in lines if line.get("job") == "prompt" and "loss" in line]
    batches = bench.batches(samples("prompt"), 3, 2, 2)
    assert found == [sum(len(tokens) for tokens, _ in batch) for batch in batches]


@pytest.mark.parametrize("travels", [False, True])
def test_it_learns_the_same_where_stages_take_turns_and_adapters_travel(travels):
    stages = tuple(StageLayers(n, n + 1, resident=n == 1) for n in range(LAYERS))
    cut = Layout(stages, (2,), travels=travels)
    streamed = streamed_executor(
        stream_model(deep("llama", torch.float64), BaseSpec(model="tiny"), bench.CPU, cut)
    )
    resident = resident_executor(whole_base("llama", torch.float64))
    found = []
    for executor, layout in ((streamed, cut), (resident, one_device())):
        jobs = [prompted(executor.base), ready(executor.base, "lora")]
        take_aboard(executor, jobs)
        _, masters = windows(executor, jobs, lambda courses, at=layout: plan_window(courses, at, CAPACITY))
        found.append(masters)
    for name, master in found[1].items():
        assert (found[0][name] - master).norm() <= 1e-8 * master.norm()
