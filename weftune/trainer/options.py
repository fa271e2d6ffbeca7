"""The options of a run, from the command line or from Python, and the machine for which the run is planned.
This module does not import torch, so that `weftune plan` can use it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftune.errors import UserError
from weftune.jobs.store.status import PYTHON_COMMAND

if TYPE_CHECKING:
    from weftune.plan.cost.profile import Profile
    from weftune.plan.layout.choose import Machine
    from weftune.plan.layout.need import StreamDevice
    from weftune.plan.window.window import Mechanisms
    from weftune.run.workers.messages import WorkerControl

AUTO = 0
"""Value of `Options.pipeline` and `Options.shards` that lets the planner choose the number."""
ALL = 0
"""Value of `Options.gpus` that requests all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run, which decide where and how the jobs are trained. No option changes the results of a
    job."""

    device: str | None = None
    resume: bool = False
    restart: tuple[str, ...] = ()
    """Names of jobs to train from the beginning although they have started."""
    retry: tuple[str, ...] = ()
    """Names of jobs to continue from their last checkpoint although they have failed or were cancelled."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Maps each dotted key to its new value for the jobs named in `retry`; `jobs.spec.retry.CHANGEABLE` lists
    the allowed keys."""
    memory: int | None = None
    """Maximum memory of the run in bytes. None means most of the free memory."""
    gpu_memory: int | None = None
    """Maximum GPU memory of the run in bytes; a larger base is streamed from host memory."""
    capacity: int | None = None
    """Maximum number of tokens per microbatch. If it is None, the planner chooses it by device and memory."""
    decoder_bytes: int = 0
    """Size in bytes of the device memory reserved for sequences that are generated while jobs train: for the
    KV cache, and for adapters that only answer. Jobs with `eval.generate` reserve the memory for their own
    answers in addition."""
    profile: Path | None = None
    """File written by `weftune doctor --profile`. None uses the profile in the cache, if there is one."""
    staff: WorkerControl | None = None
    """Object that sends commands to the other workers, if several workers hold the base model together and
    this process is the first of them. None otherwise."""
    deterministic: bool = False
    """Whether two runs of the same jobs on the same device give bitwise equal results."""
    share: int | None = None
    """Index of the share (a part of the jobs with its own workers) that this process trains. None if the jobs
    are not divided."""
    shares: int = 1
    """Number of shares (parts of the jobs) into which the jobs are divided. Each share has its own processes,
    and all shares divide the host's memory."""
    command: str = PYTHON_COMMAND
    """Shell command that resumes the run, which messages for the user contain. Empty if the jobs are in no
    file."""
    pipeline: int | None = None
    """Number of pipeline stages (consecutive layers), each in a process that `weftune train` starts. `AUTO`
    lets the planner choose."""
    replicas: int = 1
    """Number of copies of the base, or of its stages, among which every batch is divided."""
    shards: int = 1
    """Number of processes among which every layer is divided. `AUTO` lets the planner choose."""
    gpus: int | None = None
    """Number of parts into which the jobs are divided. Each part is trained on one device that holds the
    base, or on as many devices as its stages, replicas and shards need. `ALL` means as many parts as the
    devices suffice for."""

    mechanisms: Mechanisms | None = None
    """Switches of the optimisations that the planner may use. Some are disabled to measure their benefit
    (`weftune plan --ablate`); None enables all."""

    def __post_init__(self) -> None:
        """Raise an error if two options cannot be combined."""
        number = "all" if self.gpus == ALL else self.gpus
        if self.gpu_memory is not None and (self.gpus is not None or self.replicas > 1):
            raise UserError(
                "--gpu-memory streams a base that is larger than the GPU; --gpus and --replicas need all of "
                "it on each: leave it out, or stream over several GPUs with --pipeline"
            )
        for flag, count in (("--pipeline", self.pipeline), ("--shards", self.shards)):
            if self.gpu_memory is not None and count == AUTO:
                raise UserError(
                    f"--gpu-memory: {flag} auto counts the GPUs that hold the base without streaming; write "
                    f"how many to stream it over, such as {flag} 2"
                )
        if self.gpus is not None and self.pipeline == AUTO:
            raise UserError(f"--pipeline auto inspects every GPU by itself; omit it or --gpus {number}")

    @property
    def starts_processes(self) -> bool:
        return self.pipeline is not None or self.gpus is not None or self.workers_per_share > 1

    @property
    def workers_per_share(self) -> int:
        """Number of processes that train one share (part) of the jobs: stages times replicas times shards."""
        return (self.pipeline or 1) * self.replicas * (self.shards or 1)

    def machine(
        self,
        *,
        on_gpu: bool,
        device_bytes: int,
        process_bytes: int,
        host_bytes: int,
        devices: int = 1,
        workers: int = 1,
        workers_per_device: int = 1,
        shares: int = 1,
        device_flops: float | None = None,
        profile: Profile | None = None,
        worker_profile: Profile | None = None,
        gpu: Callable[[int, int, int], StreamDevice],
    ) -> Machine:
        """Return the machine that the planner assumes, with `workers` worker processes per replica, of which
        `workers_per_device` share a device.

        `device_bytes` is the memory of a device that a run without a limit may use.
        """
        from weftune.plan.layout.choose import Machine

        whole = (self.gpu_memory if on_gpu else None) or self.memory or device_bytes
        # One GPU streams whenever the base does not fit, a CPU only if it simulates a small GPU, and several
        # workers only if that was requested, since they must be connected for it from the start.
        is_alone = max(workers, self.shards) <= 1
        stream_bytes = whole if on_gpu and is_alone else self.gpu_memory
        if on_gpu and not is_alone and stream_bytes is not None:
            stream_bytes //= workers_per_device
        return Machine(
            on_gpu=on_gpu,
            devices=devices,
            budget_bytes=whole // workers_per_device,
            process_bytes=process_bytes,
            stream_budget_bytes=stream_bytes,
            has_user_limit=self.gpu_memory is not None,
            host_budget_bytes=host_bytes,
            decoder_bytes=self.decoder_bytes,
            capacity=self.capacity,
            workers=workers,
            replicas=self.replicas,
            shards=self.shards,
            shares=shares,
            device_flops=device_flops,
            profile=profile,
            worker_profile=worker_profile,
            measure_gpu=gpu,
        )


def host_budget(deterministic: bool = False) -> int:
    """Return the host memory for a run in bytes: a fraction of the free memory, or of all memory if
    `deterministic`."""
    import psutil

    from weftune.plan.cost.cluster import USABLE_SHARE

    memory = psutil.virtual_memory()
    return int((memory.total if deterministic else memory.available) * USABLE_SHARE[False])
