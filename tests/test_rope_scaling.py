"""A base with rope scaling: adapters equal those of PEFT on the same positions, beyond the context that the
base was trained with, resident, streamed and in stages, and the scaling is recorded with the adapter."""

import ast
from dataclasses import replace
from itertools import product

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests import bench, oracle
from tests.base.folders import model_folder
from tests.cases import slow_but
from tests.families import CONTEXT, config, randomised, tiny, with_exact_norms
from tests.launches import Launch, deep_folder
from tests.outputs import (
    Crash,
    assert_same_job,
    assert_same_results,
    assert_whole,
    events_of,
    status,
    write_rows,
)
from tests.test_parity import spec, two_jobs
from tests.test_quantised import by_peft, loss_of
from weftune import Trainer, UserError, train
from weftune.base.load import load_plain
from weftune.base.model import Base
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.cli.generate import recorded_base
from weftune.errors import OutputError
from weftune.report.read import read_run
from weftune.report.snippets import base_spec, load_snippet
from weftune.trainer.export import evaluation_rows, write_merged

SCALINGS = {
    "linear": {"factor": 3.0},
    "yarn": {"factor": 3.0},
    "yarn by hand": {"factor": 3.0, "attention_factor": 0.8, "beta_fast": 8.0, "truncate": False,
                     "original_max_position_embeddings": 48},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip
YARN = RopeScaling(rope_type="yarn", factor=3.0)
LONG = 2 * CONTEXT + 22
"""Tokens of the longest sample, which is over the context of the tiny models."""


def scaling(name):
    return {"rope_type": name.split()[0], **SCALINGS[name]}


def folder_of(folder, family):
    randomised(config(family), torch.float64).save_pretrained(folder)
    bench.tokenizer().save_pretrained(folder)
    return folder


def scaled_base(folder, name):
    asked = BaseSpec(model=str(folder), dtype="float64", rope_scaling=RopeScaling(**scaling(name)))
    return Base.from_model(with_exact_norms(load_plain(asked, bench.CPU)), asked, bench.CPU)


def by_transformers(folder, name):
    """The same model with a config that transformers itself makes of the scaling."""
    plain = AutoConfig.from_pretrained(folder).to_dict()
    plain.pop("rope_parameters")
    made = AutoConfig.for_model(**plain, rope_scaling=scaling(name))
    model = AutoModelForCausalLM.from_pretrained(folder, config=made, dtype=torch.float64)
    return with_exact_norms(model).eval()


@pytest.mark.parametrize(
    ("name", "family"),
    slow_but(product(SCALINGS, ("llama", "qwen3")), [("yarn", "llama"), ("llama3", "qwen3")]),
)
def test_two_jobs_together_equal_solo_peft_on_scaled_positions_in_float64(family, name, tmp_path):
    settings = two_jobs(family, tmp_path)
    for index, one in enumerate(settings):
        one["samples"] = bench.samples(9, seed=index, shortest=CONTEXT // 2, longest=LONG)
        assert max(len(tokens) for tokens, _ in one["samples"]) > 1.5 * CONTEXT
    folder = folder_of(tmp_path / "model", family)
    base = scaled_base(folder, name)
    jobs = [spec(index, one) for index, one in enumerate(settings)]
    bench.train(base, tmp_path / "out", jobs, capacity=4 * LONG)
    for index, one in enumerate(settings):
        got = bench.trained(tmp_path / "out", f"job{index}", bench.adapter(one["start"]))
        oracle.assert_equal_float64(got, by_peft(by_transformers(folder, name), one))


@pytest.mark.slow
def test_the_comparison_fails_on_positions_that_are_scaled_otherwise(tmp_path):
    one = two_jobs("llama", tmp_path)[1]
    one["samples"] = bench.samples(9, shortest=CONTEXT // 2, longest=LONG)
    folder = folder_of(tmp_path / "model", "llama")
    bench.train(scaled_base(folder, "yarn"), tmp_path / "out", [spec(0, one)])
    got = bench.trained(tmp_path / "out", "job0", bench.adapter(one["start"]))
    with pytest.raises(AssertionError):
        oracle.assert_equal_float64(got, by_peft(by_transformers(folder, "yarn by hand"), one))


def test_a_crashed_run_resumes_with_no_other_rope_scaling(tmp_path):
    def base(scaling):
        return Base.from_model(tiny("llama"), BaseSpec(model="tiny", rope_scaling=scaling), bench.CPU)

    with pytest.raises(Crash):
        events_of(tmp_path / "out", base(YARN), at=14)
    with pytest.raises(OutputError, match=r"base\.rope_scaling changed"):
        events_of(tmp_path / "out", base(replace(YARN, factor=2.0)), resume=True)
    with pytest.raises(OutputError, match=r"base\.rope_scaling changed"):
        events_of(tmp_path / "out", base(None), resume=True)
    events_of(tmp_path / "out", base(YARN), resume=True)
    assert_whole(tmp_path / "out")


# -- from the command line -------------------------------------------------------------------------------

TWO_JOBS = [
    {"name": "a", "steps": 5, "adapter": {"rank": 4}, "eval": {"fraction": 0.2}},
    {"name": "b", "steps": 3, "adapter": {"rank": 3, "targets": ["q_proj"]}, "seed": 5},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a scaled base and rows beyond its own context."""
    folder = deep_folder(tmp_path_factory.mktemp("scaled"), TWO_JOBS, "llama")
    write_rows(folder / "a.jsonl", longest=LONG)
    values = yaml.safe_load((folder / "jobs.yaml").read_text())
    values["base"]["rope_scaling"] = {"type": "yarn", "factor": 3}
    values["defaults"]["data"]["max_length"] = 3 * CONTEXT
    (folder / "jobs.yaml").write_text(yaml.safe_dump(values))
    return folder


@pytest.fixture(scope="module")
def undisturbed(place, forks):
    assert forks.weftune("train", "jobs.yaml", "--output", "undisturbed", cwd=place) == 0
    assert_whole(place / "undisturbed")
    return place / "undisturbed"


@pytest.mark.slow
def test_streamed_it_trains_every_job_to_the_same(place, undisturbed, forks):
    words = ("train", "jobs.yaml", "--device", "cpu", "--output", "streamed", "--gpu-memory", "2MiB")
    assert forks.weftune(*words, cwd=place) == 0, (place / "log").read_text()
    assert "The base is streamed in" in " ".join(status(place / "streamed")["notes"])
    for job in TWO_JOBS:
        assert_same_job(place / "streamed", undisturbed, job["name"])


@pytest.mark.slow
def test_in_two_stages_it_trains_every_job_to_the_same(place, undisturbed):
    assert Launch(place, "stages", 2).wait() == 0
    assert_same_results(place / "stages", undisturbed)


def test_it_is_recorded_and_what_generate_loads_has_the_loss_that_training_reported(place, undisturbed):
    folder = undisturbed / "a"
    assert yaml.safe_load((folder / "job.yaml").read_text())["base"]["rope_scaling"] == YARN.values()
    base = recorded_base(folder)
    assert base.rope_scaling == YARN
    samples = evaluation_rows(folder, base)
    assert samples.lengths.max() > CONTEXT
    reported = status(undisturbed)["jobs"]["a"]["eval_loss"]
    model = oracle.peft_on(base, folder)
    assert loss_of(model, samples) == pytest.approx(reported, rel=1e-6)
    plain = oracle.peft_on(replace(base, rope_scaling=None), folder)
    assert loss_of(plain, samples) != pytest.approx(reported, rel=1e-5)


def test_the_snippet_of_the_report_and_the_merged_model_have_that_loss_too(place, undisturbed, tmp_path):
    folder = undisturbed / "a"
    run = read_run(undisturbed)
    base = base_spec(next(job for job in run.jobs if job.name == "a"), run)
    samples, reported = evaluation_rows(folder, base), status(undisturbed)["jobs"]["a"]["eval_loss"]
    names = {}
    snippet = load_snippet(base, folder)
    ast.parse(snippet)
    exec(snippet, names)
    assert loss_of(names["model"].eval(), samples) == pytest.approx(reported, rel=1e-6)
    write_merged(folder, recorded_base(folder), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert merged.config.max_position_embeddings == 3 * CONTEXT
    assert loss_of(merged, samples) == pytest.approx(reported, rel=1e-6)


def test_an_adapter_that_was_trained_otherwise_is_continued_with_a_warning(
    place, undisturbed, tmp_path, capsys
):
    told = []

    class View:
        def note(self, text):
            told.append(text)

        def update(self, row):
            pass

        sweep = update

    jobs = yaml.safe_load((place / "jobs.yaml").read_text())
    del jobs["base"]["rope_scaling"]
    start = {"rank": 4, "init_from": str(undisturbed / "a")}
    jobs |= {
        "jobs": [{"name": "c", "steps": 1, "adapter": start}],
        "base": {**jobs["base"], "model": str(place / "model")},
    }
    jobs["defaults"]["data"] = {"path": str(place / "a.jsonl")}
    train(jobs, output=tmp_path / "out", view=View())
    (warning,) = [text for text in told if "rope_scaling" in text]
    assert warning == (
        "warning: c: init_from was trained with rope_scaling {rope_type: yarn, factor: 3.0}, and this run "
        "has no rope_scaling; to continue from what it computes, scale the base as it was"
    )


def test_python_takes_the_mapping_and_refuses_it_in_the_same_words():
    with pytest.raises(
        UserError, match=r"base\.rope_scaling\.factr: is not a key of base\.rope_scaling; did you mean factor"
    ):
        Trainer({"model": "demo", "rope_scaling": {"rope_type": "yarn", "factr": 2}})
    made = Trainer({"model": "demo", "rope_scaling": {"rope_type": "yarn", "factor": 3}})
    assert made.spec == BaseSpec(model="demo", rope_scaling=YARN)


# -- refusals --------------------------------------------------------------------------------------------


def refused(folder, forks, base, *words, max_length=None):
    """What a command prints that refuses the jobs file with this base before anything is written."""
    values = yaml.safe_load((folder / "jobs.yaml").read_text())
    values["base"] = {"dtype": "float64", **base}
    values["defaults"]["data"] = {
        "path": "a.jsonl",
        **({} if max_length is None else {"max_length": max_length}),
    }
    (folder / "refused.yaml").write_text(yaml.safe_dump(values))
    code = forks.weftune(*words, "refused.yaml", cwd=folder)
    assert not (folder / "out").exists()
    return code, " ".join((folder / "log").read_text().split())


COMMANDS = ("train", "plan", "preview")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_max_length_over_the_context_is_refused_with_the_scaling_that_extends_it(command, place, forks):
    code, said = refused(place, forks, {"model": "model"}, command, max_length=150)
    assert code == 2
    assert "data.max_length: max_length 150 of a, b is over the base's context of 64 tokens" in said
    remedy = "write 64 or less, or extend it with `rope_scaling: {rope_type: yarn, factor: 3}` under `base:`"
    assert remedy in said


@pytest.mark.parametrize("command", slow_but(COMMANDS, ["plan"]))
def test_a_max_length_over_the_scaled_context_is_refused_with_a_larger_factor(command, place, forks):
    scaled = {"model": "model", "rope_scaling": {"rope_type": "linear", "factor": 2}}
    code, said = refused(place, forks, scaled, command, max_length=150)
    assert code == 2
    assert "150 of a, b is over the base's context of 128 tokens" in said
    assert "write 128 or less, or raise base.rope_scaling.factor to 3" in said


@pytest.mark.parametrize("command", slow_but(COMMANDS, ["preview"]))
def test_learned_positions_are_not_scaled(command, place, forks, tmp_path):
    model = str(model_folder(tmp_path / "opt", "opt", torch.float64))
    code, said = refused(place, forks, {"model": model}, command, max_length=150)
    assert code == 2
    assert "write 64 or less, or choose another base, for the positions of this one cannot be scaled" in said
    scaled = {"model": model, "rope_scaling": {"rope_type": "yarn", "factor": 3}}
    code, said = refused(place, forks, scaled, command)
    assert code == 2
    assert "(opt) has no rotary positions that can be scaled; leave it out" in said


@pytest.mark.parametrize("command", slow_but(COMMANDS, ["train"]))
def test_scaling_by_the_longest_sample_is_refused_with_the_reason(command, place, forks):
    dynamic = {"model": "model", "rope_scaling": {"rope_type": "dynamic", "factor": 3}}
    code, said = refused(place, forks, dynamic, command)
    assert code == 2
    assert (
        "base.rope_scaling.rope_type: dynamic changes the positions of all samples with the longest" in said
    )
    assert "write rope_type: yarn" in said


def test_without_a_max_length_samples_end_at_the_context(place, tmp_path):
    jobs = {"base": {"model": str(place / "model"), "dtype": "float64"}, "jobs": [
        {"name": "a", "steps": 1, "batch_size": 2, "data": str(place / "a.jsonl")}
    ]}  # fmt: skip
    train(jobs, output=tmp_path / "out", progress=False)
    notes = yaml.safe_load((tmp_path / "out" / "a" / "job.yaml").read_text())["data"]["notes"]
    assert any(f"truncated to {CONTEXT} tokens" in note for note in notes)
