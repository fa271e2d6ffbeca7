"""Embeddings of some tokens that a job trains beside its LoRA: PEFT's `trainable_token_indices`."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests import bench, oracle
from tests.adapters.attached_banks import attach
from tests.adapters.attached_banks import together as in_one_microbatch
from tests.adapters.kinds.cases import targets
from tests.base.packs import cut_base, random_samples
from tests.cases import slow_but
from tests.families import tiny
from tests.launches import Launch, deep_folder
from tests.outputs import Crash, assert_same_results, status
from tests.run.executors import prepare
from tests.run.models import LAYERS, deep
from tests.run.test_streamed import windows
from tests.run.workers.test_agreed import CAPACITY, whole_base
from weftune import JobSpec, Options
from weftune.adapters.banks import Banks
from weftune.adapters.kind import JobAdapter
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import get_kind, kind_of_folder
from weftune.base.host.streamed import stream_model
from weftune.base.shape import embedding_module, model_shape, site_modules
from weftune.base.spec import BaseSpec
from weftune.core.shapes import LayerRange
from weftune.core.weights import Head, HeadRows
from weftune.errors import AdapterError, BaseModelError, SpecError
from weftune.jobs.spec.checks import check_starts, check_targets, warnings
from weftune.ops.logprobs import target_logprobs
from weftune.plan.program.layout import Layout, StageLayers, one_device_layout
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor, streamed_executor
from weftune.run.events import Stepped
from weftune.run.training.state import new_training
from weftune.trainer.export import write_portable

STEPS = 6
TOKENS = [31, 0, 7, 90]
"""Among them the padding of most families, whose embedding gets no gradient in torch."""
FAMILIES = ["llama", "gpt2", "gemma3", "qwen2", "phi3", "mistral"]
"""Of GPT-2 and Gemma the head is tied to the embedding; Gemma scales embeddings as it reads them, and caps
its logits."""
DELTA = "trainable_tokens_delta"


def samples(seed=3):
    """Random tokens, every third of which is one of the trained."""
    made = []
    for tokens, mask in bench.samples(11, seed=seed):
        own = [TOKENS[at % len(TOKENS)] if at % 3 == 1 else one for at, one in enumerate(tokens)]
        made.append((own, mask))
    return made


def adapter(family, **more):
    return {"rank": 3, "alpha": 6.0, "targets": targets(family), "trainable_token_indices": TOKENS, **more}


def job(family, name="tokens", start=None, **more):
    own = adapter(family) if start is None else adapter(family, init_from=str(start))
    keys = {"adapter": own, "steps": STEPS, "batch_size": 3, "learning_rate": 2e-3, "seed": 2, "warmup": 2}
    return JobSpec(name=name, **{"data": bench.rows(samples()), **keys, **more})


def others(family):
    """Jobs with the same tokens and none of their own."""
    plain = {"rank": 4, "targets": targets(family)}
    return [
        job(family, "plain", adapter=plain, seed=5),
        job(family, "prompt", adapter={"kind": "prompt", "num_virtual_tokens": 3}),
        job(family, "fewer", adapter={**adapter(family), "trainable_token_indices": [7, 8]}, seed=4),
    ]


def peft_config(family, **more):
    return LoraConfig(
        r=3,
        lora_alpha=6.0,
        target_modules=targets(family),
        trainable_token_indices=TOKENS,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",
        **more,
    )


def write_start(folder, family, dtype=torch.float64):
    """As PEFT begins, then a little off."""
    torch.manual_seed(5)
    get_peft_model(tiny(family, dtype), peft_config(family)).save_pretrained(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    moved = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    save_file(moved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def by_peft(family, start, dtype=torch.float64, padded=True):
    recipe = oracle.Recipe(STEPS, 2e-3, "linear", 2)
    batches = bench.batches(samples(), 3, 2, STEPS)
    return oracle.train_with_peft(tiny(family, dtype), peft_config(family), start, batches, recipe, padded)


# -- PEFT is the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", slow_but(FAMILIES, ["llama", "gpt2", "gemma3"]))
def test_beside_others_it_equals_peft_alone(family, tmp_path):
    start = write_start(tmp_path / "start", family)
    jobs = [job(family, start=start), *others(family)]
    trainer = bench.trainer(bench.base(family), tmp_path / "out", jobs, options=Options(capacity=512))
    trainer.run()
    assert max(len(set(one.jobs)) for run in trainer.programs for one in run.microbatches) == len(jobs)
    got = bench.trained(tmp_path / "out", "tokens", bench.adapter(start))
    assert any(DELTA in name for name in got.end)
    oracle.assert_equal_float64(got, by_peft(family, start))


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2"], ["gpt2"]))
def test_in_float32_it_is_as_near_to_float64_as_peft_is(family, tmp_path):
    start = write_start(tmp_path / "start", family)
    bench.train(bench.base(family, torch.float32), tmp_path / "out", [job(family, start=start)])
    got = bench.trained(tmp_path / "out", "tokens", bench.adapter(start))
    runs = [by_peft(family, start, torch.float32, padded) for padded in (True, False)]
    oracle.assert_equal_float32(got, *runs, by_peft(family, start))
    exact = by_peft(family, start).moved()
    (name,) = [name for name in exact if DELTA in name]
    allowed = max(((run.moved()[name] - exact[name]).norm() / exact[name].norm()).item() for run in runs)
    assert (got.moved()[name] - exact[name]).norm() <= 3 * allowed * exact[name].norm()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_it_starts_as_the_base_and_peft_loads_what_was_trained(family, tmp_path):
    held_out = samples(seed=8)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench.rows(held_out)))
    spec = job(family, eval={"path": str(tmp_path / "rows.jsonl")}, learning_rate=0.02)
    bench.train(bench.base(family), tmp_path / "out", [spec])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [one["eval_loss"] for one in lines if "eval_loss" in one]
    assert first == pytest.approx(oracle.mean_loss(tiny(family, torch.float64), held_out), rel=1e-9)
    peft = PeftModel.from_pretrained(tiny(family, torch.float64), tmp_path / "out" / "tokens").double()
    assert last == pytest.approx(oracle.mean_loss(peft.eval(), held_out), rel=1e-6)
    config = json.loads((tmp_path / "out" / "tokens" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == TOKENS
    without = shutil.copytree(tmp_path / "out" / "tokens", tmp_path / "without")
    weights = load_file(without / "adapter_model.safetensors")
    (name,) = [name for name in weights if DELTA in name]
    base_rows = tiny(family, torch.float64).get_input_embeddings().weight[torch.tensor(TOKENS)]
    assert (weights[name] - base_rows).norm() > 0.01
    save_file({**weights, name: base_rows.detach().clone()}, without / "adapter_model.safetensors")
    bare = PeftModel.from_pretrained(tiny(family, torch.float64), without).double().eval()
    assert abs(oracle.mean_loss(bare, held_out) - last) > 1e-4, "the rows must do something"


# -- among others ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    output = tmp_path_factory.mktemp("tokens") / "out"
    bench.train(bench.base("gpt2"), output, [job("gpt2"), *others("gpt2")], capacity=512)
    return output


def equal(output, other, name):
    assert bench.losses(output, name) == pytest.approx(bench.losses(other, name), rel=1e-9)
    mine, theirs = bench.adapter(output / name), bench.adapter(other / name)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (mine[key] - value).double().norm() <= 1e-8 * max(value.double().norm().item(), 1.0)


@pytest.mark.parametrize("name", ["tokens", "plain", "prompt", "fewer"])
def test_alone_it_learns_what_it_learns_among_others(name, together, tmp_path):
    (alone,) = [one for one in (job("gpt2"), *others("gpt2")) if one.name == name]
    bench.train(bench.base("gpt2"), tmp_path / "out", [alone])
    equal(tmp_path / "out", together, name)


def test_its_nan_stays_with_it(together, tmp_path):
    jobs = [job("gpt2"), *others("gpt2")]
    trainer = bench.trainer(bench.base("gpt2"), tmp_path / "out", jobs, options=Options(capacity=512))

    def spoil(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("tokens", 3):
            executor = trainer.loop.executor
            executor.banks.attached["tokens"].weights.fill_(math.nan)

    trainer.run(spoil)
    assert status(tmp_path / "out")["jobs"]["tokens"]["state"] == "failed"
    for other in ("plain", "prompt", "fewer"):
        equal(tmp_path / "out", together, other)


def test_a_microbatch_with_it_is_not_captured():
    """Its rows go in by plain torch, which a captured pass would not know of."""
    base = bench.base("llama")
    like, embedding = next(base.model.parameters()), base.model.get_input_embeddings()
    banks = Banks(base.sites(), base.shape.sites, like, embedding=embedding)
    specs = {"tokens": LoraSpec(rank=2, trainable_token_indices=(3, 5)), "plain": LoraSpec(rank=2)}
    for name, spec in specs.items():
        size = get_kind("lora").layout(spec, base.shape.sites).size
        attach(banks, base, name, spec, torch.zeros(size, dtype=base.dtype))
    samples = random_samples((4, 3))
    assert banks.is_capturable(in_one_microbatch(["plain", "stranger"], samples))
    assert not banks.is_capturable(in_one_microbatch(["plain", "tokens"], samples))


# -- however the base lies, and when killed ----------------------------------------------------------------


def test_crashed_and_resumed_it_is_the_same(together, tmp_path):
    jobs, output = [job("gpt2", save_every=2), *others("gpt2")], tmp_path / "out"

    def crash(event):
        if isinstance(event, Stepped) and (event.job, event.step) == ("tokens", 4):
            raise Crash

    with pytest.raises(Crash):
        bench.trainer(bench.base("gpt2"), output, jobs, options=Options(capacity=512)).run(crash)
    bench.train(bench.base("gpt2"), output, jobs, capacity=512, resume=True)
    equal(output, together, "tokens")


def ready_aboard(executor, family):
    data = bench.rows(samples())
    own = {"rank": 3, "trainable_token_indices": TOKENS}
    jobs = [
        prepare(executor.base, "tokens", adapter=own, data=data),
        prepare(executor.base, "plain", data=data),
    ]
    for one in jobs:
        adapter = JobAdapter(one.name, one.spec.adapter, one.spec.seed)
        base, home = executor.base, getattr(executor, "home", executor.base.device)
        frozen = base.weight_reader()
        executor.attach(new_training(adapter, one.recipe, base.shape.sites, base.dtype, home, frozen=frozen))
    return jobs


@pytest.mark.parametrize(
    ("family", "travels"),
    slow_but([("llama", False), ("llama", True), ("gemma3", False)], [("llama", True), ("gemma3", False)]),
)
def test_streamed_it_learns_the_same(family, travels):
    cut = Layout(
        tuple(StageLayers(n, n + 1, is_resident=n == 1) for n in range(LAYERS)), (2,), adapters_travel=travels
    )
    model = stream_model(deep(family, torch.float64), BaseSpec(model="tiny"), bench.CPU, cut)
    found = []
    for executor, layout in (
        (streamed_executor(model), cut),
        (resident_executor(whole_base(family, torch.float64)), one_device_layout()),
    ):
        jobs = ready_aboard(executor, family)
        _, masters = windows(executor, jobs, lambda courses, at=layout: plan_window(courses, at, CAPACITY))
        found.append(masters)
    for name, master in found[1].items():
        assert (found[0][name] - master).norm() <= 1e-8 * master.norm()


def test_where_the_head_is_tied_and_elsewhere_it_is_refused_with_the_way_out():
    cut = Layout(tuple(StageLayers(n, n + 1) for n in range(LAYERS)), (2,), adapters_travel=True)
    model = stream_model(deep("gemma3", torch.float64), BaseSpec(model="tiny"), bench.CPU, cut)
    with pytest.raises(
        AdapterError, match="shares with its head, which cannot be trained where adapters are"
    ):
        ready_aboard(streamed_executor(model), "gemma3")
    stage = cut_base(deep("gpt2", torch.float64), BaseSpec(model="tiny"), bench.CPU, LayerRange(0, 2, LAYERS))
    with pytest.raises(AdapterError, match=r"divided among workers; train it on one"):
        ready_aboard(resident_executor(stage), "gpt2")


@pytest.mark.slow
def test_in_two_stages_it_is_the_same(tmp_path, forks):
    own = {"rank": 4, "trainable_token_indices": TOKENS}
    jobs = [
        {"name": name, "steps": 6, "seed": 2, "batch_size": 3, "adapter": adapter}
        for name, adapter in (("tokens", own), ("plain", {"rank": 4}))
    ]
    place = deep_folder(tmp_path, jobs, "llama", learning_rate=2e-3)
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=place) == 0
    assert Launch(place, "stages", 2).wait() == 0
    assert_same_results(place / "stages", place / "undisturbed")


# -- DoRA and PiSSA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_beside_it_equals_peft_alone(family, tmp_path):
    torch.manual_seed(5)
    config = peft_config(family, use_dora=True)
    get_peft_model(tiny(family, torch.float64), config).save_pretrained(str(tmp_path / "start"))
    own = adapter(family, kind="dora", init_from=str(tmp_path / "start"))
    bench.train(bench.base(family), tmp_path / "out", [job(family, adapter=own), *others(family)])
    got = bench.trained(tmp_path / "out", "tokens", bench.adapter(tmp_path / "start"))
    batches, recipe = bench.batches(samples(), 3, 2, STEPS), oracle.Recipe(STEPS, 2e-3, "linear", 2)
    want = oracle.train_with_peft(tiny(family), config, tmp_path / "start", batches, recipe)
    oracle.assert_equal_float64(got, want)
    spec = replace(job(family, adapter=own).adapter, trainable_token_indices=tuple(reversed(TOKENS)))
    with pytest.raises(AdapterError, match=r"set adapter.trainable_token_indices as the folder has it"):
        get_kind("dora").check_start(spec, bench.base(family).shape.sites)


@pytest.mark.parametrize(
    ("kind", "family"),
    slow_but(product(("dora", "pissa"), ("llama", "gpt2")), [("dora", "gpt2"), ("pissa", "llama")]),
)
def test_peft_loads_other_kinds_with_it_and_a_merged_model_computes_the_same(kind, family, tmp_path):
    rows, own = samples(seed=8), adapter(family, kind=kind)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench.rows(rows)))
    first = job(family, adapter=own, eval={"path": str(tmp_path / "rows.jsonl")}, learning_rate=0.02)
    second = job(
        family, "second", adapter=own | {"init_from": {"job": "tokens"}}, steps=1, learning_rate=1e-9
    )
    bench.train(bench.base(family), tmp_path / "out", [first, second])
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    before, *_, last = [one["eval_loss"] for one in lines if "eval_loss" in one]
    assert before == pytest.approx(oracle.mean_loss(tiny(family), rows), rel=1e-9)
    merged = tiny(family)
    modules = site_modules(merged) | embedding_module(merged)
    kind_of_folder(tmp_path / "out" / "tokens").merge(
        tmp_path / "out" / "tokens", modules, model_shape(merged, merged.dtype).sites
    )
    assert oracle.mean_loss(merged, rows) == pytest.approx(last, rel=1e-6)
    for name in ("tokens", "second"):
        peft = PeftModel.from_pretrained(tiny(family), tmp_path / "out" / name).double().eval()
        assert oracle.mean_loss(peft, rows) == pytest.approx(last, rel=1e-6)


# -- its gradient, and files -------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [{}, {"softcap": 3.0, "multiplier": 0.5}, {"bias": True}])
def test_logprobs_with_rows_of_its_own_are_those_of_a_head_that_has_them(head):
    torch.manual_seed(0)
    h_SD = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    weight_VD, rows_nD = torch.randn(20, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    bias_V = torch.randn(20, dtype=torch.float64) if head.pop("bias", False) else None
    rows_nD.requires_grad_()
    ids_n, targets_S, weigh_S = torch.tensor([4, 11, 0]), torch.randint(20, (9,)), torch.randn(9).double()
    targets_S[:2] = 11

    def gradients(logprobs_S):
        return torch.autograd.grad((logprobs_S * weigh_S).sum(), (h_SD, rows_nD))

    own = HeadRows(ids_n, rows_nD)
    logprobs_S, correct_S = target_logprobs(h_SD, targets_S, Head(weight_VD, bias_V, **head), own)
    whole = Head(weight_VD.index_copy(0, ids_n, rows_nD), bias_V, **head).logits(h_SD)
    want_S = whole.log_softmax(-1).gather(1, targets_S[:, None])[:, 0]
    torch.testing.assert_close(logprobs_S, want_S, rtol=1e-12, atol=1e-12)
    assert torch.equal(correct_S, whole.argmax(-1) == targets_S)
    for got, want in zip(gradients(logprobs_S), gradients(want_S), strict=True):
        assert want.norm() > 1e-3
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_merged_into_the_base_it_computes_the_same(family, tmp_path):
    bench.train(bench.base(family), tmp_path / "out", [job(family, learning_rate=0.05)])
    folder, merged = tmp_path / "out" / "tokens", tiny(family, torch.float64)
    modules = site_modules(merged) | embedding_module(merged)
    kind_of_folder(folder).merge(folder, modules, model_shape(merged, merged.dtype).sites)
    peft = PeftModel.from_pretrained(tiny(family, torch.float64), folder).double().eval()
    tokens = torch.tensor([samples()[0][0]])
    with torch.no_grad():
        got, want = merged(input_ids=tokens).logits, peft(input_ids=tokens).logits
        plain = tiny(family, torch.float64)(input_ids=tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (want - plain).abs().max() > 1e-3
    with pytest.raises(AdapterError, match=r"trainable_token_indices.*run weftune export --merged"):
        write_portable(folder, tmp_path / "portable")


def test_another_base_or_other_tokens_are_refused(tmp_path):
    base = bench.base("llama")
    bench.train(base, tmp_path / "out", [job("llama", steps=1)])
    folder, kind = tmp_path / "out" / "tokens", get_kind("lora")
    spec = replace(job("llama").adapter, init_from=str(folder))
    kind.check_start(spec, base.shape.sites)
    with pytest.raises(AdapterError, match=r"set adapter.trainable_token_indices as the folder has it"):
        kind.check_start(replace(spec, trainable_token_indices=(7,)), base.shape.sites)
    other = JobSpec(
        name="other", data=bench.rows(samples()), adapter={**adapter("llama"), "init_from": {"job": "tokens"}}
    )
    assert check_starts([job("llama"), other], base.shape) == []
    fewer = replace(other, adapter=replace(other.adapter, trainable_token_indices=(7,)))
    (mistake,) = check_starts([job("llama"), fewer], base.shape)
    assert "tokens trains other tokens" in mistake.sentence
    with pytest.raises(
        BaseModelError, match=r"has no transformer.wte; its family keeps its embedding elsewhere"
    ):
        base.weight_reader()("transformer.wte")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = {"model.embed_tokens": TOKENS[:2]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=r"is damaged: its rows of model.embed_tokens are \[4, 32\]"):
        kind.check_start(replace(spec, trainable_token_indices=tuple(TOKENS[:2])), base.shape.sites)
    config["trainable_token_indices"] = {"lm_head": TOKENS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="names lm_head, and only those of the embedding are known"):
        kind.check_start(spec, base.shape.sites)


# -- what a job may say ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"trainable_token_indices": [3, 3]}, "trainable_token_indices[1]: names the token 3 twice"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices[0]: must be at least 0"),
        ({"trainable_token_indices": [1.5]}, "trainable_token_indices[0]: must be a whole number"),
        ({"trainable_token_indices": 7}, "must be a list of the ids of tokens such as [32000, 32001]"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "must be a list of the ids of tokens such as"),
        ({"trainable_token_indices": [True]}, "trainable_token_indices[0]: must be a whole number"),
        ({"token_indices": [1]}, "write trainable_token_indices"),
        ({"modules_to_save": ["embed_tokens"]}, "write adapter.trainable_token_indices, a list of their ids"),
        ({"kind": "ia3", "trainable_token_indices": [1]}, "is not a key of ia3 adapters"),
    ],
)
def test_what_it_may_not_say_is_answered_with_one_sentence(said, sentence):
    with pytest.raises(SpecError) as caught:
        JobSpec(name="a", data=bench.rows(samples()), adapter=said)
    (mistake,) = caught.value.mistakes
    assert sentence in str(mistake)


def test_tokens_that_the_base_has_not_are_refused_before_training():
    shape = bench.base("llama").shape
    assert check_targets([job("llama")], shape) == []
    (mistake,) = check_targets(
        [job("llama", adapter=adapter("llama") | {"trainable_token_indices": [97]})], shape
    )
    assert mistake.location.endswith("adapter.trainable_token_indices[0]")
    assert "there is no token 97: the base has tokens 0 to 96" in mistake.sentence
    (mistake,) = check_targets(
        [job("opt", adapter={"trainable_token_indices": [5]})], bench.base("opt").shape
    )
    assert "go into the first layer as they are, and the base has model.decoder.project_" in mistake.sentence
    (warning,) = [one for one in warnings([job("llama")], shape) if "vLLM" in one]
    assert "vLLM does not load trainable_token_indices" in warning
