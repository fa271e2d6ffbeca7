"""The file sweep.json, which holds the state of a sweep. The file is written at every change, and read to
resume or to show the sweep. This module also computes what is shown: the order of the trials from best to
worst, the values in which they differ, and the rungs (the steps at which they are compared)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from weftune.adapters.folder import CONFIG
from weftune.core.files import FORMAT, refuse_unknown_format, replace_json
from weftune.errors import OutputError
from weftune.jobs.store.status import CHECKSUM, resume_line, status_checksum, validate_record
from weftune.jobs.sweeps.halving import Decision, kept_trial_count, sort_value
from weftune.jobs.sweeps.spec import Judge, Mode, Search

SWEEP_FILE = "sweep.json"
BEST = "best"
"""Name of the folder, inside the folder of the sweep, that holds the adapters of the best trials."""


def best_folder(sweep: Path, trial: str) -> Path:
    """Return the folder of a winning trial's adapter in the sweep's folder. The folder is `best` itself if
    only one trial is kept."""
    best = sweep / BEST
    return best if (best / CONFIG).is_file() else best / trial


TrialState = Literal["waiting", "running", "resting", "left", "failed", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    name: str
    values: Mapping[str, Any]
    """Values in which the trial differs from the other trials."""
    state: TrialState = "waiting"
    reason: str = ""
    steps: int = 0
    """Total number of optimizer steps; 0 until the samples are counted."""
    at_rungs: Mapping[str, float | None] = field(default_factory=dict)
    """Maps each step at which trials are compared to the trial's metric there. None if the metric was not
    finite."""
    score: float | None = None
    """Metric of the trial: that of its adapter if the trial has finished, the metric at the comparison (rung)
    where it was dropped, or otherwise the metric of its last evaluation."""
    score_step: int | None = None
    """Step of the trial's weights for which `score` was measured."""
    warning: str = ""
    """Problem with a finished trial's adapter. Such a trial is ranked after all other finished trials."""
    left_at: int | None = None
    """Step at which the trial left the sweep or failed."""
    generation: int = 0
    """Index of the trial's generation. With `tpe`, later generations are proposed from the results of earlier
    ones."""


@dataclass(frozen=True, slots=True)
class SampleCount:
    trained: int = 0
    """Number of samples that all trials together have trained on so far."""
    all: int = 0
    """Number of samples that all trials together would train on if no trial left the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    name: str
    search: Search
    metric: str
    mode: Mode
    keep: int
    at: tuple[float, ...] = ()
    """Fractions of a trial's steps after which the trials are compared and some of them leave the sweep."""
    share: float | None = None
    """Fraction of the trials that continue after each comparison."""
    judge: Judge | None = None
    """Weights with which trials are compared: their mean or the last ones. None in files of old versions,
    which used the last weights."""
    steps: int = 0
    """Number of steps of the first trial. Other trials may have another number if the sweep searches over
    numbers of steps."""
    rungs: tuple[int, ...] = ()
    """Steps at which the first trial is compared with others (its rungs), and its last step."""
    trials: tuple[TrialRecord, ...] = ()
    """Trials of the sweep so far. With `tpe`, later generations are added when they are proposed."""
    expected: int = 0
    """Expected total number of trials of the sweep, including those that are not proposed yet."""
    decisions: tuple[Decision, ...] = ()
    best: tuple[str, ...] = ()
    """Names of the winning trials, whose adapters are kept in the folder `best`, the best first. Empty until
    the sweep has ended."""
    samples: SampleCount = SampleCount()

    @property
    def count(self) -> int:
        """Total number of trials, including those that will be proposed later."""
        return max(self.expected, len(self.trials))


class DamagedSweep(OutputError):
    """An error raised if a sweep's file sweep.json exists but cannot be read."""

    def __init__(self, path: Path, damage_text: str) -> None:
        self.damage_text = damage_text
        mend = f"{resume_line(None)} rebuilds it from the metrics"
        super().__init__(f"{path} cannot be used ({damage_text}); {mend}")


def write_record(folder: Path, record: SweepRecord) -> None:
    """Write the state of a sweep to its folder. Raises OutputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder / SWEEP_FILE}: {error.strerror}") from error
    whole = {"format": FORMAT, **_plain_number_text(record)}
    replace_json(folder / SWEEP_FILE, {**whole, CHECKSUM: status_checksum(whole)})


def read_record(folder: Path) -> SweepRecord | None:
    """Return the state of a sweep that its folder contains, or None if there is none. Raises DamagedSweep, or
    UnknownFormat for a file of a later version."""
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
    if CHECKSUM in value and value.pop(CHECKSUM) != status_checksum(value):
        raise DamagedSweep(path, "it does not match its checksum")
    refuse_unknown_format(value.pop("format", None), path)
    try:
        record: SweepRecord = validate_record(SweepRecord, value)
    except ValidationError:
        raise DamagedSweep(path, "it is no record of a sweep") from None
    return record


def records_in(output: Path) -> list[SweepRecord]:
    """Return the states of a run's sweeps from its output folder, except those that cannot be read."""
    found = []
    for path in sorted(output.glob(f"*/{SWEEP_FILE}")):
        with suppress(OutputError):
            if (record := read_record(path.parent)) is not None:
                found.append(record)
    return found


