"""Checks of the requested numbers of processes, which run before any process is started."""

from __future__ import annotations

from weftune.base.load import inspect
from weftune.base.shards import refuse_sharding
from weftune.jobs.spec.checks import refuse_kinds_on_shards
from weftune.jobs.spec.spec import RunSpec
from weftune.plan.layout.stages import cut_layers
from weftune.run.measure.memory import requested_devices
from weftune.trainer.options import Options


def requested_shares(run: RunSpec, options: Options) -> tuple[str, ...]:
    """Return the device of the first process of each share, a part of the jobs with its own processes. The
    tuple is empty if the jobs are not divided. Raise UserError if the base, a job or this machine does not
    allow the requested numbers of processes."""
    workers = options.workers_per_share
    devices: tuple[str, ...] = ()
    refuse_kinds_on_shards(run.jobs, options.shards)
    if options.shards > 1:
        refuse_sharding(run.base, options.shards)
    if options.gpus is not None:
        devices = requested_devices(options.gpus or None, options.device, workers)
    if workers > 1:
        shape = inspect(run.base)
        if options.pipeline is not None:
            cut_layers(shape, options.pipeline)
    return devices
