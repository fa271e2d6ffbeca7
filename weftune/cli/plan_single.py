"""Whether one device has to stream the base, and how: what the run would find, asked without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftune.base.spec import BaseSpec
    from weftune.cli.plan import Wanted
    from weftune.plan.layout.need import StreamDevice
    from weftune.plan.layout.one_device import CompanyChoice
    from weftune.run.measure.link import HostLink

ENOUGH = 1 << 50
"""Bytes of host memory: a cluster's description does not tell how much there is."""


@dataclass(frozen=True, slots=True)
class Single:
    """A run's choice, and the device that it is made for."""

    company: CompanyChoice
    place: StreamDevice
    source: str
    """Where times come from."""


def choose_single(wanted: Wanted) -> Single | None:
    """None where the run would stream nothing. PlanError where it would refuse the jobs."""
    from weftune.errors import HostTooSmall
    from weftune.plan.layout.one_device import choose_company, fits_whole, in_files

    ground, jobs = wanted.ground, [job.shape for job in wanted.company]
    if ground.is_gpu:
        streams = not fits_whole(ground.shape, jobs, ground.budgets[0])
    else:
        streams = wanted.asked.limit is not None
    if not streams:
        return None
    found = _place(wanted)
    place = found.place
    try:
        company = choose_company(ground.shape, jobs, place, ground.most)
    except HostTooSmall:
        place = in_files(place)
        company = choose_company(ground.shape, jobs, place, ground.most)
    return None if company.choice.whole else Single(company, place, found.source)


@dataclass(frozen=True, slots=True)
class _Place:
    place: StreamDevice
    source: str


def _place(wanted: Wanted) -> _Place:
    """The device as the run would find it; one that is not here by its data sheet."""
    from weftune.plan.layout.one_device import gpu_place, pretended_place

    ground, limit = wanted.ground, wanted.asked.limit
    host = host_budget() if wanted.asked.here else ENOUGH
    if not ground.is_gpu:
        assert limit is not None, "only a device with a limit is pretended"
        return _Place(pretended_place(limit, host), "a pretended device's, not measured")
    link = measured_link(wanted.base) if wanted.asked.here else None
    if link is not None:
        source = "foreseen from this GPU's link and products, measured just now"
        return _Place(gpu_place(ground.budgets[0], host, link.bandwidth, link.flops, link.both_ways), source)
    speed, bandwidth = ground.speeds[0], ground.cluster.host.bandwidth
    return _Place(gpu_place(ground.budgets[0], host, bandwidth, speed.flops), speed.source)


def host_budget() -> int:
    """Bytes of this host's memory that a run may take."""
    import psutil

    from weftune.plan.outlook.fit import SHARES

    return int(psutil.virtual_memory().available * SHARES[False])


def measured_link(base: BaseSpec) -> HostLink | None:
    """As the run measures it; None where torch cannot use this machine's GPU, or others have filled it."""
    import torch

    from weftune.run.measure.link import measure_link

    if not torch.cuda.is_available():
        return None
    # As base_dtype has it, which would import all of transformers.
    dtype: torch.dtype = getattr(torch, base.dtype or "bfloat16")
    try:
        return measure_link(torch.device("cuda", 0), dtype)
    except torch.OutOfMemoryError:
        return None
