"""Adapters on a quantised base: what PEFT learns on the same weights, in company, streamed and in stages."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import bench, oracle
from tests.base.quant.bases import quantised_base, stood_for, stored_folder
from tests.base.quant.emulated import emulated
from tests.cases import slow_but
from tests.families import tiny
from tests.launches import Launch, deep_folder
from tests.outputs import Crash, assert_same_job, assert_same_results, assert_whole, events_of, status
from tests.test_parity import STEPS, spec, two_jobs
from weftune import JobSpec, train
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.cli.generate import recorded_base
from weftune.errors import OutputError
from weftune.report.compare import kept_validation
from weftune.report.read import read_run
from weftune.trainer.export import evaluation_rows

TWO_JOBS = [
    {"name": "a", "steps": 8, "adapter": {"rank": 4, "dropout": 0.1}, "eval": {"fraction": 0.2, "every": 3}},
    {"name": "b", "steps": 5, "data": "b.jsonl", "adapter": {"rank": 3, "targets": ["q_proj"]}, "seed": 5},
]


def by_peft(model, s, padded=True, steps=STEPS):
    adam = {key: s[key] for key in ("betas", "eps") if key in s}
    recipe = oracle.Recipe(steps, 1e-3, s["schedule"], s["warmup"], s["wd"], **adam)
    batches = bench.batches(s["samples"], s["batch_size"], s["seed"], steps)
    return oracle.train_with_peft(model, s["config"], s["start"], batches, recipe, padded)


@pytest.mark.parametrize(
    ("family", "quantize"),
    slow_but([("llama", "nf4"), ("gpt2", "nf4"), ("opt", "int8")], [("gpt2", "nf4"), ("opt", "int8")]),
)
def test_two_jobs_together_equal_solo_peft_on_the_matrices_in_float64(family, quantize, tmp_path):
    settings = two_jobs(family, tmp_path)
    base = quantised_base(tiny(family, torch.float64), quantize)
    bench.train(base, tmp_path / "out", [spec(i, s) for i, s in enumerate(settings)], capacity=64)
    plain = stood_for(tiny(family, torch.float64), quantize)
    for index, s in enumerate(settings):
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(s["start"]))
        oracle.assert_equal_float64(got, by_peft(plain, s))


@pytest.mark.parametrize("family", slow_but(["llama", "opt"], ["llama"]))
def test_in_fp8_two_jobs_together_equal_solo_peft_on_linears_that_multiply_so_in_float64(family, tmp_path):
    settings = two_jobs(family, tmp_path)
    base = quantised_base(tiny(family, torch.float64), "fp8")
    bench.train(base, tmp_path / "out", [spec(i, s) for i, s in enumerate(settings)], capacity=64)
    plain = emulated(tiny(family, torch.float64))
    for index, s in enumerate(settings):
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(s["start"]))
        oracle.assert_equal_float64(got, by_peft(plain, s))
        with pytest.raises(AssertionError):
            oracle.assert_equal_float64(got, by_peft(stood_for(tiny(family, torch.float64), "fp8"), s))


def test_the_comparison_fails_on_the_weights_as_they_were_before(tmp_path):
    s = two_jobs("llama", tmp_path)[0]
    bench.train(quantised_base(tiny("llama", torch.float64)), tmp_path / "out", [spec(0, s)])
    got = bench.trained(tmp_path / "out", "job0", bench.adapter(s["start"]))
    with pytest.raises(AssertionError):
        oracle.assert_equal_float64(got, by_peft(tiny("llama", torch.float64), s))


def test_losses_equal_peft_on_linears_of_bitsandbytes_in_float32(tmp_path):
    """QLoRA as its users run it: a folder that bitsandbytes has stored, loaded by transformers."""
    pytest.importorskip("bitsandbytes")
    settings = two_jobs("llama", tmp_path)
    folder = stored_folder(tmp_path / "model", tiny("llama", torch.float32), theirs=True)
    base = load_base(BaseSpec(model=str(folder), dtype="float32"), bench.CPU)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    bench.train(base, tmp_path / "out", [spec(i, s) for i, s in enumerate(settings)], capacity=64)
    for index, s in enumerate(settings):
        wanted = by_peft(theirs, s)
        for mine, want in zip(bench.losses(tmp_path / "out", f"job{index}"), wanted.losses, strict=True):
            assert abs(mine - want) <= 1e-5 * max(1.0, want)


@pytest.mark.parametrize("quantize", ["nf4", "fp8"])
def test_a_nan_in_one_job_does_not_reach_the_others(quantize, tmp_path):
    jobs = [
        JobSpec(
            name=name, data=bench.rows(bench.samples(12, seed=3)), steps=6, batch_size=3,
            learning_rate=rate, clip=None, schedule="constant", adapter={"rank": 4},
        )
        for name, rate in (("calm", 1e-3), ("wild", 1e300))
    ]  # fmt: skip
    results = bench.train(quantised_base(tiny("llama", torch.float64), quantize), tmp_path / "out", jobs)
    assert results["wild"].state == "failed"
    bench.train(quantised_base(tiny("llama", torch.float64), quantize), tmp_path / "alone", jobs[:1])
    calm = [bench.losses(tmp_path / output, "calm") for output in ("out", "alone")]
    assert calm[0] == pytest.approx(calm[1], rel=1e-9)
    ends = [bench.adapter(tmp_path / output / "calm") for output in ("out", "alone")]
    assert oracle.distance(*ends) <= 1e-8


def test_a_site_without_an_adapter_keeps_no_matrix_for_the_backward(tmp_path, monkeypatch):
    base = quantised_base(tiny("llama", torch.float64))
    kept = []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    job = JobSpec(
        name="a", data=bench.rows(bench.samples(4)), steps=1, batch_size=4,
        adapter={"rank": 2, "targets": ["q_proj"]},
    )  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bench.train(base, tmp_path / "out", [job])
    assert kept
    assert not {(48, 32), (32, 48)} & set(kept), "those of the MLP"


@pytest.mark.slow
def test_crashed_and_resumed_it_goes_on_to_the_same_but_on_no_other_format(tmp_path):
    events_of(tmp_path / "want", quantised_base(tiny("llama", torch.float64)))
    with pytest.raises(Crash):
        events_of(tmp_path / "out", quantised_base(tiny("llama", torch.float64)), at=14)
    with pytest.raises(OutputError, match=r"base\.quantize changed"):
        events_of(tmp_path / "out", quantised_base(tiny("llama", torch.float64), "int8"), resume=True)
    events_of(tmp_path / "out", quantised_base(tiny("llama", torch.float64)), resume=True)
    assert_whole(tmp_path / "out")
    assert_same_results(tmp_path / "out", tmp_path / "want")


# -- as `weftune generate` loads it -----------------------------------------------------------------------

EVERY_KIND = ["lora", "dora", "pissa", "vera", "ia3", "prompt", "prefix"]


@torch.no_grad()
def loss_of(model, samples):
    """The mean loss of a supervised token; behind the virtual tokens of a prompt the first counts too."""
    losses = []
    for number in range(len(samples)):
        tokens, mask = samples.tokens_and_mask(number)
        tokens_L = torch.as_tensor(tokens.astype("int64"))
        logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1]
        told = min(len(logits_LV), len(tokens_L))
        every = torch.nn.functional.cross_entropy(
            logits_LV[-told:].float(), tokens_L[-told:], reduction="none"
        )
        losses.append(every[torch.as_tensor(mask.copy())[-told:]])
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize(
    ("quantize", "kinds"),
    slow_but([("nf4", EVERY_KIND), ("int8", ["lora", "prompt"]), ("int8", EVERY_KIND)],
             [("nf4", EVERY_KIND), ("int8", ["lora", "prompt"])]),
)  # fmt: skip
def test_what_generate_loads_has_the_loss_that_training_reported(quantize, kinds, tmp_path):
    jobs = [
        {
            "name": kind,
            "steps": 4,
            "learning_rate": 0.01,
            "adapter": {"kind": kind},
            "eval": {"fraction": 0.2},
        }
        for kind in kinds
    ]
    folder = deep_folder(tmp_path, jobs, "llama")
    file = folder / "jobs.yaml"
    file.write_text(file.read_text().replace("  dtype: float64", f"  dtype: float64\n  quantize: {quantize}"))
    train(file, output=folder / "out", progress=False)
    records = {record.name: record for record in read_run(folder / "out").jobs}
    samples = evaluation_rows(folder / "out" / "lora", recorded_base(folder / "out" / "lora"))
    for kind in kinds:
        job, reported = folder / "out" / kind, kept_validation(records[kind])
        base = recorded_base(job)
        model = oracle.peft_on(base, job)
        assert loss_of(model, samples) == pytest.approx(reported, rel=1e-6), kind
        plain = oracle.peft_on(replace(base, quantize=None), job)
        assert loss_of(plain, samples) != pytest.approx(reported, rel=1e-5), kind


# -- from the command line -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder whose base is quantised; `undisturbed` is the output of one process with all of it at hand."""
    folder = deep_folder(tmp_path_factory.mktemp("quantised"), TWO_JOBS)
    values = (folder / "jobs.yaml").read_text()
    (folder / "jobs.yaml").write_text(values.replace("  dtype: float64", "  dtype: float64\n  quantize: nf4"))
    assert "quantize: nf4" in (folder / "jobs.yaml").read_text()
    return folder


