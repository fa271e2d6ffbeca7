"""The inputs of the simulator: costs of the actions of a Program, and the cluster on which it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

SUMS_PER_LAYER = 2
"""Number of all-reduces over shards in a layer's forward, and also in its backward: one for attention and one
for the feed-forward."""


@dataclass(frozen=True, slots=True)
class HalfPrice:
    """Cost of the two halves of a layer (attention and feed-forward) in a forward or in a backward, for two
    microbatches that alternate after every half layer."""

    attention: float
    """Seconds in which a device computes the attention of one layer."""
    feed_forward: float
    """Seconds in which a device computes the feed-forward of one layer."""
    sum_seconds: float
    """Seconds of the all-reduce over shards after an attention or a feed-forward."""
    launch_seconds: float = 0.0
    """Seconds that the host takes to launch the kernels of half a layer. Half a layer cannot take less
    time."""

    def seconds(self, index: int) -> float:
        """Return the seconds of the half layer with this index, an attention (even) or a feed-forward (odd),
        without its all-reduce over shards."""
        return max(self.launch_seconds, self.feed_forward if index % 2 else self.attention)

    def computed_seconds(self, half_layer_count: int) -> float:
        """Return the seconds in which a device computes this number of half layers (attentions and
        feed-forwards in turn)."""
        return half_layer_count / 2 * (self.attention + self.feed_forward)


@dataclass(frozen=True, slots=True)
class PassPrice:
    """Cost of the forward and the backward of one microbatch on one stage."""

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
    """Additional device bytes during the Backward, for recomputed activations."""
    forward_sum_seconds: float = 0.0
    """Part of the forward's seconds in which the device waits for all-reduces over shards."""
    backward_sum_seconds: float = 0.0
    """Part of the backward's seconds in which the device waits for all-reduces over shards."""
    forward_half: HalfPrice | None = None
    """Cost of the half layers (attention and feed-forward) that the forward consists of, used if they
    alternate with the half layers of another microbatch. None if no passes alternate."""
    backward_half: HalfPrice | None = None
    """Cost of the half layers (attention and feed-forward) that the backward consists of, used if they
    alternate with the half layers of another microbatch. None if no passes alternate."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of all actions of a Program: seconds, and bytes that are kept or transferred."""

    passes: tuple[tuple[PassPrice, ...], ...]
    """Cost of each microbatch on each stage, indexed by [microbatch][stage]."""
    step: float = 0.0
    """Duration of one optimizer step on one device, in seconds."""
    weight_bytes: tuple[int, ...] = ()
    """Weight bytes of each stage. An empty tuple means that the simulated memory contains no weights."""
    adapter_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Maps each job to the bytes of its gradient on each stage, which replicas exchange."""
    gradient_sum_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Maps each job to the seconds, for each stage, of the all-reduce over shards of its gradient before an
    optimizer step."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices, or between a device and host memory."""

    bandwidth: float = math.inf
    """Bandwidth of the connection in bytes per second."""
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def all_reduce_seconds(self, size: float, members: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes over `members` devices."""
        return 2 * (members - 1) * self.seconds(size / members)

    def layer_sum_seconds(
        self, output_bytes: int, tokens: float, shards: int, exchanges_row_maxima: bool = False
    ) -> float:
        """Return the seconds of a layer's all-reduces over shards in a forward, which take equally long in a
        backward. A layer outputs `output_bytes` bytes per token. If shards exchange the maxima of rows, as
        fp8 requires, each all-reduce is preceded by a smaller one with a float32 per token."""
        seconds = self.all_reduce_seconds(output_bytes * tokens, shards)
        if exchanges_row_maxima:
            seconds += self.all_reduce_seconds(4 * shards * tokens, shards)
        return SUMS_PER_LAYER * seconds


@dataclass(frozen=True, slots=True)
class PricedCluster:
    """The devices and links of a cluster as the simulator sees them. By default, transfers take no time."""

    devices: int
    link: Link = Link()
    """Link between any two devices."""
    host_link: Link = Link()
    """Link between each device and host memory, which Load actions use."""
    device_roots: tuple[int, ...] = ()
    """Index of the PCIe root complex of each device. Empty means that all devices share the first one."""
    root_bandwidths: tuple[float, ...] = (math.inf,)
    """Bandwidth of each PCIe root complex in bytes per second. Copies from the host to its devices that run
    at the same time share it."""
    serializes_loads: bool = False
    """Whether concurrent Loads run one after another instead of sharing the bandwidth equally. Since the Load
    that began first is needed first, later Loads should not slow it down."""
