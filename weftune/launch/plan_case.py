"""The input of a plan (base model, cluster of devices, and jobs), read without loading weights or importing
torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weftune.base.architecture import can_be_sharded, has_half_layers, refuse_shards, spec_shape
from weftune.base.config import bytes_per_value, read_config, read_tokenizer
from weftune.base.spec import BaseSpec
from weftune.core.files import cache_folder
from weftune.core.shapes import JobShape, ModelShape
from weftune.data.prepare import Prepared, SharedData, data_identity
from weftune.data.samples import Samples
from weftune.data.spec import DataSpec, EvalSpec, RowKind
from weftune.errors import DataError, Mistake, SpecError
from weftune.jobs.courses import (
    Curriculum,
    adapt_to_objective,
    curriculum,
    job_shape,
    reference_data,
    truncate_data,
)
from weftune.jobs.spec.checks import check_on_base
from weftune.jobs.spec.spec import JobSpec, RunSpec, to_steps
from weftune.launch.plan_sweeps import SweepOutlook, averaged_trials, sweep_outlooks
from weftune.plan.cost.cluster import Cluster
from weftune.plan.cost.estimate import JobOutline, Speed, data_sheet_speed
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.outlook.whole_run import JobTotal, tokens_per_step
from weftune.plan.window.rounds import JobWindow

if TYPE_CHECKING:
    from weftune.trainer.options import Options

OUTLOOK_ROUNDS = 4
"""Number of global batches of each job that `weftune plan` inspects. Training plans as many at once, in one
window."""
FEW_ROUNDS, MANY_JOBS = 2, 12
"""If there are more than `MANY_JOBS` jobs, `weftune plan` inspects `FEW_ROUNDS` global batches of each, since
many jobs have many samples and planning should take only seconds."""
SAMPLED_ROWS, FEWEST_ROWS, ALL_ROWS = 2000, 100, 4000
"""Numbers of rows that are read from datasets that are not tokenised yet: the maximum and the minimum per
dataset, and the total number over all jobs. Planning should take only seconds, so not all rows are
tokenised."""

LINE_FILES = (".jsonl", ".ndjson", ".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job as `weftune plan` knows it, from its specification and its tokenised samples."""

    job: JobOutline
    curriculum: Curriculum
    """Samples and optimizer steps of the job, in the order in which a training run uses them."""
    is_sampled: bool
    """Whether sample lengths are known for the first rows of the dataset only."""
    total: JobTotal
    reference_data: Prepared | None = None
    """Samples for the job's reference policy. None if the job has no reference policy."""
    scored_sample_count: int = 0
    """Number of samples that the job's reference policy scores before the first step. The number is 0 if an
    earlier job has scored the same samples with the same reference policy."""

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def shape(self) -> JobShape:
        return self.job.shape


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The input of `weftune plan`: base, cluster, jobs and options."""

    options: Options
    on_this_machine: bool
    """Whether the cluster is this machine, for which a profile may exist."""
    base: BaseSpec
    shape: ModelShape
    cluster: Cluster
    speeds: Sequence[Speed]
    """Speed of each device, from its data sheet or from a profile."""
    jobs: Sequence[PlannedJob]
    sweeps: Sequence[SweepOutlook] = ()
    shard_counts: Sequence[int] = (1,)
    """Possible numbers of shards (slices of every layer for tensor parallelism) for this base and these
    adapters."""
    may_overlap: bool = False
    """Whether the layers of this base model allow one microbatch to compute while shards (tensor parallelism)
    sum the results of another one."""

    @property
    def has_several_devices(self) -> bool:
        return len(self.cluster.devices) > 1

    @property
    def shapes(self) -> list[JobShape]:
        return [one.shape for one in self.jobs]

    @property
    def totals(self) -> Mapping[str, JobTotal]:
        return {one.name: one.total for one in self.jobs}

    def job_window(self, name: str, rounds: int, begins_run: bool = True) -> JobWindow:
        """Return the job's part of the first window, the global batches that are planned together: `rounds`
        global batches and, if `begins_run` is True and the job has held-out samples, an evaluation before
        them. If `begins_run` is True and the job has a reference policy, return instead a window that only
        scores the job's samples."""
        job = next(one for one in self.jobs if one.name == name)
        if begins_run and job.reference_data is not None:
            return job.curriculum.score_window(0, job.reference_data, np.arange(job.scored_sample_count))
        return job.curriculum.job_window(0, rounds, begins_run)