def proposed_trials(output: Path, sweeps: Collection[str]) -> list[str]:
    """Return the names of the trials that earlier runs into `output` proposed as later generations. No jobs
    file names them."""
    mine = [record for record in records_in(output) if record.name in sweeps]
    return [trial.name for record in mine for trial in record.trials if trial.generation > 0]


def _plain_number_text(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain_number_text(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain_number_text(below) for key, below in value.items()}
    return [_plain_number_text(one) for one in value] if isinstance(value, list | tuple) else value


_METRIC_TITLES = {
    "eval_loss": "validation loss",
    "eval_mean_token_accuracy": "validation accuracy",
    "eval_rewards/accuracies": "reward accuracy",
    "eval_rewards/margins": "reward margin",
    "eval_accuracy": "reward accuracy",
    "eval_margin": "reward margin",
    "eval_exact_match": "exact match",
}
_ENDED = ("finished", "left", "failed")
STATES = ("finished", "running", "resting", "waiting", "left", "failed")
_LONGEST_PLAIN = 5
"""Maximum length, in characters, up to which a number is always written without an exponent."""
_GROUPS = {"finished": 0, "left": 2, "failed": 3}
"""Maps states of trials to sort keys, by which the table of trials is ordered. All other states have the sort
key 1."""


def metric_title(metric: str) -> str:
    """Return the displayed title of a sweep's metric. A metric that is a user's function has the function's
    name as title."""
    return _METRIC_TITLES.get(metric, metric.removeprefix("eval_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRow:
    """A row of the table of a sweep's rungs, the steps at which trials are compared. In the last row, the
    remaining trials end."""

    step: int
    generation: int
    is_last: bool
    started_count: int
    """Number of trials that train up to this rung (a comparison of trials)."""
    evaluated_count: int
    """Number of trials, of those that train up to this comparison of trials (rung), that have reached its
    step or ended before it."""
    kept_count: int | None = None
    """Number of trials that continue after the rung (a comparison of trials). None until this is decided."""
    lost_count: int = 0
    """Number of trials, of those that train up to this comparison of trials (rung), that failed or left the
    sweep before its step."""
    worst_kept_score: float | None = None
    best_dropped_score: float | None = None


def rank_trials(record: SweepRecord) -> list[TrialRecord]:
    """Return the trials in the order in which they are displayed: finished trials by score, then unfinished
    and dropped trials by number of steps, and finally failed trials. Equal trials keep their order in the
    jobs file."""
    return sorted(record.trials, key=lambda trial: _rank_key(record, trial))


def _rank_key(record: SweepRecord, trial: TrialRecord) -> tuple[int, int, float]:
    group = _GROUPS.get(trial.state, 1)
    if group == 0 and trial.name in record.best:
        return group, -1, record.best.index(trial.name)
    # Finished trials with a warning follow the others; among the rest, those that came further go first.
    far = bool(trial.warning) if group == 0 else -len(trial.at_rungs) if group == 1 else -(trial.left_at or 0)
    return group, far, sort_value(trial.score, record.mode)


def base_sentence(record: SweepRecord) -> str:
    """Return a sentence that no trial of a sweep improved on the base model. Return an empty string if a
    trial did, or if the sweep has not ended."""
    if not (best := winners(record)) or not best[0].warning:
        return ""
    return f"No trial improved on the base: the lowest validation loss is kept ({best[0].warning})."


def leading_trials(record: SweepRecord, count: int) -> list[TrialRecord]:
    """Return the `count` best trials among those that have a score and have neither left the sweep nor
    failed."""
    still = [trial for trial in rank_trials(record) if trial.state not in ("left", "failed")]
    return [trial for trial in still if trial.score is not None][:count]


def winners(record: SweepRecord) -> list[TrialRecord]:
    """Return the winning trials of a sweep, whose adapters are kept in the folder `best`, the best first."""
    trials = {trial.name: trial for trial in record.trials}
    return [trials[name] for name in record.best if name in trials]


def state_counts(record: SweepRecord) -> Mapping[str, int]:
    """Return a mapping from each state to the number of trials in it. States without trials are left out."""
    found: Counter[str] = Counter(trial.state for trial in record.trials)
    return {state: found[state] for state in STATES if found[state]}


def trained_fraction(record: SweepRecord) -> float | None:
    """Return the number of samples that a sweep has trained on so far, divided by the number that it would
    train on if no trial left. None if that number is unknown."""
    return record.samples.trained / record.samples.all if record.samples.all else None


# -- values ---------------------------------------------------------------------------------------------


def flatten_mapping(prefix: str, mapping: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf of a nested mapping. The yielded keys begin with
    `prefix`."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_mapping(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def flat_trial_values(trial: TrialRecord) -> dict[str, Any]:
    """Map dotted keys to a trial's values, such as `adapter.rank: 8` for `adapter: {rank: 8}`."""
    return dict(flatten_mapping("", trial.values))


def swept_keys(record: SweepRecord) -> tuple[str, ...]:
    """Return the dotted keys in which a sweep's trials differ, in the order of the file."""
    flats = [flat_trial_values(trial) for trial in record.trials]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    apart = [key for key in keys if any(flat.get(key) != flats[0].get(key) for flat in flats)]
    return tuple(apart or keys)


def shorten_keys(keys: Sequence[str]) -> Mapping[str, str]:
    """Map each dotted key to its last part, if that is unique, such as `adapter.rank` to `rank`."""
    tails = Counter(key.rpartition(".")[2] for key in keys)
    return {key: tail if tails[tail := key.rpartition(".")[2]] == 1 else key for key in keys}


def setting_text(value: Any) -> str:
    """Format the value of a setting briefly, such as `3.14e-4`, `0.05`, `64` or `q_proj, v_proj`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(item) for item in value)
    return str(value)


def number_text(value: float) -> str:
    """Format a number with three significant digits, with an exponent instead of many leading zeros."""
    plain = f"{float(f'{value:.3g}'):g}"
    digits, _, power = f"{value:.2e}".partition("e")
    scientific = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    short = len(plain) <= _LONGEST_PLAIN or len(plain) < len(scientific)
    return plain if short and "e" not in plain else scientific


# -- rungs ----------------------------------------------------------------------------------------------


def rung_rows(record: SweepRecord) -> list[RungRow]:
    """Return the rows of the table of rungs (the steps at which trials are compared), sorted by generation
    and step, including the last step. Return an empty list without successive halving."""
    if len(record.rungs) < 2:
        return []
    generations = sorted({trial.generation for trial in record.trials})
    return [row for generation in generations for row in _generation_rows(record, generation)]


def _generation_rows(record: SweepRecord, generation: int) -> Iterator[RungRow]:
    trials = {trial.name: trial for trial in record.trials if trial.generation == generation}
    decided = {one.rung: one for one in record.decisions if one.generation == generation}
    began = list(trials.values())
    for rung, step in enumerate(record.rungs):
        if (decision := decided.get(rung)) is None:
            last = rung == len(record.rungs) - 1
            here = sum(one.state in _ENDED or (not last and len(one.at_rungs) > rung) for one in began)
            yield RungRow(
                step=step, generation=generation, is_last=last, started_count=len(began), evaluated_count=here
            )
            return
        kept, dropped = decision.kept, decision.left
        worst, best = trials.get(kept[-1]) if kept else None, trials.get(dropped[0]) if dropped else None
        yield RungRow(
            step=decision.step,
            generation=generation,
            is_last=False,
            started_count=decision.began,
            evaluated_count=decision.began,
            kept_count=len(kept),
            lost_count=max(0, decision.began - len(kept) - len(dropped)),
            worst_kept_score=rung_value(worst, rung) if worst is not None else None,
            best_dropped_score=rung_value(best, rung) if best is not None else None,
        )
        began = [trials[name] for name in kept if name in trials]


def rung_value(trial: TrialRecord, rung: int) -> float | None:
    """Return the metric of a trial at a rung (a comparison of trials), counted from 0, or None if the trial
    has not reached it."""
    steps = sorted(trial.at_rungs, key=int)
    return trial.at_rungs[steps[rung]] if rung < len(steps) else None


def expected_steps_left(record: SweepRecord, steps: Mapping[str, int]) -> int:
    """Return the expected number of optimizer steps that all trials together still have to make. `steps` maps
    trials to their current steps."""
    total = 0
    for generation in sorted({trial.generation for trial in record.trials}):
        trials = {trial.name: trial for trial in record.trials if trial.generation == generation}
        decided = [one for one in record.decisions if one.generation == generation]
        began = decided[-1].kept if decided else tuple(trials)
        still = [name for name in began if name in trials and trials[name].state not in _ENDED]
        ends = record.rungs[len(decided) :] or (record.steps,)
        total += sum(max(0, ends[0] - steps.get(name, 0)) for name in still)
        count = len(began) if still else 0
        for earlier, later in pairwise(ends):
            count = kept_trial_count(record.share or 1.0, count) if count else 0
            total += count * (later - earlier)
    return total


def rung_sentence(row: RungRow) -> str:
    """Return a sentence about the trials at a rung, a step at which only the best continue, for the
    terminal."""
    if row.kept_count is not None:
        return f"step {row.step}: {row.kept_count} of {row.started_count} went on"
    verb = "ended" if row.is_last else "evaluated"
    return f"step {row.step}: {row.evaluated_count} of {row.started_count} {verb}"
