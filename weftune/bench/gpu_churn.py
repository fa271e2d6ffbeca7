"""A test of whether memory grows or CUDA graphs are captured again while jobs are attached to and detached
from one executor at random.

First, as many jobs as allowed are attached, with the largest adapters. Then jobs are attached and detached in
three random walks with different ranks. A graph is captured when its shapes occur for the second time, so all
graphs exist after the second walk. The memory in use with no job attached is compared before and after the
third walk. The allocator cache is emptied both times: captures empty it too, and the third walk makes none.

python -m benchmarks.gpu_churn [--shape 1b|8b] [--changes N] [--places N] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import psutil
import torch

from weftune.adapters.lora.spec import LoraSpec
from weftune.bench.result import arguments, finish
from weftune.bench.sizes import SIZES, build
from weftune.bench.table import aligned, number
from weftune.bench.timing import bench_hardware, reset_memory
from weftune.bench.weftune_side import AttachedJobs, resident_jobs

ALLOWED_GROWTH = 0.01
MAX_RANK = 64
SAMPLES, TOKENS = (1, 2, 4), (16, 64, 192, 512)
"""Possible numbers of samples per batch and of tokens per sample. The numbers of each job are drawn from
them."""
PROGRESS_INTERVAL = 20
"""Number of changes (jobs attached or detached) between two printed lines of progress."""


@dataclass(frozen=True, slots=True)
class ChurnState:
    """The memory of an executor without attached jobs: bytes of tensors, bytes that the process holds, and
    the number of captured graphs so far."""

    allocated_bytes: int
    reserved_bytes: int
    captures: int | None


class Churn:
    """An executor to which a benchmark attaches jobs, and from which it detaches jobs, at random."""

    def __init__(self, attached_jobs: AttachedJobs, max_jobs: int, capacity: int) -> None:
        self.attached_jobs = attached_jobs
        self.max_jobs = max_jobs
        self.capacity = capacity
        self.came = self.left = 0

    def attach_max_jobs(self) -> None:
        """Attach as many jobs as allowed, with the largest adapters, so that no adapter memory must grow
        later."""
        for _ in range(self.max_jobs):
            self._attach_job(MAX_RANK, max(SAMPLES), max(TOKENS))
        self._train_round()

    def attach_and_detach(self, changes: int, seed: int) -> None:
        """Start with no job; then repeatedly attach or detach a job and make a step of all attached jobs.

        Calls with the same number of changes have the same batch sizes; the ranks of the adapters depend on
        the seed.
        """
        sizes, ranks = random.Random(0), random.Random(seed)
        self.came = self.left = 0
        began = time.perf_counter()
        for change in range(changes):
            if change % PROGRESS_INTERVAL == 0:
                seconds = time.perf_counter() - began
                print(f"walk {seed}: {change} changes in {seconds:.0f} s", flush=True)
            attached = list(self.attached_jobs.samples_by_job)
            if not attached or (len(attached) < self.max_jobs and sizes.random() < 0.5):
                self._attach_job(ranks.randint(1, MAX_RANK), sizes.choice(SAMPLES), sizes.choice(TOKENS))
            else:
                self._detach_job(sizes.choice(attached))
            self._train_round()

    def detach_all_jobs(self) -> ChurnState:
        for job in list(self.attached_jobs.samples_by_job):
            self.attached_jobs.leave(job)
        device = self.attached_jobs.base.device
        reset_memory(device)
        captures = self.attached_jobs.executor.captures
        if device.type != "cuda":
            resident_bytes = psutil.Process().memory_info().rss
            return ChurnState(resident_bytes, resident_bytes, captures)
        return ChurnState(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), captures)

    def _attach_job(self, rank: int, samples: int, tokens: int) -> None:
        self.came += 1
        adapter = LoraSpec(rank=rank, alpha=2.0 * rank)
        self.attached_jobs.join(f"job{self.came}", adapter, [[tokens] * samples], seed=self.came)

    def _detach_job(self, job: str) -> None:
        self.left += 1
        self.attached_jobs.leave(job)

    def _train_round(self) -> None:
        if self.attached_jobs.samples_by_job:
            self.attached_jobs.run(self.attached_jobs.plan(1, self.capacity))


def growth_ratio(initial_bytes: int, final_bytes: int) -> float:
    return final_bytes / initial_bytes - 1


def main() -> None:
    parser = churn_arguments()
    options = parser.parse_args()
    hardware = bench_hardware(options.toy)
    if hardware is None:
        parser.error("no CUDA device that torch can use; --toy runs on the CPU")
    size = SIZES["toy" if options.toy else options.shape]
    together = resident_jobs(build(size, hardware), hardware.device)
    churn = Churn(together, 2 if options.toy else options.places, options.capacity)
    changes = 8 if options.toy else options.changes
    churn.attach_max_jobs()
    churn.detach_all_jobs()
    churn.attach_and_detach(changes, seed=1)
    churn.detach_all_jobs()
    churn.attach_and_detach(changes, seed=2)
    before = churn.detach_all_jobs()
    churn.attach_and_detach(changes, seed=3)
    after = churn.detach_all_jobs()
    made = f"{churn.came} joins and {churn.left} leaves"
    print(f"{size.name}: three times {made}, at most {churn.max_jobs} jobs attached\n")
    print(table(before, after))
    again = "" if after.captures is None else f", {after.captures - (before.captures or 0)} captured again"
    grown = max(
        growth_ratio(before.allocated_bytes, after.allocated_bytes),
        growth_ratio(before.reserved_bytes, after.reserved_bytes),
    )
    finish(
        {
            "shape": size.name,
            "changes": changes,
            "joins": churn.came,
            "leaves": churn.left,
            "allocated": [before.allocated_bytes, after.allocated_bytes],
            "reserved": [before.reserved_bytes, after.reserved_bytes],
            "captures": [before.captures, after.captures],
            "growth": grown,
            "allowed": ALLOWED_GROWTH,
            "verdict": f"memory {grown:+.2%}{again}",
        },
        options.json,
    )


def table(state_before: ChurnState, state_after: ChurnState) -> str:
    def memory(name: str, first: int, last: int) -> tuple[str, str, str, str]:
        change = growth_ratio(first, last)
        verdict = "" if change <= ALLOWED_GROWTH else f"over {ALLOWED_GROWTH:.0%}"
        return name, number(first, ".3f", 1e-9), number(last, ".3f", 1e-9), f"{change:+.2%} {verdict}".strip()

    again = ""
    if state_before.captures is not None and state_after.captures is not None:
        again = f"{state_after.captures - state_before.captures} in the third walk"
    return aligned(
        ("no job attached", "before", "after", ""),
        [
            memory("GB allocated", state_before.allocated_bytes, state_after.allocated_bytes),
            memory("GB reserved", state_before.reserved_bytes, state_after.reserved_bytes),
            ("captures", number(state_before.captures, "d", 1), number(state_after.captures, "d", 1), again),
        ],
    )


def churn_arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shape", choices=[name for name in SIZES if name != "toy"], default="1b")
    parser.add_argument("--changes", type=int, default=200, help="joins and leaves together")
    parser.add_argument("--places", type=int, default=8, help="maximum number of attached jobs")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a microbatch, at most")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU: does it run at all")
    return parser


if __name__ == "__main__":
    main()
