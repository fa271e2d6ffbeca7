"""Which jobs did best, and in which keys they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weftune.report.read import JobRecord

ENDED_BADLY = ("failed", "cancelled")


def first_loss(job: JobRecord) -> float | None:
    return next((line.loss for line in job.losses if line.loss is not None), None)


def last_loss(job: JobRecord) -> float | None:
    return next((line.loss for line in reversed(job.losses) if line.loss is not None), None)


def first_validation(job: JobRecord) -> float | None:
    """The validation loss at step 0: the base before any training."""
    return next((line.loss for line in job.evaluations if line.step == 0), None)


def kept_validation(job: JobRecord) -> float | None:
    """The validation loss of the adapter in the job's folder: the best with `keep: best`, else the last."""
    losses = {line.step: line.loss for line in job.evaluations}
    if job.spec.get("keep") == "best" and losses.get(job.best_step or 0) is not None:
        return losses[job.best_step or 0]
    last = next((line.loss for line in reversed(job.evaluations) if line.loss is not None), None)
    return last if last is not None else job.eval_loss


def by_result(jobs: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
    """Lowest validation loss first, then jobs without validation by training loss; those that failed last."""

    def place(job: JobRecord) -> tuple[int, float]:
        validation, training = kept_validation(job), last_loss(job)
        if job.state in ENDED_BADLY:
            return (3 if job.state == "cancelled" else 4), 0.0
        if validation is not None:
            return 0, validation
        return (1, training) if training is not None else (2, 0.0)

    return tuple(sorted(jobs, key=place))


def best_jobs(jobs: Sequence[JobRecord]) -> Mapping[str, str]:
    """The names of the best jobs, each with the rows it was measured on.

    Losses on different rows cannot be compared, so every set of rows that two jobs or more share has its
    own best. Training losses count only where no job has validation.
    """
    sound = [job for job in by_result(jobs) if job.state not in ENDED_BADLY]
    measured = [job for job in sound if kept_validation(job) is not None]
    groups: dict[str, list[JobRecord]] = {}
    for job in measured or [job for job in sound if last_loss(job) is not None]:
        groups.setdefault(validation_key(job), []).append(job)
    return {
        rivals[0].name: validation_rows(rivals[0]) if len(groups) > 1 else ""
        for rivals in groups.values()
        if len(rivals) > 1
    }


def validation_key(job: JobRecord) -> str:
    """Equal for two jobs when they are evaluated on the same rows, tokenised alike."""
    held_out = {key: value for key, value in _section(job, "eval").items() if key != "every"}
    data = dict(_section(job, "data"))
    if held_out.get("path"):
        for key in ("path", "split", "limit", "skip_bad_rows"):
            data.pop(key, None)
    return json.dumps([held_out, data], sort_keys=True, default=str)


def validation_rows(job: JobRecord) -> str:
    """Where the validation rows come from, in one word or few."""
    path = _section(job, "eval").get("path") or _section(job, "data").get("path") or "validation"
    sources = path if isinstance(path, list | tuple) else [path]
    paths = [str(source.get("path", "")) if isinstance(source, dict) else str(source) for source in sources]
    return " + ".join(path.rsplit("/", 1)[-1] for path in paths)


def differing_keys(jobs: Sequence[JobRecord]) -> tuple[str, ...]:
    """Dotted keys of the specs whose values are not the same in all jobs that have a spec."""
    flats = [flat_spec(job) for job in jobs if job.spec]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    # A key that is absent says the same as one that is none: a job without `eval` has no `eval.path` either.
    return tuple(key for key in keys if any(flat.get(key) != flats[0].get(key) for flat in flats))


def flat_spec(job: JobRecord) -> dict[str, Any]:
    return {key: value for key, value in _flatten("", job.spec) if key != "name"}


def value_text(value: Any) -> str:
    """A value as it would stand in the jobs file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _flatten(prefix: str, mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _flatten(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _section(job: JobRecord, key: str) -> Mapping[str, Any]:
    section = job.spec.get(key)
    return section if isinstance(section, dict) else {}
