"""Reading the files of an output folder. Lines that a killed run left incomplete are skipped, never fatal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftune.core.clock import WallTime
from weftune.core.files import refuse_unknown_format
from weftune.errors import OutputError
from weftune.jobs.store.folder import BASE_LOSS, METRICS, RUNG_LOSS, STATUS, WINDOWS
from weftune.jobs.store.shares import combined, read_shares, share_folders
from weftune.jobs.store.status import RunStatus, from_json, to_json
from weftune.jobs.sweeps.record import SWEEP_FILE, DamagedSweep, SweepRecord, read_record
from weftune.report.wall import read_wall_times


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One optimizer step of one job."""

    step: int
    loss: float | None
    """Loss of the step. None if it was not finite."""
    tokens: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalLine:
    """One evaluation of one job on its held-out rows; step 0 comes before any training."""

    step: int
    loss: float | None
    time: float
    tokens: int = 0
    """Number of held-out tokens that the loss is averaged over; 0 if the folder does not say."""
    accuracy: float | None = None
    """Share of these tokens that the model itself would have chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLine:
    """One executed window, with measured and predicted values."""

    tokens: int
    microbatches: int
    shared: int
    """Number of microbatches that hold two or more jobs."""
    seconds: float
    predicted_seconds: float | None
    peak_bytes: float | None
    predicted_peak_bytes: float | None
    jobs: int = 0
    changed: bool = True
    """Whether its jobs or the lengths of its samples differ from the window before."""
    unsettled: int = 0
    """Number of passes in which kernels were compiled or a graph captured."""
    source: str = ""
    """Source of the predicted time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """All that the output folder says about one job."""

    name: str
    state: str
    reason: str
    step: int
    steps: int
    trained_tokens: int
    best_step: int | None
    eval_loss: float | None
    notes: tuple[str, ...]
    base_loss: float | None = None
    """Validation loss of the base without an adapter; None if the run did not record it."""
    warning: str = ""
    """Problem with the result, such as an adapter that is worse than the base; empty if there is none."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The resolved spec; empty for a job that never started."""
    base: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[StepLine, ...] = ()
    evaluations: tuple[EvalLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An output folder as read."""

    output: Path
    base: str
    device: str
    dtype: str
    started: float | None
    seconds: float | None
    solo_seconds: float | None
    """Predicted time of the same jobs one after another."""
    peak_bytes: float | None
    notes: tuple[str, ...]
    jobs: tuple[JobRecord, ...]
    windows: tuple[WindowLine, ...]
    wall_times: tuple[WallTime, ...] = ()
    """Wall time of every process that trained into the folder."""
    sweeps: tuple[SweepRecord, ...] = ()
    command: str | None = None
    """Shell command that resumes the run, as recorded in the status."""

    @property
    def trials(self) -> frozenset[str]:
        """The jobs that belong to a sweep."""
        return frozenset(trial.name for sweep in self.sweeps for trial in sweep.trials)

    @property
    def left(self) -> frozenset[str]:
        """The trials that were dropped from their sweep before their end; this is not a failure."""
        return frozenset(
            trial.name for sweep in self.sweeps for trial in sweep.trials if trial.state == "left"
        )


@dataclass(slots=True)
class _Curves:
    """The lines of one job while they are read, by step."""

    losses: dict[int, StepLine] = field(default_factory=dict)
    evaluations: dict[int, EvalLine] = field(default_factory=dict)

    def add_step(self, line: StepLine) -> None:
        # A resumed or restarted job writes its steps again: lines beyond that point are obsolete.
        if self.losses and line.step <= max(self.losses):
            self.losses = {step: kept for step, kept in self.losses.items() if step < line.step}
            self.evaluations = {step: kept for step, kept in self.evaluations.items() if step < line.step}
        self.losses[line.step] = line

    def add_evaluation(self, line: EvalLine) -> None:
        self.evaluations = {step: kept for step, kept in self.evaluations.items() if step < line.step}
        self.evaluations[line.step] = line


def read_run(output: Path) -> Run:
    """Read an output folder; one that holds neither metrics nor a status is a user's mistake."""
    metrics, status = output / METRICS, output / STATUS
    if not metrics.exists() and not status.exists():
        what = "holds no metrics.jsonl" if output.is_dir() else "is not a folder"
        raise OutputError(f"{output} {what}: name a folder that `weftune train` has written to.")
    notes: list[str] = []
    shares = read_shares(output)
    curves = _read_curves(_metrics(output, shares, notes))
    folders = (output, *share_folders(output))
    windows = tuple(_window(line) for folder in folders for line in _read_lines(folder / WINDOWS, notes))
    record = _with_shares(output, _read_status(status, notes), shares)
    states = {str(name): _mapping(state) for name, state in _mapping(record.get("jobs")).items()}
    names = [*states, *(name for name in curves if name not in states)]
    jobs = tuple(
        _job(output, name, states.get(name, {}), curves.get(name, _Curves()), notes) for name in names
    )
    seconds = _number(record.get("seconds"))
    sweeps = _read_sweeps(output, notes)
    return Run(
        output=output,
        base=_text(record.get("base"))
        or next((_text(job.base.get("model")) for job in jobs if job.base), ""),
        device=_text(record.get("device")),
        dtype=_text(record.get("dtype")),
        started=_number(record.get("started")),
        seconds=seconds if seconds else (sum(window.seconds for window in windows) or None),
        solo_seconds=_number(record.get("solo_seconds")),
        peak_bytes=_number(record.get("peak_bytes"))
        or max((window.peak_bytes for window in windows if window.peak_bytes), default=None),
        notes=tuple(dict.fromkeys((*_texts(record.get("notes")), *notes))),
        jobs=jobs,
        windows=windows,
        wall_times=tuple(read_wall_times(output)),
        sweeps=sweeps,
        command=command if isinstance(command := record.get("command"), str) else None,
    )


def _read_lines(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file; incomplete lines other than the last are counted in `notes`."""
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


def _metrics(output: Path, shares: Sequence[RunStatus], notes: list[str]) -> list[Mapping[str, Any]]:
    """Return all lines of metrics. For a job that a share trains, only the share's lines count: they include
    those from before the share."""
    owned = frozenset(name for share in shares for name in share.jobs)
    own = [line for line in _read_lines(output / METRICS, notes) if str(line.get("job")) not in owned]
    return [
        *own,
        *(line for folder in share_folders(output) for line in _read_lines(folder / METRICS, notes)),
    ]


def _with_shares(output: Path, record: Mapping[str, Any], shares: Sequence[RunStatus]) -> Mapping[str, Any]:
    if not shares:
        return record
    try:
        whole = from_json(record, output / STATUS)
    except ValueError:
        whole = RunStatus()
    return to_json(combined(output, whole, shares))


def _read_curves(lines: list[Mapping[str, Any]]) -> dict[str, _Curves]:
    curves: dict[str, _Curves] = {}
    for line in lines:
        if "job" not in line or "step" not in line:
            continue
        job = curves.setdefault(str(line["job"]), _Curves())
        step, moment = _count(line["step"]), _number(line.get("time")) or 0.0
        if RUNG_LOSS in line or BASE_LOSS in line:
            # These are losses of other weights than the trained ones, so they are no points of the curve.
            continue
        if "eval_loss" in line:
            evaluation = EvalLine(
                step=step,
                loss=_number(line["eval_loss"]),
                time=moment,
                tokens=_count(line.get("eval_tokens")),
                accuracy=_number(line.get("eval_token_accuracy")),
            )
            job.add_evaluation(evaluation)
        else:
            tokens = _count(line.get("tokens"))
            job.add_step(StepLine(step=step, loss=_number(line.get("loss")), tokens=tokens, time=moment))
    return curves


def _read_status(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        record = _mapping(json.loads(path.read_text(encoding="utf-8")))
        refuse_unknown_format(record.get("format"), path)
        return record
    except ValueError:
        notes.append("status.json could not be read, so states and reasons are missing.")
        return {}


def _job(output: Path, name: str, state: Mapping[str, Any], curves: _Curves, notes: list[str]) -> JobRecord:
    saved = _read_job_file(output, name, notes)
    losses = tuple(curves.losses[step] for step in sorted(curves.losses))
    data = _mapping(saved.get("data"))
    best_step = _number(state.get("best_step"))
    last_step = losses[-1].step if losses else 0
    return JobRecord(
        name=name,
        state=_text(state.get("state")) or "unknown",
        reason=_text(state.get("reason")),
        step=_count(state.get("step")) or last_step,
        steps=_count(state.get("steps")) or last_step,
        trained_tokens=_count(state.get("trained_tokens")) or sum(line.tokens for line in losses),
        best_step=None if best_step is None else int(best_step),
        eval_loss=_number(state.get("eval_loss")),
        base_loss=_number(state.get("base_loss")),
        warning=_text(state.get("warning")),
        # Notes about a job's rows are in both files.
        notes=tuple(dict.fromkeys((*_texts(state.get("notes")), *_texts(data.get("notes"))))),
        spec=_mapping(saved.get("job")),
        base=_mapping(saved.get("base")),
        data=data,
        losses=losses,
        evaluations=tuple(curves.evaluations[step] for step in sorted(curves.evaluations)),
    )


def _read_job_file(output: Path, name: str, notes: list[str]) -> Mapping[str, Any]:
    import yaml

    from weftune.core.files import load_yaml

    path = output / name / "job.yaml"
    # Names come from files: one that points outside the folder reads nothing.
    if path.parent.parent != output or name in ("", ".", "..") or not path.is_file():
        return {}
    try:
        return _mapping(load_yaml(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        notes.append(f"{name}/job.yaml could not be read, so the settings of {name} are missing.")
        return {}


def _read_sweeps(output: Path, notes: list[str]) -> tuple[SweepRecord, ...]:
    found = []
    for path in sorted(output.glob(f"*/{SWEEP_FILE}")):
        try:
            record = read_record(path.parent)
        except DamagedSweep as error:
            notes.append(f"{path.parent.name}/{SWEEP_FILE} cannot be used ({error.complaint}).")
            continue
        # Paths are built from the folder's name.
        if record is not None and record.name == path.parent.name:
            found.append(record)
    return tuple(found)


def _window(line: Mapping[str, Any]) -> WindowLine:
    return WindowLine(
        tokens=_count(line.get("tokens")),
        microbatches=_count(line.get("microbatches")),
        shared=_count(line.get("shared")),
        seconds=_number(line.get("seconds")) or 0.0,
        predicted_seconds=_number(line.get("predicted_seconds")),
        peak_bytes=_number(line.get("peak_bytes")),
        predicted_peak_bytes=_number(line.get("predicted_peak_bytes")),
        jobs=_count(line.get("jobs")),
        changed=line.get("changed") is not False,
        unsettled=_count(line.get("unsettled")),
        source=_text(line.get("source")),
    )


def _number(value: Any) -> float | None:
    """Return a finite number or None: `json` accepts NaN and 1e400."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _count(value: Any) -> int:
    return int(_number(value) or 0)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list | tuple) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
