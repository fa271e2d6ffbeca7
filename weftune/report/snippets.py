"""Code and commands to copy: how to use a finished adapter, and how to resume an unfinished job."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftune.adapters.folder import has_scalar_head, read_config
from weftune.base.spec import BaseSpec, RopeScaling
from weftune.core.shapes import is_name_in_wrapper
from weftune.errors import AdapterError
from weftune.jobs.store.status import State, resume_line
from weftune.report.read import JobRecord, Run


@dataclass(frozen=True, slots=True)
class Remedy:
    """An action that may solve the problem of a job without a finished adapter, with the command for it."""

    description: str
    command: str


def base_spec(job: JobRecord, run: Run) -> BaseSpec | None:
    """Return the specification of the base model that the job was trained on, or None if it is not
    recorded."""
    model = job.base.get("model") or run.base
    if not model:
        return None
    own = {key: value for key, value in job.base.items() if key != "written"}
    try:
        return BaseSpec.from_record({**own, "model": model, "dtype": own.get("dtype") or run.dtype or None})
    except TypeError:
        return None


VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Allowed values of vLLM's option `--max-lora-rank`. The first one is the default."""
UNSERVED_KEYS = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "modules_to_save",
)
"""Keys of a LoRA config with which vLLM loads an adapter wrongly or not at all."""


def vllm_max_rank(rank: int) -> int | None:
    """Return the smallest value of vLLM's `--max-lora-rank` that allows a rank, or None if there is none."""
    return next((largest for largest in VLLM_RANKS if largest >= rank), None)


def vllm_rank(base: BaseSpec, folder: Path) -> int | None:
    """Return the rank of the adapter in `folder` if vLLM can load the adapter, and None if it cannot. vLLM
    cannot serve an adapter that was trained on a quantised base or with rope scaling, since vLLM would load
    another model as the base."""
    if base.quantize is not None or base.rope_scaling is not None:
        return None
    try:
        config = read_config(folder)
    except AdapterError:
        return None
    rank = int(config.get("r") or 0)
    is_served = config.get("peft_type") == "LORA" and not any(config.get(key) for key in UNSERVED_KEYS)
    return rank if is_served and vllm_max_rank(rank) is not None else None


def serve_command(run: Run) -> str | None:
    """Return the shell command with which vLLM serves all finished adapters that it can load, or None if it
    can load none."""
    found: dict[str, dict[str, int]] = {}
    for job in run.jobs:
        base = base_spec(job, run)
        if job.state != State.SUCCEEDED or job.name in run.trials or base is None:
            continue
        if (rank := vllm_rank(base, run.output / job.name)) is not None:
            found.setdefault(base.published_name, {})[job.name] = rank
    if len(found) != 1:
        return None
    ((model, ranks),) = found.items()
    folders = (f"{name}={run.output / name}" for name in ranks)
    words = ["vllm", "serve", model, "--enable-lora", "--max-lora-rank"]
    words += [str(vllm_max_rank(max(ranks.values()))), "--lora-modules", *folders]
    return shlex.join(words)


def load_snippet(base: BaseSpec, folder: Path) -> str:
    """Return Python code that loads the adapter in `folder` with PEFT onto the base of its training."""
    name = base.published_name
    arguments = [repr(name)]
    if name.endswith(".gguf"):
        file = Path(name)
        arguments = [repr(str(file.parent)), f"gguf_file={file.name!r}"]
    if base.revision:
        arguments.append(f"revision={base.revision!r}")
    located = ", ".join(arguments)
    if base.dtype:
        arguments.append(f"dtype={base.dtype!r}")
    model = "AutoModelForImageTextToText" if _is_in_wrapper(folder) else "AutoModelForCausalLM"
    if is_reward_model(folder):
        model = "AutoModelForSequenceClassification"
        arguments.append("num_labels=1")
    imports = [model, "AutoTokenizer"]
    rope_lines = []
    if base.rope_scaling is not None:
        imports.insert(0, "AutoConfig")
        rope_lines = _rope_scaling_lines(base.rope_scaling, located)
        arguments.append("config=config")
    if base.quantize == "nf4":
        imports.append("BitsAndBytesConfig")
        arguments.append("quantization_config=nf4")
    return "\n".join(
        (
            "from peft import PeftModel",
            f"from transformers import {', '.join(imports)}",
            "",
            *_quantisation_lines(base, folder),
            *rope_lines,
            f"model = {model}.from_pretrained({', '.join(arguments)})",
            f"model = PeftModel.from_pretrained(model, {str(folder)!r})",
            f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})",
        )
    )


