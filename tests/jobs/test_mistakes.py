"""Every mistake in a jobs file: its exact place, and a sentence that names the mend."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weftune.errors import SpecError
from weftune.jobs.spec.keys import ADVICE, ANSWERED, RENAMED, SECTIONS, unknown_key
from weftune.jobs.spec.read import parse_run, read_run

HEAD = "base: demo\njobs:\n"
JOB = HEAD + "  - name: a\n    data: rows.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "no_adapter").mkdir()
    return tmp_path


def mistakes_in(folder: Path, text: str) -> list[tuple[str, str]]:
    file = folder / "jobs.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        read_run(file)
    return [(mistake.location, mistake.sentence) for mistake in caught.value.mistakes]


ONE_KEY = [
    # unknown keys, and those of others
    ("adapter: {r: 8}", "adapter.r", "write rank"),
    ("r: 8", "r", "write adapter.rank"),
    ("adapter: {lora_alpha: 8}", "adapter.lora_alpha", "write alpha"),
    ("adapter: {target_modules: [q_proj]}", "adapter.target_modules", "write targets"),
    ("adapter: {learning_rate: 1}", "adapter.learning_rate", "write learning_rate one level up"),
    ("gradient_accumulation_steps: 4", "gradient_accumulation_steps", "multiply it into batch_size"),
    ("per_device_train_batch_size: 4", "per_device_train_batch_size", "write batch_size"),
    ("num_train_epochs: 3", "num_train_epochs", "write epochs"),
    ("lr: 1", "lr", "write learning_rate"),
    ("max_grad_norm: 1", "max_grad_norm", "write clip"),
    ("sequence_len: 512", "sequence_len", "write data.max_length"),
    ("eval: {fraction: 0.1, eval_steps: 5}", "eval.eval_steps", "write every"),
    ("sample_packing: true", "sample_packing", "leave it out, Weftune always packs"),
    ("bf16: true", "bf16", "dtype: bfloat16"),
    ("base_model: x", "base_model", "write base at the top of the file"),
    ("output: x", "output", "write output at the top of the file"),
    ("batch-size: 4", "batch-size", "write batch_size"),
    ("batchsize: 4", "batchsize", "did you mean batch_size?"),
    ("adapter: {rnak: 4}", "adapter.rnak", "did you mean rank?"),
    ("zzz: 4", "zzz", "its keys are name, adapter"),
    ("eval: {fraction: 0.1, every: 1}\nearly_stop: {patience: 1, delta: 2}", "early_stop.delta", "min_delta"),
    ("eval: {fraction: 0.1, generate: {prompt: 4}}", "eval.generate.prompt", "did you mean prompts?"),
    ("eval: {fraction: 0.1, generate: {zzz: 4}}", "eval.generate.zzz", "its keys are prompts, max_new"),
    ("eval: {fraction: 0.1, generate: 8}", "eval.generate", "must be a mapping such as {prompts: 8, max_new"),
    ("eval: {fraction: 0.1, metric: exact_match}", "eval.metric", "needs generate: {prompts: 8}"),
    ("eval: {fraction: 0.1, generate: {}, metric: exact}", "eval.metric", "must be exact_match, or a Python"),
    ("eval: {fraction: 0.1, generate: {}, metric: no.py:f}", "eval.metric", 'there is no file "no.py"'),
    ("eval: {fraction: 0.1, generate: {}, metric: no.py:loss}", "eval.metric", "loss is already the name of"),
    # wrong types
    ("adapter: lora", "adapter", "{kind: lora, rank: 16}"),
    ("adapter:", "adapter", "must be a mapping such as {kind: lora, rank: 16}, got nothing"),
    ("adapter: {kind: loha}", "adapter.kind", 'prompt or prefix, got "loha"'),
    ("adapter: {kind: ia3, rank: 4}", "adapter.rank", "is not a key of ia3 adapters; leave it out"),
    ("adapter: {use_dora: true}", "adapter.use_dora", "for true write kind: dora in adapter"),
    ("adapter: {init_lora_weights: pissa}", "adapter.init_lora_weights", "for pissa write kind: pissa"),
    ("adapter: {layers: 3-1}", "adapter.layers", "'3-1' ends before it begins; write numbers"),
    ("adapter: {layers: 0-99999999999}", "adapter.layers", "goes beyond the layers of any base"),
    ("adapter: {layers: some}", "adapter.layers", "'some' is neither a number nor a range; write numbers"),
    ("adapter: {layers: []}", "adapter.layers", "must name at least one layer; for all of them leave it out"),
    ("adapter: {layers: [-1]}", "adapter.layers", "layers are counted from 0, got a list"),
    ("betas: 0.9", "betas", "must be a list of two numbers such as [0.9, 0.999], got 0.9"),
    ("betas: [0.9]", "betas", "must be a list of two numbers such as [0.9, 0.999], got a list"),
    ("betas: [0.9, 0.99, 0.999]", "betas", "must be a list of two numbers such as [0.9, 0.999], got a list"),
    ("betas: [0.9, high]", "betas[1]", 'must be a number, got "high"'),
    ("adapter: {rank: '8'}", "adapter.rank", 'must be a whole number, got "8"'),
    ("adapter: {rank: 8.5}", "adapter.rank", "must be a whole number, got 8.5"),
    ("adapter: {targets: {q: 1}}", "adapter.targets", "a list of the endings of module paths"),
    ("adapter: {targets: [q_proj, 3]}", "adapter.targets[1]", "must be text, got 3; write it in quotes"),
    ("adapter: {target_parameters: down}", "adapter.target_parameters", "a list such as [mlp.experts.gate_u"),
    ("adapter: {target_parameters: ['']}", "adapter.target_parameters[0]", "must not be empty"),
    ("adapter: {target_parameters: [x], dropout: 0.1}", "adapter.dropout", "must be 0 where target_param"),
    ("adapter: {rslora: 7}", "adapter.rslora", "must be true or false, got 7"),
    ("adapter: {rank_pattern: 4}", "adapter.rank_pattern", "a mapping from a module path's ending to a rank"),
    ("seed: true", "seed", "must be a whole number, got true"),
    ("epochs: [1]", "epochs", "must be a number, got a list"),
    ("eval: 0.1", "eval", "a mapping such as {fraction: 0.1}"),
    ("schedule: cosin", "schedule", "must be linear, cosine or constant"),
    ("objective: dpoo", "objective", "sft, dpo, cpo, orpo, kto or reward, got \"dpoo\"; did you mean dpo?"),
    ("objective: {kind: dpo, bta: 1}", "objective.bta", "is not a key of objective; did you mean beta?"),
    ("objective: {kind: orpo, cpo_alpha: 1}", "objective.cpo_alpha", "is not a key of orpo; leave it out"),
    ("objective: {beta: 1}", "objective.beta", "is not a key of sft; leave it out"),
    ("objective: [dpo]", "objective", "must be a name such as dpo"),
    ("objective: {kind: dpo, loss_type: kto}", "objective.loss_type", "sigmoid, hinge, ipo or robust"),
    (
        "objective: {kind: dpo, label_smoothing: 0.1}",
        "objective.label_smoothing",
        "is used with loss_type: robust only",
    ),
    (
        "objective: {kind: cpo, loss_type: hinge, label_smoothing: 0.1}",
        "objective.label_smoothing",
        "is used with loss_type: sigmoid or simpo only",
    ),
    ("objective: {kind: cpo, simpo_gamma: 1}", "objective.simpo_gamma", "is used with loss_type: simpo only"),
    ("beta: 0.1", "beta", "write objective.beta"),
    ("keep: bst", "keep", "did you mean best?"),
    ("early_stop: soon", "early_stop", "a number of evaluations"),
    # not finite
    ("learning_rate: .nan", "learning_rate", "must be a finite number, got nan"),
    ("learning_rate: -.inf", "learning_rate", "must be a finite number, got -inf"),
    ("learning_rate: 1e400", "learning_rate", "must be a finite number, got inf"),
    (f"weight_decay: {'9' * 400}", "weight_decay", "must be a finite number"),
    ("adapter: {alpha: .inf}", "adapter.alpha", "must be a finite number, got inf"),
    # out of range
    ("adapter: {rank: 0}", "adapter.rank", "must be at least 1, got 0"),
    ("adapter: {rank: 1000000}", "adapter.rank", "must be at most 65536, got 1000000"),
    ("adapter: {rank_pattern: {q_proj: 0}}", "adapter.rank_pattern.q_proj", "must be at least 1, got 0"),
    ("adapter: {alpha_pattern: {q_proj: -1}}", "adapter.alpha_pattern.q_proj", "must be above 0, got -1"),
    ("adapter: {dropout: 1}", "adapter.dropout", "must be below 1, got 1"),
    ("adapter: {dropout: -0.1}", "adapter.dropout", "must be at least 0, got -0.1"),
    ("learning_rate: 0", "learning_rate", "must be above 0, got 0"),
    ("epochs: 0", "epochs", "must be above 0, got 0"),
    ("steps: 0", "steps", "must be at least 1, got 0"),
    ("batch_size: 0", "batch_size", "must be at least 1, got 0"),
    ("clip: -1", "clip", "must be at least 0, got -1"),
    ("betas: [0.9, 1]", "betas[1]", "must be below 1, got 1"),
    ("betas: [-0.1, 0.9]", "betas[0]", "must be at least 0, got -0.1"),
    ("eps: 0", "eps", "must be above 0, got 0"),
    ("seed: -1", "seed", "must be at least 0, got -1"),
    ("warmup: 1.5", "warmup", "below 1 (a share of the run) or a whole number of steps, got 1.5"),
    ("save_every: 0", "save_every", "must be above 0, got 0"),
    ("eval: {fraction: 1}", "eval.fraction", "must be below 1, got 1"),
    ("eval: {fraction: 0.1, every: 2.5}", "eval.every", "a whole number of steps, got 2.5"),
    # what does not agree
    ("epochs: 1\nsteps: 2", "steps", "give epochs or steps, not both"),
    ("eval: {path: rows.jsonl, fraction: 0.1}", "eval", "give path or fraction, not both"),
    ("eval: {every: 3}", "eval", "needs path (a file of held-out rows) or fraction"),
    ("keep: best", "keep", "needs eval: {fraction: 0.1}"),
    ("early_stop: 3", "early_stop", "needs eval: {fraction: 0.1, every: 0.1}"),
    ("early_stop: 3\neval: {fraction: 0.1}", "early_stop", "needs eval.every"),
    # targets and patterns
    ("adapter: {targets: []}", "adapter.targets", "for all of them write all-linear"),
    ("adapter: {targets: [all-linear]}", "adapter.targets[0]", "write targets: all-linear, without a list"),
    ("adapter: {targets: '(q_proj'}", "adapter.targets", "is no regular expression"),
    ("adapter: {rank_pattern: {'[': 4}}", "adapter.rank_pattern.[", "is no regular expression"),
    # files
    ("adapter: {init_from: nowhere}", "adapter.init_from", 'there is no folder "nowhere"'),
    ("adapter: {init_from: no_adapter}", "adapter.init_from", "holds no adapter_config.json"),
    ("eval: {path: row.jsonl}", "eval.path", "did you mean rows.jsonl?"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "place", "sentence"), ONE_KEY, ids=[case[0] for case in ONE_KEY])
def test_one_wrong_key_is_one_mistake_at_its_place(
    folder: Path, written: str, place: str, sentence: str
) -> None:
    lines = written.split("\n")
    text = JOB + "".join(f"    {line}\n" for line in lines)
    key = re.split(r"[.\[]", place)[0]
    line = next(number for number, said in enumerate(lines, 5) if said.startswith(key))
    ((found_place, found_sentence),) = mistakes_in(folder, text)
    assert found_place == f"jobs.yaml:{line} jobs[0].{place}"
    assert sentence in found_sentence


DATA = [
    ("row.jsonl", "data", "did you mean rows.jsonl?"),
    ("data/rows.jsonl", "data", 'there is no file "data/rows.jsonl"'),
    ("../a/b/c", "data", "write a path relative to the jobs file"),
    ("''", "data", "must not be empty"),
    ("7", "data", "must be a path, a list of {path, weight}, or a mapping"),
    ("[]", "data", "must name at least one file"),
    ("{max_length: 8}", "data", "needs path"),
    ("{path: rows.jsonl, max_length: 1}", "data.max_length", "must be at least 2, got 1"),
    ("{path: rows.jsonl, limit: 0}", "data.limit", "must be at least 1, got 0"),
    ("{path: rows.jsonl, split: 3}", "data.split", "write it in quotes"),
    ("{path: rows.jsonl, format: chatml}", "data.format", "must be auto, messages"),
    ("{path: rows.jsonl, train_on: assistent}", "data.train_on", "did you mean assistant?"),
    ("{path: rows.jsonl, columns: [a]}", "data.columns", "a mapping such as {prompt: question}"),
    ("{path: rows.jsonl, chat_template: llama}", "data.chat_template", "must be chatml or a Jinja file"),
    ("{path: rows.jsonl, chat_template: x.jinja}", "data.chat_template", 'there is no file "x.jinja"'),
    ("{path: rows.jsonl, cutoff_len: 9}", "data.cutoff_len", "write max_length"),
    ("{rows: [1], path: rows.jsonl}", "data.rows", "write the rows to a file"),
    ("[{path: rows.jsonl, weight: 0}]", "data[0].weight", "must be above 0, got 0"),
    ("[{path: rows.jsonl}, {path: row.jsonl}]", "data[1].path", "did you mean rows.jsonl?"),
    ("[{path: rows.jsonl}, {weight: 2}]", "data[1]", "needs a path"),
    ("[{path: rows.jsonl, wieght: 2}]", "data[0].wieght", "did you mean weight?"),
    ("[rows.jsonl, 7]", "data[1]", "must be a mapping, got 7"),
]


@pytest.mark.parametrize(("written", "place", "sentence"), DATA, ids=[case[0] for case in DATA])
def test_a_mistake_in_data_is_told_at_its_place(
    folder: Path, written: str, place: str, sentence: str
) -> None:
    ((found_place, found_sentence),) = mistakes_in(folder, f"{HEAD}  - name: a\n    data: {written}\n")
    assert found_place == f"jobs.yaml:4 jobs[0].{place}"
    assert sentence in found_sentence


NAMES = [
    ("", "must be text, got nothing"),
    ("''", "must not be empty"),
    ("7", "must be text, got 7; write it in quotes"),
    ("a/b", "must be a plain name and no path"),
    ("'a\\b'", "must be a plain name and no path"),
    ("'..'", "must be a plain name and no path"),
    (".hidden", "must not start with a dot or a dash"),
    ("-x", "must not start with a dot or a dash"),
    ("a b", "must be made of ASCII letters, digits"),
    ("größe", "must be made of ASCII letters, digits"),
    ("end.", "not end with a dot"),
    ("x" * 65, "must have at most 64 letters, got 65"),
    ("CON", "is a reserved name"),
    ("nul.txt", "is a reserved name"),
    ("Metrics.jsonl", "is a reserved name"),
]


@pytest.mark.parametrize(("name", "sentence"), NAMES, ids=[case[0][:12] for case in NAMES])
def test_a_name_that_cannot_be_a_folder_is_refused(folder: Path, name: str, sentence: str) -> None:
    ((place, found),) = mistakes_in(folder, f"{HEAD}  - name: {name}\n    data: rows.jsonl\n")
    assert place == "jobs.yaml:3 jobs[0].name"
    assert sentence in found


FILES = [
    ("", "jobs.yaml", "must be a mapping with the keys base and jobs, but it is empty"),
    ("- a\n", "jobs.yaml:1", "must be a mapping with the keys base and jobs"),
    ("base: demo\n", "jobs.yaml:1", "needs jobs"),
    ("base: demo\njobs: []\n", "jobs.yaml:2 jobs", "a list of at least one job, got an empty list"),
    ("base: demo\njobs: {name: a}\n", "jobs.yaml:2 jobs", "a list of at least one job, got a mapping"),
    ("base: demo\njobs: [a]\n", "jobs.yaml:2 jobs[0]", "must be a mapping such as"),
    ("jobs: [{name: a, data: rows.jsonl}]\n", "jobs.yaml:1", "needs base: a Hub id"),
    (JOB + "bse: x\n", "jobs.yaml:5 bse", "did you mean base?"),
    (JOB + "learning_rate: 1\n", "jobs.yaml:5 learning_rate", "in each job, or under defaults"),
    (JOB + "output: 3\n", "jobs.yaml:5 output", "must be the path of a folder, got 3"),
    (JOB + "output: rows.jsonl\n", "jobs.yaml:5 output", "is a file; name a folder"),
    (JOB + "report_to: [wandb, comet]\n", "jobs.yaml:5 report_to[1]", "must be tensorboard, wandb or mlflow"),
    (JOB + "report_to: none\n", "jobs.yaml:5 report_to", "for none leave report_to out"),
    (JOB + "report_to: 3\n", "jobs.yaml:5 report_to", "must be a list of tensorboard"),
    (JOB + "deterministic: maybe\n", "jobs.yaml:5 deterministic", 'must be true or false, got "maybe"'),
    (JOB + "full_determinism: true\n", "jobs.yaml:5 full_determinism", "write deterministic"),
    (JOB + "defaults: 3\n", "jobs.yaml:5 defaults", "must be a mapping of a job's keys"),
    (JOB + "defaults: {name: x}\n", "jobs.yaml:5 defaults.name", "must be given in each job"),
    (JOB.replace("demo", "3"), "jobs.yaml:1 base", "must be a Hub id, a folder, a GGUF file, demo"),
    (JOB.replace("demo", "model.gguf"), "jobs.yaml:1 base", 'there is no file or folder "model.gguf"'),
    (JOB.replace("demo", "./model"), "jobs.yaml:1 base", 'there is no file or folder "./model"'),
    (JOB.replace("demo", "{dtype: float32}"), "jobs.yaml:1 base", "needs model"),
    (JOB.replace("demo", "{model: demo, dtype: bf16}"), "jobs.yaml:1 base.dtype", "must be float32, bf"),
    (JOB.replace("demo", "{model: demo, written: x}"), "jobs.yaml:1 base.written", "its keys are model"),
    (JOB + "    seed: 1\n    seed: 2\n", "jobs.yaml:6 jobs[0].seed", "is written twice, first on line 5"),
    (JOB + "    seed: !!python/name:os.system\n", "jobs.yaml:5 jobs[0].seed", "means nothing here"),
    (JOB + "\tseed: 1\n", "jobs.yaml:5", "indent with spaces"),
    (JOB + "    seed: [1\n", "jobs.yaml:6", "is not YAML"),
    (JOB + "    seed: a: b\n", "jobs.yaml:5", "put the text in quotes"),
    (JOB + "  - name: a\n    data: rows.jsonl\n", "jobs.yaml:5 jobs[1].name", "already the name of jobs[0]"),
    (JOB + "  - name: A\n    data: rows.jsonl\n", "jobs.yaml:5 jobs[1].name", "only by case"),
    (HEAD + "  - data: rows.jsonl\n", "jobs.yaml:3 jobs[0]", "needs a name"),
    (HEAD + "  - name: a\n", "jobs.yaml:3 jobs[0]", "needs data"),
    ("a: &a [*a]\n" + JOB, "jobs.yaml:1 a[0]", "an alias stands inside the thing it names"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "sentence"), FILES, ids=range(len(FILES)))
def test_a_mistake_of_the_file_is_told_at_its_place(
    folder: Path, text: str, place: str, sentence: str
) -> None:
    found = dict(mistakes_in(folder, text))
    assert place in found
    assert sentence in found[place]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(folder: Path) -> None:
    text = """\
