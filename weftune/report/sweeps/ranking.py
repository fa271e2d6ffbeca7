"""The state of a sweep: its trials from best to worst, the values in which they differ, its rungs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weftune.jobs.sweeps.record import SweepRecord, TrialRecord
from weftune.jobs.sweeps.rungs import Decision, quota, worth
from weftune.report.compare import flattened

METRIC_NAMES = {"eval_loss": "validation loss", "eval_mean_token_accuracy": "validation accuracy"}
_ENDED = ("finished", "left", "failed")
STATES = ("finished", "running", "resting", "waiting", "left", "failed")
_LONGEST_PLAIN = 5
"""Length in characters up to which a number never has an exponent."""
_GROUPS = {"finished": 0, "left": 2, "failed": 3}
"""State → sort group; trials that have not ended are in group 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRow:
    """A step at which trials are compared; at the last one the remaining trials end."""

    step: int
    generation: int
    last: bool
    began: int
    """Number of trials that are to reach this step."""
    evaluated: int
    """Number of these trials that have reached it, or have ended before."""
    kept: int | None = None
    """Number of trials that were kept. None until that is decided."""
    left: int = 0
    lost: int = 0
    """Number of trials that had failed or were dropped before."""
    worst_kept: float | None = None
    best_left: float | None = None


def ranked(record: SweepRecord) -> list[TrialRecord]:
    """Sort the trials: finished ones by score, then unfinished and then dropped ones, the furthest first,
    then failed ones; ties are in the order of the file."""
    return sorted(record.trials, key=lambda trial: _place(record, trial))


def _place(record: SweepRecord, trial: TrialRecord) -> tuple[int, int, float]:
    group = _GROUPS.get(trial.state, 1)
    if group == 0 and trial.name in record.best:
        return group, -1, record.best.index(trial.name)
    # Finished trials with a warning follow the others; among the rest, those that came further go first.
    far = bool(trial.warning) if group == 0 else -len(trial.at_rungs) if group == 1 else -(trial.left_at or 0)
    return group, far, worth(trial.score, record.mode)


def base_sentence(record: SweepRecord) -> str:
    """Return a sentence if no trial improved on the base; empty if one did, or the sweep has not ended."""
    if not (best := winners(record)) or not best[0].warning:
        return ""
    return f"No trial improved on the base: the lowest validation loss is kept ({best[0].warning})."


def leaders(record: SweepRecord, count: int) -> list[TrialRecord]:
    """Return the best trials that are still in the sweep and have a score."""
    still = [trial for trial in ranked(record) if trial.state not in ("left", "failed")]
    return [trial for trial in still if trial.score is not None][:count]


def winners(record: SweepRecord) -> list[TrialRecord]:
    """Return the trials in `best`, in its order."""
    trials = {trial.name: trial for trial in record.trials}
    return [trials[name] for name in record.best if name in trials]


def counts(record: SweepRecord) -> Mapping[str, int]:
    """Return state → number of trials in it, without zeros."""
    found: Counter[str] = Counter(trial.state for trial in record.trials)
    return {state: found[state] for state in STATES if found[state]}


def trained_share(record: SweepRecord) -> float | None:
    """Return the samples trained, divided by those of all trials trained to their end."""
    return record.samples.trained / record.samples.all if record.samples.all else None


# -- values ---------------------------------------------------------------------------------------------


def flat_values(trial: TrialRecord) -> dict[str, Any]:
    """Return dotted key → value; `adapter: {rank: 8}` and `adapter.rank: 8` are the same."""
    return dict(flattened("", trial.values))


def swept_keys(record: SweepRecord) -> tuple[str, ...]:
    """Return the keys in which trials differ, in the order of the file."""
    flats = [flat_values(trial) for trial in record.trials]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    apart = [key for key in keys if any(flat.get(key) != flats[0].get(key) for flat in flats)]
    return tuple(apart or keys)


def short_keys(keys: Sequence[str]) -> Mapping[str, str]:
    """Return key → the key without its section if that is unique: `rank` for `adapter.rank`."""
    tails = Counter(key.rpartition(".")[2] for key in keys)
    return {key: tail if tails[tail := key.rpartition(".")[2]] == 1 else key for key in keys}


def setting_text(value: Any) -> str:
    """Format a value briefly: `3.14e-4`, `0.05`, `64`, `q_proj, v_proj`."""
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
    """Format three significant digits, with an exponent instead of many leading zeros."""
    plain = f"{float(f'{value:.3g}'):g}"
    digits, _, power = f"{value:.2e}".partition("e")
    scientific = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    short = len(plain) <= _LONGEST_PLAIN or len(plain) < len(scientific)
    return plain if short and "e" not in plain else scientific


# -- rungs ----------------------------------------------------------------------------------------------


def rung_rows(record: SweepRecord) -> list[RungRow]:
    """Return every rung by generation and step, including the last step; none without halving."""
    if len(record.rungs) < 2:
        return []
    generations = sorted({trial.generation for trial in record.trials})
    return [row for generation in generations for row in _generation_rows(record, generation)]


def _generation_rows(record: SweepRecord, generation: int) -> Iterator[RungRow]:
    trials = {trial.name: trial for trial in record.trials if trial.generation == generation}
    decided = {one.rung: one for one in record.decisions if one.generation == generation}
    began = list(trials.values())
    for number, step in enumerate(record.rungs):
        decision = decided.get(number)
        if decision is None:
            yield _open_row(began, number, step, generation, last=number == len(record.rungs) - 1)
            return
        yield _decided_row(trials, decision)
        began = [trials[name] for name in decision.kept if name in trials]


def _open_row(
    began: Sequence[TrialRecord], number: int, step: int, generation: int, *, last: bool
) -> RungRow:
    here = sum(trial.state in _ENDED or (not last and len(trial.at_rungs) > number) for trial in began)
    return RungRow(step=step, generation=generation, last=last, began=len(began), evaluated=here)


def _decided_row(trials: Mapping[str, TrialRecord], decision: Decision) -> RungRow:
    def value(names: Sequence[str]) -> float | None:
        return rung_value(trials[names[0]], decision.rung) if names and names[0] in trials else None

    lost = decision.began - len(decision.kept) - len(decision.left)
    return RungRow(
        step=decision.step,
        generation=decision.generation,
        last=False,
        began=decision.began,
        evaluated=decision.began,
        kept=len(decision.kept),
        left=len(decision.left),
        lost=max(0, lost),
        worst_kept=value(decision.kept[-1:]),
        best_left=value(decision.left[:1]),
    )


def rung_value(trial: TrialRecord, rung: int) -> float | None:
    """Return the value measured at a rung of the trial, counted from 0; None if it has not reached it."""
    steps = sorted(trial.at_rungs, key=int)
    return trial.at_rungs[steps[rung]] if rung < len(steps) else None


def expected_steps_left(record: SweepRecord, steps: Mapping[str, int]) -> int:
    """Return the steps that all trials together are still expected to make, after they have made `steps`."""
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
            count = quota(record.share or 1.0, count) if count else 0
            total += count * (later - earlier)
    return total


def rung_sentence(row: RungRow) -> str:
    """Format one rung for the terminal."""
    if row.kept is not None:
        return f"step {row.step}: {row.kept} of {row.began} went on"
    return f"step {row.step}: {row.evaluated} of {row.began} {'ended' if row.last else 'evaluated'}"
