"""A trial as a job: the trial's values merged over the sweep's own keys, and the place where each was
written."""

from __future__ import annotations

from typing import Any

from weftune.errors import SpecError
from weftune.jobs.spec.layer import Layer, merged, written_out
from weftune.jobs.spec.places import Loc, Places, in_file_order
from weftune.jobs.spec.settle import settle
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.sweeps.spec import Sweep, Trial, ValueRange
from weftune.jobs.sweeps.ways import nested, way_of


def trial_job(sweep: Sweep, trial: Trial) -> JobSpec:
    """Return the job of a trial, also for later generations, which no file lists."""
    job, found = settle(JobSpec, trial_layer(sweep, trial), sweep.folder)
    if job is None:
        raise SpecError(in_file_order(found))
    return job


def trial_layer(sweep: Sweep, trial: Trial) -> Layer:
    """Return the keys of a trial; the places of those that `over` sets point to the value there."""
    job = own_keys(sweep.keys)
    places = {loc: place for loc, place in job.places.items() if not loc}
    for key, value in trial.values.items():
        places |= _places(sweep, key, value)
    laid = merged(job, written_out(nested(trial.values), places))
    return Layer({**laid.values, "name": trial.name}, laid.places)


def own_keys(keys: Layer) -> Layer:
    """Return a job's keys without `sweep`."""
    values = {key: value for key, value in keys.values.items() if key != "sweep"}
    return Layer(values, {loc: place for loc, place in keys.places.items() if loc[:1] != ("sweep",)})


def _places(sweep: Sweep, key: str, value: Any) -> Places:
    written: Loc = ("sweep", "over", key)
    choices = sweep.spec.over[key]
    if not isinstance(choices, ValueRange):
        written = (*written, choices.index(value))
    way, depth = way_of(key), len(written)
    return {(*way, *loc[depth:]): place for loc, place in sweep.keys.places.items() if loc[:depth] == written}
