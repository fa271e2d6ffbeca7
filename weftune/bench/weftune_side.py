"""Weftune's row in a benchmark's table: jobs on random samples in one executor, without files, a job store or
the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from weftune.adapters.kind import JobAdapter
from weftune.adapters.kinds import AdapterSpec
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.batch import Microbatch
from weftune.data.cache import SampleStore, Tally
from weftune.data.collate import Part, collate
from weftune.data.samples import Samples, StoreRows
from weftune.objectives.spec import SFT_SPEC, ObjectiveSpec
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import (
    NOTHING,
    ForwardPass,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Score,
    group_samples,
)
from weftune.plan.window.rounds import JobWindow
from weftune.plan.window.window import plan_window
from weftune.run.assemble import resident_executor
from weftune.run.events import Failed, Passed, Scored, Stepped
from weftune.run.executor import Executor
from weftune.run.training.schedule import Recipe
from weftune.run.training.state import new_training

Lengths = Sequence[Sequence[int]]
"""Lengths in tokens of a job's samples, one list per global batch. After the last batch, training continues
with the first."""

RECIPE = Recipe(steps=10**9, learning_rate=1e-4, schedule="constant")


@dataclass(slots=True)
class JobSamples:
    """A job's samples, the index of the first sample of each batch, and the last executed step."""

    samples: Samples
    batch_starts: tuple[int, ...]
    step: int = 0

    def batch(self, job: str, step: int) -> GlobalBatch:
        first, end = list(pairwise(self.batch_starts))[(step - 1) % (len(self.batch_starts) - 1)]
        placed = group_samples(self.batch_samples(first, end), self.samples.group_size)
        return GlobalBatch(job, step, placed, int(self.samples.supervised[first:end].sum()))

    def batch_samples(self, first_sample: int, end_sample: int) -> tuple[PlacedSample, ...]:
        """Return consecutive samples as one batch."""
        lengths = self.samples.lengths[first_sample:end_sample].tolist()
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        return tuple(
            PlacedSample(*item)
            for item in zip(range(first_sample, end_sample), lengths, offsets, strict=True)
        )


