"""Jobs with real sample lengths: useful tokens per second and the fraction of padding, in Weftune and PEFT.

Each of gsm8k, OpenBookQA, SST-2 and RTE provides the lengths for a quarter of the jobs (lengths.json); the
tokens are random and all supervised. PEFT pads every batch to its longest sample and runs one job after
another. Useful tokens are those of the samples. Padding is given as a fraction of all rows that the base
computes.

    python -m benchmarks.gpu_lengths [--shape 1b|8b] [--jobs N] [--batch-size N] [--rank R] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weftune.adapters.lora.spec import LoraSpec
from weftune.bench.baselines import peft_padded
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, floor_seconds
from weftune.bench.table import aligned, number, ratio
from weftune.bench.timing import (
    Hardware,
    MeasuredStep,
    Repeats,
    bench_hardware,
    gemm_rate,
    measure,
    measure_or_explain,
)
from weftune.bench.weftune_side import computed_rows, resident_jobs, useful_rows

Round = list[list[int]]
"""Lengths in tokens of the samples of one round: one batch of every job."""
GB = 1e9
FILE = Path(__file__).parent / "lengths.json"
"""File with the numbers of tokens of real samples, which `benchmarks.make_lengths` has counted."""


@dataclass(frozen=True, slots=True)
class LengthsRow:
    name: str
    measured: MeasuredStep
    padding: float | None
    """Fraction of the computed rows that are padding."""


def draw_rounds(count: int, jobs: int, batch_size: int) -> list[Round]:
    """Draw the sample lengths of `count` rounds (one batch of every job each). The lengths are the same on
    every call: each job has its own seed, and jobs cycle through the datasets."""
    pools = list(json.loads(FILE.read_text()).values())
    drawn = [
        np.random.default_rng(job).choice(pools[job % len(pools)], (count, batch_size)).tolist()
        for job in range(jobs)
    ]
    return [[batches[at] for batches in drawn] for at in range(count)]


def count_tokens(rounds: Sequence[Round]) -> int:
    return sum(sum(batch) for jobs in rounds for batch in jobs)


def measure_peft(
    size: Size, rounds: Sequence[Round], rank: int, hardware: Hardware, repeats: Repeats
) -> LengthsRow:
    measured = measure_or_explain(
        lambda: measure(peft_padded(size, rounds, rank, hardware), hardware, repeats), hardware
    )
    padded = sum(len(batch) * max(batch) for jobs in rounds for batch in jobs)
    return LengthsRow("PEFT bf16, one by one", measured, 1 - count_tokens(rounds) / padded)


def measure_weftune(
    size: Size, rounds: Sequence[Round], rank: int, hardware: Hardware, repeats: Repeats, capacity: int
) -> LengthsRow:
    shares: list[float] = []

    def run() -> MeasuredStep:
        together = resident_jobs(build(size, hardware), hardware.device)
        for job in range(len(rounds[0])):
            batches = [jobs[job] for jobs in rounds]
            together.join(f"job{job}", LoraSpec(rank=rank, alpha=2.0 * rank), batches, seed=job)
        measured = measure(together.block(capacity), hardware, repeats)
        passes = together.run(together.plan(len(rounds), capacity))
        shares.append(1 - useful_rows(passes) / computed_rows(passes))
        return measured

    measured = measure_or_explain(run, hardware)
    return LengthsRow("Weftune, together", measured, shares[0] if shares else None)


def table(rows: Sequence[LengthsRow], tokens: float, floor_seconds: float) -> str:
    """Format the rows of the table; a round (one batch of every job) has `tokens` useful tokens, and the last
    row is Weftune's."""
    titles = ("", "ms per round", "× Weftune", "useful tokens/s", "padding", "peak GB", "ρ", "")
    weftune = rows[-1].measured.seconds
    return aligned(
        titles,
        [
            (
                row.name,
                number(row.measured.seconds, scale=1e3),
                number(ratio(row.measured.seconds, weftune), ".2f"),
                number(ratio(tokens, row.measured.seconds), ",.0f"),
                number(row.padding, ".1%"),
                number(row.measured.peak_bytes, ".1f", 1 / GB),
                number(ratio(floor_seconds, row.measured.seconds), ".2f"),
                row.measured.note,
            )
            for row in rows
        ],
    )


def main() -> None:
    parser = lengths_arguments()
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size = SIZES["toy" if options.toy else options.shape]
    jobs, pace, rank = options.jobs, Repeats(options.rounds, options.blocks, options.rounds), options.rank
    if options.toy:
        jobs, pace, rank = 4, Repeats(1, 1, 1), 4
    rounds = draw_rounds(pace.steps, jobs, options.batch_size)
    rate = gemm_rate(hardware)
    print("measuring: PEFT", flush=True)
    rows = [measure_peft(size, rounds, rank, hardware, pace)]
    print("measuring: Weftune", flush=True)
    rows.append(measure_weftune(size, rounds, rank, hardware, pace, options.capacity))
    tokens = count_tokens(rounds) / len(rounds)
    every = [length for batches in rounds for batch in batches for length in batch]
    floor = floor_seconds(size, rate, every, rank) / len(rounds)
    print(f"\n{size.name}: {jobs} jobs, rank {rank}, batches of {options.batch_size}, real lengths\n")
    print(table(rows, tokens, floor))
    finish(
        {
            "shape": size.name,
            "jobs": jobs,
            "batch_size": options.batch_size,
            "rank": rank,
            "tokens": tokens,
            "gemm_rate": rate,
            "strongest": rows[0].name if rows[0].measured.seconds else None,
            "rows": [as_json(row) for row in rows],
        },
        options.json,
    )


def as_json(row: LengthsRow) -> dict[str, object]:
    measured = row.measured
    return {
        "name": row.name,
        "seconds": measured.seconds,
        "padding": row.padding,
        "peak_bytes": measured.peak_bytes,
        "note": measured.note,
    }


def lengths_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="1b")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4, help="samples in a batch of each job")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a microbatch, at most")
    parser.add_argument("--rounds", type=int, default=4, help="different rounds, all seen in the warm-up")
    parser.add_argument("--blocks", type=int, default=3, help="the median of so many passes over the rounds")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