@pytest.fixture(scope="module")
def undisturbed(place, forks):
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=place) == 0
    assert_whole(place / "undisturbed")
    return place / "undisturbed"


@pytest.mark.slow
def test_it_learns_something_else_than_on_the_plain_base(place, undisturbed, tmp_path):
    plain = deep_folder(tmp_path / "plain", copy.deepcopy(TWO_JOBS))
    train(plain / "jobs.yaml", output=plain / "out", progress=False)
    mine, other = bench.losses(undisturbed, "a"), bench.losses(plain / "out", "a")
    assert 1e-4 < abs(mine[0] - other[0]) / other[0] < 0.2


@pytest.mark.slow
def test_streamed_it_trains_every_job_to_the_same(place, undisturbed, forks):
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "streamed", "--gpu-memory", "520KiB")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    told = " ".join(status(place / "streamed")["notes"])
    assert "The base is streamed in" in told
    assert_whole(place / "streamed")
    for job in TWO_JOBS:
        assert_same_job(place / "streamed", undisturbed, job["name"])


@pytest.mark.slow
def test_in_two_stages_it_trains_every_job_to_the_same(place, undisturbed):
    assert Launch(place, "stages", 2).wait() == 0
    assert_whole(place / "stages")
    assert_same_results(place / "stages", undisturbed)
