"""Sweeps in `weftune plan` and `weftune preview`: their trials (one job for each combination of values), and
the work that successive halving saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weftune.jobs.sweeps.halving import Saving, TrialWork, expected_saving, rung_steps, trial_count
from weftune.jobs.sweeps.read import sweep_warnings
from weftune.jobs.sweeps.spec import Sweep
from weftune.report.words import count_noun

if TYPE_CHECKING:
    from weftune.jobs.spec.spec import JobSpec
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun


@dataclass(frozen=True, slots=True)
class SweepOutlook:
    """A sweep as `weftune plan` shows it: its trials, and the work that successive halving saves."""

    sweep: Sweep
    steps: tuple[int, ...]
    """Optimizer steps after which halving compares trials (its rungs), and the last step of a trial."""
    sample_saving: Saving
    token_saving: Saving
    """Tokens of all trials with and without successive halving, including tokens of evaluations."""
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.sweep.name

    @property
    def known_trials(self) -> list[str]:
        """Names of the trials that are known before the run. With the `tpe` search, these are the trials of
        the first generation."""
        return [trial.name for trial in self.sweep.trials]

    @property
    def has_halving(self) -> bool:
        return self.sweep.spec.halving is not None

    @property
    def trials(self) -> int:
        return trial_count(self.sweep.spec)

    def sentence(self) -> str:
        """Return a sentence about the number of trials and the work that halving saves."""
        count, listed = self.trials, len(self.known_trials)
        later = f", of which the first {listed} are known" if listed < count else ""
        if not self.has_halving:
            return f"Sweep {self.name}: {count_noun(count, 'trial')}{later}, all trained to their end."
        rungs = " and ".join(
            f"{kept:,} after step {step:,}"
            for step, kept in zip(self.steps[:-1], self.sample_saving.rungs[1:], strict=True)
        )
        saving = self.sample_saving
        return (
            f"Sweep {self.name}: {count_noun(count, 'trial')}{later}; {rungs} continue. That takes "
            f"{saving.expected_work:,.0f} samples instead of {saving.full_work:,.0f}, "
            f"{saving.expected_fraction:.0%}."
        )


def averaged_trials(sweeps: Iterable[Sweep]) -> set[str]:
    """Return the names of trials that keep a running mean of their weights, because their sweep compares
    trials by these means."""
    return {
        trial.name
        for sweep in sweeps
        if sweep.spec.halving is not None and sweep.spec.halving.judge == "mean"
        for trial in sweep.trials
    }


def sweep_outlooks(
    sweeps: Iterable[Sweep], jobs: Iterable[JobSpec], totals: Mapping[str, JobTotal]
) -> tuple[SweepOutlook, ...]:
    specs = {job.name: job for job in jobs}
    all_steps = {name: total.steps for name, total in totals.items()}

    found = []
    for sweep in sweeps:
        spec, names = sweep.spec, [trial.name for trial in sweep.trials]
        steps = all_steps[names[0]]
        found.append(
            SweepOutlook(
                sweep,
                (*rung_steps(spec.halving, steps), steps),
                expected_saving(spec, [TrialWork(all_steps[name], specs[name].batch_size) for name in names]),
                expected_saving(spec, [TrialWork(all_steps[name], totals[name].tokens) for name in names]),
                tuple(sweep_warnings([sweep], specs, all_steps)),
            )
        )
    return tuple(found)


def expected_seconds(run: WholeRun, sweeps: Sequence[SweepOutlook], totals: Mapping[str, JobTotal]) -> float:
    """Return the predicted seconds of the run if successive halving drops as many trials as expected and the
    `tpe` search proposes all of its trials."""
    known = {name: totals[name].steps * totals[name].tokens for name in run.end_seconds}
    if not sum(known.values()):
        return run.seconds
    trials = {name for one in sweeps for name in one.known_trials}
    others = sum(tokens for name, tokens in known.items() if name not in trials)
    return (
        run.seconds * (others + sum(one.token_saving.expected_work for one in sweeps)) / sum(known.values())
    )


def collapse_trials(names: Iterable[str], sweeps: Iterable[Sweep]) -> list[str]:
    """Return the names of jobs, with the trials of each sweep replaced by one entry such as
    `sql (24 trials)`."""
    owner = {trial.name: sweep.name for sweep in sweeps for trial in sweep.trials}
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        groups.setdefault((owner.get(name, name), name in owner), []).append(name)
    return [
        f"{group} ({len(found)} trials)" if is_sweep and len(found) > 1 else found[0]
        for (group, is_sweep), found in groups.items()
    ]


def sweep_numbers(
    run: WholeRun, sweeps: Sequence[SweepOutlook], totals: Mapping[str, JobTotal]
) -> dict[str, Any]:
    """Return the numbers about sweeps that `weftune plan --json` writes."""
    return {
        "sweeps": [
            {
                "name": one.name,
                "search": one.sweep.spec.search,
                "trials": one.trials,
                "listed": [
                    {
                        "name": trial.name,
                        "values": dict(trial.values),
                        "steps": totals[trial.name].steps,
                        "ends": run.end_seconds.get(trial.name),
                        "state_bytes": totals[trial.name].state_bytes,
                    }
                    for trial in one.sweep.trials
                ],
                "rungs": [
                    {"step": step, "trials": count}
                    for step, count in zip(one.steps, one.sample_saving.rungs, strict=True)
                ],
                "samples": {"all": one.sample_saving.full_work, "expected": one.sample_saving.expected_work},
                "warnings": list(one.warnings),
            }
            for one in sweeps
        ],
        "expected_seconds": expected_seconds(run, sweeps, totals),
    }
