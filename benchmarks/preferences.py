"""Rounds of DPO on one GPU beside rounds of supervised fine-tuning (SFT) on the same number of tokens.

    python -m benchmarks.preferences [--shape 8b] [--layers N] [--jobs 4] [--pairs 2] [--length 512]
                                     [--rank 16] [--capacity 8192] [--blocks N] [--steps N] [--toy]

Every job has `--pairs` pairs of two samples of `--length` tokens per step; SFT trains on the same samples one
by one. Jobs of DPO need one forward more: the base scores each sample once, before the job's first step. The
last row is the time of DPO with the scoring of its samples, divided by that of SFT and a forward of the same
samples. The forward is that of SFT's passes, which also computes the gradient of the loss with respect to the
last hidden states.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace

from weftune.adapters.lora.spec import LoraSpec
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, Size, build, toy_size
from weftune.bench.table import aligned
from weftune.bench.timing import Hardware, Repeats, bench_hardware, measure, reset_memory, synchronise
from weftune.bench.weftune_side import AttachedJobs, jobs_of_base
from weftune.objectives.spec import SFT_SPEC, DpoSpec, ObjectiveSpec

DPO = DpoSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairWork:
    """The work of one round."""

    jobs: int
    pairs: int
    """Number of pairs in one job's step."""
    length: int
    rank: int
    capacity: int
    """Maximum number of tokens in a microbatch."""

    @property
    def tokens(self) -> int:
        return self.jobs * self.pairs * 2 * self.length


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Measured seconds of a round."""

    sft: float
    forward: float
    """Seconds of the forwards of a round of SFT."""
    scoring: float
    """Seconds in which the base scores the samples of a round of DPO."""
    dpo: float

    @property
    def ratio(self) -> float:
        return (self.dpo + self.scoring) / (self.sft + self.forward)


def attach(jobs: AttachedJobs, work: PairWork, objective: ObjectiveSpec) -> None:
    spec = LoraSpec(rank=work.rank, alpha=2.0 * work.rank)
    for number in range(work.jobs):
        lengths = [[work.length] * (2 * work.pairs)]
        jobs.join(f"{objective.kind}{number}", spec, lengths, number, objective)


def detach(jobs: AttachedJobs) -> None:
    for job in list(jobs.samples_by_job):
        jobs.leave(job)


def round_seconds(jobs: AttachedJobs, work: PairWork, hardware: Hardware, repeats: Repeats) -> float:
    seconds = measure(jobs.block(work.capacity), hardware, repeats).seconds
    assert seconds is not None
    return seconds


def scoring_seconds(jobs: AttachedJobs, work: PairWork, hardware: Hardware, repeats: Repeats) -> float:
    """Return the median seconds in which the references of one round are scored."""
    found = []
    for _ in range(1 + repeats.blocks):
        synchronise(hardware.device)
        began = time.perf_counter()
        jobs.score_references(work.capacity)
        synchronise(hardware.device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # The first one compiles kernels.


def measure_pairs(size: Size, work: PairWork, hardware: Hardware, repeats: Repeats) -> PairTimes:
    base = Base.from_model(build(size, hardware), BaseSpec(model="random weights"), hardware.device)
    jobs = jobs_of_base(base)
    attach(jobs, work, SFT_SPEC)
    sft = round_seconds(jobs, work, hardware, repeats)
    rounds = [jobs.run(jobs.plan(1, work.capacity)) for _ in range(repeats.blocks)]
    forward = statistics.median(sum(one.time.forward for one in passes) for passes in rounds)
    detach(jobs)
    reset_memory(hardware.device)
    attach(jobs, work, DPO)
    scoring = scoring_seconds(jobs, work, hardware, repeats)
    dpo = round_seconds(jobs, work, hardware, repeats)
    return PairTimes(sft, forward, scoring, dpo)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=SIZES, default="8b")
    parser.add_argument("--layers", type=int, help="keep only so many layers")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2, help="pairs in one job's step")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of a pair's samples")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=8192, help="maximum tokens in a microbatch")
    parser.add_argument("--blocks", type=int, default=5, help="blocks to take the median of")
    parser.add_argument("--steps", type=int, default=3, help="steps per block")
    parser.add_argument("--toy", action="store_true", help="a tiny base on the CPU, to try the script")
    options = parser.parse_args()
    if (hardware := bench_hardware(options.toy)) is None:
        parser.error("no GPU is found here; --toy runs on the CPU")
    size, repeats = SIZES[options.shape], Repeats(3, options.blocks, options.steps)
    if options.toy:
        size, repeats = toy_size(size), Repeats(1, 2, 1)
        work = PairWork(jobs=2, pairs=1, length=16, rank=2, capacity=64)
    else:
        size = replace(size, layers=options.layers or size.layers)
        work = PairWork(
            jobs=options.jobs,
            pairs=options.pairs,
            length=options.length,
            rank=options.rank,
            capacity=options.capacity,
        )
    found = measure_pairs(size, work, hardware, repeats)
    rows = [
        ("SFT", f"{1e3 * found.sft:,.1f}"),
        ("forward of SFT's passes", f"{1e3 * found.forward:,.1f}"),
        ("scoring by the base", f"{1e3 * found.scoring:,.1f}"),
        ("DPO", f"{1e3 * found.dpo:,.1f}"),
        ("(DPO + scoring) / (SFT + forward)", f"{found.ratio:.3f}"),
    ]
    print(f"{size.name}: {work.jobs} jobs, {work.pairs} pairs of 2 × {work.length} tokens each")
    print(aligned(("ms per round", ""), rows))
    finish(
        {"size": asdict(size), "work": asdict(work), "times": asdict(found), "ratio": found.ratio},
        options.json,
    )


if __name__ == "__main__":
    main()
