"""Warnings about sweeps that will run but may not be what the user meant: one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weftune.jobs.spec.spec import JobSpec, in_steps
from weftune.jobs.sweeps.rungs import rung_steps
from weftune.jobs.sweeps.spec import Sweep


def sweep_warnings(
    sweeps: Iterable[Sweep], jobs: Mapping[str, JobSpec], steps: Mapping[str, int]
) -> list[str]:
    """Return the warnings about all sweeps; `steps` maps each known trial to its number of steps."""
    return [
        f"{sweep.name}: {sentence}" for sweep in sweeps for sentence in _rung_warnings(sweep, jobs, steps)
    ]


def _rung_warnings(sweep: Sweep, jobs: Mapping[str, JobSpec], steps: Mapping[str, int]) -> Iterator[str]:
    """Warn of a first rung within the warm-up: trials that differ in their learning rate are still alike
    there."""
    known = [trial.name for trial in sweep.trials if trial.name in steps]
    early = []
    for name in known:
        rungs, warmup = rung_steps(sweep.spec.halving, steps[name]), in_steps(jobs[name].warmup, steps[name])
        if rungs and rungs[0] <= warmup:
            early.append((rungs[0], warmup))
    if early:
        (rung, warmup), some = early[0], "" if len(early) == len(known) else f"{len(early)} of {len(known)} "
        yield (
            f"sweep.halving.at: the first rung is at step {rung}, and {some}trials warm up until step "
            f"{warmup}: they are judged before their learning rate is reached; set it later, or warmup "
            "shorter"
        )
