"""`weftune export` as a user types it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from tests.base.folders import model_folder
from tests.base.quant.bases import stood_for, stored_folder
from tests.cli.test_main import weftune
from tests.families import tiny
from weftune import train
from weftune.cli.export import vllm_advice
from weftune.cli.main import app
from weftune.errors import AdapterError, BaseModelError, OutputError, UserError
from weftune.jobs.store.job_file import read_job_file, write_job_file

TOKENS = torch.arange(6, 30)[None]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two jobs trained on it from a jobs file: `narrow`, and `wide` with a rank pattern."""
    folder = tmp_path_factory.mktemp("project")
    model_folder(folder / "base")
    (folder / "rows.jsonl").write_text('{"prompt": "w10 w20", "completion": "w30 w40 w50"}\n' * 6)
    (folder / "jobs.yaml").write_text(
        "base: base\noutput: out\n"
        "defaults: {data: rows.jsonl, steps: 2, batch_size: 3, learning_rate: 0.05}\n"
        "jobs:\n- {name: narrow}\n- {name: wide, adapter: {rank: 4, rank_pattern: {q_proj: 20}}}\n"
    )
    train(folder / "jobs.yaml")
    return folder


@pytest.fixture
def job(project: Path, tmp_path: Path) -> Path:
    """The finished job `narrow`, in a copy that a test may spoil."""
    return Path(shutil.copytree(project / "out" / "narrow", tmp_path / "narrow"))


def put_on(job: Path, base: Path, **keys: str) -> None:
    """As if the job had been trained on that base."""
    found = read_job_file(job)
    assert found is not None
    write_job_file(job, {**found.values, "base": {**found.values["base"], "model": str(base), **keys}})