def read_case(
    run: RunSpec, cluster: Cluster, options: Options, *, on_this_machine: bool, max_steps: int | None = None
) -> PlanCase:
    """Read the input of a plan: the jobs of `run` and the devices of `cluster`. The sizes of the base model
    are computed from its config.json."""
    config = read_config(run.base)
    refuse_shards(run.base, config, max(1, options.shards))
    shape = spec_shape(run.base, config, bytes_per_value(run.base, cluster.devices[0].is_gpu))
    if mistakes := check_on_base(run.jobs, shape, run.base, run.locate):
        # Trials share the line of a wrong target.
        raise SpecError(dict.fromkeys(mistakes))
    averaged = averaged_trials(run.sweeps)
    jobs = outline_jobs(run.jobs, read_tokenizer(run.base), shape, max_steps, averaged)
    sweeps = sweep_outlooks(run.sweeps, run.jobs, {one.name: one.total for one in jobs})
    speeds = [data_sheet_speed(device) for device in cluster.devices]
    return PlanCase(
        options,
        on_this_machine,
        run.base,
        shape,
        cluster,
        speeds,
        jobs,
        sweeps,
        shard_counts=_shard_counts(run, config, len(cluster.devices)),
        may_overlap=has_half_layers(config),
    )


def _shard_counts(run: RunSpec, config: Mapping[str, Any], devices: int) -> list[int]:
    """Return the numbers of shards, from 1 to the number of devices, that the base and all adapters allow."""
    if not all(job.adapter.runs_on_shards for job in run.jobs):
        return [1]
    return [count for count in range(1, devices + 1) if can_be_sharded(run.base, config, count)]


