"""The quickstart's jobs in Weftune together, in Weftune one after another, and in PEFT one after another.

Seconds are wall time of all training, without evaluation; Weftune's include its checkpoints, exports and
reports, PEFT's are the bare training loop. The base is loaded once and not timed, and tokenising neither.
PEFT pads its batches to their longest sample. Useful tokens are those of the samples, padding not counted.

    python -m benchmarks.cpu_quickstart [--steps N] [--batch-size N] [--json FILE]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from weftune.base.load import load_base, load_plain, load_tokenizer
from weftune.base.model import Base
from weftune.bench.result import arguments, finish
from weftune.core.paths import cache_folder
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import JobSpec, RunSpec
from weftune.run.training.schedule import learning_rate
from weftune.trainer.job import Ready, make_ready
from weftune.trainer.trainer import Trainer

JOBS = Path(__file__).parent.parent / "examples" / "quickstart" / "jobs.yaml"
CPU = torch.device("cpu")


def with_weftune(base: Base, run: RunSpec, groups: Sequence[Sequence[JobSpec]]) -> float:
    """Seconds to train each group, one group after another."""
    tokenizer = load_tokenizer(run.base)
    began = time.perf_counter()
    for group in groups:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(base, output=Path(folder) / "out", tokenizer=tokenizer)
            for job in group:
                trainer.add(job)
            results = trainer.run()
            assert all(result.state == "succeeded" for result in results.values())
    return time.perf_counter() - began


def with_peft(model: PreTrainedModel, jobs: Sequence[Ready]) -> float:
    return sum(_one_with_peft(model, job) for job in jobs)


def _one_with_peft(model: PreTrainedModel, job: Ready) -> float:
    spec = job.spec.adapter
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=int(spec.alpha),
        lora_dropout=spec.dropout,
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        task_type="CAUSAL_LM",
    )
    peft_model = get_peft_model(model, config)
    peft_model.train()
    trainable = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=job.recipe.learning_rate)
    began = time.perf_counter()
    for step in range(1, job.recipe.steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(job.recipe, step)
        ids, present, labels = _padded(job, step)
        peft_model(input_ids=ids, attention_mask=present, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    peft_model.unload()
    return seconds


def _padded(job: Ready, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    samples = job.data.train
    chosen = job.order.batch(step)
    longest = int(samples.lengths[chosen].max())
    ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    present = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, index in enumerate(chosen.tolist()):
        tokens = torch.from_numpy(samples.tokens(index).copy()).long()
        mask = torch.from_numpy(samples.mask(index).copy())
        ids[row, : len(tokens)] = tokens
        present[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(mask, tokens, -100)
    return ids, present, labels


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, help="steps of each job; else as in jobs.yaml")
    parser.add_argument("--batch-size", type=int, help="samples in a batch of each job; else as in jobs.yaml")
    asked = parser.parse_args()
    run = read_run(JOBS)
    steps, size = asked.steps, asked.batch_size
    jobs = [
        replace(job, eval=None, steps=steps or job.steps, batch_size=size or job.batch_size)
        for job in run.jobs
    ]
    base, plain = load_base(run.base, CPU), load_plain(run.base, CPU)
    tokenizer = load_tokenizer(run.base)
    ready = [make_ready(job, 0, tokenizer, base.shape, cache_folder() / "tokens") for job in jobs]
    tokens = sum(batch.tokens for job in ready for batch in job.course(0, job.recipe.steps, False).batches)
    _one_with_peft(plain, replace(ready[0], recipe=replace(ready[0].recipe, steps=1)))
    with_weftune(base, run, [[replace(jobs[0], steps=1)]])

    seconds = {
        "PEFT, one after another": with_peft(plain, ready),
        "Weftune, one after another": with_weftune(base, run, [[job] for job in jobs]),
        "Weftune, together": with_weftune(base, run, [jobs]),
    }
    together = seconds["Weftune, together"]
    print(f"{len(jobs)} jobs, {tokens} useful tokens")
    for name, taken in seconds.items():
        print(f"{name:<26}{taken:8.1f} s {tokens / taken:8.0f} tokens/s   {taken / together:5.2f} × together")
    finish({"jobs": len(jobs), "tokens": tokens, "seconds": seconds}, asked.json)


if __name__ == "__main__":
    main()
