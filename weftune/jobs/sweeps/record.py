"""sweep.json: the state of a sweep, written at every change and read to resume or to show the sweep."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from weftune.adapters.folder import CONFIG
from weftune.core.files import FORMAT, json_text, refuse_unknown_format, replace_json
from weftune.errors import OutputError
from weftune.jobs.sweeps.rungs import Decision
from weftune.jobs.sweeps.spec import Judge, Metric, Mode, Search

SWEEP_FILE = "sweep.json"
BEST = "best"
"""Folder of the winners, beside the record."""
CHECKSUM = "checksum"


def best_folder(sweep: Path, trial: str) -> Path:
    """Return the folder of a winner in that of its sweep: `best` itself if one trial was kept."""
    best = sweep / BEST
    return best if (best / CONFIG).is_file() else best / trial


TrialState = Literal["waiting", "running", "resting", "left", "failed", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    name: str
    values: Mapping[str, Any]
    """Values in which the trial differs from the others."""
    state: TrialState = "waiting"
    reason: str = ""
    steps: int = 0
    """Total number of steps; 0 until the data are counted."""
    at_rungs: Mapping[str, float | None] = field(default_factory=dict)
    """Step of a rung → the metric there; null if it was not finite."""
    score: float | None = None
    """The metric of a finished trial's adapter, of the rung at which a trial was dropped, or of the last
    evaluation so far."""
    score_step: int | None = None
    """The step of the weights that `score` was measured with."""
    warning: str = ""
    """Problem with a finished trial's adapter; such a trial is ranked behind all others."""
    left_at: int | None = None
    """Step at which the trial left or failed."""
    generation: int = 0
    """Number of the trial's generation; later generations of `tpe` are proposed from how the earlier ones
    ended."""


@dataclass(frozen=True, slots=True)
class SampleCount:
    trained: int = 0
    """Samples that the trials' steps have taken so far."""
    all: int = 0
    """Samples that the trials' steps would take if none left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    name: str
    search: Search
    metric: Metric
    mode: Mode
    keep: int
    at: tuple[float, ...] = ()
    """Shares of the steps after which trials are halved."""
    share: float | None = None
    """Share of the trials that continues from each rung."""
    judge: Judge | None = None
    """Weights that the rungs evaluate; None in records of a Weftune that could evaluate the last weights
    only."""
    steps: int = 0
    """Number of steps of the first trial; each trial has its own if they are searched over."""
    rungs: tuple[int, ...] = ()
    """Rungs of the first trial, its last step included."""
    trials: tuple[TrialRecord, ...] = ()
    """Trials so far; later generations of `tpe` follow."""
    expected: int = 0
    """Expected number of trials in all, at least those so far."""
    decisions: tuple[Decision, ...] = ()
    best: tuple[str, ...] = ()
    """Trials whose adapters are in `best`, the best first; empty until the sweep has ended."""
    samples: SampleCount = SampleCount()

    @property
    def count(self) -> int:
        """Number of all trials, including those that are yet to be proposed."""
        return max(self.expected, len(self.trials))


class DamagedSweep(OutputError):
    """An error raised if there is a sweep.json that cannot be read."""

    def __init__(self, path: Path, complaint: str) -> None:
        self.complaint = complaint
        super().__init__(f"{path} cannot be used ({complaint}); --resume rebuilds it from the metrics")


def write_record(folder: Path, record: SweepRecord) -> None:
    """Write the record of a sweep. Raises OutputError if the disk does not take it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder / SWEEP_FILE}: {error.strerror}") from error
    whole = {"format": FORMAT, **_plain(record)}
    replace_json(folder / SWEEP_FILE, {**whole, CHECKSUM: _checksum(whole)})


def read_record(folder: Path) -> SweepRecord | None:
    """Return the record of the sweep in this folder; None if there is none.

    Raises DamagedSweep, or UnknownFormat for a record of a later Weftune.
    """
    path = folder / SWEEP_FILE
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedSweep(path, str(error).splitlines()[0]) from None
    if not isinstance(value, dict):
        raise DamagedSweep(path, "it is no record of a sweep")
    # Checked before the format: a flipped bit there is damage, not a newer Weftune.
    if CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise DamagedSweep(path, "it does not match its checksum")
    refuse_unknown_format(value.pop("format", None), path)
    known = {item.name for item in fields(SweepRecord)}
    try:
        return _adapter().validate_python({key: below for key, below in value.items() if key in known})
    except ValidationError:
        raise DamagedSweep(path, "it is no record of a sweep") from None


def records_in(output: Path) -> list[SweepRecord]:
    """Return the records of a run's sweeps; one that cannot be read is left out."""
    found = []
    for path in sorted(output.glob(f"*/{SWEEP_FILE}")):
        with suppress(OutputError):
            if (record := read_record(path.parent)) is not None:
                found.append(record)
    return found


def proposed_trials(output: Path, sweeps: Collection[str]) -> list[str]:
    """Return the trials of later generations that earlier runs into `output` have proposed: no jobs file
    names them."""
    mine = [record for record in records_in(output) if record.name in sweeps]
    return [trial.name for record in mine for trial in record.trials if trial.generation > 0]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _checksum(whole: Mapping[str, Any]) -> str:
    """Return the checksum of all other keys: a bit that a disk has flipped often leaves valid JSON with
    another number in it."""
    return f"{zlib.crc32(json_text(whole).encode()):08x}"


@cache
def _adapter() -> TypeAdapter[SweepRecord]:
    return TypeAdapter(SweepRecord)