def _rope_scaling_lines(scaling: RopeScaling, load_arguments: str) -> list[str]:
    """Return lines of Python code that load the base's config with the rope scaling that the adapter was
    trained with. The lines also work for model families whose layers have different rope parameters, where
    only full attention is scaled."""
    return [
        f"config = AutoConfig.from_pretrained({load_arguments})",
        "rope = config.get_text_config().rope_parameters",
        f'rope.get("full_attention", rope).update({scaling.values()!r})',
    ]


def _quantisation_lines(base: BaseSpec, folder: Path) -> list[str]:
    """Return lines of Python code that load a quantised base. For nf4, bitsandbytes then computes the same
    weights as in training. For formats that transformers cannot load, comments describe the difference."""
    if base.quantize is None:
        return []
    if base.quantize == "nf4":
        compute = [f"    bnb_4bit_compute_dtype={base.dtype!r},"] if base.dtype else []
        return [
            "# The adapter was trained on the base in nf4: pip install bitsandbytes",
            "# bitsandbytes may round a few weights otherwise, so that losses agree to about 0.1 %.",
            "nf4 = BitsAndBytesConfig(",
            "    load_in_4bit=True,",
            '    bnb_4bit_quant_type="nf4",',
            "    bnb_4bit_use_double_quant=True,",
            *compute,
            ")",
        ]
    return [
        f"# The adapter was trained on the base in {base.quantize}, which transformers cannot load.",
        "# The lines below load the plain base, so losses and answers differ from those reported. A model",
        "# with the weights that the adapter was trained on is written by:",
        *(f"# {line}" for line in f"weftune export --merged {shlex.quote(str(folder))}".splitlines()),
    ]


def _is_in_wrapper(folder: Path) -> bool:
    """Return whether the adapter is for the text tower of a model that also takes images."""
    try:
        targets = read_config(folder).get("target_modules")
    except AdapterError:
        return False
    return isinstance(targets, list) and any(is_name_in_wrapper(str(target)) for target in targets)


def is_reward_model(folder: Path) -> bool:
    try:
        return has_scalar_head(read_config(folder))
    except AdapterError:
        return False


def generate_command(folder: Path) -> str:
    """Return the shell command that shows the answers of the base and the adapter side by side. Empty for a
    reward model, which gives no answers."""
    if is_reward_model(folder):
        return ""
    return f'weftune generate {shlex.quote(str(folder))} "your prompt" --against-base'


def remedies(job: JobRecord, command: str | None = None) -> tuple[Remedy, ...]:
    """Return actions, with commands, that may solve the problem of an unfinished job, the best first.
    `command` is the recorded command of the run."""
    resumed, anew = resume_line(command), resume_line(command, restart=[job.name])
    if job.state == "succeeded":
        return ()
    if job.state == "cancelled":
        return (Remedy("Train it anew", anew),)
    if job.state == "failed" and _is_divergence(job.reason):
        rate = _lower_learning_rate(job.spec.get("learning_rate"))
        return (
            Remedy(
                "Go on from its last good checkpoint with a lower learning rate",
                resume_line(command, retry=[job.name], changes={"learning_rate": rate}),
            ),
            Remedy("Or change its settings in the jobs file and train it anew", anew),
        )
    if job.state == "failed":
        return (Remedy("Once the cause is mended, train it anew", anew),)
    if job.state in ("paused", "interrupted"):
        return (Remedy("Go on from its last checkpoint", resumed),)
    return (Remedy("If nothing trains it any more, resume with", resumed),)


def _is_divergence(reason: str) -> bool:
    return re.search(r"\b(nan|inf|infinite|not finite)\b", reason.lower()) is not None


def _lower_learning_rate(learning_rate: Any) -> str:
    """Return a tenth of the given learning rate, formatted for a command."""
    known = isinstance(learning_rate, int | float) and learning_rate > 0
    return f"{learning_rate / 10:g}" if known else "1e-5"
