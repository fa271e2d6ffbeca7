"""A comparison of quality: four jobs trained together in bfloat16 on the GPU, and each alone in PEFT in
float32. Both start from the same adapters and see the same batches. The final validation losses are compared.

python -m benchmarks.gpu_quality [--model FOLDER] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from weftune import JobSpec, Options, Trainer
from weftune.base.load import inspect, load_plain, load_tokenizer
from weftune.base.spec import BaseSpec, Dtype
from weftune.bench.result import arguments, finish
from weftune.bench.table import aligned, number
from weftune.bench.timing import bench_hardware
from weftune.core.batch import IGNORED
from weftune.data.samples import Samples
from weftune.run.training.schedule import learning_rate
from weftune.trainer.job import PreparedJob, prepare_job

SHARED = Path(__file__).parents[3] / "shared"
MODEL = Path(os.environ.get("WEFTUNE_STORIES", SHARED / "models" / "stories15m"))
TEXTS = Path(__file__).parent / "texts"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALLOWED = 0.005
BATCH = 8


@dataclass(frozen=True, slots=True)
class QualityCase:
    name: str
    texts: str
    rank: int
    targets: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, slots=True)
class Losses:
    """The final validation loss of every job, with PEFT and with Weftune."""

    peft: dict[str, float]
    weftune: dict[str, float]

    def relative_difference(self, job: str) -> float:
        return self.weftune[job] / self.peft[job] - 1


CASES = (
    QualityCase("arithmetic", "gsm8k", 8),
    QualityCase("arithmetic-wide", "gsm8k", 32),
    QualityCase("science", "openbookqa", 8),
    QualityCase("science-attention", "openbookqa", 16, ATTENTION),
)


def write_texts(folder: Path, name: str, toy: bool) -> None:
    """Write the quickstart's conversations as plain texts, since the base is not a chat model.

    With `toy`, the texts are few and short.
    """
    lines_kept, letters_kept = (8, 80) if toy else (None, None)
    for file in (f"{name}.jsonl", f"{name}_held_out.jsonl"):
        lines = (TEXTS / file).read_text().splitlines()[:lines_kept]
        turns = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
        rows = [json.dumps({"text": "\n".join(contents)[:letters_kept]}) for contents in turns]
        (folder / file).write_text("\n".join(rows) + "\n")


def write_start(folder: Path, model: PreTrainedModel, case: QualityCase, seed: int) -> Path:
    """Write an adapter with the weights that PEFT initialises, from which both tools start, and return its
    folder."""
    torch.manual_seed(seed)
    targets = case.targets if isinstance(case.targets, str) else list(case.targets)
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=targets, task_type="CAUSAL_LM")
    made = get_peft_model(model, config)
    made.save_pretrained(str(folder / f"start-{case.name}"))
    made.unload()
    return folder / f"start-{case.name}"


def quality_job(case: QualityCase, folder: Path, start: Path, steps: int, seed: int) -> JobSpec:
    return JobSpec(
        name=case.name,
        data=str(folder / f"{case.texts}.jsonl"),
        eval={"path": str(folder / f"{case.texts}_held_out.jsonl")},
        adapter={
            "rank": case.rank,
            "alpha": 2 * case.rank,
            "targets": case.targets,
            "init_from": str(start),
        },
        steps=steps,
        batch_size=BATCH,
        learning_rate=1e-3,
        warmup=0.1,
        seed=seed,
    )


def train_with_weftune(
    base: BaseSpec, jobs: Iterable[JobSpec], device: torch.device, folder: Path
) -> dict[str, float]:
    """Train all jobs together with Weftune and return the final validation loss of each."""
    trainer = Trainer(base, output=folder / "output", options=Options(device=str(device)))
    for job in jobs:
        trainer.add(job)
    results = trainer.run()
    assert all(result.state == "succeeded" for result in results.values()), results
    return {name: result.metrics["eval_loss"] for name, result in results.items()}


def train_with_peft(model: PreTrainedModel, job: PreparedJob) -> float:
    """Train a job alone in PEFT, with the batches and learning rates that Weftune uses, and return its final
    validation loss."""
    start = job.spec.adapter.init_from
    assert isinstance(start, str)
    peft_model = PeftModel.from_pretrained(model, start, is_trainable=True)
    trainable = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.recipe.learning_rate, weight_decay=0.0)
    for step in range(1, job.recipe.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(job.recipe, step)
        batch = padded_batch(job.data.train, job.sample_order.batch(step).tolist(), model.device)
        loss, supervised = loss_sum(peft_model, batch)
        (loss / supervised).backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert job.data.evaluation is not None
    measured = validation_loss(peft_model, job.data.evaluation, model.device)
    peft_model.unload()
    return measured


@torch.no_grad()
def validation_loss(model: Any, samples: Samples, device: torch.device) -> float:
    total = supervised = 0.0
    for indices in chunks(len(samples), BATCH):
        loss, count = loss_sum(model, padded_batch(samples, indices, device))
        total, supervised = total + loss.item(), supervised + count
    return total / supervised


def chunks(count: int, size: int) -> Iterator[list[int]]:
    for first in range(0, count, size):
        yield list(range(first, min(first + size, count)))


def loss_sum(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, int]:
    ids, present, labels = batch
    logits = model(input_ids=ids, attention_mask=present, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss, int((targets != IGNORED).sum())


def padded_batch(samples: Samples, indices: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros(len(indices), int(samples.lengths[indices].max()), dtype=torch.long)
    present, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, index in enumerate(indices):
        tokens = torch.from_numpy(samples.tokens(index).copy()).long()
        mask = torch.from_numpy(samples.mask(index).copy())
        ids[row, : len(tokens)], present[row, : len(tokens)] = tokens, 1
        labels[row, : len(tokens)] = torch.where(mask, tokens, IGNORED)
    return ids.to(device), present.to(device), labels.to(device)


def compare(model: Path, dtype: Dtype, device: torch.device, steps: int, toy: bool) -> Losses:
    """Train every job alone in PEFT in float32, then all together in Weftune in `dtype`."""
    base, exact = BaseSpec(model=str(model), dtype=dtype), BaseSpec(model=str(model), dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = load_plain(exact, device)
        for texts in {case.texts for case in CASES}:
            write_texts(folder, texts, toy)
        jobs = [
            quality_job(case, folder, write_start(folder, plain, case, seed), steps, seed)
            for seed, case in enumerate(CASES)
        ]
        tokenizer, shape = load_tokenizer(base), inspect(base, device)
        ready = [prepare_job(job, 0, tokenizer, shape, folder / "tokens") for job in jobs]
        alone = {job.name: train_with_peft(plain, job) for job in ready}
        return Losses(alone, train_with_weftune(base, jobs, device, folder))


def main() -> None:
    parser = quality_arguments()
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    if not options.model.is_dir():
        parser.error(f"--model: there is no folder {options.model}")
    dtype: Dtype = "float32" if options.toy else "bfloat16"
    steps = 2 if options.toy else options.steps
    losses = compare(options.model, dtype, hardware.device, steps, options.toy)
    print(f"{options.model.name}, {steps} steps of {BATCH} samples; allowed: {ALLOWED:.1%}\n")
    print(table(losses, dtype))
    apart = {job: losses.relative_difference(job) for job in losses.peft}
    worst = max(map(abs, apart.values()))
    finish(
        {
            "steps": steps,
            "dtype": dtype,
            "peft": losses.peft,
            "weftune": losses.weftune,
            "apart": apart,
            "allowed": ALLOWED,
            "verdict": f"validation losses within {worst:.2%} of float32 PEFT",
        },
        options.json,
    )


def table(losses: Losses, dtype: str) -> str:
    def row(job: str) -> tuple[str, str, str, str]:
        apart = losses.relative_difference(job)
        verdict = "" if abs(apart) <= ALLOWED else "too far"
        alone, together = number(losses.peft[job], ".4f"), number(losses.weftune[job], ".4f")
        return job, alone, together, f"{apart:+.3%} {verdict}".strip()

    titles = ("validation loss", "PEFT float32", f"Weftune {dtype}", "")
    return aligned(titles, [row(job) for job in losses.peft])


def quality_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with a small model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--toy", action="store_true", help="a few steps on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
