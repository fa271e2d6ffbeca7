"""The trials of a sweep: all combinations of a grid, random draws, or generations proposed by TPE."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from weftune.errors import MissingPackage
from weftune.jobs.spec.keys import MAX_NAME_LETTERS
from weftune.jobs.spec.layer import Loc
from weftune.jobs.sweeps.spec import (
    Choices,
    Ends,
    Sweep,
    SweepSpec,
    Trial,
    ValueRange,
    leaf_locations,
    leaf_values,
    location_of,
)

if TYPE_CHECKING:
    import optuna

GENERATIONS = 4
"""Number of generations of trials that TPE, Optuna's sampler, proposes. Each is proposed when the previous
one has ended."""
MAX_REPEATS = 50
"""Maximum number of consecutive proposals by TPE, Optuna's sampler, that repeat known trials. After that, the
remaining trials of a generation are drawn at random."""
PATIENCE = 20
"""Maximum number of consecutive random draws of a trial that repeat earlier trials. After that, values are
drawn with one more digit."""


def grid_combinations(over: Mapping[str, Choices]) -> list[dict[str, Any]]:
    """Return every combination of the values of all keys of a grid. The last key changes fastest."""
    lists = [choices for choices in over.values() if not isinstance(choices, ValueRange)]
    assert len(lists) == len(over), "a grid has no ranges"
    return [dict(zip(over, values, strict=True)) for values in product(*lists)]


def count_combinations(over: Mapping[str, Choices]) -> float:
    """Return the number of distinct trials that a sweep can have, or infinity if it draws real numbers from a
    range."""
    return math.prod(_count_choices(choices) for choices in over.values())


def _count_choices(choices: Choices) -> float:
    if not isinstance(choices, ValueRange):
        return len(choices)
    return choices.max - choices.min + 1 if is_integer_range(choices) else math.inf


def draw_combinations(
    over: Mapping[str, Choices],
    count: int,
    seed: int,
    excluded_combinations: Iterable[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return `count` random combinations, distinct from one another and from those in
    `excluded_combinations`.

    Only `Random.random` is used, whose sequence Python guarantees. Numbers from a range have three digits, so
    that names contain all digits and rounding differences between machines do not matter.
    """
    uniform = Random(seed).random
    seen = {combination_key(values) for values in excluded_combinations}
    drawn: list[dict[str, Any]] = []
    repeats = 0
    while len(drawn) < count:
        digits = 3 + repeats // PATIENCE
        values = {key: _draw_value(choices, uniform(), digits) for key, choices in over.items()}
        if combination_key(values) in seen:
            repeats += 1
            continue
        repeats = 0
        seen.add(combination_key(values))
        drawn.append(values)
    return drawn


def combination_key(values: Mapping[str, Any]) -> str:
    """Return a string by which combinations of values are compared. The string is equal for equal
    combinations, whatever the order of their keys."""
    return json.dumps(values, sort_keys=True, default=repr)


def _draw_value(choices: Choices, quantile: float, digits: int) -> Any:
    """Return the value of a range or list `choices` at `quantile`, a number from 0 (included) to 1
    (excluded)."""
    if not isinstance(choices, ValueRange):
        return choices[int(quantile * len(choices))]
    low, high = choices.min, choices.max
    if is_integer_range(choices):
        count = int(high) - int(low) + 1
        value = _interpolate_log(low, low + count, quantile) if choices.log else low + int(quantile * count)
        return min(max(int(value), int(low)), int(high))
    value = _interpolate_log(low, high, quantile) if choices.log else low + quantile * (high - low)
    return round_value(choices, value, digits)


def _interpolate_log(min_value: float, max_value: float, quantile: float) -> float:
    return math.exp(math.log(min_value) + quantile * (math.log(max_value) - math.log(min_value)))


def is_integer_range(choices: ValueRange) -> bool:
    return isinstance(choices.min, int) and isinstance(choices.max, int)


def round_value(choices: ValueRange, value: float, digits: int = 3) -> float:
    """Round a value of a range to `digits` digits. Digits are counted relative to the width of the range or,
    on a logarithmic range, to the value itself if that is smaller."""
    first = _power_of_ten(choices.max - choices.min)
    if choices.log:
        first = min(first, _power_of_ten(value))
    return float(min(max(round(value, digits - 1 - first), choices.min), choices.max))


def _power_of_ten(value: float) -> int:
    """Return the exponent of `value` in scientific notation. `math.log10` could be off by a rounding
    error."""
    return int(f"{value:.17e}".partition("e")[2])


