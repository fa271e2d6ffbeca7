"""Trials proposed by Optuna's tree-structured Parzen estimator, a generation at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from weftune.errors import MissingPackage
from weftune.jobs.sweeps.draws import draws, generations, identity, is_whole, tidy
from weftune.jobs.sweeps.names import named
from weftune.jobs.sweeps.spec import Choices, Ends, SweepSpec, Trial, ValueRange

if TYPE_CHECKING:
    import optuna

MAX_REPEATS = 50
"""Number of proposals in a row that may repeat other trials before the rest of a generation is drawn at
random."""


@dataclass(frozen=True, slots=True)
class Tpe:
    """A proposer that draws the first generation at random, and asks for each later one when the one before
    has ended.

    No state is kept between calls: the sampler is given all ended trials anew, and is seeded by their number.
    """

    name: str
    spec: SweepSpec
    seed: int
    taken: tuple[str, ...] = ()

    def first(self) -> tuple[Trial, ...]:
        count = next(generations(self._trials))
        return named(self.name, self.spec, draws(self.spec.over, count, self.seed), self.taken)

    def next(self, ended: Ends) -> tuple[Trial, ...]:
        # Sorted by name: the order in which trials ended depends on the clock and must not matter.
        known = sorted(ended, key=lambda one: one[0].name)
        count = min(next(generations(self._trials)), self._trials - len(known))
        if count <= 0:
            return ()
        seed = int(Random(f"{self.seed} after {len(known)}").random() * 2**32)
        with _quiet():
            proposed = self._proposed(_study(self.spec, known, seed), known, count, seed)
        names = (trial.name for trial, _ in known)
        return named(self.name, self.spec, proposed, (*self.taken, *names))

    @property
    def _trials(self) -> int:
        assert self.spec.trials is not None
        return self.spec.trials

    def _proposed(self, study: optuna.Study, known: Ends, count: int, seed: int) -> list[Mapping[str, Any]]:
        """Return `count` combinations that are distinct from one another and from all before."""
        over = self.spec.over
        asked = {key: _distribution(choices) for key, choices in over.items()}
        before = [trial.values for trial, _ in known]
        seen = {identity(values) for values in before}
        proposed: list[Mapping[str, Any]] = []
        repeats = 0
        while len(proposed) < count and repeats < MAX_REPEATS:
            params = study.ask(asked).params
            values = {key: _value(choices, params[key]) for key, choices in over.items()}
            if identity(values) in seen:
                repeats += 1
                continue
            seen.add(identity(values))
            proposed.append(values)
        return proposed + draws(over, count - len(proposed), seed, [*before, *proposed])


def _study(spec: SweepSpec, known: Ends, seed: int) -> optuna.Study:
    try:
        import optuna
    except ImportError:
        raise MissingPackage(
            'search: tpe needs Optuna: pip install "weftune[sweeps]", or write search: random'
        ) from None
    direction: Literal["minimize", "maximize"] = "minimize" if spec.mode == "min" else "maximize"
    # One startup trial: the first generation is given to the sampler, not requested from it.
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=1)
    study = optuna.create_study(direction=direction, sampler=sampler)
    complete, pruned = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    for trial, value in known:
        is_known = value is not None and math.isfinite(value)
        study.add_trial(
            optuna.trial.create_trial(
                # A trial without a value counts as worse than every other, so that similar ones are avoided.
                state=complete if is_known else pruned,
                value=value if is_known else None,
                params={key: _param(choices, trial.values[key]) for key, choices in spec.over.items()},
                distributions={key: _distribution(choices) for key, choices in spec.over.items()},
            )
        )
    return study


def _distribution(choices: Choices) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution. Values of a list are given by their index, since they may be mappings,
    which Optuna does not support."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(choices, ValueRange):
        return CategoricalDistribution(range(len(choices)))
    if is_whole(choices):
        return IntDistribution(int(choices.min), int(choices.max), log=choices.log)
    return FloatDistribution(choices.min, choices.max, log=choices.log)


def _param(choices: Choices, value: Any) -> Any:
    return value if isinstance(choices, ValueRange) else choices.index(value)


def _value(choices: Choices, param: Any) -> Any:
    if not isinstance(choices, ValueRange):
        return choices[param]
    return param if is_whole(choices) else tidy(choices, param)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna, which logs every study and warns of what it calls experimental."""
    try:
        import optuna
    except ImportError:
        yield
        return
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
