"""The keys of jobs.yaml, the rules for names of jobs, and the error messages for unknown keys and invalid
names.

Many users know the keys of PEFT, TRL, transformers, Axolotl and LLaMA-Factory: for such a key, the message
names the corresponding key of Weftune.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Required, TypedDict

from weftune.adapters.kinds import KINDS, AdapterSpec
from weftune.adapters.target import FromJob
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.core.bounds import MAX_COUNT, RUN_SHARE, SEED, Bound, format_value
from weftune.data.spec import DataSpec, EvalSpec, GenerateSpec, Source
from weftune.jobs.sweeps.spec import Halving, SweepSpec
from weftune.objectives.spec import OBJECTIVES, ObjectiveSpec

CUTOFF = 0.8
"""Minimum similarity, from 0 to 1, of a suggested word to a misspelled one. The value is above 0.75, since
words of four letters that differ in one letter, such as dora and lora, may be unrelated."""
MIN_LETTERS = 3


def nearest_word(unknown_word: str, known_words: Iterable[str]) -> str | None:
    """Return the known word that `unknown_word` most likely stands for: a misspelling, a unique abbreviation
    or an anagram. Return None if there is none."""
    names = list(known_words)
    near = difflib.get_close_matches(unknown_word, names, n=1, cutoff=CUTOFF)
    if not near and len(unknown_word) >= MIN_LETTERS:
        near = [
            name for name in names if name.startswith(unknown_word) or sorted(name) == sorted(unknown_word)
        ]
    return near.pop() if len(near) == 1 else None


MAX_NAME_LETTERS = 64

DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
"""File names that are reserved on Windows, with or without a suffix."""

OUTPUT_NAMES = {
    "metrics.jsonl", "windows.jsonl", "status.json", "learned.json", "promise.json", "shares.json",
    "report.html", "ranks", "inbox", "tensorboard", "wandb", "mlruns",
}  # fmt: skip
"""Names of files and folders that Weftune writes next to the jobs' folders."""


def name_fault(name: Any) -> str | None:
    """Return the error message for a job's name, or None if it is valid."""
    if not isinstance(name, str):
        hint = "" if name is None or isinstance(name, list | tuple | dict) else "; write it in quotes"
        return f"must be text, got {format_value(name)}{hint}"
    if not name:
        return "must not be empty"
    if len(name) > MAX_NAME_LETTERS:
        return f"must have at most {MAX_NAME_LETTERS} letters, got {len(name)}"
    if "/" in name or "\\" in name or name in (".", ".."):
        return f"must be a plain name and no path, got {format_value(name)}"
    if name[0] in ".-":
        return f"must not start with a dot or a dash, got {format_value(name)}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name.endswith("."):
        shown = format_value(name)
        return f"must be made of ASCII letters, digits, . _ and - and not end with a dot, got {shown}"
    if name.lower() in OUTPUT_NAMES or name.lower().partition(".")[0] in DEVICES:
        return f"{format_value(name)} is a reserved name; choose another"
    return None


