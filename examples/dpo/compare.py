"""Trains the DPO job of jobs.yaml with Weftune and with TRL, from one adapter, on the same batches.

It needs `pip install trl==1.16.0`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from weftune import JobSpec, train
from weftune.base.load import demo_folder, load_tokenizer
from weftune.data.samples import SampleOrder
from weftune.errors import UserError
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import RunSpec

HERE = Path(__file__).parent
TRL = "1.16.0"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trainer reports for the held-out pairs, and how long it took from loading the base on."""

    loss: float
    accuracy: float
    margin: float
    seconds: float


def read_job(seed: int) -> tuple[RunSpec, JobSpec]:
    """Return the run of jobs.yaml and its DPO job with another seed."""
    run = read_run(HERE / "jobs.yaml")
    (job,) = (job for job in run.jobs if job.objective.kind == "dpo")
    return run, replace(job, seed=seed)


def load_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)


def write_start(job: JobSpec, folder: Path) -> None:
    """Write the adapter with which both trainers begin."""
    torch.manual_seed(job.seed)
    adapter: Any = job.adapter
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules="all-linear")
    get_peft_model(load_model(), config).save_pretrained(folder)


def train_with_weftune(run: RunSpec, job: JobSpec, start: Path, output: Path) -> Outcome:
    begun = time.perf_counter()
    job = replace(job, adapter=replace(job.adapter, init_from=str(start)))
    result = train(replace(run, jobs=(job,)), output=output, progress=False)[job.name]
    if result.state != "succeeded":
        raise UserError(f"{job.name} has not finished: {result.reason}")
    last_evaluation = read_rows(output / "metrics.jsonl")[-1]
    return outcome_of(last_evaluation, begun)


def train_with_trl(job: JobSpec, start: Path, output: Path) -> Outcome:
    import trl
    from datasets import Dataset

    begun = time.perf_counter()
    rows, held_out = (read_rows(path) for path in (job.data.path, job.eval.path))
    order = SampleOrder(len(rows), job.batch_size, job.seed)
    in_order = [rows[index] for step in range(1, job.steps + 1) for index in order.batch(step)]
    trainer = trl.DPOTrainer(
        PeftModel.from_pretrained(load_model(), start, is_trainable=True),
        args=trl.DPOConfig(
            output_dir=str(output), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_steps=job.steps, per_device_train_batch_size=job.batch_size, per_device_eval_batch_size=4,
            train_sampling_strategy="sequential", gradient_checkpointing=False, disable_tqdm=True,
            learning_rate=job.learning_rate, lr_scheduler_type=job.schedule, warmup_steps=0,
            weight_decay=job.weight_decay, max_grad_norm=job.clip, max_length=job.data.max_length,
            beta=job.objective.beta, loss_type=job.objective.loss_type,
        ),
        train_dataset=Dataset.from_list(in_order),
        eval_dataset=Dataset.from_list(held_out),
        processing_class=load_tokenizer(read_run(HERE / "jobs.yaml").base),
    )  # fmt: skip
    trainer.train()
    return outcome_of(trainer.evaluate(), begun)


def outcome_of(metrics: dict[str, Any], begun: float) -> Outcome:
    """Return the metrics of an evaluation, whose names are the same with both."""
    names = ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins")
    return Outcome(*(metrics[name] for name in names), time.perf_counter() - begun)


def read_rows(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def compare(seed: int, output: Path) -> dict[str, Outcome]:
    """Train with both, one after the other."""
    run, job = read_job(seed)
    start = output / "start"
    write_start(job, start)
    return {
        "Weftune": train_with_weftune(run, job, start, output / "weftune"),
        "TRL": train_with_trl(job, start, output / "trl"),
    }


def outcome_table(outcomes: dict[str, Outcome]) -> Table:
    table = Table("", *("held-out loss", "accuracy", "margin", "seconds"))
    table.add_row("before", f"{math.log(2):.5f}", "", "", "")
    for name, one in outcomes.items():
        cells = (f"{one.loss:.5f}", f"{one.accuracy:.1%}", f"{one.margin:.4f}", f"{one.seconds:.0f}")
        table.add_row(name, *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "../../output/dpo-compare")
    arguments = parser.parse_args()
    outcomes = compare(arguments.seed, arguments.output / f"seed{arguments.seed}")
    Console().print(outcome_table(outcomes))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
