"""The trials of a sweep: all of a grid, random draws, or generation after generation as TPE proposes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weftune.jobs.sweeps.draws import draws, grid
from weftune.jobs.sweeps.names import named
from weftune.jobs.sweeps.spec import Ends, Sweep, SweepSpec, Trial
from weftune.jobs.sweeps.tpe import Tpe


class Proposer(Protocol):
    """A source of trials. It keeps no state: from the same ends it proposes the same trials, so a run can
    resume."""

    def first(self) -> tuple[Trial, ...]: ...

    def next(self, ended: Ends) -> tuple[Trial, ...]:
        """Return the generation after all of `ended`, which are all trials so far; empty if there are no
        more."""
        ...


def proposer(sweep: Sweep, taken: Iterable[str] = ()) -> Proposer:
    """Return the proposer for a sweep that was read; `taken` are the names of the run's other jobs."""
    return propose(sweep.name, sweep.spec, int(sweep.keys.values.get("seed", 0)), taken)


def propose(name: str, spec: SweepSpec, seed: int, taken: Iterable[str] = ()) -> Proposer:
    if spec.search == "tpe":
        return Tpe(name, spec, seed, tuple(taken))
    return AtOnce(name, spec, seed, tuple(taken))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A grid or random draws: all trials are known before the first is trained."""

    name: str
    spec: SweepSpec
    seed: int
    taken: tuple[str, ...] = ()

    def first(self) -> tuple[Trial, ...]:
        over, trials = self.spec.over, self.spec.trials
        drawn = grid(over) if trials is None else draws(over, trials, self.seed)
        return named(self.name, self.spec, drawn, self.taken)

    def next(self, ended: Ends) -> tuple[Trial, ...]:
        return ()