def generation_sizes(trials: int) -> Iterator[int]:
    """Yield the number of trials in each of TPE's generations: a quarter of all trials, and in the last
    generation also the remainder."""
    size = -(-trials // GENERATIONS)
    for start in range(0, trials, size):
        yield min(size, trials - start)


SHORT: Mapping[str, str] = {
    "rank": "r",
    "learning_rate": "lr",
    "alpha": "a",
    "dropout": "d",
    "batch_size": "b",
    "epochs": "e",
    "steps": "s",
    "weight_decay": "wd",
    "warmup": "w",
}
BY_VALUE = ("schedule", "targets")
"""Keys that are left out of the names of trials, since their values are clear without them."""
LEAST_OF_SWEEP = 16
"""Minimum number of characters of the sweep's name that remain in a trial's name if it has to be
shortened."""


def trial_names(
    sweep: str,
    over: Mapping[str, Choices],
    combinations_drawn: Sequence[Mapping[str, Any]],
    used_names: Iterable[str] = (),
) -> list[str]:
    """Return a unique name for each combination in `combinations_drawn`, none of them in `used_names`."""
    locations = _named_locations(over)
    used = {sweep.lower(), *(name.lower() for name in used_names)}
    names = []
    for values in combinations_drawn:
        name = _unique_name(_trial_name(sweep, locations, values), used)
        used.add(name.lower())
        names.append(name)
    return names


def _named_locations(over: Mapping[str, Choices]) -> list[Loc]:
    """Return the locations of the values that trial names contain. These are the values that differ between
    trials; if several values change together, only the first of them is contained. If no values differ, names
    contain one value of each key."""
    locations: list[Loc] = []
    for key, choices in over.items():
        if isinstance(choices, ValueRange):
            locations.append(location_of(key))
        elif len(choices) > 1:
            locations += _distinguishing_locations(key, choices)
    return locations or [loc for key, choices in over.items() for loc in leaf_locations(key, choices)[:1]]


def _distinguishing_locations(key: str, choices: Sequence[Any]) -> list[Loc]:
    locations: list[Loc] = []
    apart = 1
    for loc in leaf_locations(key, tuple(choices)):
        kinds = {
            tuple(repr(dict(leaf_values(location_of(key), value)).get(one)) for one in (*locations, loc))
            for value in choices
        }
        if len(kinds) > apart:
            locations.append(loc)
            apart = len(kinds)
    return locations


def _trial_name(sweep: str, locations: Sequence[Loc], values: Mapping[str, Any]) -> str:
    value_at = {
        loc: value for key, value in values.items() for loc, value in leaf_values(location_of(key), value)
    }
    tail = "-".join(
        part for loc in locations if loc in value_at and (part := _trial_name_part(loc, value_at[loc]))
    )
    head = sweep[: max(LEAST_OF_SWEEP, MAX_NAME_LETTERS - 1 - len(tail))]
    return f"{head}-{tail}"[:MAX_NAME_LETTERS].rstrip("-.") if tail else head


def _trial_name_part(location: Loc, value: Any) -> str:
    key, text = str(location[-1]), value_text(value)
    if key in BY_VALUE:
        return text
    if isinstance(value, bool):
        return _name_text(key if value else f"no-{key}")
    short = SHORT.get(key, _name_text(key)) if len(location) < 3 else _name_text(key)
    is_number = isinstance(value, int | float)
    return f"{short}{text}" if is_number else f"{short}-{text}"


def value_text(value: Any) -> str:
    """Format a value briefly for the name of a trial, such as `3e-4`, `0.05` or `cosine`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, list | tuple):
        return "_".join(value_text(item).removesuffix("_proj") for item in value)
    if isinstance(value, Mapping):
        return "_".join(value_text(item) for item in value.values())
    return _name_text(str(value).rstrip("/").rpartition("/")[2])


def number_text(value: float) -> str:
    """Format a number in at most four digits, with an exponent unless plain digits are as short."""
    plain = f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1000 else f"{float(f'{value:.4g}')!r}"
    plain = plain.removesuffix(".0")
    digits, _, power = f"{value:.3e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    scientific = f"{digits}e{int(power)}"
    is_shorter = len(plain) < len(scientific) or len(plain) == len(scientific) <= len("0.05")
    return plain if is_shorter and "e" not in plain else scientific


def _name_text(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def _unique_name(name: str, used_names: set[str]) -> str:
    number, found = 1, name
    while found.lower() in used_names:
        number += 1
        found = f"{name[: MAX_NAME_LETTERS - 1 - len(str(number))]}-{number}"
    return found


@dataclass(frozen=True, slots=True)
class TrialSearch:
    """The source of a sweep's trials. The search has no state, so equal results lead to equal trials, even
    after a run was killed and resumed."""

    name: str
    spec: SweepSpec
    seed: int
    used_names: tuple[str, ...] = ()
    """Names of the run's other jobs, which trials must not have."""

    def first_generation(self) -> tuple[Trial, ...]:
        """Return the trials with which a sweep begins: all trials of a grid or of random draws or, for `tpe`,
        a first generation drawn at random."""
        over, count = self.spec.over, self.spec.trials
        if count is None:
            return self._name_trials(grid_combinations(over))
        count = next(generation_sizes(count)) if self.spec.search == "tpe" else count
        return self._name_trials(draw_combinations(over, count, self.seed))

    def next_generation(self, ended_trials: Ends) -> tuple[Trial, ...]:
        """Return the next generation of trials, given all trials so far with their metrics. Return an empty
        tuple if there is none. The sampler's seed depends on the number of trials so far."""
        # Sorted by name: the order in which trials ended depends on the clock and must not matter.
        known = sorted(ended_trials, key=lambda one: one[0].name)
        if self.spec.search != "tpe" or self.spec.trials is None:
            return ()
        count = min(next(generation_sizes(self.spec.trials)), self.spec.trials - len(known))
        if count <= 0:
            return ()
        seed = int(Random(f"{self.seed} after {len(known)}").random() * 2**32)
        with _silence_optuna():
            proposed = self._propose_combinations(_optuna_study(self.spec, known, seed), known, count, seed)
        return self._name_trials(proposed, [trial.name for trial, _ in known])

    def _name_trials(
        self, combinations_drawn: Sequence[Mapping[str, Any]], used_names: Iterable[str] = ()
    ) -> tuple[Trial, ...]:
        names = trial_names(self.name, self.spec.over, combinations_drawn, (*self.used_names, *used_names))
        return tuple(map(Trial, names, combinations_drawn))

    def _propose_combinations(
        self, study: optuna.Study, ended_trials: Ends, count: int, seed: int
    ) -> list[Mapping[str, Any]]:
        """Return `count` combinations of values that TPE proposes, distinct from one another and from those
        in `ended_trials`."""
        over = self.spec.over
        distributions = {key: _distribution(choices) for key, choices in over.items()}
        before = [trial.values for trial, _ in ended_trials]
        seen = {combination_key(values) for values in before}
        proposed: list[Mapping[str, Any]] = []
        repeats = 0
        while len(proposed) < count and repeats < MAX_REPEATS:
            params = study.ask(distributions).params
            values = {key: _optuna_choice(choices, params[key]) for key, choices in over.items()}
            if combination_key(values) in seen:
                repeats += 1
                continue
            seen.add(combination_key(values))
            proposed.append(values)
        return proposed + draw_combinations(over, count - len(proposed), seed, [*before, *proposed])


def later_generation_search(sweep: Sweep, used_names: Iterable[str]) -> TrialSearch | None:
    """Return the search that proposes later generations of a sweep's trials, or None if all trials are
    already known."""
    if sweep.spec.search != "tpe":
        return None
    return TrialSearch(sweep.name, sweep.spec, int(sweep.keys.values.get("seed", 0)), tuple(used_names))


def _optuna_study(spec: SweepSpec, ended_trials: Ends, seed: int) -> optuna.Study:
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
    for trial, value in ended_trials:
        is_known = value is not None and math.isfinite(value)
        study.add_trial(
            optuna.trial.create_trial(
                # A trial without a value counts as worse than every other, so that similar ones are avoided.
                state=complete if is_known else pruned,
                value=value if is_known else None,
                params={key: _optuna_value(choices, trial.values[key]) for key, choices in spec.over.items()},
                distributions={key: _distribution(choices) for key, choices in spec.over.items()},
            )
        )
    return study


def _distribution(choices: Choices) -> optuna.distributions.BaseDistribution:
    """Return Optuna's distribution for the values that a key may have. Values of a list are represented by
    their index."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(choices, ValueRange):
        return CategoricalDistribution(range(len(choices)))
    if is_integer_range(choices):
        return IntDistribution(int(choices.min), int(choices.max), log=choices.log)
    return FloatDistribution(choices.min, choices.max, log=choices.log)


def _optuna_value(choices: Choices, value: Any) -> Any:
    return value if isinstance(choices, ValueRange) else choices.index(value)


def _optuna_choice(choices: Choices, param: Any) -> Any:
    if not isinstance(choices, ValueRange):
        return choices[param]
    return param if is_integer_range(choices) else round_value(choices, param)


@contextmanager
def _silence_optuna() -> Iterator[None]:
    """Return a context manager that silences Optuna, which logs every study and warns about experimental
    features."""
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
