"""The reader of the key `sweep` of a job. It returns the sweep and its trials, one job for each combination
of values. All jobs are checked before any of them is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from weftune.core.bounds import format_value
from weftune.errors import Mistake, SpecError
from weftune.jobs.spec.build import build_job
from weftune.jobs.spec.keys import SECTIONS, shared_value_reason, unknown_key
from weftune.jobs.spec.layer import (
    Fault,
    Layer,
    Loc,
    Places,
    expand_shorthands,
    find_source_location,
    merge_over_defaults,
    plain_values,
    sort_mistakes,
)
from weftune.jobs.spec.schema import EXPECTED, bound_of_key, build, choice_sentence, number_faults
from weftune.jobs.spec.spec import JobSpec, to_steps
from weftune.jobs.sweeps.halving import rung_counts, rung_steps
from weftune.jobs.sweeps.search import TrialSearch, count_combinations, grid_combinations
from weftune.jobs.sweeps.spec import (
    MAX_TRIALS,
    Choices,
    Halving,
    Sweep,
    SweepSpec,
    Trial,
    ValueRange,
    leaf_locations,
    location_of,
    nest_values,
)
from weftune.objectives.spec import OBJECTIVES

MIN_RANGE = 1e-9
"""Minimum width of a range of numbers, relative to its values. It is far above the rounding errors of
floats."""
RANGE_KEYS = ("min", "max", "log")
BEST_MODES = {
    "eval_loss": "min",
    "eval_mean_token_accuracy": "max",
    "eval_rewards/accuracies": "max",
    "eval_rewards/margins": "max",
    "eval_accuracy": "max",
    "eval_margin": "max",
}
"""Maps each metric to `min` or `max`: whether its lowest or its highest value is best. A job's own
`eval.metric` has `max`."""


def read_sweep(job: Mapping[str, Any]) -> tuple[SweepSpec | None, list[Fault]]:
    """Return the spec of the sweep that a job's keys describe (None if the job has no valid sweep), and the
    errors in it."""
    value = job["sweep"]
    if not isinstance(value, Mapping):
        return None, [Fault(("sweep",), f"must be {EXPECTED[('sweep',)]}, got {format_value(value)}")]
    faults: dict[Loc, str] = {}
    for fault in number_faults({"sweep": {key: below for key, below in value.items() if key != "over"}}):
        faults.setdefault(fault.loc, fault.sentence)
    # The values that `over` may have depend on the job's other keys, which the record does not know.
    made = build(SweepSpec, {**value, **({"over": {}} if "over" in value else {})}, "sweep", ("sweep",))
    over, found = _read_searched_keys(value["over"]) if "over" in value else ({}, [])
    more = [
        *(made if isinstance(made, list) else []),
        *found,
        *_contradiction_faults(value, job, over, bool(found)),
    ]
    for fault in more:
        faults.setdefault(fault.loc, fault.sentence)
    if faults:
        return None, [Fault(loc, sentence) for loc, sentence in faults.items()]
    assert isinstance(made, SweepSpec)
    mode: Any = value.get("mode", BEST_MODES.get(made.metric, "max"))
    spec = replace(made, over=over, mode=mode)
    last = rung_counts(spec)[-1]
    if spec.keep > last:
        reach = "that reach the end" if spec.halving else "of the sweep"
        return None, [
            Fault(("sweep", "keep"), f"must be at most {last}, the trials {reach}, got {spec.keep}")
        ]
    return spec, []


def _contradiction_faults(
    value: Mapping[str, Any], job: Mapping[str, Any], over: Mapping[str, Choices], has_invalid_over: bool
) -> Iterator[Fault]:
    """Yield an error for each pair of a sweep's keys that contradict each other. `has_invalid_over` is
    whether a part of `over` is invalid."""
    yield from _search_faults(value, over, has_invalid_over or not over)
    if job.get("eval") is None:
        at = next((key for key in ("halving", "metric") if value.get(key) is not None), None)
        yield Fault(
            ("sweep", at) if at else ("sweep",),
            "needs eval in the job: {fraction: 0.1} or {path: ...}, to know which trial is best",
        )
    metric = value.get("metric", "eval_loss")
    own = _metric_of_answers(job)
    known = [*BEST_MODES, *([own] if own else [])]
    if isinstance(metric, str) and metric not in known:
        hint = "; a metric of answers is named in the job, eval: {generate: {...}, metric: ...}"
        yield Fault(("sweep", "metric"), choice_sentence(known, metric) + ("" if own else hint))
    best, mode = BEST_MODES.get(str(metric), "max"), value.get("mode")
    if metric in known and mode in ("min", "max") and mode != best:
        yield Fault(("sweep", "mode"), f"must be {best} for {metric}, or left out")
    objective = job.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    named = str(value.get("metric")).removeprefix("eval_")
    kinds = [name for name, spec in OBJECTIVES.items() if named in spec.metrics]
    if kinds and kind not in kinds:
        names = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        sentence = f"needs a job that learns from preferences, objective: {names}"
        yield Fault(("sweep", "metric"), sentence)
    if named == "mean_token_accuracy" and kind in OBJECTIVES and OBJECTIVES[kind].scalar_head:
        sentence = f"is not measured for objective: {kind}; write eval_accuracy or eval_margin"
        yield Fault(("sweep", "metric"), sentence)
    yield from _halving_faults(value.get("halving"), job.get("steps"))


def _metric_of_answers(job: Mapping[str, Any]) -> str | None:
    """Return the name by which a sweep refers to the job's `eval.metric`, or None if the job has no such
    metric."""
    held_out = job.get("eval")
    metric = held_out.get("metric") if isinstance(held_out, Mapping) else None
    return f"eval_{metric.rpartition(':')[2]}" if isinstance(metric, str) else None


def _search_faults(
    value: Mapping[str, Any], over: Mapping[str, Choices], has_invalid_over: bool
) -> Iterator[Fault]:
    search, trials = value.get("search", "grid"), value.get("trials")
    count = count_combinations(over)
    if search == "grid":
        ranges = [key for key, choices in over.items() if isinstance(choices, ValueRange)]
        for key in ranges:
            yield Fault(
                ("sweep", "over", key),
                "a grid takes no range: write a list of values, or search: random and how many trials",
            )
        if trials is not None:
            all_of_them = (
                f"all of its {count:,.0f} combinations"
                if not has_invalid_over and not ranges
                else "all combinations"
            )
            yield Fault(
                ("sweep", "trials"),
                f"a grid trains {all_of_them}: leave trials out, or write search: random",
            )
        elif count > MAX_TRIALS and not ranges and not has_invalid_over:
            yield Fault(
                ("sweep", "over"),
                f"is a grid of {count:,.0f} trials, and a sweep has at most {MAX_TRIALS:,}; write search: "
                "random and how many trials",
            )
        return
    if search not in ("random", "tpe"):
        return
    if trials is None:
        yield Fault(("sweep",), f"needs trials: how many to try, for search: {search}")
    elif isinstance(trials, int) and not has_invalid_over and trials > count:
        yield Fault(
            ("sweep", "trials"),
            f"must be at most {count:,.0f}, the number of combinations, got {trials}; for all write "
            "search: grid",
        )
    if search == "tpe" and find_spec("optuna") is None:
        yield Fault(
            ("sweep", "search"), 'tpe needs Optuna: pip install "weftune[sweeps]", or write search: random'
        )


def _halving_faults(halving: Any, steps: Any) -> Iterator[Fault]:
    at = halving.get("at") if isinstance(halving, Mapping) else None
    if not isinstance(at, list | tuple):
        return
    if not at:
        yield Fault(("sweep", "halving", "at"), f"must be {EXPECTED[('sweep', 'halving', 'at')]}")
    numbers = all(isinstance(share, int | float) for share in at)
    if numbers and any(later <= earlier for earlier, later in pairwise(at)):
        yield Fault(("sweep", "halving", "at"), "must rise from each share to the next, such as [0.1, 0.3]")
    elif numbers and at and type(steps) is int and steps > 0 and all(0 < share < 1 for share in at):
        rungs = [0, *rung_steps(Halving(tuple(at), 0.5), steps)]
        if any(later <= earlier for earlier, later in pairwise(rungs)):
            told = ", ".join(map(str, rungs[1:]))
            yield Fault(
                ("sweep", "halving", "at"),
                f"must be at least a step apart, and of {steps} steps they are {told}; take fewer shares or "
                "more steps",
            )


def _read_searched_keys(over_values: Any) -> tuple[dict[str, Choices], list[Fault]]:
    loc: Loc = ("sweep", "over")
    if not isinstance(over_values, Mapping) or not over_values:
        return {}, [Fault(loc, f"must be {EXPECTED[loc]}, got {format_value(over_values)}")]
    over: dict[str, Choices] = {}
    faults: list[Fault] = []
    for key, value in over_values.items():
        found = [Fault((*loc, key), sentence)] if (sentence := _key_fault(str(key))) else []
        found = found or list(_choice_faults(str(key), value, (*loc, key)))
        faults += found
        if not found:
            over[str(key)] = ValueRange(**value) if isinstance(value, Mapping) else tuple(plain_values(value))
    return over, faults + list(_overlap_faults(over))


def _key_fault(key: str) -> str | None:
    first, *below = location_of(key)
    if (shared := shared_value_reason((first, *below))) is not None:
        return f"cannot be swept: {shared}"
    if first not in SECTIONS["job"]:
        return unknown_key("job", str(below[-1] if first in ("job", "jobs", "defaults") and below else first))
    if not below:
        return None
    if first not in SECTIONS:
        return f"has no keys below it; write {first}"
    return None if below[0] in SECTIONS[str(first)] else unknown_key(str(first), str(below[0]))


def _choice_faults(key: str, value: Any, location: Loc) -> Iterator[Fault]:
    if isinstance(value, Mapping):
        yield from _range_faults(key, value, location)
    elif not isinstance(value, list | tuple):
        yield Fault(
            location,
            f"must be a list of values, or a range {{min: ..., max: ...}}, got {format_value(value)}; "
            "one value for all trials is written in the job itself"
        )  # fmt: skip
    elif not value:
        yield Fault(location, "must hold at least one value, got an empty list")
    else:
        for index, item in enumerate(value):
            earlier = next(at for at, other in enumerate(value) if _is_same_value(item, other))
            if earlier < index:
                yield Fault(
                    (*location, index),
                    f"{format_value(item)} is already there as {key}[{earlier}]; remove one",
                )


def _is_same_value(first_value: Any, second_value: Any) -> bool:
    """Return whether two values are equal. Unlike in Python, true does not equal 1."""
    return isinstance(first_value, bool) == isinstance(second_value, bool) and first_value == second_value


def _range_faults(key: str, value: Mapping[str, Any], location: Loc) -> Iterator[Fault]:
    if not {"min", "max"} & value.keys():
        yield Fault(location, _not_a_range_message(key, value))
        return
    foreign = [name for name in value if name not in RANGE_KEYS]
    for name in foreign:
        yield Fault((*location, name), _range_key(str(name)))
    if foreign:
        return
    bound = bound_of_key(location_of(key))
    if bound is None:
        yield Fault(location, "takes no range, for it is no number; write a list of values")
        return
    ends = [(name, value[name]) for name in ("min", "max") if name in value]
    wrong = [
        Fault((*location, name), sentence)
        for name, end in ends
        if (sentence := replace(bound, allows_none=False).fault(end))
    ]
    yield from wrong
    if len(ends) < 2:
        yield Fault(location, "needs min and max")
    if not isinstance(value.get("log", False), bool):
        yield Fault((*location, "log"), f"must be true or false, got {format_value(value['log'])}")
    if wrong or len(ends) < 2:
        return
    low, high = value["min"], value["max"]
    if low >= high:
        yield Fault(
            (*location, "max"), f"must be above min, which is {format_value(low)}, got {format_value(high)}"
        )
    elif value.get("log") is True and low <= 0:
        yield Fault((*location, "min"), f"must be above 0 where log is true, got {format_value(low)}")
    elif not isinstance(low, int) and high - low < MIN_RANGE * high:
        yield Fault(location, "is too narrow to draw from; write a list of values")
    elif bound.allows_fraction and high > 1 and not (isinstance(low, int) and isinstance(high, int)):
        yield Fault(
            location, "must go over shares of the run (below 1) or over whole numbers of steps, not both"
        )


def _range_key(name: str) -> str:
    known = unknown_key("sweep", name)
    foreign = name in ("distribution", "values", "value", "q", "step")
    return known if foreign else f"is not a key of a range; its keys are {', '.join(RANGE_KEYS)}"


def _not_a_range_message(key: str, value: Mapping[str, Any]) -> str:
    """Return the error message for a mapping that cannot be read as a range of values, such as a list inside
    a mapping, or nested keys."""
    if any(isinstance(value.get(name), list | tuple) for name in ("values", "choices", "grid")):
        return f"write the list itself, {key}: [...]"
    inside = [name for name in value if name in SECTIONS.get(key, ())]
    if inside:
        return f"write dotted keys, such as {key}.{inside[0]}: [...], or a list of mappings"
    return "must be a list of values, or a range {min: ..., max: ...}"


def _overlap_faults(over: Mapping[str, Choices]) -> Iterator[Fault]:
    """Yield an error for every key in a sweep's `over` that sets the same value of a job as an earlier
    key."""
    ways = {key: leaf_locations(key, choices) for key, choices in over.items()}
    keys = list(over)
    for index, key in enumerate(keys):
        for earlier in keys[:index]:
            if shared := _shared_location(ways[earlier], ways[key]):
                name = ".".join(map(str, shared))
                yield Fault(
                    ("sweep", "over", key), f"{name} is set by the key {earlier} too; write it in one"
                )
                break


def _shared_location(first_locations: Sequence[Loc], second_locations: Sequence[Loc]) -> Loc | None:
    for a in first_locations:
        for b in second_locations:
            if a[: len(b)] == b[: len(a)]:
                return max(a, b, key=len)
    return None


def trial_job(sweep: Sweep, trial: Trial) -> JobSpec:
    """Return the job of a sweep's trial. The trial may belong to a generation that was proposed during the
    run and is in no file."""
    job, found = build_job(JobSpec, trial_keys(sweep, trial), sweep.folder)
    if job is None:
        raise SpecError(sort_mistakes(found))
    return job


def trial_keys(sweep: Sweep, trial: Trial) -> Layer:
    """Return the keys of a trial (a job of a sweep) with their source locations. Values from the sweep's key
    `over` have their location there."""
    job = keys_without_sweep(sweep.keys)
    places = {loc: place for loc, place in job.places.items() if not loc}
    for key, value in trial.values.items():
        places |= _value_locations(sweep, key, value)
    laid = merge_over_defaults(job, expand_shorthands(nest_values(trial.values), places))
    return Layer({**laid.values, "name": trial.name}, laid.places)


def keys_without_sweep(keys: Layer) -> Layer:
    """Return a job's keys without `sweep`."""
    values = {key: value for key, value in keys.values.items() if key != "sweep"}
    return Layer(values, {loc: place for loc, place in keys.places.items() if loc[:1] != ("sweep",)})


