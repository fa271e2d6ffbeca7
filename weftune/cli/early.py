"""Checks that commands make before torch is imported, since the import takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weftune.base.spec import DEMO, BaseSpec
from weftune.errors import BaseModelError, DataError, Mistake, UserError

if TYPE_CHECKING:
    from weftune.core.shapes import ModelShape
    from weftune.data.spec import DataSpec, EvalSpec
    from weftune.jobs.spec.spec import JobSpec, RunSpec

DEVICES = ("cpu", "cuda", "mps", "xpu")
SMALL_BYTES = 4 << 20
"""File size up to which rows are checked early. Larger files would take too long: their rows are read only
when they are tokenised."""


def read_early(jobs: Path) -> RunSpec:
    """Read the jobs file, and report the mistakes that its base's config shows."""
    from weftune.jobs.spec.read import read_run

    run = read_run(jobs, shape_of_folder)
    refuse_base(run.base)
    return run


def shape_of_folder(base: BaseSpec) -> ModelShape | None:
    """Return the shape of a local folder of a known family; None if only the model itself can tell."""
    from weftune.base.architecture import spec_shape
    from weftune.base.config import bytes_per_value, read_config

    if not Path(base.model).is_dir():
        return None
    config = read_config(base)
    try:
        return spec_shape(base, config, bytes_per_value(base, gpu=False))
    except BaseModelError:
        return None


def refuse_base(base: BaseSpec) -> None:
    """Refuse a folder that holds no model, or a Hub id that the Hub does not know."""
    from weftune.base.config import model_folder, refuse_absent
    from weftune.jobs.spec.build import is_hub_id

    path = Path(base.model).expanduser()
    if base.model == DEMO or path.suffix.lower() == ".gguf":
        return
    if path.is_dir():
        model_folder(base)
    elif not path.exists() and is_hub_id(base.model):
        refuse_absent(base)


def refuse_device(name: str | None) -> None:
    if name is not None and name.partition(":")[0] not in DEVICES:
        raise UserError(f"--device: {name} is no device; write cuda or cpu.")


def refuse_rows(jobs: Iterable[JobSpec], named: bool) -> None:
    """Refuse rows of small files that are wrong in themselves, reporting those of all jobs at once.

    `named` adds the job's name to each mistake.
    """
    from weftune.data.prepare import check_rows

    known: list[tuple[DataSpec, EvalSpec | None, tuple[Mistake, ...]]] = []
    mistakes: dict[Mistake, None] = {}
    for job in jobs:
        found = next((one[2] for one in known if one[:2] == (job.data, job.eval)), None)
        if found is None:
            found = ()
            try:
                check_rows(job.data, job.eval, SMALL_BYTES)
            except DataError as error:
                found = error.mistakes
            known.append((job.data, job.eval, found))
        mistakes.update(dict.fromkeys(_of_job(job.name, one) if named else one for one in found))
    if mistakes:
        raise DataError(mistakes)


def one_of_each(run: RunSpec) -> list[JobSpec]:
    """Return the jobs, and one trial per sweep: all trials of a sweep have the same rows."""
    others = {trial.name for sweep in run.sweeps for trial in sweep.trials[1:]}
    return [job for job in run.jobs if job.name not in others]


def _of_job(job: str, mistake: Mistake) -> Mistake:
    return replace(mistake, place=f"job {job}: {mistake.place}" if mistake.place else f"job {job}")
