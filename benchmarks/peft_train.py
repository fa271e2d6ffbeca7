"""PEFT as a process: one job after another on one base, from the first import to the last saved adapter.

Plain is what most people run: batches padded to their longest sample, PEFT's default float32 adapters. Strong
is as fast as PEFT gets without another model code: the samples of a batch end to end in one row without
padding, kept apart by positions that begin anew; Liger's kernels; adapters in the base's dtype. Only the rows
that are trained on are tokenised. Nothing is compiled by torch: lengths change with every batch.

    python -m benchmarks.peft_train TASK.json RESULT.json

Shapes: B samples, L tokens of the longest, T tokens of all.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weftune.core.clock import Phase, count_imports, phase, process_clock, use_clock

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100


@dataclass(frozen=True, slots=True)
class PeftJob:
    name: str
    data: str
    batches: list[list[int]]
    """For each step the rows of the file."""


@dataclass(frozen=True, slots=True)
class PeftTask:
    model: str
    device: str
    dtype: str
    output: str
    strong: bool
    rank: int
    jobs: list[PeftJob]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample."""

    tokens: list[int]
    labels: list[int]


def read_task(path: Path) -> PeftTask:
    values = json.loads(path.read_text())
    return PeftTask(**{**values, "jobs": [PeftJob(**job) for job in values["jobs"]]})


def main() -> None:
    with use_clock(process_clock()) as clock:
        task = read_task(Path(sys.argv[1]))
        with count_imports():
            import torch
            import transformers  # noqa: F401
            from peft import get_peft_model  # noqa: F401
        note = apply_liger(task) if task.strong else ""
        tokens = train(task)
        peak = torch.cuda.max_memory_allocated() if task.device != "cpu" else None
        wall = clock.read()
        found = {"phases": wall.phases, "tokens": tokens, "peak_bytes": peak, "note": note}
    Path(sys.argv[2]).write_text(json.dumps(found))


def apply_liger(task: PeftTask) -> str:
    """Change transformers' classes before the model is built; why not, where it cannot be."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "without Liger, which is not installed"
    if task.device == "cpu":
        return "without Liger, which needs a GPU"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = json.loads((Path(task.model) / "config.json").read_text())["model_type"]
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"without Liger, which has no kernels for {kind}"
    MODEL_TYPE_TO_APPLY_LIGER_FN[kind]()
    return ""


def train(task: PeftTask) -> int:
    """All jobs; the tokens that were trained on."""
    from transformers import AutoTokenizer

    with phase(Phase.LOADING):
        tokenizer = AutoTokenizer.from_pretrained(task.model)
        model = load_base(task.model, task.device, task.dtype, attention(task))
    return sum(train_job(task, job, model, tokenizer) for job in task.jobs)


def load_base(model: str, device: str, dtype: str, attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), device_map={"": device}, attn_implementation=attention
    )
    base.config.use_cache = False
    return base


def attention(task: PeftTask) -> str:
    """Flash attention takes samples end to end as they are; SDPA is given a mask of blocks."""
    flash = task.strong and task.device != "cpu" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if flash else "sdpa"


def lora_config(rank: int, alpha: float) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, task_type="CAUSAL_LM")


def train_job(task: PeftTask, job: PeftJob, model: Any, tokenizer: Any) -> int:
    import torch
    from peft import get_peft_model

    with phase(Phase.TRAINING):
        config = lora_config(task.rank, 2 * task.rank)
        adapted = get_peft_model(model, config, autocast_adapter_dtype=not task.strong).train()
        trained = [one for one in adapted.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
        tokens = 0
        for samples in batches(job, tokenizer):
            tokens += sum(len(one.tokens) for one in samples)
            compute_gradients(adapted, samples, task)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if task.device != "cpu":
            torch.cuda.synchronize()
    with phase(Phase.EXPORT):
        adapted.save_pretrained(Path(task.output) / job.name)
        tokenizer.save_pretrained(Path(task.output) / job.name)
        adapted.unload()
    return tokens


def compute_gradients(model: Any, samples: Sequence[Encoded], task: PeftTask, parts: int = 1) -> None:
    """Of the mean over all supervised tokens; where a batch does not fit, accumulated over parts of it, as a
    user would."""
    import torch

    lay_out = packed if task.strong else padded
    size, whole = -(-len(samples) // parts), supervised_tokens(samples)
    try:
        for start in range(0, len(samples), size):
            some = samples[start : start + size]
            loss = model(**lay_out(some, task.device)).loss
            (loss * (supervised_tokens(some) / whole)).backward()
        return
    except torch.OutOfMemoryError:
        if size == 1:
            raise
    # Here, where nothing holds on to what did not fit.
    model.zero_grad()
    torch.cuda.empty_cache()
    compute_gradients(model, samples, task, 2 * parts)


def supervised_tokens(samples: Sequence[Encoded]) -> int:
    return sum(label != IGNORED for one in samples for label in one.labels[1:])


def batches(job: PeftJob, tokenizer: Any) -> Iterator[list[Encoded]]:
    with phase(Phase.TOKENISING):
        rows = [json.loads(line) for line in Path(job.data).read_text().split("\n") if line]
    for chosen in job.batches:
        with phase(Phase.TOKENISING):
            made = [encoded(rows[row], tokenizer) for row in chosen]
        yield made


def encoded(row: Mapping[str, Any], tokenizer: Any) -> Encoded:
    """The chat as its template prints it; the last message is supervised."""
    messages = row["messages"]
    whole, prompt = (
        tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=asks)
        for some, asks in ((messages, False), (messages[:-1], True))
    )
    tokens, before = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, prompt))
    known = min(len(before), len(tokens) - 1)
    return Encoded(tokens, [IGNORED] * known + tokens[known:])


def padded(samples: Sequence[Encoded], device: str) -> dict[str, Any]:
    import torch

    longest = max(len(one.tokens) for one in samples)
    shape = len(samples), longest
    ids_BL, present_BL = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    labels_BL = torch.full(shape, IGNORED)
    for at, one in enumerate(samples):
        ids_BL[at, : len(one.tokens)] = torch.tensor(one.tokens)
        labels_BL[at, : len(one.tokens)] = torch.tensor(one.labels)
        present_BL[at, : len(one.tokens)] = 1
    made = {"input_ids": ids_BL, "attention_mask": present_BL, "labels": labels_BL}
    return {name: value.to(device) for name, value in made.items()}


def packed(samples: Sequence[Encoded], device: str) -> dict[str, Any]:
    import torch

    def row(lists: Iterator[Sequence[int]]) -> Any:
        return torch.tensor([value for values in lists for value in values], device=device)[None]

    # The first token of a sample is not what follows the last one of the sample before it.
    return {
        "input_ids": row(one.tokens for one in samples),
        "position_ids": row(range(len(one.tokens)) for one in samples),
        "labels": row([IGNORED, *one.labels[1:]] for one in samples),
    }


if __name__ == "__main__":
    main()
