"""The expansion of a job with `sweep` into the jobs of its trials, all of them checked before the first is
trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weftune.errors import UserError
from weftune.jobs.spec.layer import Layer
from weftune.jobs.spec.places import Place, Placed, Places, place_of
from weftune.jobs.spec.settle import settle
from weftune.jobs.spec.show import show
from weftune.jobs.spec.spec import JobSpec
from weftune.jobs.sweeps.draws import grid
from weftune.jobs.sweeps.read import read_sweep
from weftune.jobs.sweeps.search import propose
from weftune.jobs.sweeps.spec import Sweep, Trial, ValueRange
from weftune.jobs.sweeps.trials import own_keys, trial_layer


@dataclass(slots=True)
class Expanded:
    """The expansion of one job with `sweep`; it holds only the mistakes in `found` if there are any."""

    found: list[Placed] = field(default_factory=list)
    jobs: list[JobSpec] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    places: dict[str, Places] = field(default_factory=dict)


def expand(keys: Layer, folder: Path) -> Expanded:
    spec, faults = read_sweep(keys.values)
    found = [Placed(place_of(keys.places, fault.loc), fault.sentence) for fault in faults]
    job, wrong = settle(JobSpec, own_keys(keys), folder)
    if spec is None:
        return Expanded([*found, *wrong])
    name = str(keys.values.get("name"))
    sweep = Sweep(name, spec, (), keys, folder)
    wrong += _wrong(sweep, (Trial(name, values) for values in _one_by_one(sweep)))
    if job is None or wrong:
        return Expanded(wrong)
    trials = propose(name, spec, job.seed).first()
    return _jobs(replace(sweep, trials=trials))


def _one_by_one(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield every value by itself, including those that no draw has hit yet."""
    for key, choices in sweep.spec.over.items():
        if not isinstance(choices, ValueRange):
            yield from grid({key: choices})


def _wrong(sweep: Sweep, trials: Iterable[Trial]) -> list[Placed]:
    return [
        placed for trial in trials for placed in settle(JobSpec, trial_layer(sweep, trial), sweep.folder)[1]
    ]


def _jobs(sweep: Sweep) -> Expanded:
    made = Expanded(sweeps=[sweep])
    found: dict[Place, Placed] = {}
    for trial in sweep.trials:
        layer = trial_layer(sweep, trial)
        job, wrong = settle(JobSpec, layer, sweep.folder)
        for placed in wrong:
            found.setdefault(placed.place, placed)
        if job is not None:
            made.jobs.append(job)
            made.places[job.name] = layer.places
    return Expanded(list(found.values())) if found else made


def trial_clashes(names: Sequence[Any], sweeps: Sequence[Sweep]) -> Iterator[tuple[int, str]]:
    """Yield the position of every job with a trial whose name another job or its trial has, with the
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
                yield index, f"its trial {show(trial.name)} has the name of {whose}; choose another"
                break


def refuse_shares(sweeps: Sequence[Sweep]) -> None:
    """Raise UserError if there is a sweep: it is trained by one process, or by workers that train every trial
    together."""
    if sweeps:
        raise UserError(
            f"The trials of sweep {sweeps[0].name} are compared with one another while they train, which "
            "processes with jobs of their own cannot do; leave --gpus out"
        )
