"""The specs of a job and of a run, and the comparison of two versions of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

from weftune.adapters.kinds import AdapterSpec
from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.target import FromJob
from weftune.base.spec import BaseSpec
from weftune.data.spec import DEFAULT_MAX_LENGTH, DataSpec, EvalSpec, GenerateSpec
from weftune.errors import Mistake, SpecError
from weftune.jobs.spec.build import build_job
from weftune.jobs.spec.keys import EarlyStop, JobKeys, Keep, Schedule
from weftune.jobs.spec.layer import (
    ROWS,
    Loc,
    Places,
    dotted_name,
    find_source_location,
    keys_from_keywords,
    sort_mistakes,
)
from weftune.jobs.sweeps.spec import Sweep
from weftune.objectives.spec import SFT_SPEC, ObjectiveSpec

Tracker = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class JobSpec:
    """One job, with the keys of jobs.yaml: `JobSpec(name="a", data="a.jsonl", adapter={"rank": 8})`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "arbitrary_types_allowed": True}

    name: str
    data: DataSpec
    adapter: AdapterSpec = field(default_factory=LoraSpec)
    objective: ObjectiveSpec = SFT_SPEC
    eval: EvalSpec | None = None
    epochs: float | None = None
    """Number of epochs, 1 by default. None if and only if `steps` is given."""
    steps: int | None = None
    batch_size: int = 16
    """Number of rows per global batch (one optimizer step). A row is a sample or, for preference objectives,
    a pair of samples."""
    learning_rate: float = SFT_SPEC.learning_rate
    """Peak learning rate of AdamW. The default depends on the objective."""
    schedule: Schedule = "linear"
    warmup: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    """Epsilon of the AdamW optimizer."""
    clip: float | None = 1.0
    """Maximum gradient norm. None disables clipping."""
    seed: int = 0
    priority: int = 0
    early_stop: EarlyStop | None = None
    save_every: float | None = None
    keep: Keep = "last"

    def __init__(self, **keys: Unpack[JobKeys]) -> None:
        if "sweep" in keys:
            raise SpecError(Mistake("sweep", "a JobSpec is one job; give a job with sweep as a mapping"))
        job, found = build_job(JobSpec, keys_from_keywords(keys), Path.cwd())
        if job is None:
            raise SpecError(sort_mistakes(found))
        for item in fields(JobSpec):
            object.__setattr__(self, item.name, getattr(job, item.name))

    def total_steps(self, batches: int) -> int:
        """Return the number of optimizer steps of the job's whole training if one epoch has `batches` global
        batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(_decimal_fraction(self.epochs) * batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The content of one jobs file: the base, the output folder, and the jobs."""

    base: BaseSpec
    output: Path
    report_to: tuple[Tracker, ...] = ()
    deterministic: bool = False
    """Whether two runs on the same device give bitwise equal results."""
    jobs: tuple[JobSpec, ...] = ()
    """Jobs of the run. A job with a sweep is replaced by the sweep's trials, one job for each combination of
    values."""
    sweeps: tuple[Sweep, ...] = ()
    file: Path | None = None
    places: Mapping[str, Places] = field(default_factory=dict, repr=False, compare=False)
    """Maps each job's name to the files and lines where its keys were written."""

    def locate(self, job: str, *location: str | int) -> str:
        """Return the file and line in which the user wrote the key of a job at `location`."""
        return (
            str(find_source_location(self.places[job], location))
            if job in self.places
            else locate_in_job(job, *location)
        )


def locate_in_job(job: str, *location: str | int) -> str:
    """Return the name that messages use for a key of a job that was created in Python, such as `job a
    adapter.rank`."""
    return f"job {job} {dotted_name(location)}"


def to_steps(value: float, total: int) -> int:
    """Return `value` as a number of steps. A value below 1 is a fraction of `total`, and is rounded up."""
    assert value >= 0
    return math.ceil(_decimal_fraction(value) * total) if value < 1 else int(value)


def _decimal_fraction(value: float) -> Fraction:
    """Return the exact fraction that the decimal digits of `value` denote, so that 0.07 of 100 steps is 7 and
    not slightly more."""
    return Fraction(repr(float(value)))


def resolve_job(job: JobSpec) -> dict[str, Any]:
    """Return the job with all defaults filled in, as keys and values of jobs.yaml."""
    whole = {item.name: getattr(job, item.name) for item in fields(JobSpec)}
    whole["betas"] = list(job.betas)
    whole["adapter"] = _to_plain_values(job.adapter)
    objective = _to_plain_values(job.objective)
    whole["objective"] = job.objective.kind if len(objective) == 1 else objective
    whole["data"] = _data_values(job.data)
    whole["eval"] = None if job.eval is None else _to_plain_values(job.eval)
    whole["early_stop"] = None if job.early_stop is None else _to_plain_values(job.early_stop)
    return whole


def _data_values(data: DataSpec) -> dict[str, Any]:
    """Return the keys and values of a job's data. Rows that were passed from Python are replaced by their
    number."""
    whole = {item.name: getattr(data, item.name) for item in fields(DataSpec)}
    rows = whole.pop(ROWS)
    whole["columns"] = dict(data.columns)
    if rows is not None:
        del whole["path"]
        return {ROWS: len(rows), **whole}
    if not isinstance(data.path, str):
        whole["path"] = [asdict(source) for source in data.path]
    return whole


def _to_plain_values(record: Any) -> dict[str, Any]:
    def plain_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, FromJob | GenerateSpec):
            return asdict(value)
        return list(value) if isinstance(value, tuple) else value

    return {item.name: plain_value(getattr(record, item.name)) for item in fields(record)}


ADDED: Mapping[str, Any] = {"betas": [0.9, 0.999], "eps": 1e-8}
"""Maps each key that older versions of Weftune did not record in job.yaml to the value with which those
versions trained."""
ADDED_TO_ADAPTERS: Mapping[str, Any] = {
    "target_parameters": [],
    "layers": None,
    "loraplus_lr_ratio": 1.0,
    "trainable_token_indices": [],
    "modules_to_save": [],
    "svd_iterations": None,
    "init": "random",
    "init_text": "",
}
ADDED_TO_EVAL: Mapping[str, Any] = {"generate": None, "metric": None}


def changed_keys(old_values: Mapping[str, Any], new_values: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which the values of two jobs differ. Lists are not compared item by item."""
    return sorted(_changed_keys(_add_missing_keys(old_values), _add_missing_keys(new_values), ()))


def _add_missing_keys(job: Mapping[str, Any]) -> dict[str, Any]:
    whole = {**ADDED, **job}
    if isinstance(adapter := whole.get("adapter"), Mapping):
        whole["adapter"] = {**ADDED_TO_ADAPTERS, **adapter}
    if isinstance(held_out := whole.get("eval"), Mapping):
        whole["eval"] = {**ADDED_TO_EVAL, **held_out}
    if isinstance(data := whole.get("data"), Mapping) and data.get("max_length") is None:
        whole["data"] = {**data, "max_length": DEFAULT_MAX_LENGTH}
    return whole


def _changed_keys(old_value: Any, new_value: Any, location: Loc) -> list[str]:
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        absent = object()
        return [
            name
            for key in {**old_value, **new_value}
            for name in _changed_keys(
                old_value.get(key, absent), new_value.get(key, absent), (*location, str(key))
            )
        ]
    return [] if old_value == new_value else [".".join(map(str, location))]
