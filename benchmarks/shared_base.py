"""Training and generation on one base on one GPU: how far they agree, and what they cost each other.

    python -m benchmarks.shared_base [--base FOLDER | --shape 8b] [--layers N]
                                     [--only agreement,weights,speed]
                                     [--jobs 8] [--length 1024] [--rank 16] [--sequences 16] [--prompt 128]
                                     [--rounds N] [--tokens 64] [--toy]

Jobs train, each on one sample of `--length` random tokens per step, and sequences are decoded with the
adapters of these jobs by `Decoder`, as a service does it: with the same base, banks and kernels.

agreement   After some steps, tokens are sampled, `--tokens` for each of `4 × --sequences` sequences, at
            temperature 1. A training pass computes the log-probabilities of the same tokens; printed is their
            difference from those that the decoder returned, in nats.
weights     Time of a decode step that follows an optimizer step at once, and so is the first one with new
            weights, beside that of the next decode step.
speed       Tokens per second of training alone and while sequences decode after every pass, and the times
            between tokens. Microbatches are then so small that no forward or backward takes longer than
            0.1 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.load import load_base
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, toy_size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, bench_hardware, reset_memory, synchronise
from weftune.bench.weftune_side import AttachedJobs, computed_rows, jobs_of_base, useful_rows
from weftune.core.batch import IGNORED, Microbatch, Segment
from weftune.generate.decoder import Decoder, Generation
from weftune.generate.sampling import Sampling
from weftune.ops.logprobs import target_logprobs
from weftune.run.events import Passed
from weftune.trainer.windows import TURN_SECONDS

PARTS = ("agreement", "weights", "speed")
FIRST_TOKEN = 1
"""Prompt of the sequences whose log-probabilities are compared; `<s>` in Llama's vocabulary."""
CAPACITY = 8192
WARM_ROUNDS = 3
MAX_TURNS = 1000
"""Tokens after which a sequence ends; no part of the benchmark takes so many turns."""
WEIGHT_STEPS = 8
"""Number of optimizer steps after which decode steps are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWork:
    """What is trained and decoded."""

    jobs: int
    length: int
    rank: int
    sequences: int
    prompt: int
    """Tokens of each sequence that is decoded while jobs train."""
    rounds: int
    """Measured rounds of training."""
    tokens: int
    """Tokens that are sampled per sequence, to be compared with a training pass."""
    cache_bytes: int = 8 << 30

    def job(self, number: int) -> str:
        return f"job{number % self.jobs}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences in nats between log-probabilities of a decoder and those of a training pass."""

    tokens: int
    mean: float
    p99: float
    max: float
    mean_logprob: float


@dataclass(slots=True)
class Speed:
    """Training at one token capacity, with or without sequences that decode."""

    capacity: int
    tokens_per_second: float
    longest_action: float
    """Seconds of the slowest forward or backward."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between consecutive tokens of a sequence."""


def attach(jobs: AttachedJobs, work: SharedWork) -> None:
    spec = LoraSpec(rank=work.rank, alpha=2.0 * work.rank)
    for number in range(work.jobs):
        jobs.join(work.job(number), spec, [[work.length]], number)


# -- agreement -----------------------------------------------------------------------------------------


def agreement(jobs: AttachedJobs, work: SharedWork) -> Agreement:
    decoder = Decoder(jobs.executor.adapted, work.cache_bytes)
    made = [
        decoder.submit(
            [FIRST_TOKEN], Sampling(max_tokens=work.tokens, temperature=1.0, seed=number), work.job(number)
        )
        for number in range(4 * work.sequences)
    ]
    decoder.run_until_idle()
    made.sort(key=lambda one: one.adapter or "")
    sampled = np.concatenate([one.logprobs for one in made])
    differences = np.abs(sampled - trained_logprobs(jobs, made).cpu().double().numpy())
    return Agreement(
        tokens=len(sampled),
        mean=float(differences.mean()),
        p99=float(np.quantile(differences, 0.99)),
        max=float(differences.max()),
        mean_logprob=float(sampled.mean()),
    )