def _value_locations(sweep: Sweep, key: str, value: Any) -> Places:
    written: Loc = ("sweep", "over", key)
    choices = sweep.spec.over[key]
    if (
        not isinstance(choices, ValueRange) and value in choices
    ):  # a recorded trial may have a value since removed
        written = (*written, choices.index(value))
    loc, depth = location_of(key), len(written)
    return {(*loc, *at[depth:]): place for at, place in sweep.keys.places.items() if at[:depth] == written}


def expand_sweep(
    keys: Layer, folder: Path
) -> tuple[Sweep | None, list[tuple[JobSpec, Places]], list[Mistake]]:
    """Return a job's sweep, and the jobs of its trials with the source locations of their keys. If the sweep
    or a trial has errors, return these errors instead."""
    spec, faults = read_sweep(keys.values)
    found = [find_source_location(keys.places, fault.loc).mistake(fault.sentence) for fault in faults]
    job, wrong = build_job(JobSpec, keys_without_sweep(keys), folder)
    if spec is None:
        return None, [], [*found, *wrong]
    name = str(keys.values.get("name"))
    sweep = Sweep(name, spec, (), keys, folder)
    for key, choices in spec.over.items():
        # Every value by itself, including those that no draw has hit yet.
        for values in () if isinstance(choices, ValueRange) else grid_combinations({key: choices}):
            wrong += build_job(JobSpec, trial_keys(sweep, Trial(name, values)), folder)[1]
    if job is None or wrong:
        return None, [], wrong
    sweep = replace(sweep, trials=TrialSearch(name, spec, job.seed).first_generation())
    jobs: list[tuple[JobSpec, Places]] = []
    mistakes: dict[str, Mistake] = {}
    for trial in sweep.trials:
        layer = trial_keys(sweep, trial)
        made, wrong = build_job(JobSpec, layer, folder)
        for mistake in wrong:
            mistakes.setdefault(mistake.location, mistake)
        jobs += [(made, layer.places)] if made is not None else []
    return (None, [], list(mistakes.values())) if mistakes else (sweep, jobs, [])


