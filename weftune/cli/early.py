"""Options, the reading of jobs files, and checks that do not need torch, whose import takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.base.spec import DEMO, BaseSpec
from weftune.errors import BaseModelError, DataError, Mistake, UserError

if TYPE_CHECKING:
    from weftune.core.shapes import ModelShape
    from weftune.data.spec import DataSpec, EvalSpec, RowKind
    from weftune.jobs.spec.spec import JobSpec, RunSpec
    from weftune.trainer.options import Options

USER_ERROR_CODE = 2
"""Exit code of a user error, equal to typer's exit code for a wrong option."""
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
DEVICES = ("cpu", "cuda", "mps", "xpu")
SMALL_BYTES = 4 << 20
"""Maximum size in bytes of a file of rows that is checked before training starts. Rows of larger files are
checked when they are tokenised."""

# -- options --------------------------------------------------------------------------------------------

JobsFile = Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cuda or cpu. Default: the fastest device of this machine.")
]
MaxStepsOption = Annotated[int | None, typer.Option(min=1, help="Maximum number of steps per job.")]
MemoryOption = Annotated[str | None, typer.Option(help="Maximum memory of the run, such as 8GiB.")]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(help="Maximum memory per GPU, such as 24GiB. A larger base is streamed from the host."),
]
PipelineOption = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="Number of pipeline stages, each in its own process."),
]
ReplicasOption = Annotated[
    int, typer.Option(min=1, help="Number of copies of the base that divide every batch.")
]
ShardsOption = Annotated[
    str,
    typer.Option(metavar="N|auto", help="Number of processes that divide every layer (tensor parallelism)."),
]
CapacityOption = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of tokens per microbatch. Default: chosen by the planner."),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|all", help="Number of GPUs that each hold the whole base and train a share of the jobs."
    ),
]


def read_options(
    *,
    device: str | None,
    memory: str | None,
    gpu_memory: str | None,
    pipeline: str | None,
    replicas: int,
    gpus: str | None,
    shards: str = "1",
    capacity: int | None = None,
) -> Options:
    """Return the options that `weftune train` and `weftune plan` share, or raise UserError."""
    from weftune.trainer.options import ALL, AUTO, Options

    check_device(device)
    if pipeline not in (None, "auto") and (not pipeline.isdecimal() or int(pipeline) < 2):
        raise UserError(f"--pipeline {pipeline}: write auto, or how many stages: 2 or more")
    if shards != "auto" and (not shards.isdecimal() or int(shards) < 1):
        raise UserError(f"--shards {shards}: write auto, or how many: 1 or more")
    if gpus not in (None, "all") and (not gpus.isdecimal() or int(gpus) < 1):
        raise UserError(f"--gpus {gpus}: write all, or how many: 1 or more")
    return Options(
        device=device,
        memory=None if memory is None else parse_bytes(memory),
        gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory, "--gpu-memory"),
        pipeline=None if pipeline is None else AUTO if pipeline == "auto" else int(pipeline),
        replicas=replicas,
        shards=AUTO if shards == "auto" else int(shards),
        gpus=None if gpus is None else ALL if gpus == "all" else int(gpus),
        capacity=capacity,
    )


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Parse a size such as `8GiB` and return the number of bytes."""
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        return int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"{option} {text}: write a number and a unit, such as 8GiB") from None


def check_device(name: str | None) -> None:
    if name is not None and name.partition(":")[0] not in DEVICES:
        raise UserError(f"--device: {name} is no device; write cuda or cpu.")


def store_folder(folder: Path | None) -> Path:
    """Return the folder of a service: `folder`, or `weftune` in the user's data folder if it is None."""
    if folder is not None:
        return folder.expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share") / "weftune"


# -- jobs files -----------------------------------------------------------------------------------------


def read_jobs_file(jobs: Path) -> RunSpec:
    """Read a jobs file. Raise one error that lists everything invalid that can be found from the file and the
    config of its base."""
    from weftune.jobs.spec.read import read_run

    run = read_run(jobs, read_model_shape)
    refuse_missing_base(run.base)
    return run


def read_model_shape(base: BaseSpec) -> ModelShape | None:
    """Return the model shape (sizes and module names) of a local folder of a known family. Return None if the
    model must be loaded to find it out."""
    if not Path(base.model).is_dir():
        return None
    # Errors of the config itself are raised; those of an unknown family are not.
    from weftune.base.architecture import spec_shape
    from weftune.base.config import bytes_per_value, read_config

    config = read_config(base)
    try:
        return spec_shape(base, config, bytes_per_value(base, on_gpu=False))
    except BaseModelError:
        return None


def refuse_missing_base(base: BaseSpec) -> None:
    """Raise an error if the base is a folder that holds no model, or an id that the Hugging Face Hub does not
    know."""
    from weftune.base.config import model_folder, refuse_missing_base
    from weftune.jobs.spec.build import is_hub_id

    path = Path(base.model).expanduser()
    if base.model == DEMO or path.suffix.lower() == ".gguf":
        return
    if path.is_dir():
        model_folder(base)
    elif not path.exists() and is_hub_id(base.model):
        refuse_missing_base(base)


def check_row_files(jobs: Iterable[JobSpec], includes_job_names: bool) -> None:
    """Raise one error that lists the invalid rows in the small row files of all jobs. If
    `includes_job_names`, each entry also names its job."""
    from weftune.data.prepare import check_rows

    checked_data: list[tuple[DataSpec, EvalSpec | None, RowKind, tuple[Mistake, ...]]] = []
    mistakes: dict[Mistake, None] = {}
    for job in jobs:
        row_kind = job.objective.row_kind
        found = next((one[3] for one in checked_data if one[:3] == (job.data, job.eval, row_kind)), None)
        if found is None:
            found = ()
            try:
                check_rows(job.data, job.eval, SMALL_BYTES, row_kind)
            except DataError as error:
                found = error.mistakes
            checked_data.append((job.data, job.eval, row_kind, found))
        mistakes.update(
            dict.fromkeys(one.with_job_name(job.name) if includes_job_names else one for one in found)
        )
    if mistakes:
        raise DataError(mistakes)


def one_trial_per_sweep(run: RunSpec) -> list[JobSpec]:
    """Return the jobs of a run with only one trial (job) of each sweep, since all trials of a sweep have the
    same rows."""
    others = {trial.name for sweep in run.sweeps for trial in sweep.trials[1:]}
    return [job for job in run.jobs if job.name not in others]