def trained_logprobs(jobs: AttachedJobs, made: Sequence[Generation]) -> Tensor:
    """Return the log-probabilities of all generated tokens in one training pass."""
    adapted, microbatch = jobs.executor.adapted, as_microbatch(made)
    with adapted.on_stream(), torch.enable_grad():
        microbatch = microbatch.to(adapted.base.device)
        with adapted.banks.bind(microbatch, adapted.route, training=True):
            h_TD = adapted.base.hidden(microbatch).detach()
        rows = microbatch.targets_T != IGNORED
        logprobs, _ = target_logprobs(h_TD[rows], microbatch.targets_T[rows], adapted.base.head())
    synchronise(adapted.base.device)
    return logprobs


def as_microbatch(made: Sequence[Generation]) -> Microbatch:
    """Return the sequences as samples of their jobs; generated tokens are supervised."""
    tokens, targets, positions, segments = [], [], [], []
    for adapter, run in groupby(made, key=lambda one: one.adapter):
        start = len(tokens)
        for one in run:
            whole = [*one.prompt, *one.tokens]
            prompt_targets = [IGNORED] * (len(one.prompt) - 1)
            tokens += whole
            targets += [*prompt_targets, *one.tokens, IGNORED]
            positions += range(len(whole))
        segments.append(Segment(adapter or "", 1, start, len(tokens)))
    return Microbatch(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        targets_T=torch.tensor(targets),
        token_index_T=torch.arange(len(tokens)),
        sample_lengths=tuple(len(one.prompt) + len(one.tokens) for one in made),
        segments=tuple(segments),
    )


# -- weights -------------------------------------------------------------------------------------------


def weight_seconds(jobs: AttachedJobs, work: SharedWork) -> tuple[float, float]:
    """Return the median seconds of the decode steps that are the first with new weights, and of others."""
    device = jobs.base.device
    decoder = decoding(jobs, work)
    for _ in range(4):
        decoder.run_pass()
    first, other = [], []
    for _ in range(WEIGHT_STEPS):
        jobs.run(jobs.plan(1, CAPACITY))
        synchronise(device)
        steps = {job: stock.step for job, stock in jobs.samples_by_job.items()}
        for found in (first, other):
            began = time.perf_counter()
            continued = decoder.run_pass()
            found.append(time.perf_counter() - began)
            for one in continued:
                assert one.versions[-1] == steps[one.adapter or ""], "an older adapter answered"
    return float(np.median(first)), float(np.median(other))


def decoding(jobs: AttachedJobs, work: SharedWork) -> Decoder:
    """Return a decoder with sequences that do not end, after their first tokens."""
    decoder = Decoder(jobs.executor.adapted, work.cache_bytes)
    generator = torch.Generator().manual_seed(0)
    base = jobs.base.shape
    max_tokens = min(MAX_TURNS, base.context - work.prompt - 1)
    for number in range(work.sequences):
        prompt = torch.randint(3, base.vocabulary, (work.prompt,), generator=generator).tolist()
        sampling = Sampling(max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=number)
        decoder.submit(prompt, sampling, work.job(number))
    while decoder.is_waiting:
        decoder.run_pass()
    return decoder


# -- speed ---------------------------------------------------------------------------------------------


def training_speed(
    jobs: AttachedJobs, work: SharedWork, capacity: int, turn: Callable[[], object] | None = None
) -> Speed:
    jobs.executor.offer_turn = turn
    jobs.run(jobs.plan(WARM_ROUNDS, capacity))
    program = jobs.plan(work.rounds, capacity)
    synchronise(jobs.base.device)
    began = time.perf_counter()
    passes = jobs.run(program)
    synchronise(jobs.base.device)
    seconds = time.perf_counter() - began
    jobs.executor.offer_turn = None
    return Speed(capacity, useful_rows(passes) / seconds, longest_action(passes))


def longest_action(passes: Sequence[Passed]) -> float:
    return max(max(one.time.forward, one.time.backward) for one in passes)


def lowered_capacity(jobs: AttachedJobs, work: SharedWork) -> int:
    """Return a capacity at which no action is expected to take longer than a turn may wait."""
    passes = jobs.run(jobs.plan(WARM_ROUNDS, CAPACITY))
    row_seconds = longest_action(passes) / (computed_rows(passes) / len(passes))
    samples = max(1, min(work.jobs, int(TURN_SECONDS / row_seconds / work.length)))
    return samples * work.length