class AttachedJobs:
    """An executor for benchmarks, and the samples and losses of the jobs that are attached to it."""

    def __init__(self, executor: Executor) -> None:
        self.base = executor.base
        self.executor = executor
        self.samples_by_job: dict[str, JobSamples] = {}
        self.losses: dict[str, list[float]] = {}
        self.recompute = NOTHING

    def join(
        self,
        job: str,
        adapter: AdapterSpec,
        batches: Lengths,
        seed: int,
        objective: ObjectiveSpec = SFT_SPEC,
    ) -> None:
        """Attach a job with random samples, which are pairs if the objective learns from pairs."""
        lengths = [length for batch in batches for length in batch]
        batch_starts = np.cumsum([0, *(len(batch) for batch in batches)]).tolist()
        group_size = 2 if objective.row_kind == "pairs" else 1
        samples = random_samples(lengths, self.base.shape.vocabulary, seed, group_size)
        self.samples_by_job[job] = JobSamples(samples, tuple(batch_starts))
        self.losses[job] = []
        base, home = self.base, self.executor.home
        training = new_training(
            JobAdapter(job, adapter, seed),
            replace(RECIPE, objective=objective),
            base.shape.sites,
            base.dtype,
            home,
            draw_device=base.device,
            frozen=base.weight_reader(),
        )
        self.executor.attach(training)

    def leave(self, job: str) -> None:
        self.executor.detach(job)
        del self.samples_by_job[job]

    def plan(self, rounds: int, capacity: int) -> Program:
        """Return a Program (an executable plan) of the next `rounds` global batches of every attached job."""
        job_windows = []
        for job, stock in self.samples_by_job.items():
            steps = range(stock.step + 1, stock.step + rounds + 1)
            batches = tuple(stock.batch(job, step) for step in steps)
            job_windows.append(JobWindow(job, stock.step, batches, (), frozenset(), frozenset()))
        return self._plan_window(job_windows, capacity)

    def score_references(self, capacity: int) -> list[Passed]:
        """Score all samples with the base alone, store the results as the jobs' reference log-probabilities,
        and return every pass over the base."""
        windows = []
        for job, stock in self.samples_by_job.items():
            count = len(stock.samples)
            stock.samples.references = np.full(count, np.nan)
            scored = stock.batch_samples(0, count)
            windows.append(
                JobWindow(job, stock.step, (), (), frozenset(), frozenset(), scored_samples=scored)
            )
        return self.run(self._plan_window(windows, capacity))

    def _plan_window(self, job_windows: Sequence[JobWindow], capacity: int) -> Program:
        layout = self.executor.part.layout
        ladder = self.executor.captures is not None and not self.recompute.tile_rows
        return plan_window(job_windows, layout, capacity, ladder, self.recompute)

    def run(self, program: Program) -> list[Passed]:
        """Execute the program and return every pass that it made over the base."""
        passes = []
        for event in self.executor.run(program, self._fetch_microbatch, lambda: False):
            assert not isinstance(event, Failed), event
            if isinstance(event, Passed):
                passes.append(event)
            if isinstance(event, Stepped):
                self.losses[event.job].append(event.outcome.loss)
            if isinstance(event, Scored):
                references = self.samples_by_job[event.job].samples.references
                assert references is not None
                references[list(event.samples)] = event.logprobs
        for batch in program.batches:
            self.samples_by_job[batch.job].step = batch.step
        return passes

    def block(self, capacity: int) -> Callable[[int], Callable[[], list[Passed]]]:
        """Return a `Block` for `timing.measure`: it plans rounds (one global batch of every job each) and
        returns the function that runs them.

        Planning is not timed, since the training loop plans while the device computes.
        """

        def prepare_rounds(rounds: int) -> Callable[[], list[Passed]]:
            program = self.plan(rounds, capacity)
            return lambda: self.run(program)

        return prepare_rounds

    def _fetch_microbatch(self, plan: MicrobatchPlan, kind: type[ForwardPass]) -> Microbatch:
        microbatch = collate(
            [
                Part(
                    segment.job,
                    segment.step,
                    self.samples_by_job[segment.job].samples,
                    placed.sample,
                    placed.sample_offset,
                    rows=placed.chunk_rows,
                )
                for segment in plan.segments
                for placed in segment.samples
            ]
        )
        if kind is not Score:
            return microbatch
        segments = tuple(replace(segment, adapter=None) for segment in microbatch.segments)
        return replace(microbatch, segments=segments, references_S=None)


def resident_jobs(
    model: PreTrainedModel, device: torch.device, optimizer_offloaded: bool = False
) -> AttachedJobs:
    """Return an `AttachedJobs` without jobs, whose executor has the whole base on the device.

    `optimizer_offloaded` keeps the adapters' master weights and moments in host memory.
    """
    base = Base.from_model(model, BaseSpec(model="random weights"), device)
    return jobs_of_base(base, optimizer_offloaded)


def jobs_of_base(base: Base, optimizer_offloaded: bool = False) -> AttachedJobs:
    """Return an `AttachedJobs` without jobs, whose executor runs on the device of this base."""
    layout = one_device_layout(base.shape.layers, optimizer_offloaded)
    return AttachedJobs(resident_executor(base, part=layout.for_worker(0)))


def random_samples(lengths: Sequence[int], vocabulary: int, seed: int, group_size: int = 1) -> Samples:
    """Return samples of random tokens, all of them supervised. Each row has `group_size` samples."""
    total = sum(lengths)
    store = SampleStore(
        tokens=np.random.default_rng(seed).integers(vocabulary, size=total, dtype=np.int32),
        mask=np.ones(total, dtype=np.bool_),
        lengths=np.array(lengths, dtype=np.int32),
        supervised=np.array(lengths, dtype=np.int32) - 1,
        rows=np.arange(len(lengths), dtype=np.uint64),
        tally=Tally(),
    )
    return Samples([StoreRows(store, np.arange(len(lengths)))], f"random {seed}", group_size)


def computed_rows(passes: Sequence[Passed]) -> int:
    """Return the number of rows that the base computed, including padding, in all given passes."""
    return sum(passed.microbatch.rows for passed in passes)


def useful_rows(passes: Sequence[Passed]) -> int:
    return sum(passed.microbatch.tokens for passed in passes)
