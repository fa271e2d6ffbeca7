"""Verdicts at the top of the page: the best adapter, its change against the base, and on how many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftune.jobs.sweeps.record import SweepRecord
from weftune.report.compare import (
    ENDED_BADLY,
    MIN_ROWS,
    MIN_TOKENS,
    base_validation,
    held_out_rows,
    held_out_tokens,
    is_enough,
    is_worse,
    kept_validation,
    validation_groups,
    validation_rows,
)
from weftune.report.read import JobRecord, Run
from weftune.report.sweeps.ranking import leaders
from weftune.report.words import loss_text, plural

_MOST_GROUPS = 4
"""Number of sets of held-out rows that have a verdict of their own: those with the most jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """One sentence about a set of jobs that can be compared, in the parts that the page formats apart."""

    lead: str
    change: str = ""
    """Difference of the loss from the base."""
    tone: str = ""
    """`good` or `worse` for the change; `bad` if there is no result."""
    losses: str = ""
    basis: str = ""
    """Rows and tokens that the verdict is based on."""
    caution: str = ""


def verdicts(run: Run) -> tuple[RunVerdict, ...]:
    """Return one verdict per sweep and per set of held-out rows; a single one if nothing was evaluated."""
    trials = run.trials
    plain = [job for job in run.jobs if job.name not in trials]
    groups = sorted(validation_groups(plain), key=len, reverse=True)
    found = [verdict for record in run.sweeps if (verdict := _sweep_verdict(run, record)) is not None]
    found += [_verdict(rivals, several=len(groups) > 1) for rivals in groups[:_MOST_GROUPS]]
    return tuple(found) or (_no_verdict(run),)


def _sweep_verdict(run: Run, record: SweepRecord) -> RunVerdict | None:
    best = next(iter(leaders(record, 1)), None)
    job = next((job for job in run.jobs if best is not None and job.name == best.name), None)
    if job is None or kept_validation(job) is None:
        return None
    best_of = "is the best of" if is_enough(job) and not is_worse(job) else "leads"
    so_far = "" if record.best else " so far"
    lead = f"{job.name} {best_of} {plural(len(record.trials), 'trial')}{so_far}."
    return _about(job, lead, rivals=len(record.trials), rows_name="")


def _verdict(rivals: Sequence[JobRecord], several: bool) -> RunVerdict:
    job, count = rivals[0], len(rivals)
    lead = _lead_alone(job) if count == 1 else _lead_among(job, count)
    return _about(job, lead, rivals=count, rows_name=validation_rows(job) if several else "")


def _lead_among(job: JobRecord, count: int) -> str:
    if is_worse(job):
        return f"No adapter beats the base; {job.name} comes closest."
    best = "is the best" if is_enough(job) else "has the lowest loss"
    return f"{job.name} {best} of {count} adapters."


def _lead_alone(job: JobRecord) -> str:
    base, kept = base_validation(job), kept_validation(job)
    if base is None or kept is None:
        return f"{job.name} has been evaluated."
    if kept == base:
        return f"{job.name} is no better than the base."
    if kept > base:
        return f"{job.name} is worse than the base."
    return f"{job.name} {'is better' if is_enough(job) else 'has a lower loss'} than the base."


def _about(job: JobRecord, lead: str, rivals: int, rows_name: str) -> RunVerdict:
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
    return RunVerdict(
        lead=lead,
        change=change,
        tone=tone,
        losses=losses,
        basis=basis_text(job) + (f" of {rows_name}" if rows_name and basis_text(job) else ""),
        caution="" if is_enough(job) else _too_few(rivals),
    )


def basis_text(job: JobRecord) -> str:
    """Format the numbers of held-out rows and tokens of a job."""
    rows, tokens = held_out_rows(job), held_out_tokens(job)
    words = [plural(rows, "held-out row")] if rows else []
    words += [plural(tokens, "token" if rows else "held-out token")] if tokens else []
    return ", ".join(words)


def _too_few(rivals: int) -> str:
    what = "which adapter is better" if rivals > 1 else "whether the adapter is better"
    return f"Too few to tell {what}: that takes at least {MIN_ROWS} held-out rows and {MIN_TOKENS} tokens."


def _no_verdict(run: Run) -> RunVerdict:
    """Return the verdict for a run in which nothing was evaluated after training had begun."""
    jobs = run.jobs
    if jobs and all(job.state in ENDED_BADLY for job in jobs):
        states = " or ".join(sorted({job.state for job in jobs}))
        every = f"all {len(jobs)} jobs {states}" if len(jobs) > 1 else f"the job {states}"
        return RunVerdict(lead=f"No adapter was trained: {every}.", tone="bad")
    based = next((job for job in jobs if base_validation(job) is not None), None)
    if based is not None:
        losses = f"validation loss of the base {loss_text(base_validation(based))}"
        return RunVerdict(lead="No adapter has been evaluated yet.", losses=losses, basis=basis_text(based))
    if any(job.state == "succeeded" for job in jobs):
        caution = "Give the jobs `eval: {fraction: 0.1}` to see how they do against the base."
        return RunVerdict(
            lead="No job has held-out rows, so no adapter can be called better.", caution=caution
        )
    return RunVerdict(lead="No adapter has been evaluated yet.")