def while_decoding(jobs: AttachedJobs, work: SharedWork, capacity: int) -> Speed:
    """Measure training at this capacity while sequences decode, and the times between their tokens."""
    decoder, times = decoding(jobs, work), []

    def turn() -> None:
        if decoder.run_pass():
            times.append(time.perf_counter())

    found = training_speed(jobs, work, capacity, turn)
    assert not decoder.is_idle, "the sequences ended before training did"
    measured = len(times) * work.rounds // (work.rounds + WARM_ROUNDS)
    found.gaps = np.diff(times[-measured:]).tolist()
    return found


def speeds(jobs: AttachedJobs, work: SharedWork) -> dict[str, Speed]:
    alone = training_speed(jobs, work, CAPACITY)
    capacity = lowered_capacity(jobs, work)
    return {
        "alone": alone,
        "alone, smaller microbatches": training_speed(jobs, work, capacity),
        "while sequences decode": while_decoding(jobs, work, capacity),
    }


TITLES = ("ms", "capacity", "tokens/s", "/ alone", "longest action", "between tokens p50", "p95", "max")


def speed_rows(found: dict[str, Speed]) -> list[tuple[str, ...]]:
    alone = found["alone"].tokens_per_second
    return [
        (
            name,
            f"{one.capacity:,}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_second / alone:.3f}",
            f"{1e3 * one.longest_action:,.1f}",
            *(f"{1e3 * np.quantile(one.gaps, share):,.1f}" if one.gaps else "" for share in (0.5, 0.95)),
            f"{max(one.gaps) * 1e3:,.1f}" if one.gaps else "",
        )
        for name, one in found.items()
    ]


# -- the command ---------------------------------------------------------------------------------------


def opened_base(folder: Path | None, size: Size, hardware: Hardware) -> Base:
    if folder is None:
        return Base.from_model(build(size, hardware), BaseSpec(model="random weights"), hardware.device)
    dtype = "bfloat16" if hardware.dtype is torch.bfloat16 else "float32"
    return load_base(BaseSpec(model=str(folder), dtype=dtype), hardware.device)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="a model; else random weights")
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a job's step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt while jobs train")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds of training")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens per sequence")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - {*PARTS}:
        parser.error(f"--only: {min(unknown)} is none of {', '.join(PARTS)}")
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size = SIZES[options.shape]
    size = toy_size(size) if options.toy else replace(size, layers=options.layers or size.layers)
    work = SharedWork(
        jobs=options.jobs,
        length=16 if options.toy else options.length,
        rank=options.rank,
        sequences=options.sequences,
        prompt=8 if options.toy else options.prompt,
        rounds=2 if options.toy else options.rounds,
        tokens=options.tokens,
        cache_bytes=16 << 20 if options.toy else 8 << 30,
    )
    jobs = jobs_of_base(opened_base(options.base, size, hardware))
    attach(jobs, work)
    jobs.run(jobs.plan(WARM_ROUNDS, CAPACITY))
    numbers: dict[str, object] = {"base": str(options.base or size.name), "work": asdict(work)}
    if "agreement" in chosen:
        agreed = agreement(jobs, work)
        numbers["agreement"] = asdict(agreed)
        print(
            f"log-probabilities of {agreed.tokens:,} sampled tokens (mean {agreed.mean_logprob:.3f}): they "
            f"differ from a training pass by {agreed.mean:.5f} nats on average, p99 {agreed.p99:.5f}, "
            f"max {agreed.max:.5f}",
            flush=True,
        )
        reset_memory(hardware.device)
    if "weights" in chosen:
        first, other = weight_seconds(jobs, work)
        numbers["weights"] = {"first": first, "other": other}
        print(
            f"decode step just after an optimizer step {1e3 * first:.2f} ms, the next one "
            f"{1e3 * other:.2f} ms",
            flush=True,
        )
        reset_memory(hardware.device)
    if "speed" in chosen:
        found = speeds(jobs, work)
        numbers["speed"] = {name: asdict(one) for name, one in found.items()}
        print(aligned(TITLES, speed_rows(found)))
    finish(numbers, options.json)


if __name__ == "__main__":
    main()
