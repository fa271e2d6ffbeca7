"""What `weft train --gpu-memory` would do on a cluster of one device, as `weft plan` foresees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.plan.estimate import JobOutline
from weft.plan.fit import Ground
from weft.plan.memory import FUSED_SLACK_BYTES
from weft.plan.stream_choice import StreamChoice, choose_stream
from weft.plan.stream_need import ASKING_SECONDS, STREAM_SLACK_BYTES, StreamDevice

ENOUGH = 1 << 50
"""Bytes of host memory: a cluster's description does not tell how much there is."""


def run_choice(ground: Ground, jobs: Sequence[JobOutline]) -> StreamChoice:
    """PlanError where not even so these jobs fit together."""
    assert len(ground.cluster.devices) == 1, "a run streams through one device"
    speed = ground.speeds[0]
    device = StreamDevice(
        budget=ground.budgets[0],
        host_budget=ENOUGH,
        bandwidth=ground.cluster.host.bandwidth,
        flops=speed.flops,
        slack=STREAM_SLACK_BYTES if ground.is_gpu else 0,
        whole_slack=FUSED_SLACK_BYTES if ground.is_gpu else None,
        fused=ground.is_gpu,
        launch=speed.launch,
        asking=ASKING_SECONDS if ground.is_gpu else 0.0,
    )
    largest = [max(sum(batch) for batch in job.batches) for job in jobs]
    shapes = [replace(job.shape, batch_tokens=tokens) for job, tokens in zip(jobs, largest, strict=True)]
    return choose_stream(ground.shape, shapes, device, ground.most, sum(largest))
