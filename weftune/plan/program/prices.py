"""Costs of a Program's actions and the cluster that it runs on: the inputs of the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassPrice:
    """Cost of one microbatch on one stage."""

    forward: float
    """Seconds of a Forward or an Evaluate."""
    backward: float
    activation_bytes: int = 0
    """Bytes handed to the next stage."""
    gradient_bytes: int = 0
    """Bytes of gradients handed to the previous stage."""
    kept_bytes: int = 0
    """Bytes kept on the device from the Forward to the Backward."""
    working_bytes: int = 0
    """Additional bytes while the Backward runs, for what it recomputes of the Forward."""


@dataclass(frozen=True, slots=True)
class Prices:
    passes: tuple[tuple[PassPrice, ...], ...]
    """Cost of each microbatch on each stage."""
    step: float = 0.0
    """Seconds of one Step on one device."""
    weight_bytes: tuple[int, ...] = ()
    """Weight bytes of each stage; empty if weights are not counted."""
    adapter_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Job → bytes of its gradient on each stage, which replicas exchange; 0 for absent jobs."""


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth: float = math.inf
    """Bytes per second."""
    latency: float = 0.0

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class PricedCluster:
    """A cluster as the simulator sees it: without more than a number of devices, links take no time."""

    devices: int
    link: Link = Link()
    """Link between any two devices."""
    host: Link = Link()
    """Link of every device to host memory, for Loads."""
    homes: tuple[int, ...] = ()
    """Index of the root complex of each device's host link. Empty means that all are under the first."""
    roots: tuple[float, ...] = (math.inf,)
    """Bandwidth of each root complex in bytes per second, shared by all Loads in progress there."""
    queued: bool = False
    """Whether such Loads run in first-come order instead of sharing the bandwidth equally. The first Load is
    needed first, so a queue delays no stage for one that is needed later."""
