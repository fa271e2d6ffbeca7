"""The keys of jobs.yaml, and the error messages for unknown keys.

Many users know the keys of PEFT, TRL, transformers, Axolotl and LLaMA-Factory: for those, the message names
the key of Weftune.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weftune.jobs.spec.near import nearest

RUN_KEYS = ("base", "output", "report_to", "deterministic", "defaults", "jobs")
BASE_KEYS = ("model", "dtype", "revision", "quantize")
DATA_KEYS = (
    "path", "format", "columns", "split", "limit", "max_length", "train_on", "chat_template", "skip_bad_rows",
)  # fmt: skip
ADAPTER_KEYS = (
    "kind", "rank", "alpha", "dropout", "targets", "layers", "target_parameters", "rslora",
    "loraplus_lr_ratio", "rank_pattern", "alpha_pattern", "init_from", "feedforward", "d_initial",
    "projection_prng_key", "placement", "size", "activation", "sparsity", "l0_weight", "structured",
    "relaxed", "mask_lr_ratio", "num_virtual_tokens", "svd_iterations", "init", "init_text",
    "trainable_token_indices",
)  # fmt: skip
JOB_KEYS = (
    "name", "adapter", "data", "objective", "eval", "epochs", "steps", "batch_size", "learning_rate",
    "schedule", "warmup", "weight_decay", "betas", "eps", "clip", "seed", "priority", "early_stop",
    "save_every", "keep", "sweep",
)  # fmt: skip

SECTIONS: Mapping[str, Sequence[str]] = {
    "run": RUN_KEYS,
    "base": BASE_KEYS,
    "job": JOB_KEYS,
    "adapter": ADAPTER_KEYS,
    "data": DATA_KEYS,
    "source": ("path", "weight"),
    "eval": ("path", "fraction", "every"),
    "early_stop": ("patience", "min_delta"),
    "sweep": ("over", "search", "trials", "metric", "mode", "halving", "keep"),
    "halving": ("at", "keep", "judge"),
    "init_from": ("job",),
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
"""First part of a key → why all trials of a sweep share it."""

INNER = ("source", "halving", "init_from")
"""Sections inside other sections; their keys are not suggested for a key that was written elsewhere."""

RENAMED: Mapping[str, str] = {
    # PEFT
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "layers_to_transform": "adapter.layers",
    "feedforward_modules": "adapter.feedforward",
    "vera_dropout": "adapter.dropout",
    "peft_type": "adapter.kind",
    "prompt_tuning_init": "adapter.init",
    "prompt_tuning_init_text": "adapter.init_text",
    "token_indices": "adapter.trainable_token_indices",
    # TRL and transformers
    "lora_r": "adapter.rank",
    "lora_target_modules": "adapter.targets",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "num_train_epochs": "epochs",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_betas": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "max_grad_norm": "clip",
    "gradient_clipping": "clip",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "early_stopping_patience": "early_stop",
    "eval_steps": "eval.every",
    "save_steps": "save_every",
    "model_name_or_path": "run.base",
    "model_name": "run.base",
    "torch_dtype": "base.dtype",
    "model_revision": "base.revision",
    "quantization": "base.quantize",
    "quantization_config": "base.quantize",
    "quantization_bit": "base.quantize",
    "quantization_method": "base.quantize",
    "bnb_4bit_quant_type": "base.quantize",
    "load_in_4bit": "base.quantize",
    "load_in_8bit": "base.quantize",
    "output_dir": "run.output",
    "dataset_name": "data.path",
    "train_file": "data.path",
    "training_file": "data.path",
    "validation_file": "eval.path",
    "dataset_text_field": "data.columns",
    "run_name": "name",
    # Axolotl
    "base_model": "run.base",
    "sequence_len": "data.max_length",
    "micro_batch_size": "batch_size",
    "lora_target_linear": "adapter.targets",
    "lora_target_parameters": "adapter.target_parameters",
    "lora_model_dir": "adapter.init_from",
    "datasets": "data.path",
    "test_datasets": "eval.path",
    "val_set_size": "eval.fraction",
    "evals_per_epoch": "eval.every",
    "saves_per_epoch": "save_every",
    "train_on_inputs": "data.train_on",
    # LLaMA-Factory
    "lora_rank": "adapter.rank",
    "lora_target": "adapter.targets",
    "finetuning_type": "adapter.kind",
    "adapter_name_or_path": "adapter.init_from",
    "cutoff_len": "data.max_length",
    "dataset": "data.path",
    "dataset_path": "data.path",
    "dataset_dir": "data.path",
    "template": "data.chat_template",
    "max_samples": "data.limit",
    "val_size": "eval.fraction",
    "stage": "objective",
    "full_determinism": "run.deterministic",
    "use_deterministic_algorithms": "run.deterministic",
    # Sweeps of W&B, Optuna, Ray Tune and transformers
    "parameters": "sweep.over",
    "param_space": "sweep.over",
    "search_space": "sweep.over",
    "hp_space": "sweep.over",
    "sweeps": "sweep.over",
    "method": "sweep.search",
    "sampler": "sweep.search",
    "n_trials": "sweep.trials",
    "num_trials": "sweep.trials",
    "num_samples": "sweep.trials",
    "run_cap": "sweep.trials",
    "goal": "sweep.mode",
    "direction": "sweep.mode",
    "early_terminate": "sweep.halving",
    "pruner": "sweep.halving",
}
"""Foreign key → the section and name of ours; a name without a section belongs to the job."""

ADVICE: Mapping[str, str] = {
    "lora_target_linear": "for true write all-linear",
    "lora_target": "for all write all-linear",
    "prompt_tuning_init": "random, vocabulary for SAMPLE_VOCAB, or text",
    "prompt_tuning_init_text": "beside init: text",
    "per_device_train_batch_size": "the whole global batch, gradient accumulation multiplied in",
    "micro_batch_size": "the whole global batch, gradient accumulation multiplied in",
    "quantization": "nf4, int8 or fp8",
    "quantization_config": "nf4, int8 or fp8",
    "quantization_bit": "nf4 for 4, int8 or fp8 for 8",
    "quantization_method": "nf4, int8 or fp8",
    "bnb_4bit_quant_type": "nf4",
    "load_in_4bit": "nf4",
    "load_in_8bit": "int8",
    "adam_beta1": "both of them, such as [0.9, 0.999]",
    "adam_beta2": "both of them, such as [0.9, 0.999]",
    "warmup_ratio": "below 1 it is a share of the run",
    "warmup_steps": "from 1 on it counts steps",
    "train_on_inputs": "for true write all",
    "dataset_text_field": "columns: {text: your column}",
    "evals_per_epoch": "below 1 a share of the run, otherwise steps",
    "method": "grid, random, or tpe for bayes",
    "sampler": "grid, random or tpe",
    "goal": "min or max",
    "direction": "min or max",
    "early_terminate": "such as {at: [0.1, 0.3], keep: 0.33}",
    "pruner": "such as {at: [0.1, 0.3], keep: 0.33}",
    "saves_per_epoch": "below 1 a share of the run, otherwise steps",
}
"""Foreign key → advice shown beside the name of our key."""

MODULES_TO_SAVE = (
    "leave it out, only the adapter is trained; for embeddings of some tokens write "
    "adapter.trainable_token_indices, a list of their ids"
)
NEW_TOKENS = (
    "leave it out, the tokenizer stays as it is; give tokens of it that the base has not learned a meaning, "
    "and train their embeddings with adapter.trainable_token_indices"
)

ANSWERED: Mapping[str, str] = {
    "gradient_accumulation_steps": "multiply it into batch_size, which is the whole global batch",
    "per_device_eval_batch_size": "leave it out, evaluation shares the microbatches of training",
    "packing": "leave it out, Weftune always packs",
    "sample_packing": "leave it out, Weftune always packs",
    "eval_sample_packing": "leave it out, Weftune always packs",
    "pad_to_sequence_len": "leave it out, Weftune packs and never pads",
    "group_by_length": "leave it out, Weftune packs and never pads",
    "bf16": "write base: {model: ..., dtype: bfloat16} at the top of the file",
    "fp16": "write base: {model: ..., dtype: float16} at the top of the file",
    "tf32": "leave it out",
    "bnb_4bit_use_double_quant": "leave it out, nf4 always quantises twice",
    "bnb_4bit_compute_dtype": "write base: {model: ..., dtype: ...}, which all products are computed in",
    "bnb_4bit_quant_storage": "leave it out, nf4 is stored in bytes",
    "llm_int8_threshold": "leave it out, int8 has a scale a row and no outlier columns",
    "gradient_checkpointing": "leave it out, the microbatch capacity is chosen from memory",
    "flash_attention": "leave it out, attention is chosen for the device",
    "attn_implementation": "leave it out, attention is chosen for the device",
    "optim": "leave it out, the optimizer is AdamW",
    "optimizer": "leave it out, the optimizer is AdamW",
    "logging_steps": "leave it out, every step is logged",
    "save_total_limit": "leave it out, one checkpoint is kept; choose which with keep: best or last",
    "save_strategy": "write save_every, a share of the run or a number of steps",
    "eval_strategy": "write eval: {every: ...}, a share of the run or a number of steps",
    "evaluation_strategy": "write eval: {every: ...}, a share of the run or a number of steps",
    "load_best_model_at_end": "for true write keep: best",
    "resume_from_checkpoint": "leave it out and run weftune train --resume",
    "do_train": "leave it out, weftune train trains",
    "do_eval": "leave it out and write eval: {fraction: ...} or eval: {path: ...}",
    "bias": "leave it out, biases are not trained",
    "task_type": "leave it out, the base is a causal language model",
    "modules_to_save": MODULES_TO_SAVE,
    "lora_modules_to_save": MODULES_TO_SAVE,
    "tokens": NEW_TOKENS,
    "add_tokens": NEW_TOKENS,
    "new_special_tokens": NEW_TOKENS,
    "resize_vocab": NEW_TOKENS,
    "prefix_projection": "leave it out, keys and values are trained themselves",
    "encoder_hidden_size": "leave it out, keys and values are trained themselves",
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
"""Foreign key without a counterpart → what to do instead."""


def unknown_key(section: str, key: str) -> str:
    """Return the message for a key that `section` does not know; it always says how to fix it."""
    known = SECTIONS[section]
    plain = key.strip().lower().replace("-", "_")
    if plain in known:
        return f"write {plain}"
    if plain in RENAMED:
        advice = f" ({ADVICE[plain]})" if plain in ADVICE else ""
        return f"write {_way(section, RENAMED[plain])}{advice}"
    if plain in ANSWERED:
        return ANSWERED[plain]
    homes = [home for home, keys in SECTIONS.items() if home not in (*INNER, section) and plain in keys]
    if homes:
        return f"is not a key of {_title(section)}; write {_way(section, f'{homes[0]}.{plain}')}"
    near = nearest(plain, known)
    if near:
        return f"is not a key of {_title(section)}; did you mean {near}?"
    everywhere = {name: home for home, keys in SECTIONS.items() if home not in INNER for name in keys}
    near = nearest(plain, everywhere)
    if near:
        way = _way(section, f"{everywhere[near]}.{near}")
        return f"is not a key of {_title(section)}; did you mean {way}?"
    return f"is not a key of {_title(section)}; its keys are {', '.join(known)}"


def _title(section: str) -> str:
    return {"run": "the file", "job": "a job", "source": "a source of data", "halving": "sweep.halving"}.get(
        section, section
    )


def _way(section: str, target: str) -> str:
    """Return the name of `target` as seen from `section`, in which the user wrote."""
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