def repeated_trial_names(names: Sequence[Any], sweeps: Sequence[Sweep]) -> Iterator[tuple[int, str]]:
    """Yield the index of every job whose sweep has a trial with a name that is already used, with the error
    message."""
    owners = {
        name.lower(): index for index, name in reversed(list(enumerate(names))) if isinstance(name, str)
    }
    for sweep in sweeps:
        index = names.index(sweep.name)
        for trial in sweep.trials:
            owner = owners.setdefault(trial.name.lower(), index)
            if owner != index:
                whose = (
                    f"jobs[{owner}]"
                    if str(names[owner]).lower() == trial.name.lower()
                    else f"a trial of jobs[{owner}]"
                )
                yield index, f"its trial {format_value(trial.name)} has the name of {whose}; choose another"
                break


def sweep_warnings(
    sweeps: Iterable[Sweep], jobs: Mapping[str, JobSpec], steps: Mapping[str, int]
) -> list[str]:
    """Return the warnings about all sweeps of a run. `steps` maps each known trial to its number of steps."""
    return [
        f"{sweep.name}: {sentence}"
        for sweep in sweeps
        for sentence in (*_rung_warnings(sweep, jobs, steps), *_scale_warnings(sweep, jobs))
    ]


def _scale_warnings(sweep: Sweep, jobs: Mapping[str, JobSpec]) -> Iterator[str]:
    """Yield a warning if a sweep compares its trials by loss although a key in `over` changes what the loss
    measures."""
    key = next((key for key in sweep.spec.over if key.split(".")[0] == "objective"), None)
    first = next((jobs[trial.name] for trial in sweep.trials if trial.name in jobs), None)
    if key is None or first is None or sweep.spec.metric != "eval_loss":
        return
    measured = [f"eval_{name}" for name in first.objective.metrics]
    better = next((metric for metric in BEST_MODES if metric in measured), None)
    if better is not None:
        yield (
            f"sweep.metric: {key} changes what the validation loss measures, so that trials cannot be "
            f"compared by it; write metric: {better}"
        )


def _rung_warnings(sweep: Sweep, jobs: Mapping[str, JobSpec], steps: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning if a sweep's first rung (comparison of trials) is during the warm-up of the learning
    rate, where learning rates hardly make a difference yet."""
    known = [trial.name for trial in sweep.trials if trial.name in steps]
    early = []
    for name in known:
        rungs, warmup = rung_steps(sweep.spec.halving, steps[name]), to_steps(jobs[name].warmup, steps[name])
        if rungs and rungs[0] <= warmup:
            early.append((rungs[0], warmup))
    if early:
        (rung, warmup), some = early[0], "" if len(early) == len(known) else f"{len(early)} of {len(known)} "
        yield (
            f"sweep.halving.at: the first rung is at step {rung}, and {some}trials warm up until step "
            f"{warmup}: they are judged before their learning rate is reached; set it later, or warmup "
            "shorter"
        )