def outline_jobs(
    jobs: Sequence[JobSpec],
    tokenizer: Any,
    shape: ModelShape,
    max_steps: int | None = None,
    averaged_jobs: Collection[str] = (),
) -> list[PlannedJob]:
    """Return what planning needs to know about each job, such as its samples, steps and memory. Jobs in
    `averaged_jobs` keep a running mean of their weights. Raise one DataError that lists what is wrong with
    the data of all jobs."""
    planned_jobs: list[PlannedJob] = []
    mistakes: list[Mistake] = []
    rounds = OUTLOOK_ROUNDS if len(jobs) <= MANY_JOBS else FEW_ROUNDS
    rows = min(SAMPLED_ROWS, max(FEWEST_ROWS, ALL_ROWS // len(jobs)))
    reader = _JobReader(SharedData(tokenizer, cache_folder() / "tokens", shape.context), rows, shape.context)
    for order, job in enumerate(jobs):
        try:
            plain, sampled, scale = reader.read_job(job)
            samples = plain.add_prefix(job.adapter.rows_before, job.adapter.keys_before)
            if not len(samples.train):
                raise DataError("it has 0 samples to train on")
            planned = curriculum(job, samples, max_steps)
            means = int(job.name in averaged_jobs)
            outline = JobOutline(
                shape=job_shape(job, order, samples, shape, means),
                ranks={
                    site.name: job.adapter.rank_at(site.name)
                    for site in shape.sites
                    if job.adapter.adapts(site)
                },
                batches=tuple(
                    tuple(samples.train.lengths[planned.sample_order.batch(step)].tolist())
                    for step in range(1, min(rounds, planned.steps) + 1)
                ),
            )
            references = reference_data(job, plain, samples)
            scored = 0 if references is None else reader.count_scored_samples(job, references)
            total = _job_total(job, outline, samples, scale, shape, max_steps, bool(scored))
            planned_jobs.append(PlannedJob(outline, planned, sampled, total, references, scored))
        except DataError as error:
            mistakes += [mistake.with_job_name(job.name) for mistake in error.mistakes]
    if mistakes:
        raise DataError(mistakes)
    return planned_jobs


def _job_total(
    job: JobSpec,
    outline: JobOutline,
    samples: Prepared,
    scale: float | None,
    shape: ModelShape,
    max_steps: int | None,
    scores: bool,
) -> JobTotal:
    """Return the number of steps, the tokens per step and the memory of the job's whole training, even if
    only the first rows of its data were read. `scale` is the number of all rows divided by the number of rows
    read, or None if it is unknown. `scores` says whether the reference policy scores the samples before the
    first step."""
    order = samples.train.sample_order(job.batch_size, job.seed)
    steps = job.total_steps(math.ceil(order.steps_per_epoch * (scale or 1.0)))
    steps = steps if max_steps is None else min(steps, max_steps)
    held_out = 0 if samples.evaluation is None else _count_tokens(samples.evaluation.parts)
    evaluations = 0
    if job.eval is not None:
        every = steps if job.eval.every is None else max(1, to_steps(job.eval.every, steps))
        # At the start, at the interval of the job, and at the end.
        evaluations = len(range(0, steps, every)) + 1
    scored = 0.0
    if scores:
        # A run that finds the scores in its cache skips this.
        scored = _count_tokens(samples.parts) * (scale or 1.0)
    if samples.train.mismatched_samples is not None:
        scored += int(samples.train.mismatched_samples.lengths.sum()) * steps / order.steps_per_epoch
    return JobTotal(
        steps=steps,
        tokens=tokens_per_step(outline.batches, held_out, evaluations, steps, scored),
        state_bytes=MemoryModel(shape, 0).state_bytes([outline.shape]),
        is_lower_bound=scale is None and job.steps is None,
    )


class _JobReader:
    """A reader of the samples of jobs. The reader uses the token cache or, for data that are not in the
    cache, tokenises the first `rows` rows. Data that several jobs share are read once."""

    def __init__(self, shared_data: SharedData, rows: int, context: int) -> None:
        self._shared, self._rows, self._context = shared_data, rows, context
        self._read_data: dict[Hashable, tuple[Prepared, bool, float | None]] = {}
        self._scored_pairs: set[Hashable] = set()
        """Pairs of samples and reference adapter that the reference policy of an earlier job has already
        scored."""

    def read_job(self, job: JobSpec) -> tuple[Prepared, bool, float | None]:
        """Return the job's samples without an adapter's virtual tokens, whether they come from the first rows
        only, and the number of all rows divided by the number of rows read, or None if it is unknown."""
        data, row_kind = truncate_data(job, self._context), job.objective.row_kind
        key = data_identity(data, job.eval, row_kind)
        if key not in self._read_data:
            self._read_data[key] = self._prepare_data(data, job.eval, row_kind)
        samples, sampled, scale = self._read_data[key]
        return adapt_to_objective(job, samples, self._context), sampled, scale

    def count_scored_samples(self, job: JobSpec, data: Prepared) -> int:
        """Return the number of samples that the job's reference policy scores. Of several jobs with the same
        samples and the same reference policy, only the first one scores them; the others get 0."""
        adapter = None if job.adapter.init_from is None else job.adapter
        policy = (*(part.fingerprint for part in data.parts), repr(adapter))
        is_first = policy not in self._scored_pairs
        self._scored_pairs.add(policy)
        return sum(map(len, data.parts)) if is_first else 0

    def _prepare_data(
        self, data: DataSpec, evaluation: EvalSpec | None, row_kind: RowKind
    ) -> tuple[Prepared, bool, float | None]:
        sampled = not self._shared.is_prepared(data, evaluation, row_kind)
        limit = min(data.limit or self._rows, self._rows) if sampled else data.limit
        samples = self._shared.prepare(replace(data, limit=limit), evaluation, row_kind=row_kind)
        scale = _row_ratio(data, limit) if sampled and limit is not None else 1.0
        return samples, sampled, scale


def _count_tokens(parts: Sequence[Samples]) -> int:
    return sum(int(part.lengths.sum()) for part in parts)


def _row_ratio(data: DataSpec, limit: int) -> float | None:
    """Return the number of all rows divided by the number of rows read, at most `limit` per file. Return None
    if a file does not have one row per line."""
    if data.rows is not None:
        counts = [len(data.rows)]
    else:
        paths = [Path(source.path) for source in data.sources]
        if not all(path.is_file() and path.suffix.lower() in LINE_FILES for path in paths):
            return None
        counts = [_count_lines(path) for path in paths]
    read = sum(min(count, limit) for count in counts)
    whole = sum(min(count, data.limit or count) for count in counts)
    return max(1.0, whole / max(1, read))


def _count_lines(path: Path) -> int:
    with path.open("rb") as content:
        return sum(part.count(b"\n") for part in iter(lambda: content.read(1 << 20), b""))