base: {model: demo, dtype: half}
defaults:
  adapter: {rank: 0}
jobs:
  - name: a
    data: row.jsonl
    learning_rate: .nan
  - name: a
    data: rows.jsonl
    keep: best
    lora_r: 4
    seed: 1
    seed: 2
"""
    assert [place for place, _ in mistakes_in(folder, text)] == [
        "jobs.yaml:1 base.dtype",
        "jobs.yaml:3 defaults.adapter.rank",
        "jobs.yaml:6 jobs[0].data",
        "jobs.yaml:7 jobs[0].learning_rate",
        "jobs.yaml:8 jobs[1].name",
        "jobs.yaml:10 jobs[1].keep",
        "jobs.yaml:11 jobs[1].lora_r",
        "jobs.yaml:13 jobs[1].seed",
    ]


def test_a_mapping_in_memory_is_placed_without_a_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    with pytest.raises(SpecError) as caught:
        parse_run({"base": "demo", "jobs": [{"name": "a", "data": "rows.jsonl", "steps": 0}]}, tmp_path)
    assert str(caught.value) == "jobs[0].steps: must be at least 1, got 0"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("learning_rate", "[1e-4, 3e-4]", "must be a number, got a list; to try each, write sweep: {over: "
                                          "{learning_rate: [...]}}"),
        ("adapter", "{rank: [8, 16]}", "must be a whole number, got a list; to try each, write sweep: {over: "
                                       "{adapter.rank: [...]}}"),
        ("schedule", "[linear, cosine]", "must be linear, cosine or constant, got a list; to try each, write "
                                         "sweep: {over: {schedule: [...]}}"),
        ("seed", "[1, 2]", "must be a whole number, got a list"),
        ("betas", "[0.9, [1]]", "must be a number, got a list"),
    ],
)  # fmt: skip
def test_a_list_where_one_value_belongs_leads_to_sweep(
    folder: Path, key: str, value: str, sentence: str
) -> None:
    text = f"base: demo\njobs: [{{name: a, data: rows.jsonl, {key}: {value}}}]\n"
    assert [told for _, told in mistakes_in(folder, text)] == [sentence]


@pytest.mark.parametrize("key", [*RENAMED, *ANSWERED])
def test_every_foreign_key_is_answered_with_a_key_that_exists(key: str) -> None:
    target = RENAMED.get(key)
    if target is not None:
        section, _, ours = target.rpartition(".")
        assert ours in SECTIONS[section or "job"]
        assert ours in unknown_key("job", key)
    else:
        assert unknown_key("job", key) == ANSWERED[key]


def test_advice_is_given_only_for_keys_that_have_ours() -> None:
    assert set(ADVICE) <= set(RENAMED)
    assert not set(RENAMED) & set(ANSWERED)


def test_no_foreign_key_hides_one_of_ours() -> None:
    for section, known in SECTIONS.items():
        assert not set(known) & {*RENAMED, *ANSWERED}, section


def test_a_file_of_many_aliases_is_refused_before_it_fills_the_memory(folder: Path) -> None:
    layers = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    ((place, sentence),) = mistakes_in(folder, "a0: &a0 [x]\n" + layers)
    assert place == "jobs.yaml"
    assert "once aliases are followed" in sentence


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no file"):
        read_run(tmp_path / "jobs.yaml")
    with pytest.raises(SpecError, match="is a folder; name the YAML file in it"):
        read_run(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"base: caf\xe9\n")
    with pytest.raises(SpecError, match="is not UTF-8"):
        read_run(tmp_path / "latin.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 1500)
    with pytest.raises(SpecError, match="nested too deeply"):
        read_run(tmp_path / "deep.yaml")
