"""The reader that turns a jobs file, or a mapping with its content, into a `RunSpec`, and reports all errors
in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from weftune.base.spec import DEMO, BaseSpec
from weftune.core.bounds import format_value
from weftune.core.shapes import ModelShape
from weftune.errors import Mistake, SpecError, UserError
from weftune.jobs.spec.build import (
    build_job,
    check_rope,
    is_hub_id,
    is_revision,
    missing_path_message,
    path_exists,
    resolve_path,
)
from weftune.jobs.spec.checks import SOURCE, check_on_base, name_faults
from weftune.jobs.spec.keys import SECTIONS, repeated_names, unknown_key
from weftune.jobs.spec.layer import (
    ROWS,
    Layer,
    Loc,
    Place,
    Places,
    dotted_name,
    expand_shorthands,
    find_source_location,
    is_row_data,
    merge_over_defaults,
    sort_mistakes,
    source_locations,
)
from weftune.jobs.spec.lines import MAX_NODES, parse_yaml, read_yaml
from weftune.jobs.spec.schema import EXPECTED, build
from weftune.jobs.spec.spec import JobSpec, RunSpec, Tracker
from weftune.jobs.sweeps.read import expand_sweep, repeated_trial_names
from weftune.jobs.sweeps.spec import Sweep

OUTPUT = "output"
ANY_DEFAULTS = 100
"""Number of values that `defaults` in a jobs file may always have, however few jobs there are. A job has
about 40 keys."""


ShapeOf = Callable[[BaseSpec], ModelShape | None]


def read_run(path: Path | str, shape_of: ShapeOf | None = None) -> RunSpec:
    """Read a jobs file, or raise one SpecError with all errors in it. If `shape_of` is given, the targets of
    adapters are checked too. `shape_of` is a function that returns the shape (sizes and module names) of a
    base model, or None if that is unknown."""
    path = Path(path)
    document = read_yaml(path)
    reader = _Reader(path.name, path.parent.resolve(), document.lines, document.faults, shape_of)
    return reader.run(document.values, path)


def read_added_run(text: str, path: Path, known_jobs: Sequence[str]) -> RunSpec:
    """Read the content of a jobs file whose jobs are added to a run. The added jobs may start from the
    adapters of `known_jobs`, the jobs of the run."""
    document = parse_yaml(text, path.name)
    reader = _Reader(path.name, path.parent, document.lines, document.faults, known_jobs=known_jobs)
    return reader.run(document.values, path)


def parse_run(mapping: Any, folder: Path, file: Path | None = None) -> RunSpec:
    """Read a run from a mapping that is already in memory; paths are relative to `folder`."""
    return _Reader("" if file is None else file.name, folder.absolute(), {}, []).run(mapping, file)


def parse_base(values: Mapping[str, Any]) -> BaseSpec:
    """Read a base from a mapping with the keys of `base` in a jobs file."""
    reader = _Reader("", Path.cwd(), {}, [])
    base = reader.read_base(values)
    reader.raise_mistakes()
    assert base is not None
    return base


@dataclass(slots=True)
class _Reader:
    file: str
    folder: Path
    lines: Mapping[Loc, int]
    yaml_mistakes: list[Mistake]
    """Errors in the YAML syntax. No other errors are reported for values with such an error."""
    shape_of: ShapeOf | None = None
    known_jobs: Sequence[str] = ()
    """Names of jobs outside the jobs file from whose adapters its jobs may start."""
    mistakes: list[Mistake] = field(default_factory=list)

    def run(self, values: Any, file: Path | None) -> RunSpec:
        if not isinstance(values, Mapping):
            got = "it is empty" if values is None else f"it holds {format_value(values)}"
            self.add_fault((), f"must be a mapping with the keys base and jobs, but {got}")
            self.raise_mistakes()
        if not values.keys() >= {"base"}:
            self.add_fault((), "needs base: a Hub id, a folder, a GGUF file, or demo")
        for key in values:
            if key not in SECTIONS["run"]:
                self.add_fault((key,), unknown_key("run", str(key)))
        base = self.read_base(values["base"]) if "base" in values else None
        output = self.read_output(values.get("output"))
        report_to = self.read_report_to(values.get("report_to"))
        deterministic = self.read_deterministic(values.get("deterministic", False))
        jobs, sweeps, places = self.read_jobs(values)
        if base is None:
            self.raise_mistakes()
        assert base is not None
        run = RunSpec(
            base=base,
            output=output,
            report_to=report_to,
            deterministic=deterministic,
            jobs=jobs,
            sweeps=sweeps,
            file=file,
            places=places,
        )
        self.raise_mistakes(self.target_mistakes(run))
        return run

    def raise_mistakes(self, more_mistakes: Sequence[Mistake] = ()) -> None:
        unread = {mistake.location for mistake in self.yaml_mistakes}
        mistakes = self.yaml_mistakes + [one for one in self.mistakes if one.location not in unread]
        if mistakes or more_mistakes:
            # Trials share the place of a wrong target.
            raise SpecError([*sort_mistakes(mistakes), *dict.fromkeys(more_mistakes)])

    def target_mistakes(self, run: RunSpec) -> Sequence[Mistake]:
        """Return the errors in the targets of adapters (patterns of module names), or one error if the base
        model cannot be inspected."""
        if self.shape_of is None or not run.jobs:
            return ()
        try:
            shape = self.shape_of(run.base)
        except UserError as error:
            return error.mistakes
        if shape is None:
            return ()
        return check_on_base(run.jobs, shape, run.base, run.locate)

    def add_fault(self, location: Loc, sentence: str) -> None:
        line = next(
            (self.lines[location[:n]] for n in range(len(location), -1, -1) if location[:n] in self.lines), 0
        )
        self.mistakes.append(Place(self.file, line, dotted_name(location)).mistake(sentence))

    def read_base(self, value: Any) -> BaseSpec | None:
        keys = {"model": value} if isinstance(value, str) else value
        if not isinstance(keys, Mapping):
            self.add_fault(("base",), f"must be {EXPECTED[('base',)]}, got {format_value(value)}")
            return None
        known = {key: keys[key] for key in keys if key in SECTIONS["base"]}
        for key in keys:
            if key not in known:
                self.add_fault(("base", key), unknown_key("base", str(key)))
        known, flaws = check_rope(known)
        base = build(BaseSpec, known, "base", ("base",))
        flaws = [*flaws, *(base if isinstance(base, list) else ())]
        if flaws:
            for loc, sentence in {flaw.loc: flaw.sentence for flaw in reversed(flaws)}.items():
                self.add_fault(loc, sentence)
            return None
        assert isinstance(base, BaseSpec)
        return self.resolve_base(base, ("base",) if isinstance(value, str) else ("base", "model"))

    def resolve_base(self, base: BaseSpec, location: Loc) -> BaseSpec:
        path = resolve_path(self.folder, base.model)
        if base.revision is not None and not is_revision(base.revision):
            self.add_fault(
                ("base", "revision"), f"must be a branch, tag or commit, got {format_value(base.revision)}"
            )
        if not base.model:
            self.add_fault(location, "must not be empty")
        elif base.model == DEMO:
            return base
        elif path_exists(path):
            return replace(base, model=str(path), written=base.model)
        elif not is_hub_id(base.model):
            self.add_fault(location, missing_path_message(self.folder, base.model, "file or folder"))
        return base

    def read_output(self, value: Any) -> Path:
        if value is not None and (not isinstance(value, str) or not value):
            self.add_fault(("output",), f"must be the path of a folder, got {format_value(value)}")
            value = None
        path = resolve_path(self.folder, value or OUTPUT)
        if path_exists(path) and not path.is_dir():
            self.add_fault(("output",), f"{format_value(value or OUTPUT)} is a file; name a folder")
        return path

    def read_report_to(self, value: Any) -> tuple[Tracker, ...]:
        known = get_args(Tracker)
        trackers = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(trackers, list):
            self.add_fault(("report_to",), f"must be a list of {', '.join(known)}, got {format_value(value)}")
            return ()
        for index, tracker in enumerate(trackers):
            if tracker not in known:
                loc: Loc = ("report_to",) if isinstance(value, str) else ("report_to", index)
                sentence = f"must be {', '.join(known[:-1])} or {known[-1]}, got {format_value(tracker)}"
                self.add_fault(loc, f"{sentence}; for none leave report_to out")
        return tuple(dict.fromkeys(tracker for tracker in trackers if tracker in known))

    def read_deterministic(self, value: Any) -> bool:
        if not isinstance(value, bool):
            self.add_fault(("deterministic",), f"must be true or false, got {format_value(value)}")
        return value is True

    def read_jobs(
        self, values: Mapping[str, Any]
    ) -> tuple[tuple[JobSpec, ...], tuple[Sweep, ...], dict[str, Places]]:
        listed = values.get("jobs")
        if not isinstance(listed, list | tuple) or not listed:
            loc: Loc = ("jobs",) if "jobs" in values else ()
            self.add_fault(
                loc,
                f"must be a list of at least one job, got {format_value(listed)}"
                if loc
                else "needs jobs: a list",
            )
            return (), (), {}
        defaults = self.read_defaults(values.get("defaults"))
        if len(defaults.places) > max(ANY_DEFAULTS, MAX_NODES // len(listed)):
            self.add_fault(
                ("defaults",),
                f"has {len(defaults.places):,} values for each of {len(listed):,} jobs, and a file can hold "
                f"{MAX_NODES:,} in all; split it",
            )
            return (), (), {}
        made: list[JobSpec] = []
        sweeps: list[Sweep] = []
        places: dict[str, Places] = {}
        for index, keys in enumerate(listed):
            loc = ("jobs", index)
            if not isinstance(keys, Mapping):
                self.add_fault(
                    loc, f"must be a mapping such as {{name: a, data: rows.jsonl}}, got {format_value(keys)}"
                )
                continue
            layer = merge_over_defaults(defaults, self.read_layer(keys, loc))
            if "sweep" in keys:
                sweep, trials, found = expand_sweep(layer, self.folder)
                self.mistakes.extend(found)
                sweeps += [sweep] if sweep is not None else []
                made += [job for job, _ in trials]
                places |= {job.name: where for job, where in trials}
                continue
            job, found = build_job(JobSpec, layer, self.folder)
            self.mistakes.extend(found)
            if job is not None:
                made.append(job)
                places[job.name] = layer.places
        names = [keys.get("name") if isinstance(keys, Mapping) else None for keys in listed]
        for index, sentence in (*repeated_names(names), *repeated_trial_names(names, sweeps)):
            self.add_fault(("jobs", index, "name"), sentence)
        known = [*(name for name in names if isinstance(name, str)), *self.known_jobs]
        trial_names = {trial.name: sweep.name for sweep in sweeps for trial in sweep.trials}
        for name, sentence in name_faults(made, known, trial_names):
            self.mistakes.append(find_source_location(places[name], SOURCE).mistake(sentence))
        return tuple(made), tuple(sweeps), places

    def read_defaults(self, values: Any) -> Layer:
        if values is not None and not isinstance(values, Mapping):
            self.add_fault(("defaults",), f"must be a mapping of a job's keys, got {format_value(values)}")
            values = None
        keys = dict(values or {})
        if "name" in keys:
            self.add_fault(("defaults", "name"), "must be given in each job, for no two share it")
            del keys["name"]
        if "sweep" in keys:
            self.add_fault(("defaults", "sweep"), "must be given in the job whose values are to be tried")
            del keys["sweep"]
        return self.read_layer(keys, ("defaults",))

    def read_layer(self, keys: Mapping[str, Any], location: Loc) -> Layer:
        """Return the keys at `location` with their source locations, with shorthands expanded. Rows in a jobs
        file are an error, since they can be passed only from Python."""
        data = keys.get("data")
        if not self.file:
            keys = {**keys, "data": {ROWS: data}} if "data" in keys and is_row_data(data) else keys
        elif isinstance(data, Mapping) and "rows" in data:
            self.add_fault((*location, "data", "rows"), "write the rows to a file, and its path as data.path")
            keys = {**keys, "data": {key: value for key, value in data.items() if key != "rows"}}
        return expand_shorthands(keys, source_locations(keys, location, self.file, self.lines))
