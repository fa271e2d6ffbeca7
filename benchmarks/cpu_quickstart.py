"""The quickstart's jobs in Weftune together, in Weftune one after another, and in PEFT one after another.

Seconds are wall time of all training, without evaluation; Weftune's include its checkpoints, exports and
reports, PEFT's are the bare training loop. The base is loaded once and not timed, and tokenising neither.
PEFT pads its batches to their longest sample. Useful tokens are those of the samples, padding not counted.
ρ is the arithmetic that no way of training can leave out, at the rate of a large product measured first, over
the measured time.

    python -m benchmarks.cpu_quickstart [--steps N] [--batch-size N] [--profile] [--json FILE]

--profile: once more together and once more in PEFT under torch's profiler, and the operations that took most.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from weftune.base.load import load_base, load_plain, load_tokenizer
from weftune.base.model import Base
from weftune.bench.result import arguments, finish
from weftune.bench.timing import Hardware, gemm_rate
from weftune.core.files import cache_folder
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import JobSpec, RunSpec
from weftune.run.training.schedule import learning_rate
from weftune.trainer.job import PreparedJob, prepare_job
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


def with_peft(model: PreTrainedModel, jobs: Sequence[PreparedJob]) -> float:
    return sum(_one_with_peft(model, job) for job in jobs)


def _one_with_peft(model: PreTrainedModel, job: PreparedJob) -> float:
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
        ids, present, labels = padded(job, step)
        peft_model(input_ids=ids, attention_mask=present, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    peft_model.unload()
    return seconds


def padded(job: PreparedJob, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    samples = job.data.train
    chosen = job.sample_order.batch(step)
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


def least_operations(base: Base, jobs: Sequence[PreparedJob]) -> float:
    """Of all steps: forward and dX of the frozen linears, of the head at supervised tokens only; causal
    attention, whose backward takes 2.5 of its forward; and the six products of the adapters' factors."""
    return sum(_least_of_job(base, job) for job in jobs)


def _least_of_job(base: Base, job: PreparedJob) -> float:
    shape, samples = base.shape, job.data.train
    chosen = [
        index for step in range(1, job.recipe.steps + 1) for index in job.sample_order.batch(step).tolist()
    ]
    lengths = [int(samples.lengths[index]) for index in chosen]
    supervised = sum(int(samples.mask(index).sum()) for index in chosen)
    linears = sum(site.in_features * site.out_features for site in shape.sites)
    attention = 2 * shape.layers * shape.hidden * sum(length * length for length in lengths)
    head = shape.hidden * shape.vocabulary
    return (
        sum(lengths) * (4 * linears + 6 * job.shape.trainable_parameters)
        + 4 * supervised * head
        + 3.5 * attention
    )


def heaviest(run: Callable[[], object], most: int = 12) -> list[tuple[str, float]]:
    """The operations of torch that took the most time, in seconds."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    found = {one.key: one.self_cpu_time_total / 1e6 for one in seen.key_averages()}
    return sorted(found.items(), key=lambda one: -one[1])[:most]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--profile", action="store_true", help="name the operations that take most")
    parser.add_argument("--steps", type=int, help="steps of each job; else as in jobs.yaml")
    parser.add_argument("--batch-size", type=int, help="samples in a batch of each job; else as in jobs.yaml")
    options = parser.parse_args()
    run = read_run(JOBS)
    steps, size = options.steps, options.batch_size
    jobs = [
        replace(job, eval=None, steps=steps or job.steps, batch_size=size or job.batch_size)
        for job in run.jobs
    ]
    base, plain = load_base(run.base, CPU), load_plain(run.base, CPU)
    tokenizer = load_tokenizer(run.base)
    ready = [prepare_job(job, 0, tokenizer, base.shape, cache_folder() / "tokens") for job in jobs]
    tokens = sum(
        batch.tokens for job in ready for batch in job.job_window(0, job.recipe.steps, False).batches
    )
    _one_with_peft(plain, replace(ready[0], recipe=replace(ready[0].recipe, steps=1)))
    with_weftune(base, run, [[replace(jobs[0], steps=1)]])

    seconds = {
        "PEFT, one after another": with_peft(plain, ready),
        "Weftune, one after another": with_weftune(base, run, [[job] for job in jobs]),
        "Weftune, together": with_weftune(base, run, [jobs]),
    }
    rate = gemm_rate(Hardware(CPU, torch.float32), matrix_side=1024)
    floor = least_operations(base, ready) / rate
    together, plain_seconds = seconds["Weftune, together"], seconds["PEFT, one after another"]
    print(f"{len(jobs)} jobs, {tokens} useful tokens, a large product: {rate / 1e9:.0f} GFLOP/s")
    for name, taken in seconds.items():
        rates = f"{taken:8.1f} s {tokens / taken:8.0f} tokens/s   ρ {floor / taken:4.2f}"
        print(f"{name:<26}{rates}   {taken / together:5.2f} × together, {taken / plain_seconds:4.2f} × PEFT")
    if options.profile:
        for name, way in (
            ("Weftune, together", lambda: with_weftune(base, run, [jobs])),
            ("PEFT", lambda: with_peft(plain, ready)),
        ):
            print(f"\n{name}, seconds by operation:")
            for operation, taken in heaviest(way):
                print(f"  {operation:<50}{taken:7.2f}")
    finish({"jobs": len(jobs), "tokens": tokens, "seconds": seconds, "floor_seconds": floor}, options.json)


if __name__ == "__main__":
    main()
