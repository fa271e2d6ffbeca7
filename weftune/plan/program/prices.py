"""Costs of a Program's actions and the cluster that it runs on: the inputs of the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassPrice:
    """Cost of one microbatch on one stage."""

    forward: float
    """Duration of a Forward, an Evaluate or a Score, in seconds."""
    backward: float
    """Duration of a Backward, in seconds."""
    activation_bytes: int = 0
    """Bytes of activations sent to the next stage."""
    gradient_bytes: int = 0
    """Bytes of gradients sent to the previous stage."""
    kept_bytes: int = 0
    """Bytes kept on the device from the Forward to the Backward."""
    working_bytes: int = 0
    """Additional bytes during the Backward, for recomputed activations."""
    forward_sums: float = 0.0
    """Seconds of `forward` in which the device waits for sums over shards."""
    backward_sums: float = 0.0
    """Seconds of `backward` in which the device waits for sums over shards."""


@dataclass(frozen=True, slots=True)
class Prices:
    passes: tuple[tuple[PassPrice, ...], ...]
    """Cost of each microbatch on each stage."""
    step: float = 0.0
    """Duration of one optimizer step on one device, in seconds."""
    weight_bytes: tuple[int, ...] = ()
    """Weight bytes of each stage; empty if weights are not counted."""
    adapter_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Maps each job to the bytes of its gradient on each stage, which replicas exchange."""
    gradient_sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Maps each job to the seconds on each stage in which shards sum its gradient before a Step."""


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth: float = math.inf
    """Bytes per second."""
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def all_reduce_seconds(self, size: float, members: int) -> float:
        """Return the seconds of a sum of `size` bytes over `members` devices in a ring, in which every device
        sends all but its own part twice."""
        return 2 * (members - 1) * self.seconds(size / members)


@dataclass(frozen=True, slots=True)
class PricedCluster:
    """Devices and links of a cluster for the simulator. By default, links take no time."""

    devices: int
    link: Link = Link()
    """Link between any two devices."""
    host_link: Link = Link()
    """Link between each device and host memory, used by Load actions."""
    device_roots: tuple[int, ...] = ()
    """Index of the PCIe root complex of each device. Empty means that all devices share the first one."""
    root_bandwidths: tuple[float, ...] = (math.inf,)
    """Bandwidth of each root complex in bytes per second, shared by its concurrent Loads."""
    queues_loads: bool = False
    """Whether concurrent Loads run in first-come order instead of sharing the bandwidth equally. The first
    Load is needed first, so a queue does not delay it for a later one."""
