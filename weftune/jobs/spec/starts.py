"""Jobs that start from the adapters of other jobs: `init_from: {job: NAME}`.

NAME is another job of the same run, and no jobs wait for each other in a circle. An adapter is refused for
the same reasons as a folder, before anything is trained: other sites, or another rank at one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from weftune.adapters.start import source_of
from weftune.adapters.target import TargetSpec
from weftune.core.shapes import ModelShape
from weftune.errors import Mistake
from weftune.jobs.spec.near import nearest
from weftune.jobs.spec.places import Loc
from weftune.jobs.spec.show import show
from weftune.jobs.spec.spec import JobSpec, place_in_job

SOURCE: Loc = ("adapter", "init_from", "job")
MOST_NAMED = 8
"""Number of jobs that a message names before it only counts them."""


def name_faults(
    jobs: Sequence[JobSpec], known: Sequence[str], trials: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield every job whose source has a wrong name, with the error message; `known` are all names of the
    run, and `trials` maps the names of trials to their sweeps."""
    sources = {job.name: source for job in jobs if (source := source_of(job.adapter))}
    trials = trials or {}
    told: set[str] = set()
    for name, source in sources.items():
        if source in trials or source in trials.values():
            yield name, _swept(source, trials)
        elif source == name:
            yield name, "a job cannot start from itself; name another, or write init_from: null"
        elif source not in known:
            yield name, _unknown(source, [other for other in known if other != name])
        elif name not in told and (circle := _circle(name, sources)):
            told.update(circle)
            way = " from ".join([*circle, name])
            yield name, f"jobs wait for each other in a circle, {way}; let one of them start from a folder"


def _swept(source: str, trials: Mapping[str, str]) -> str:
    if source in trials:
        why = f"a trial of the sweep {trials[source]} and may leave without an adapter"
    else:
        why = "a sweep, whose best adapter is known at its end only"
    best = f"{trials.get(source, source)}/best"
    return f"{source} is {why}; in a later run write the path of a folder in {best} as init_from"


def _unknown(source: str, others: Sequence[str]) -> str:
    sentence = f"there is no job {show(source)} in this run"
    if near := nearest(source, others):
        return f"{sentence}; did you mean {near}?"
    if not others:
        return f"{sentence}; for a folder write its path as init_from"
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return f"{sentence}; its other jobs are {', '.join(others[:MOST_NAMED])}{more}"


def _circle(name: str, sources: Mapping[str, str]) -> list[str]:
    """Return the chain of sources from `name` back to itself; empty if it does not lead back."""
    way = [name]
    while (source := sources.get(way[-1], "")) and source not in way:
        way.append(source)
    return way if source == name else []


def check_names(
    jobs: Sequence[JobSpec], known: Sequence[str], place: Callable[..., str] = place_in_job
) -> list[Mistake]:
    """Return the faults of `name_faults` as mistakes, for jobs that were made in Python."""
    return [Mistake(place(name, *SOURCE), sentence) for name, sentence in name_faults(jobs, known)]


def check_starts(
    jobs: Sequence[JobSpec], shape: ModelShape, place: Callable[..., str] = place_in_job
) -> list[Mistake]:
    """Return a mistake for every job whose source has other sites or ranks on this base."""
    adapters = {job.name: job.adapter for job in jobs}
    return [
        Mistake(place(job.name, *SOURCE), sentence)
        for job in jobs
        if (source := source_of(job.adapter)) in adapters
        and (sentence := _misfit(source, adapters[source], job.adapter, shape))
    ]


def _misfit(source: str, before: TargetSpec, own: TargetSpec, shape: ModelShape) -> str:
    """Return why a folder with that adapter would be refused; empty if it would not be."""
    if before.kind != own.kind:
        return f"{source} is a {before.kind} adapter; write kind: {before.kind}"
    if differ := [site for site in shape.sites if before.adapts(site) != own.adapts(site)]:
        where = "this job" if own.adapts(differ[0]) else source
        keys = "adapter.targets and adapter.target_parameters" if shape.mixes else "adapter.targets"
        more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
        return (
            f"{source} and this job do not adapt the same sites: only {where} does {differ[0].name}{more}; "
            f"set {keys} as {source} has it"
        )
    if before.shapes_outside(shape.sites) != own.shapes_outside(shape.sites):
        return f"{source} has weights of other shapes; write adapter as {source} has it"
    if before.trained_tokens != own.trained_tokens:
        return f"{source} trains other tokens; set adapter.trainable_token_indices as {source} has it"
    for site in shape.sites:
        if own.adapts(site) and before.rank_at(site.name) != own.rank_at(site.name):
            return (
                f"{source} has rank {before.rank_at(site.name)} at {site.name}, the job asks for "
                f"{own.rank_at(site.name)}; set adapter.rank and adapter.rank_pattern as {source} has them"
            )
        if own.adapts(site) and before.shapes_at(site) != own.shapes_at(site):
            return f"{source} has weights of other shapes at {site.name}; write adapter as {source} has it"
    return ""
