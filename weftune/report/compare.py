"""Comparison of jobs for the report: their order by result, the keys in which they differ, and sentences
about the best ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftune.jobs.sweeps.record import SweepRecord, flatten_mapping, leading_trials
from weftune.objectives.spec import OBJECTIVES
from weftune.report.read import JobRecord, MetricLine, Run
from weftune.report.words import count_noun, loss_text

ENDED_BADLY = ("failed", "cancelled")
MIN_ROWS, MIN_TOKENS = 20, 500
"""Minimum numbers of held-out rows and tokens for saying that one adapter is better than another. The loss of
a single token varies by about 1, so the mean of 500 tokens is accurate to about 0.05; and the tokens of one
row are correlated, so a few rows say little about the adapter."""


def first_loss(job: JobRecord) -> float | None:
    return next((line.loss for line in job.losses if line.loss is not None), None)


def first_validation(job: JobRecord) -> float | None:
    """Return the validation loss at step 0, which is measured before any training."""
    return next((line.loss for line in job.evaluations if line.step == 0), None)


def base_validation(job: JobRecord) -> float | None:
    """Return the validation loss of the base without an adapter. If a run did not record this loss, return
    the loss at step 0, which is equal if the adapter does not change the base at step 0."""
    return job.base_loss if job.base_loss is not None else first_validation(job)


def base_accuracy(job: JobRecord) -> float | None:
    """Return the token accuracy of the base without an adapter, which is measured at step 0 only. Return None
    for an adapter that already changes the base at step 0."""
    first = next((line for line in job.evaluations if line.step == 0), None)
    if first is None or first.loss is None or first.accuracy is None:
        return None
    is_base = job.base_loss is None or abs(first.loss - job.base_loss) <= 1e-4 * abs(job.base_loss)
    return first.accuracy if is_base else None


def kept_evaluation(job: JobRecord) -> MetricLine | None:
    """Return the evaluation of the adapter in the job's folder: the best evaluation if the job has `keep:
    best`, otherwise the last one. Return None if the job was not evaluated after step 0, since an evaluation
    at step 0 says nothing about training."""
    known = [line for line in job.evaluations if line.loss is not None]
    if all(line.step == 0 for line in known):
        return None
    best = next((line for line in known if line.step == (job.best_step or 0)), None)
    return best if job.spec.get("keep") == "best" and best is not None else known[-1]


def kept_validation(job: JobRecord) -> float | None:
    """Return the validation loss of the adapter in the job's folder."""
    kept = kept_evaluation(job)
    if kept is not None or job.evaluations:
        return None if kept is None else kept.loss
    return job.eval_loss


def held_out_rows(job: JobRecord) -> int | None:
    """Return the number of rows that the job is evaluated on, or None if it is not recorded. A preference
    pair is one row with two samples."""
    samples = job.data.get("evaluation_samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples <= 0:
        return None
    spec = OBJECTIVES.get(objective_name(job))
    return samples // 2 if spec is not None and spec.row_kind == "pairs" else samples


def objective_name(job: JobRecord) -> str:
    return str(_spec_section(job, "objective").get("kind") or "sft")


def held_out_tokens(job: JobRecord) -> int | None:
    return max((line.tokens for line in job.evaluations), default=0) or None


def has_enough_rows(job: JobRecord) -> bool:
    """Return whether the job has enough held-out rows and tokens to say that one adapter is better than
    another."""
    rows, tokens = held_out_rows(job), held_out_tokens(job)
    return (rows is None or rows >= MIN_ROWS) and (tokens is None or tokens >= MIN_TOKENS)


def sort_by_result(jobs: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
    """Return the jobs sorted from best to worst: first those with a validation loss, by that loss; then those
    without, by training loss; failed jobs last."""

    def rank(job: JobRecord) -> tuple[int, float]:
        validation, training = kept_validation(job), job.loss
        if job.state in ENDED_BADLY:
            return (3 if job.state == "cancelled" else 4), 0.0
        if validation is not None:
            return 0, validation
        return (1, training) if training is not None else (2, 0.0)

    return tuple(sorted(jobs, key=rank))


def validation_groups(jobs: Sequence[JobRecord]) -> tuple[tuple[JobRecord, ...], ...]:
    """Return groups of jobs that have a validation loss, best first. Each group has its own held-out rows,
    since losses on different rows cannot be compared."""
    groups: dict[str, list[JobRecord]] = {}
    for job in sort_by_result(jobs):
        if job.state not in ENDED_BADLY and kept_validation(job) is not None:
            groups.setdefault(validation_key(job), []).append(job)
    return tuple(map(tuple, groups.values()))


def best_jobs(jobs: Sequence[JobRecord]) -> Mapping[str, str]:
    """Map the name of each best job to a short name of its held-out rows, or to an empty string if all jobs
    have the same rows.

    A job counts as best if it has the lowest loss of at least two jobs with the same rows, there are enough
    rows, and it is not worse than the base.
    """
    groups = validation_groups(jobs)
    return {
        rivals[0].name: validation_rows(rivals[0]) if len(groups) > 1 else ""
        for rivals in groups
        if len(rivals) > 1 and has_enough_rows(rivals[0]) and not is_worse_than_base(rivals[0])
    }


def is_worse_than_base(job: JobRecord) -> bool:
    """Return whether the job's adapter has a higher validation loss than the base."""
    base, kept = base_validation(job), kept_validation(job)
    return base is not None and kept is not None and kept > base


def validation_key(job: JobRecord) -> str:
    """Return a key by which jobs are grouped. It is equal for jobs that were evaluated on the same rows with
    the same tokenisation and loss."""
    held_out = {
        key: value for key, value in _spec_section(job, "eval").items() if key in ("path", "fraction")
    }
    data = dict(_spec_section(job, "data"))
    if held_out.get("path"):
        for key in ("path", "split", "limit", "skip_bad_rows"):
            data.pop(key, None)
    sections = [held_out, data, dict(_spec_section(job, "objective"))]
    return json.dumps(sections, sort_keys=True, default=str)


def validation_rows(job: JobRecord) -> str:
    """Return a short name of the files that the validation rows come from, and of the objective that they are
    scored by if that is not supervised fine-tuning."""
    path = _spec_section(job, "eval").get("path") or _spec_section(job, "data").get("path") or "validation"
    sources = path if isinstance(path, list | tuple) else [path]
    paths = [str(source.get("path", "")) if isinstance(source, dict) else str(source) for source in sources]
    named = " + ".join(path.rsplit("/", 1)[-1] for path in paths)
    kind = objective_name(job)
    return named if kind == "sft" else f"{named} by {kind}"


def differing_keys(jobs: Sequence[JobRecord]) -> tuple[str, ...]:
    """Return the dotted keys, such as `adapter.rank`, whose values differ between the jobs. Jobs without a
    recorded spec are left out."""
    flats = [flat_spec(job) for job in jobs if job.spec]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    # An absent key means the same as None: a job without `eval` has no `eval.path` either.
    return tuple(key for key in keys if any(flat.get(key) != flats[0].get(key) for flat in flats))


def flat_spec(job: JobRecord) -> dict[str, Any]:
    return {key: value for key, value in flatten_mapping("", job.spec) if key != "name"}


def value_text(value: Any) -> str:
    """Format the value of a job's key as the user would write it in the jobs file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _spec_section(job: JobRecord, key: str) -> Mapping[str, Any]:
    section = job.spec.get(key)
    return section if isinstance(section, dict) else {}


_MAX_GROUPS = 4
"""Maximum number of sets of held-out rows for which the report has a verdict, a sentence about the best job.
The sets with the most jobs are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """A verdict of the report: a sentence about jobs that can be compared, in parts that are formatted
    differently."""

    introduction: str
    change: str = ""
    """Difference between the loss of the adapter and the loss of the base, as a formatted string."""
    colour_class: str = ""
    """CSS class that colours the change of the loss: `good`, `worse`, or `bad` if there is no result."""
    losses: str = ""
    basis: str = ""
    """Numbers of rows and tokens that the verdict is based on, as a formatted string."""
    caution: str = ""


def verdicts(run: Run) -> tuple[RunVerdict, ...]:
    """Return one sentence about the best job of each sweep and of each set of held-out rows, up to
    `_MAX_GROUPS` sets. If nothing was evaluated, the only sentence says so."""
    trials = run.trials
    plain = [job for job in run.jobs if job.name not in trials]
    groups = sorted(validation_groups(plain), key=len, reverse=True)
    found = [verdict for record in run.sweeps if (verdict := _sweep_verdict(run, record)) is not None]
    for rivals in groups[:_MAX_GROUPS]:
        lead = _comparison_lead(rivals[0], len(rivals)) if len(rivals) > 1 else _single_job_lead(rivals[0])
        rows_name = validation_rows(rivals[0]) if len(groups) > 1 else ""
        found.append(_job_verdict(rivals[0], lead, rival_count=len(rivals), rows_name=rows_name))
    return tuple(found) or (_unevaluated_verdict(run),)


def _sweep_verdict(run: Run, record: SweepRecord) -> RunVerdict | None:
    best = next(iter(leading_trials(record, 1)), None)
    job = next((job for job in run.jobs if best is not None and job.name == best.name), None)
    if job is None or kept_validation(job) is None:
        return None
    best_of = "is the best of" if has_enough_rows(job) and not is_worse_than_base(job) else "leads"
    so_far = "" if record.best else " so far"
    lead = f"{job.name} {best_of} {count_noun(len(record.trials), 'trial')}{so_far}."
    return _job_verdict(job, lead, rival_count=len(record.trials), rows_name="")


def _comparison_lead(job: JobRecord, count: int) -> str:
    if is_worse_than_base(job):
        return f"No adapter beats the base; {job.name} comes closest."
    best = "is the best" if has_enough_rows(job) else "has the lowest loss"
    return f"{job.name} {best} of {count} adapters."


def _single_job_lead(job: JobRecord) -> str:
    base, kept = base_validation(job), kept_validation(job)
    if base is None or kept is None:
        return f"{job.name} has been evaluated."
    if kept == base:
        return f"{job.name} is no better than the base."
    if kept > base:
        return f"{job.name} is worse than the base."
    return f"{job.name} {'is better' if has_enough_rows(job) else 'has a lower loss'} than the base."


def _job_verdict(job: JobRecord, lead_sentence: str, rival_count: int, rows_name: str) -> RunVerdict:
    base, kept = base_validation(job), kept_validation(job)
    assert kept is not None
    change = tone = ""
    losses = f"validation loss {loss_text(kept)}"
    if base:
        share = (kept - base) / abs(base)
        direction = "above" if share > 0 else "below"
        change = f"{100 * abs(share):.1f} % {direction} the base" if share else "as the base"
        tone = "worse" if share > 0 else "good" if share < 0 else ""
        losses += f", base {loss_text(base)}"
    what = "which adapter is better" if rival_count > 1 else "whether the adapter is better"
    least = f"at least {MIN_ROWS} held-out rows and {MIN_TOKENS} tokens"
    basis = basis_text(job)
    return RunVerdict(
        introduction=lead_sentence,
        change=change,
        colour_class=tone,
        losses=losses,
        basis=f"{basis} of {rows_name}" if rows_name and basis else basis,
        caution="" if has_enough_rows(job) else f"Too few to tell {what}: that takes {least}.",
    )


def basis_text(job: JobRecord) -> str:
    """Format the numbers of held-out rows and tokens of a job."""
    rows, tokens = held_out_rows(job), held_out_tokens(job)
    words = [count_noun(rows, "held-out row")] if rows else []
    words += [count_noun(tokens, "token" if rows else "held-out token")] if tokens else []
    return ", ".join(words)


def _unevaluated_verdict(run: Run) -> RunVerdict:
    """Return the report's sentence about a run in which nothing was evaluated after training had begun."""
    jobs = run.jobs
    if jobs and all(job.state in ENDED_BADLY for job in jobs):
        states = " or ".join(sorted({job.state for job in jobs}))
        every = f"all {len(jobs)} jobs {states}" if len(jobs) > 1 else f"the job {states}"
        return RunVerdict(introduction=f"No adapter was trained: {every}.", colour_class="bad")
    based = next((job for job in jobs if base_validation(job) is not None), None)
    if based is not None:
        losses = f"validation loss of the base {loss_text(base_validation(based))}"
        return RunVerdict(
            introduction="No adapter has been evaluated yet.", losses=losses, basis=basis_text(based)
        )
    if any(job.state == "succeeded" for job in jobs):
        caution = "Give the jobs `eval: {fraction: 0.1}` to see how they do against the base."
        return RunVerdict(
            introduction="No job has held-out rows, so no adapter can be called better.", caution=caution
        )
    return RunVerdict(introduction="No adapter has been evaluated yet.")