def repeated_names(names: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Yield the index of every name in `names` that an earlier job has too, with the error message."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if not isinstance(name, str):
            continue
        earlier = first.setdefault(name.lower(), index)
        if earlier == index:
            continue
        if names[earlier] == name:
            yield index, f"{format_value(name)} is already the name of jobs[{earlier}]; choose another"
        else:
            yield (
                index,
                f"{format_value(name)} differs from the name of jobs[{earlier}] only by case; choose another",
            )


Schedule = Literal["linear", "cosine", "constant"]
Keep = Literal["best", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """A rule that stops a job after `patience` evaluations in a row that did not improve the best loss by
    more than `min_delta`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    patience: Annotated[int, Bound(at_least=1, at_most=MAX_COUNT)]
    min_delta: Annotated[float, Bound(at_least=0)] = 0.0


class JobKeys(TypedDict, total=False):
    """The keyword arguments of `JobSpec`. They are the keys of a job in jobs.yaml, but rows and specs may be
    given instead of paths and mappings."""

    name: Required[str]
    adapter: AdapterSpec | Mapping[str, Any]
    data: Required[str | Path | DataSpec | Mapping[str, Any] | Sequence[Any]]
    objective: str | ObjectiveSpec | Mapping[str, Any]
    eval: EvalSpec | Mapping[str, Any] | None
    epochs: Annotated[float | None, Bound(above=0, at_most=1e9)]
    steps: Annotated[int | None, Bound(at_least=1, at_most=MAX_COUNT)]
    batch_size: Annotated[int, Bound(at_least=1, at_most=10**9)]
    learning_rate: Annotated[float, Bound(above=0)]
    schedule: Schedule
    warmup: Annotated[float, Bound(at_least=0, at_most=MAX_COUNT, allows_fraction=True)]
    weight_decay: Annotated[float, Bound(at_least=0)]
    betas: Sequence[Annotated[float, Bound(at_least=0, below=1)]]
    eps: Annotated[float, Bound(above=0, at_most=1)]
    clip: Annotated[float | None, Bound(at_least=0)]
    seed: Annotated[int, SEED]
    priority: Annotated[int, Bound(at_least=-(10**9), at_most=10**9)]
    early_stop: EarlyStop | Mapping[str, Any] | int | None
    save_every: Annotated[float | None, RUN_SHARE]
    keep: Keep


def _field_names(*records: type) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.name for record in records for item in fields(record)))


SECTIONS: Mapping[str, Sequence[str]] = {
    "run": ("base", "output", "report_to", "deterministic", "defaults", "jobs"),
    "base": tuple(name for name in _field_names(BaseSpec) if name != "written"),
    "rope_scaling": _field_names(RopeScaling),
    "job": (*JobKeys.__annotations__, "sweep"),
    # The objective decides whether a scalar head is trained.
    "adapter": tuple(name for name in _field_names(*KINDS.values()) if name != "modules_to_save"),
    "objective": _field_names(*OBJECTIVES.values()),
    "data": tuple(name for name in _field_names(DataSpec) if name != "rows"),
    "source": _field_names(Source),
    "eval": _field_names(EvalSpec),
    "generate": _field_names(GenerateSpec),
    "early_stop": _field_names(EarlyStop),
    "sweep": _field_names(SweepSpec),
    "halving": _field_names(Halving),
    "init_from": _field_names(FromJob),
}
"""Maps each section of jobs.yaml to its keys, which are the fields of the section's dataclasses."""
TITLES = {
    "run": "the file",
    "rope_scaling": "base.rope_scaling",
    "job": "a job",
    "source": "a source of data",
    "generate": "eval.generate",
    "halving": "sweep.halving",
}
SAME_FOR_ALL: Mapping[str, str] = {
    "name": "every trial is named after what sets it apart",
    "data": "trials that train on other rows cannot be compared; write a job for each",
    "eval": "losses on other held-out rows cannot be compared; write a job for each",
    "objective": "the losses of other objectives cannot be compared; write a job for each",
    "seed": "its trials would differ by chance alone; write a job for each seed",
    "priority": "it decides when a trial is trained, not what comes of it",
    "sweep": "a sweep holds no other",
}
"""Maps the first part of a dotted key to the reason why the key must have the same value in all trials of a
sweep."""


def shared_value_reason(location: Sequence[str | int]) -> str | None:
    """Return the reason why all trials of a sweep must have the same value at `location`, or None if the
    values may differ. Numbers in the section `objective`, such as `objective.beta`, may differ."""
    if location[0] == "objective" and len(location) > 1 and location[1] not in ("kind", "loss_type"):
        return None
    return SAME_FOR_ALL.get(str(location[0]))


INNER = ("source", "generate", "halving", "init_from", "rope_scaling")
"""Names of the sections of jobs.yaml that are inside other sections. Their keys are not suggested as
corrections outside these sections."""

FOREIGN: Mapping[str, str] = {
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout vera_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target_linear lora_target",
    "adapter.rslora": "use_rslora",
    "adapter.layers": "layers_to_transform",
    "adapter.feedforward": "feedforward_modules",
    "adapter.kind": "peft_type finetuning_type",
    "adapter.init": "prompt_tuning_init",
    "adapter.init_text": "prompt_tuning_init_text",
    "adapter.trainable_token_indices": "token_indices",
    "batch_size": "per_device_train_batch_size train_batch_size micro_batch_size",
    "epochs": "num_train_epochs n_epochs num_epochs",
    "steps": "max_steps",
    "learning_rate": "lr",
    "schedule": "lr_scheduler_type lr_scheduler scheduler",
    "warmup": "warmup_ratio warmup_steps",
    "betas": "adam_beta1 adam_beta2 adam_betas",
    "eps": "adam_epsilon epsilon",
    "clip": "max_grad_norm gradient_clipping",
    "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len",
    "early_stop": "early_stopping_patience",
    "eval.every": "eval_steps evals_per_epoch",
    "eval.metric": "metric_for_best_model",
    "save_every": "save_steps saves_per_epoch",
    "run.base": "model_name_or_path model_name base_model",
    "base.dtype": "torch_dtype",
    "base.revision": "model_revision",
    "base.quantize": (
        "quantization quantization_config quantization_bit quantization_method bnb_4bit_quant_type "
        "load_in_4bit load_in_8bit"
    ),
    "base.rope_scaling": "rope_parameters",
    "run.output": "output_dir",
    "data.path": "dataset_name train_file training_file datasets dataset dataset_path dataset_dir",
    "eval.path": "validation_file test_datasets",
    "data.columns": "dataset_text_field",
    "name": "run_name",
    "adapter.target_parameters": "lora_target_parameters",
    "adapter.init_from": "lora_model_dir adapter_name_or_path",
    "eval.fraction": "val_set_size val_size",
    "data.train_on": "train_on_inputs",
    "data.chat_template": "template",
    "data.limit": "max_samples",
    "objective": "stage rl",
    "objective.beta": "pref_beta rl_beta dpo_beta orpo_alpha",
    "objective.loss_type": "pref_loss dpo_loss_type",
    "objective.label_smoothing": "dpo_label_smoothing",
    "run.deterministic": "full_determinism use_deterministic_algorithms",
    "sweep.over": "parameters param_space search_space hp_space sweeps",
    "sweep.search": "method sampler",
    "sweep.trials": "n_trials num_trials num_samples run_cap",
    "sweep.mode": "goal direction",
    "sweep.halving": "early_terminate pruner",
}
"""Maps keys of jobs.yaml to their names in other tools. Keys of a section are preceded by its name."""
RENAMED = {name: ours for ours, names in FOREIGN.items() for name in names.split()}

_ADVICE: Mapping[str, str] = {
    "lora_target_linear": "for true write all-linear",
    "lora_target": "for all write all-linear",
    "prompt_tuning_init": "random, vocabulary for SAMPLE_VOCAB, or text",
    "prompt_tuning_init_text": "beside init: text",
    "per_device_train_batch_size micro_batch_size": (
        "the whole global batch, gradient accumulation multiplied in"
    ),
    "quantization quantization_config quantization_method": "nf4, int8 or fp8",
    "quantization_bit": "nf4 for 4, int8 or fp8 for 8",
    "bnb_4bit_quant_type load_in_4bit": "nf4",
    "load_in_8bit": "int8",
    "adam_beta1 adam_beta2": "both of them, such as [0.9, 0.999]",
    "warmup_ratio": "below 1 it is a share of the run",
    "warmup_steps": "from 1 on it counts steps",
    "train_on_inputs": "for true write all",
    "dataset_text_field": "columns: {text: your column}",
    "evals_per_epoch saves_per_epoch": "below 1 a share of the run, otherwise steps",
    "method": "grid, random, or tpe for bayes",
    "sampler": "grid, random or tpe",
    "goal direction": "min or max",
    "early_terminate pruner": "such as {at: [0.1, 0.3], keep: 0.33}",
}
ADVICE = {key: sentence for keys, sentence in _ADVICE.items() for key in keys.split()}
"""Maps keys of other tools that have another name in Weftune to additional advice for the error message."""

_ANSWERED: Mapping[str, str] = {
    "gradient_accumulation_steps": "multiply it into batch_size, which is the whole global batch",
    "per_device_eval_batch_size": "leave it out, evaluation shares the microbatches of training",
    "packing sample_packing eval_sample_packing": "leave it out, Weftune always packs",
    "pad_to_sequence_len group_by_length": "leave it out, Weftune packs and never pads",
    "bf16": "write base: {model: ..., dtype: bfloat16} at the top of the file",
    "fp16": "write base: {model: ..., dtype: float16} at the top of the file",
    "tf32": "leave it out",
    "partial_rotary_factor": "leave it out, the base's own is kept",
    "bnb_4bit_use_double_quant": "leave it out, nf4 always quantises twice",
    "bnb_4bit_compute_dtype": "write base: {model: ..., dtype: ...}, which all products are computed in",
    "bnb_4bit_quant_storage": "leave it out, nf4 is stored in bytes",
    "llm_int8_threshold": "leave it out, int8 has a scale a row and no outlier columns",
    "gradient_checkpointing": "leave it out, the microbatch capacity is chosen from memory",
    "flash_attention attn_implementation": "leave it out, attention is chosen for the device",
    "optim optimizer": "leave it out, the optimizer is AdamW",
    "logging_steps": "leave it out, every step is logged",
    "save_total_limit": "leave it out, one checkpoint is kept; choose which with keep: best or last",
    "save_strategy": "write save_every, a share of the run or a number of steps",
    "eval_strategy evaluation_strategy": "write eval: {every: ...}, a share of the run or a number of steps",
    "load_best_model_at_end": "for true write keep: best",
    "resume_from_checkpoint": "leave it out and run weftune train --resume",
    "do_train": "leave it out, weftune train trains",
    "do_eval": "leave it out and write eval: {fraction: ...} or eval: {path: ...}",
    "bias": "leave it out, biases are not trained",
    "task_type": "leave it out, the base is a causal language model",
    "modules_to_save lora_modules_to_save": (
        "leave it out, only the adapter is trained; for embeddings of some tokens write "
        "adapter.trainable_token_indices, a list of their ids"
    ),
    "tokens add_tokens new_special_tokens resize_vocab": (
        "leave it out, the tokenizer stays as it is; give tokens of it that the base has not learned a "
        "meaning, and train their embeddings with adapter.trainable_token_indices"
    ),
    "prefix_projection encoder_hidden_size": "leave it out, keys and values are trained themselves",
    "token_dim": "leave it out, it is the base's",
    "use_dora": "for true write kind: dora in adapter",
    "init_lora_weights": "leave it out; for pissa write kind: pissa in adapter, for a niter svd_iterations",
    "trust_remote_code": "leave it out, code from a model's folder is never run",
    "deepspeed": "leave it out, one process trains all jobs",
    "wandb_project": "write report_to: [wandb] at the top of the file",
    "device": "give it on the command line: weftune train --device",
    "distribution": "write {min: ..., max: ...}, and log: true for log_uniform",
    "values": "write the list itself, key: [...]",
    "special_tokens": "leave it out, the tokenizer's own are used",
}
ANSWERED = {key: sentence for keys, sentence in _ANSWERED.items() for key in keys.split()}
"""Maps keys of other tools that have no counterpart in Weftune to advice on what to do instead."""


def unknown_key(section: str, key: str) -> str:
    """Return the error message for an unknown key of `section`. The message always says how to correct it."""
    known, title = SECTIONS[section], TITLES.get(section, section)
    plain = key.strip().lower().replace("-", "_")
    if plain in known:
        return f"write {plain}"
    if plain in RENAMED:
        advice = f" ({ADVICE[plain]})" if plain in ADVICE else ""
        return f"write {_relative_name(section, RENAMED[plain])}{advice}"
    if plain in ANSWERED:
        return ANSWERED[plain]
    homes = [home for home, keys in SECTIONS.items() if home not in (*INNER, section) and plain in keys]
    if homes:
        return f"is not a key of {title}; write {_relative_name(section, f'{homes[0]}.{plain}')}"
    near = nearest_word(plain, known)
    if near:
        return f"is not a key of {title}; did you mean {near}?"
    skipped = (*INNER, "objective")
    everywhere = {name: home for home, keys in SECTIONS.items() if home not in skipped for name in keys}
    near = nearest_word(plain, everywhere)
    if near:
        name = _relative_name(section, f"{everywhere[near]}.{near}")
        return f"is not a key of {title}; did you mean {name}?"
    return f"is not a key of {title}; its keys are {', '.join(known)}"


def _relative_name(section: str, target: str) -> str:
    """Return the dotted key `target` relative to `section`."""
    home, _, key = target.rpartition(".")
    home = home or "job"
    if home == section:
        return key
    if home == "run":
        return f"{key} at the top of the file, beside jobs"
    if home == "base":
        return f"base.{key} at the top of the file, beside jobs"
    name = key if home == "job" else f"{home}.{key}"
    if section in ("run", "base") and home == "sweep":
        return f"{name} in a job"
    if section in ("run", "base"):
        return f"{name} in each job, or under defaults"
    return name if section == "job" or home != "job" else f"{name} one level up, beside {section}"
