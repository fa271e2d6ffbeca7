"""The reader of the files in an output folder, from which the report is made. Lines that a killed run left
incomplete are skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weftune.core.clock import Phase, WallTime
from weftune.core.files import FORMAT, refuse_unknown_format, replace_json
from weftune.errors import OutputError
from weftune.jobs.store.shares import combine_statuses, read_shares, share_folders
from weftune.jobs.store.status import (
    BASE_LOSS,
    METRICS,
    RUNG_LOSS,
    STATUS,
    WINDOWS,
    JobStatus,
    RunStatus,
    State,
    from_json,
    to_json,
)
from weftune.jobs.sweeps.record import SWEEP_FILE, DamagedSweep, SweepRecord, read_record
from weftune.objectives.spec import OBJECTIVE_METRICS
from weftune.report.evaluation import SampleAnswers, read_answers

WALL_TIME = "wall.json"
Curve = list["MetricLine"]
_EVALUATION_KEYS = ("eval_loss", "eval_tokens", "eval_token_accuracy")
"""Keys in an evaluation's line of metrics.jsonl for which `MetricLine` has fields of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """One optimizer step of a job, or one evaluation on its held-out rows; step 0 is before training."""

    step: int
    loss: float | None
    """Loss of the optimizer step or of the evaluation. None if the loss was not finite."""
    tokens: int = 0
    """Number of tokens over which the loss is averaged. 0 if it is not recorded."""
    accuracy: float | None = None
    """Fraction of held-out tokens for which the model's most likely token is correct."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Maps the name of each metric, except the loss, to its value. The prefix `eval_` is removed from the
    names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLine:
    """A record of one executed window (a few global batches of every job, planned together), with its
    measured and predicted values."""

    tokens: int
    microbatches: int
    shared: int
    """Number of microbatches with samples of two or more jobs."""
    seconds: float
    predicted_seconds: float | None
    peak_bytes: float | None
    predicted_peak_bytes: float | None
    jobs: int = 0
    changed: bool = True
    """Whether the jobs or sample lengths of the window (a few global batches of every job) differ from those
    of the window before."""
    compiled_passes: int = 0
    """Number of passes of the window (a few global batches of every job) in which kernels were compiled or a
    CUDA graph was captured."""
    source: str = ""
    """Description, for the user, of what the predicted time is based on, such as a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(JobStatus):
    """The status of a job with its name and, if it was read from an output folder, the spec, curves and
    answers of the job.

    The state may be a string that is no `State`, as in files of other versions; a job without a status has
    the state `unknown`.
    """

    name: str
    loss: float | None = None
    """Last training loss that was finite. None if there is none."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values of the job with all defaults filled in. Empty for a job that never started."""
    base: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[MetricLine, ...] = ()
    evaluations: tuple[MetricLine, ...] = ()
    answers: SampleAnswers | None = None
    """Answers to held-out prompts of the adapter in the job's folder. None if the job has generated none."""

    @property
    def metric_name(self) -> str | None:
        """Name of the job's own metric, `eval.metric`; None if it has none."""
        metric = _as_mapping(self.spec.get("eval")).get("metric")
        return metric.rpartition(":")[2] if isinstance(metric, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The content of an output folder, as the report shows it."""

    output: Path
    base: str
    device: str
    dtype: str
    started: float | None
    seconds: float | None
    solo_seconds: float | None
    """Predicted seconds if the same jobs were trained one after another."""
    peak_bytes: float | None
    notes: tuple[str, ...]
    jobs: tuple[JobRecord, ...]
    windows: tuple[WindowLine, ...]
    wall_times: tuple[WallTime, ...] = ()
    """Wall time, by phase, of every process that has trained into the folder."""
    sweeps: tuple[SweepRecord, ...] = ()
    command: str | None = None
    """Shell command that resumes the run, as recorded in the status."""

    @property
    def trials(self) -> frozenset[str]:
        """Names of the jobs that are trials of a sweep."""
        return frozenset(trial.name for sweep in self.sweeps for trial in sweep.trials)

    @property
    def dropped_trials(self) -> frozenset[str]:
        """Names of the trials that were dropped from their sweeps. Such trials do not count as failures."""
        return frozenset(
            trial.name for sweep in self.sweeps for trial in sweep.trials if trial.state == "left"
        )


def read_run(output: Path) -> Run:
    """Read an output folder. Raise a UserError if it has neither metrics nor a status."""
    metrics, status = output / METRICS, output / STATUS
    if not metrics.exists() and not status.exists():
        what = "holds no metrics.jsonl" if output.is_dir() else "is not a folder"
        raise OutputError(f"{output} {what}: name a folder that `weftune train` has written to.")
    notes: list[str] = []
    shares = read_shares(output)
    losses, evaluations = _read_curves(_read_metrics(output, shares, notes))
    folders = (output, *share_folders(output))
    windows = tuple(_window_line(line) for folder in folders for line in _read_lines(folder / WINDOWS, notes))
    record = _merge_shares(output, _read_status(status, notes), shares)
    states = {str(name): _as_mapping(state) for name, state in _as_mapping(record.get("jobs")).items()}
    jobs = tuple(
        _job_record(
            output, name, states.get(name, {}), losses.get(name, ()), evaluations.get(name, ()), notes
        )
        for name in dict.fromkeys((*states, *losses))
    )
    seconds = _as_number(record.get("seconds"))
    sweeps = _read_sweeps(output, notes)
    return Run(
        output=output,
        base=_as_text(record.get("base"))
        or next((_as_text(job.base.get("model")) for job in jobs if job.base), ""),
        device=_as_text(record.get("device")),
        dtype=_as_text(record.get("dtype")),
        started=_as_number(record.get("started")),
        seconds=seconds if seconds else (sum(window.seconds for window in windows) or None),
        solo_seconds=_as_number(record.get("solo_seconds")),
        peak_bytes=_as_number(record.get("peak_bytes"))
        or max((window.peak_bytes for window in windows if window.peak_bytes), default=None),
        notes=tuple(dict.fromkeys((*_as_texts(record.get("notes")), *notes))),
        jobs=jobs,
        windows=windows,
        wall_times=tuple(read_wall_times(output)),
        sweeps=sweeps,
        command=command if isinstance(command := record.get("command"), str) else None,
    )


def _read_lines(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the lines of a file. If lines other than the last are incomplete, add a note
    about them to `notes`."""
    if not path.exists():
        return []
    texts = [text for text in path.read_text(encoding="utf-8", errors="replace").split("\n") if text.strip()]
    lines: list[Mapping[str, Any]] = []
    torn = 0
    for position, text in enumerate(texts):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            torn += position < len(texts) - 1
    if torn:
        notes.append(
            f"{torn} torn line{'s' * (torn > 1)} of {path.name} left out: a killed run broke off there."
        )
    return lines


def _read_metrics(output: Path, shares: Sequence[RunStatus], notes: list[str]) -> list[Mapping[str, Any]]:
    """Return all lines of metrics. If several processes each trained a part of the jobs, the lines of a job
    come from the folder of its process, where they are complete."""
    owned = frozenset(name for share in shares for name in share.jobs)
    own = [line for line in _read_lines(output / METRICS, notes) if str(line.get("job")) not in owned]
    return [
        *own,
        *(line for folder in share_folders(output) for line in _read_lines(folder / METRICS, notes)),
    ]


def _merge_shares(output: Path, record: Mapping[str, Any], shares: Sequence[RunStatus]) -> Mapping[str, Any]:
    if not shares:
        return record
    try:
        whole = from_json(record, output / STATUS)
    except ValueError:
        whole = RunStatus()
    return to_json(combine_statuses(output, whole, shares))


def _read_curves(lines: list[Mapping[str, Any]]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Return two mappings from each job: one to the lines of its steps, the other to the lines of its
    evaluations, both in order. A job that was resumed or restarted has repeated some steps, whose earlier
    lines are dropped."""
    losses: dict[str, Curve] = {}
    evaluations: dict[str, Curve] = {}
    for line in lines:
        if "job" not in line or "step" not in line:
            continue
        job, step = str(line["job"]), _as_count(line["step"])
        steps, evaluated = losses.setdefault(job, []), evaluations.setdefault(job, [])
        if RUNG_LOSS in line or BASE_LOSS in line:
            # These are losses of other weights than the trained ones, so they are no points of the curve.
            continue
        if "eval_loss" not in line and steps and step <= steps[-1].step:
            _drop_repeated_lines(step, steps)
            _drop_repeated_lines(step, evaluated)
        if "eval_loss" in line:
            _drop_repeated_lines(step, evaluated)
            evaluated.append(
                MetricLine(
                    step=step,
                    loss=_as_number(line["eval_loss"]),
                    tokens=_as_count(line.get("eval_tokens")),
                    accuracy=_as_number(line.get("eval_token_accuracy")),
                    metrics=_evaluation_metrics(line),
                )
            )
        else:
            tokens = _as_count(line.get("tokens"))
            metrics = _line_numbers(line, {name: name for name in OBJECTIVE_METRICS})
            loss = _as_number(line.get("loss"))
            steps.append(MetricLine(step=step, loss=loss, tokens=tokens, metrics=metrics))
    return losses, evaluations


def _evaluation_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation, with the prefix `eval_` removed from their keys."""
    own = (key for key in line if key.startswith("eval_") and key not in _EVALUATION_KEYS)
    return _line_numbers(line, {key.removeprefix("eval_"): key for key in own})


def _line_numbers(line: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """Return the finite numbers in a line of metrics. `keys` maps each number's name to its key in the
    line."""
    found = {name: _as_number(line.get(key)) for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _drop_repeated_lines(step: int, curve: Curve) -> None:
    while curve and curve[-1].step >= step:
        curve.pop()


def _read_status(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        record = _as_mapping(json.loads(path.read_text(encoding="utf-8")))
        refuse_unknown_format(record.get("format"), path)
        return record
    except ValueError:
        notes.append("status.json could not be read, so states and reasons are missing.")
        return {}


def _job_record(
    output: Path,
    name: str,
    status: Mapping[str, Any],
    losses: Sequence[MetricLine],
    evaluations: Sequence[MetricLine],
    notes: list[str],
) -> JobRecord:
    saved = _read_job_file(output, name, notes)
    data = _as_mapping(saved.get("data"))
    best_step = _as_number(status.get("best_step"))
    last_step = losses[-1].step if losses else 0
    return JobRecord(
        name=name,
        state=cast("State", _as_text(status.get("state")) or "unknown"),
        reason=_as_text(status.get("reason")),
        step=_as_count(status.get("step")) or last_step,
        steps=_as_count(status.get("steps")) or last_step,
        trained_tokens=_as_count(status.get("trained_tokens")) or sum(line.tokens for line in losses),
        best_step=None if best_step is None else int(best_step),
        eval_loss=_as_number(status.get("eval_loss")),
        base_loss=_as_number(status.get("base_loss")),
        warning=_as_text(status.get("warning")),
        # Notes about a job's rows are in both files.
        notes=tuple(dict.fromkeys((*_as_texts(status.get("notes")), *_as_texts(data.get("notes"))))),
        loss=next((line.loss for line in reversed(losses) if line.loss is not None), None),
        spec=_as_mapping(saved.get("job")),
        base=_as_mapping(saved.get("base")),
        data=data,
        losses=tuple(losses),
        evaluations=tuple(evaluations),
        score=_as_number(status.get("score")),
        base_score=_as_number(status.get("base_score")),
        answers=read_answers(output / name) if saved else None,
    )


def _read_job_file(output: Path, name: str, notes: list[str]) -> Mapping[str, Any]:
    import yaml

    from weftune.core.files import load_yaml

    path = output / name / "job.yaml"
    # Names come from files: one that points outside the folder reads nothing.
    if path.parent.parent != output or name in ("", ".", "..") or not path.is_file():
        return {}
    try:
        return _as_mapping(load_yaml(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        notes.append(f"{name}/job.yaml could not be read, so the settings of {name} are missing.")
        return {}


def _read_sweeps(output: Path, notes: list[str]) -> tuple[SweepRecord, ...]:
    found = []
    for path in sorted(output.glob(f"*/{SWEEP_FILE}")):
        try:
            record = read_record(path.parent)
        except DamagedSweep as error:
            notes.append(f"{path.parent.name}/{SWEEP_FILE} cannot be used ({error.damage_text}).")
            continue
        # Paths are built from the folder's name.
        if record is not None and record.name == path.parent.name:
            found.append(record)
    return tuple(found)


def _window_line(line: Mapping[str, Any]) -> WindowLine:
    return WindowLine(
        tokens=_as_count(line.get("tokens")),
        microbatches=_as_count(line.get("microbatches")),
        shared=_as_count(line.get("shared")),
        seconds=_as_number(line.get("seconds")) or 0.0,
        predicted_seconds=_as_number(line.get("predicted_seconds")),
        peak_bytes=_as_number(line.get("peak_bytes")),
        predicted_peak_bytes=_as_number(line.get("predicted_peak_bytes")),
        jobs=_as_count(line.get("jobs")),
        changed=line.get("changed") is not False,
        compiled_passes=_as_count(line.get("unsettled")),
        source=_as_text(line.get("source")),
    )


def save_wall_time(output: Path, wall_time: WallTime) -> None:
    """Add a run's wall time to the file in the output folder, or replace it if the run is already recorded
    there."""
    earlier = [one for one in read_wall_times(output) if one.started != wall_time.started]
    replace_json(
        output / WALL_TIME,
        {"format": FORMAT, "runs": [_wall_time_record(one) for one in (*earlier, wall_time)]},
    )


def read_wall_times(output: Path) -> list[WallTime]:
    """Return the wall times of the runs into an output folder, the earliest first. Return an empty list if
    they cannot be read."""
    try:
        runs: Any = json.loads((output / WALL_TIME).read_bytes())["runs"]
        return [_wall_time(run) for run in runs]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _wall_time_record(wall_time: WallTime) -> dict[str, Any]:
    phases = {str(phase): round(seconds, 3) for phase, seconds in wall_time.phases.items()}
    return {"started": wall_time.started, "seconds": wall_time.seconds, "phases": phases}


def _wall_time(run: Any) -> WallTime:
    phases = {phase: _phase_seconds(run["phases"].get(phase, 0.0)) for phase in Phase}
    return WallTime(_phase_seconds(run["started"]), _phase_seconds(run["seconds"]), phases)


def _phase_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("no number of seconds")
    return float(value)


def _as_number(value: Any) -> float | None:
    """Return the value if it is a finite number, and None otherwise. The check is needed because `json`
    accepts NaN and parses 1e400 as infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _as_count(value: Any) -> int:
    return int(_as_number(value) or 0)


def _as_text(value: Any) -> str:
    return "" if value is None else str(value)


def _as_texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
