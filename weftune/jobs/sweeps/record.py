"""sweep.json: how a sweep stands. Written at every change, and read by whoever resumes or shows it."""

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
from weftune.core.files import json_text, replace_json
from weftune.core.formats import FORMAT, refuse_unknown_format
from weftune.errors import OutputError
from weftune.jobs.sweeps.rungs import Decision
from weftune.jobs.sweeps.spec import Judge, Metric, Mode, Search

SWEEP_FILE = "sweep.json"
BEST = "best"
"""The folder of the winners, beside the record."""
CHECKSUM = "checksum"


def best_folder(sweep: Path, trial: str) -> Path:
    """The folder of a winner in that of its sweep: `best` itself where one trial was kept."""
    best = sweep / BEST
    return best if (best / CONFIG).is_file() else best / trial


TrialState = Literal["waiting", "running", "resting", "left", "failed", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    name: str
    values: Mapping[str, Any]
    """What sets it apart from the others."""
    state: TrialState = "waiting"
    reason: str = ""
    steps: int = 0
    """In all; 0 until its data are counted."""
    at_rungs: Mapping[str, float | None] = field(default_factory=dict)
    """Step of a rung → the metric there; null where it was not finite."""
    score: float | None = None
    """The metric of a finished trial's adapter, of the rung at which a trial was dropped, or of the last
    evaluation so far."""
    score_step: int | None = None
    """The step of the weights that `score` was measured with."""
    warning: str = ""
    """What is wrong with a finished trial's adapter; such a trial is ranked behind all others."""
    left_at: int | None = None
    """The step at which it left or failed."""
    generation: int = 0
    """Of `tpe`: trials of later ones were proposed by how those before ended."""


@dataclass(frozen=True, slots=True)
class SampleCount:
    trained: int = 0
    """Samples that the trials' steps have taken so far."""
    all: int = 0
    """What they would take if nobody left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    name: str
    search: Search
    metric: Metric
    mode: Mode
    keep: int
    at: tuple[float, ...] = ()
    """The shares of the steps after which trials are halved."""
    share: float | None = None
    """Of the trials, that goes on from each of them."""
    judge: Judge | None = None
    """What the rungs judge; None in records of a Weftune that could judge the last weights only."""
    steps: int = 0
    """Of the first trial; each has its own where they are searched over."""
    rungs: tuple[int, ...] = ()
    """Of the first trial, its last step included."""
    trials: tuple[TrialRecord, ...] = ()
    """So far: later generations of `tpe` follow."""
    expected: int = 0
    """Trials that there will be, at least those that there are."""
    decisions: tuple[Decision, ...] = ()
    best: tuple[str, ...] = ()
    """Whose adapters are in `best`, the best first; empty until the sweep has ended."""
    samples: SampleCount = SampleCount()

    @property
    def count(self) -> int:
        """All trials, those that are yet to be proposed too."""
        return max(self.expected, len(self.trials))


class DamagedSweep(OutputError):
    """There is a sweep.json, and it cannot be read."""

    def __init__(self, path: Path, complaint: str) -> None:
        self.complaint = complaint
        super().__init__(f"{path} cannot be used ({complaint}); --resume rebuilds it from the metrics")


def write_record(folder: Path, record: SweepRecord) -> None:
    """Raises OutputError where the disk does not take it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder / SWEEP_FILE}: {error.strerror}") from error
    whole = {"format": FORMAT, **_plain(record)}
    replace_json(folder / SWEEP_FILE, {**whole, CHECKSUM: _checksum(whole)})


def read_record(folder: Path) -> SweepRecord | None:
    """The record of the sweep in this folder, None if there is none.

    Raises DamagedSweep, or UnknownFormat for a later Weftune's.
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
    # Before the format: a flipped bit there is damage, no newer Weftune.
    if CHECKSUM in value and value.pop(CHECKSUM) != _checksum(value):
        raise DamagedSweep(path, "it does not match its checksum")
    refuse_unknown_format(value.pop("format", None), path)
    known = {item.name for item in fields(SweepRecord)}
    try:
        return _adapter().validate_python({key: below for key, below in value.items() if key in known})
    except ValidationError:
        raise DamagedSweep(path, "it is no record of a sweep") from None


def records_in(output: Path) -> list[SweepRecord]:
    """The sweeps of a run; one whose record cannot be read is left out."""
    found = []
    for path in sorted(output.glob(f"*/{SWEEP_FILE}")):
        with suppress(OutputError):
            if (record := read_record(path.parent)) is not None:
                found.append(record)
    return found


def proposed_trials(output: Path, sweeps: Collection[str]) -> list[str]:
    """Trials of later generations that earlier runs into `output` have proposed: no jobs file names them."""
    mine = [record for record in records_in(output) if record.name in sweeps]
    return [trial.name for record in mine for trial in record.trials if trial.generation > 0]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _checksum(whole: Mapping[str, Any]) -> str:
    """Of all the rest: a bit that a disk has flipped often leaves valid JSON with another number in it."""
    return f"{zlib.crc32(json_text(whole).encode()):08x}"


@cache
def _adapter() -> TypeAdapter[SweepRecord]:
    return TypeAdapter(SweepRecord)