def export(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@torch.no_grad()
def spoken(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def with_adapter(folder: Path) -> torch.Tensor:
    return spoken(PeftModel.from_pretrained(tiny("llama", torch.float32), folder))


def test_portable_goes_beside_the_adapter_unless_told_where(job: Path, tmp_path: Path) -> None:
    assert export(job, "--portable") == (
        f"Wrote {job / 'portable'}: a PEFT adapter of rank 16, its scale folded in.\n"
    )
    export(job, "--portable", tmp_path / "deep" / "there")
    for folder in (job / "portable", tmp_path / "deep" / "there"):
        torch.testing.assert_close(with_adapter(folder), with_adapter(job), rtol=1e-5, atol=1e-5)
        assert AutoTokenizer.from_pretrained(folder).chat_template
        names = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
        assert not names & {"job.yaml", "checkpoints", "portable"}


def test_a_rank_that_vllm_takes_only_when_told_comes_with_the_flag(project: Path, tmp_path: Path) -> None:
    said = export(project / "out" / "wide", tmp_path / "portable", "--portable")
    assert "of rank 20" in said
    assert said.splitlines()[1] == "vLLM takes ranks up to 16 by default: start it with --max-lora-rank 32."
    assert "--max-lora-rank 320" in vllm_advice(257)
    assert "no rank over 512" in vllm_advice(513)


def test_merged_is_a_model_that_needs_neither_peft_nor_the_base(project: Path, tmp_path: Path) -> None:
    job, target = project / "out" / "wide", tmp_path / "merged"
    said = export(job, "--merged", target)
    assert said == (
        f"Merging {job} into base.\nWrote {target}: a whole model in float32, with its tokenizer.\n"
    )
    merged = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(spoken(merged), with_adapter(job), rtol=1e-5, atol=1e-5)
    assert (spoken(merged) - spoken(tiny("llama", torch.float32))).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert GenerationConfig.from_pretrained(target).eos_token_id == 2
    config = json.loads((target / "config.json").read_text())
    assert str(tmp_path) not in json.dumps(config)


def test_merged_keeps_the_dtype_of_the_base(project: Path, job: Path, tmp_path: Path) -> None:
    """It was trained in float32, as always on a CPU."""
    low = tmp_path / "low"
    shutil.copytree(project / "base", low)
    model = AutoModelForCausalLM.from_pretrained(low, dtype=torch.bfloat16)
    model.save_pretrained(low)
    put_on(job, low, dtype="float32")
    assert "a whole model in bfloat16" in export(job, "--merged")
    with safe_open(job / "merged" / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((job / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_merged_in_another_dtype_is_the_same_but_for_rounding(project: Path, tmp_path: Path) -> None:
    job = project / "out" / "narrow"
    export(job, "--merged", tmp_path / "wide")
    assert "a whole model in bfloat16" in export(job, "--merged", tmp_path / "low", "--dtype", "bfloat16")
    low = AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    assert low.dtype is torch.bfloat16
    # Rounded when the base is read and when the sum is written: half a last place each.
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "wide").state_dict()
    for name, value in low.state_dict().items():
        torch.testing.assert_close(value.float(), full[name], rtol=2**-8, atol=2**-8)


def test_a_base_whose_sampling_settings_transformers_will_not_save_is_merged(
    project: Path, tmp_path: Path
) -> None:
    job = project / "out" / "narrow"
    settings = project / "base" / "generation_config.json"
    before = settings.read_text()
    settings.write_text(
        json.dumps(json.loads(before) | {"temperature": 0.6, "top_p": 0.9, "do_sample": False})
    )
    try:
        export(job, "--merged", tmp_path / "merged")
    finally:
        settings.write_text(before)
    merged = GenerationConfig.from_pretrained(tmp_path / "merged")
    assert (merged.temperature, merged.top_p, merged.do_sample) == (0.6, 0.9, True)


@pytest.mark.parametrize("flags", [(), ("--portable", "--merged")])
def test_exactly_one_form_must_be_asked_for(job: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="either --portable or --merged"):
        export(job, *flags)


@pytest.mark.parametrize("words", [("--portable", "--dtype", "float16"), ("--merged", "--dtype", "int8")])
def test_a_dtype_that_makes_no_sense_is_a_sentence(job: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--dtype goes with --merged and is one of float32, bfloat16"):
        export(job, *words)


@pytest.mark.parametrize("form", ["--portable", "--merged"])
def test_what_is_there_is_never_written_over(job: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine too")
    for target, why in (("full", "is not empty"), ("file", "is a file"), ("narrow", "is not empty")):
        with pytest.raises(OutputError, match=f"{why}; name a folder that is new or empty"):
            export(job, tmp_path / target, form)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    export(job, tmp_path / "empty", form)
    assert any((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("form", ["--portable", "--merged"])
def test_a_failed_export_leaves_nothing_behind(job: Path, tmp_path: Path, form: str) -> None:
    weights = job / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="is damaged"):
        export(job, tmp_path / "target", form)
    assert list((tmp_path / "target").iterdir()) == []


def test_a_folder_that_is_no_finished_job_is_a_sentence(job: Path, tmp_path: Path) -> None:
    for form in ("--portable", "--merged"):
        with pytest.raises(AdapterError, match=r"it holds no adapter_config\.json, but folders in it do: "):
            export(tmp_path, form, tmp_path / "target")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match=r"is no adapter folder: it holds no adapter_config\.json"):
        export(tmp_path / "empty", "--portable", tmp_path / "target")
    with pytest.raises(AdapterError, match=r"is no folder of a finished job: it holds no job\.yaml"):
        export(tmp_path / "empty", "--merged", tmp_path / "target")
    (job / "adapter_config.json").unlink()
    for form in ("--portable", "--merged"):
        with pytest.raises(AdapterError, match="has not finished: there is no adapter in it yet"):
            export(job, form, tmp_path / "target")


def test_an_adapter_of_another_base_is_a_sentence(job: Path, tmp_path: Path) -> None:
    for family, why in (
        ("gpt2", "has no linear model.layers"),
        ("qwen3", "k_proj it goes from 32 to 16 features"),
    ):
        other = model_folder(tmp_path / family, family)
        put_on(job, other)
        with pytest.raises(AdapterError, match=f"is for another base: .*{why}"):
            export(job, "--merged", tmp_path / "target")


def test_a_mistake_is_one_sentence_and_exit_code_2(job: Path) -> None:
    done = weftune("export", str(job))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Say what to export: either --portable or --merged.\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "notes.txt", "adapter_model.safetensors", "job.yaml"])
@pytest.mark.parametrize("way", ["--portable", "--merged"])
def test_a_link_out_of_a_strangers_folder_is_not_followed(
    name: str, way: str, job: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((job / name).read_bytes() if (job / name).exists() else b"secret")
    (job / name).unlink(missing_ok=True)
    (job / name).symlink_to(secret)
    with pytest.raises(AdapterError, match=f"{name} is a link that leads out of its folder"):
        CliRunner().invoke(app, ["export", str(job), way], catch_exceptions=False)
    assert not (job / way.removeprefix("--")).exists()


def test_a_link_inside_the_folder_is_copied_as_what_it_leads_to(job: Path) -> None:
    (job / "tokenizer.json").rename(job / "real.json")
    (job / "tokenizer.json").symlink_to("real.json")
    export(job, "--portable")
    assert not (job / "portable" / "tokenizer.json").is_symlink()
    assert (job / "portable" / "tokenizer.json").read_bytes() == (job / "real.json").read_bytes()


def test_a_target_that_is_a_link_is_refused(job: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (job / "portable").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="portable is a link"):
        CliRunner().invoke(app, ["export", str(job), "--portable"], catch_exceptions=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that was trained on the same base in NF4, and evaluated on rows of their own."""
    folder = tmp_path_factory.mktemp("quantised")
    model_folder(folder / "base")
    rows = [
        f'{{"prompt": "w10 w{number}", "completion": "w30 w40 w5{number % 10}"}}\n' for number in range(20)
    ]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "jobs.yaml").write_text(
        "base: {model: base, quantize: nf4}\noutput: out\n"
        "defaults: {data: rows.jsonl, steps: 3, batch_size: 3, learning_rate: 0.05}\n"
        "jobs:\n- {name: a, eval: {fraction: 0.3}}\n- {name: b}\n"
    )
    train(folder / "jobs.yaml")
    return folder


def test_an_adapter_of_a_quantised_base_is_merged_into_what_its_weights_stand_for(
    quantised: Path, tmp_path: Path
) -> None:
    job = quantised / "out" / "a"
    said = export(job, "--merged", tmp_path / "merged")
    assert f"Merging {job} into the dequantised weights of base." in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    stands = PeftModel.from_pretrained(stood_for(tiny("llama", torch.float32)), job).eval()
    torch.testing.assert_close(spoken(merged), spoken(stands), rtol=1e-5, atol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert json.loads((job / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"


def test_or_into_the_original_ones_and_the_validation_loss_of_both_is_told(
    quantised: Path, tmp_path: Path
) -> None:
    job = quantised / "out" / "a"
    said = export(job, "--merged", tmp_path / "merged", "--into", "original")
    assert f"Merging {job} into the original weights of base." in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(spoken(merged), with_adapter(job), rtol=1e-5, atol=1e-5)
    lines = [json.loads(line) for line in (quantised / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["eval_loss"] for line in lines if "eval_loss" in line][-1]
    told = re.search(r"Validation loss: ([\d.]+) merged into the dequantised weights, ([\d.]+)", said)
    assert told is not None
    assert float(told[1]) == pytest.approx(trained, abs=1e-4)
    assert 1e-4 < abs(float(told[2]) - trained) < 0.3


def test_of_a_job_without_rows_to_evaluate_on_nothing_is_told(quantised: Path, tmp_path: Path) -> None:
    assert "Validation loss" not in export(quantised / "out" / "b", "--merged", tmp_path / "merged")


def test_rows_that_have_changed_since_are_not_evaluated_on(quantised: Path, tmp_path: Path) -> None:
    rows, job = quantised / "rows.jsonl", quantised / "out" / "a"
    before = rows.read_text()
    try:
        rows.write_text(before.replace("w30", "w31"))
        assert "Validation loss" not in export(job, "--merged", tmp_path / "merged")
    finally:
        rows.write_text(before)


def test_a_choice_of_weights_that_makes_no_sense_is_a_sentence(project: Path, quantised: Path) -> None:
    for words, sentence in (
        (
            (project / "out" / "narrow", "--merged", "--into", "original"),
            "base is not quantised",
        ),
        ((quantised / "out" / "a", "--merged", "--into", "half"), "is one of dequantised, original"),
        ((quantised / "out" / "a", "--portable", "--into", "original"), "--into goes with --merged"),
    ):
        with pytest.raises(UserError, match=sentence):
            CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False)


def test_a_base_that_is_stored_quantised_has_no_original(quantised: Path, tmp_path: Path) -> None:
    stored = stored_folder(tmp_path / "stored", tiny("llama", torch.bfloat16))
    job = Path(shutil.copytree(quantised / "out" / "b", tmp_path / "b"))
    put_on(job, stored)
    assert "a whole model in bfloat16" in export(job, "--merged", tmp_path / "merged")
    with pytest.raises(BaseModelError, match="is stored quantised, and what it was made of is not known"):
        CliRunner().invoke(
            app, ["export", str(job), "--merged", str(tmp_path / "x"), "--into", "original"],
            catch_exceptions=False,
        )  # fmt: skip
