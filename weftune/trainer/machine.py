"""A description of this machine for the planner: devices, memory, host-to-device link and profile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from weftune.base.host.streamed import weights_in_files
from weftune.base.load import base_dtype
from weftune.base.model import Base
from weftune.base.spec import BaseSpec
from weftune.core.shapes import ModelShape
from weftune.errors import BaseModelError, HostTooSmall, UserError
from weftune.plan.cost.cluster import PCIE
from weftune.plan.cost.memory import format_bytes
from weftune.plan.cost.profile import find_profile, read_profile
from weftune.plan.layout.choose import PROCESS_BYTES, Machine
from weftune.plan.layout.need import StreamDevice, file_device, gpu_device
from weftune.plan.window.pace import data_sheet_device_speed, data_sheet_link
from weftune.run.measure.link import measure_file_bandwidth, measure_link
from weftune.run.measure.memory import GPU_FRACTION, budget_bytes, bytes_before_base, fixed_budget_bytes
from weftune.run.profile import device_profile_key
from weftune.run.workers.groups import WorkerPosition, has_separate_gpus
from weftune.trainer.options import Options, host_budget

UNKNOWN_FLOPS, UNKNOWN_MEMORY, FILE_BANDWIDTH = 1e14, 1e12, 2e9
"""Speeds that are assumed if nothing may be measured: operations per second of a GPU without a data sheet,
bytes per second of its memory, and bytes per second of a disk."""
MIN_FREE_FRACTION = 0.9
"""Minimum fraction of the planned memory that must be free. Otherwise a deterministic run prints a
warning."""


def describe_machine(
    options: Options, base: BaseSpec | Base, device: torch.device, shape: ModelShape
) -> Machine:
    """Return a description of this process's device, or of the identical devices of all workers, for the
    planner. For a deterministic run, nothing that is measured now enters the description: neither times nor
    free memory."""
    is_loaded = isinstance(base, Base) and options.staff is None
    if is_loaded and options.gpu_memory is not None:
        raise UserError("gpu_memory: this base is on its device already; give its name and Weftune loads it")
    workers, on_gpu = _worker_position(options), device.type == "cuda"
    spec, key = base.spec if isinstance(base, Base) else base, device_profile_key(shape, device)
    profile = find_profile(key) if options.profile is None else read_profile(options.profile, key)
    if profile is None and options.profile is not None:
        raise UserError(
            f"{options.profile} is no profile of {spec.model} on this device; `weftune doctor --profile` "
            "makes one"
        )
    worker_key = key if on_gpu else replace(key, threads=torch.get_num_threads())
    steady = options.deterministic
    machine = replace(options, replicas=workers.replicas, shards=workers.shards).machine(
        on_gpu=on_gpu,
        device_bytes=(fixed_budget_bytes if steady else budget_bytes)(device),
        process_bytes=PROCESS_BYTES if steady and not on_gpu else bytes_before_base(device),
        # Workers of other machines have memory of their own.
        host_bytes=host_budget(steady) * workers.workers // (workers.local_workers * options.shares),
        workers=workers.stages,
        workers_per_device=workers_per_device(options, device),
        device_flops=_device_flops(on_gpu and workers.workers > 1),
        profile=profile,
        worker_profile=profile if workers.workers == 1 else find_profile(worker_key),
        gpu=data_sheet_gpu if steady else partial(measure_gpu, spec, device),
    )
    files = partial(file_stream_device, spec, device, measure_speed=not steady)
    return replace(
        machine,
        link=data_sheet_link() if on_gpu and workers.workers > 1 else None,
        make_file_device=files,
        stream_budget_bytes=None if is_loaded else machine.stream_budget_bytes,
    )


def launcher_machine(
    options: Options, device: torch.device, shape: ModelShape, processes: int = 1
) -> Machine:
    """Return a description of this machine for a process that starts `processes` worker processes, which
    share the CPU or use one GPU each."""
    on_gpu = device.type == "cuda"
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() * on_gpu)]
    if options.deterministic:
        device_bytes = fixed_budget_bytes(device)
    elif on_gpu:
        # Not the free memory: querying it creates a context on every GPU, in a process that needs none.
        device_bytes = int(min(gpu.total_memory for gpu in gpus) * GPU_FRACTION)
    else:
        device_bytes = budget_bytes(device)
    return options.machine(
        on_gpu=on_gpu,
        device_bytes=device_bytes,
        process_bytes=bytes_before_base(device),
        host_bytes=0,
        devices=max(1, len(gpus)),
        workers_per_device=1 if on_gpu else processes,
        profile=find_profile(device_profile_key(shape, device)),
        gpu=data_sheet_gpu,
    )


def _device_flops(is_required: bool) -> float | None:
    """Return the peak FLOP/s of this machine's GPUs according to their data sheet. None if the value is
    unknown or not required."""
    speed = data_sheet_device_speed(on_gpu=True) if is_required else None
    return None if speed is None else speed.flops


def _worker_position(options: Options) -> WorkerPosition:
    return options.staff.connections.position if options.staff else WorkerPosition(0, 1)


def workers_per_device(options: Options, device: torch.device) -> int:
    place = _worker_position(options)
    return 1 if has_separate_gpus(place, device) else place.local_workers


def memory_warning(options: Options, device: torch.device) -> str:
    """Return a warning if a deterministic run is planned for more memory than is free; empty otherwise."""
    if not options.deterministic or options.gpu_memory or options.memory:
        return ""
    free, planned = budget_bytes(device), fixed_budget_bytes(device)
    if free >= MIN_FREE_FRACTION * planned:
        return ""
    return (
        f"warning: deterministic: this run is planned for {format_bytes(planned)} whatever is free, and now "
        f"{format_bytes(free)} is free; give --memory the same value in every run, or free memory"
    )


def data_sheet_gpu(budget_bytes: int, host_bytes: int, _workers: int = 1) -> StreamDevice:
    """Return a description of the GPU with the speeds of its data sheet, which are the same in every run."""
    speed = data_sheet_device_speed(on_gpu=True)
    if speed is None:
        return gpu_device(budget_bytes, host_bytes, PCIE.bandwidth, UNKNOWN_FLOPS, UNKNOWN_MEMORY)
    return gpu_device(budget_bytes, host_bytes, PCIE.bandwidth, speed.flops, speed.bandwidth)


def measure_gpu(
    spec: BaseSpec, device: torch.device, budget_bytes: int, host_bytes: int, _workers: int = 1
) -> StreamDevice:
    """Measure the GPU's host link and matrix products, and return a description of the GPU with these
    speeds."""
    link = measure_link(device, base_dtype(spec, device))
    return gpu_device(
        budget_bytes, host_bytes, link.bandwidth, link.flops, link.memory_bandwidth, link.duplex_bandwidth
    )


def file_stream_device(
    spec: BaseSpec,
    device: torch.device,
    stream: StreamDevice,
    host_error: HostTooSmall,
    measure_speed: bool = True,
) -> StreamDevice:
    """Return the description of the device for a base that is streamed from its weight files. If that is
    impossible, raise HostTooSmall with the reasons of `host_error` and the further reason."""
    try:
        files = list(weights_in_files(spec, device))
    except BaseModelError as error:
        raise HostTooSmall([*host_error.mistakes, *error.mistakes]) from None
    if device.type != "cuda":
        return file_device(stream)
    bandwidth = measure_file_bandwidth(files) if measure_speed else FILE_BANDWIDTH
    duplex_bandwidth = None if stream.duplex_bandwidth is None else min(stream.duplex_bandwidth, bandwidth)
    return replace(
        file_device(stream), bandwidth=min(stream.bandwidth, bandwidth), duplex_bandwidth=duplex_bandwidth
    )
