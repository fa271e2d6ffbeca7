"""What a Program's actions cost, and the cluster that it would run on: all that the simulator is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassPrice:
    """One microbatch on one stage."""

    forward: float
    """Seconds, of a Forward or an Evaluate."""
    backward: float
    activation_bytes: int = 0
    """What the stage hands on."""
    gradient_bytes: int = 0
    """What the stage hands back to the one before it."""
    kept_bytes: int = 0
    """What stays on the device from the Forward to the Backward."""
    working_bytes: int = 0
    """What the Backward needs beside that while it runs: what it recomputes of the Forward."""


@dataclass(frozen=True, slots=True)
class Prices:
    passes: tuple[tuple[PassPrice, ...], ...]
    """For each microbatch, for each stage."""
    step: float = 0.0
    """Seconds of one Step on one device."""
    weight_bytes: tuple[int, ...] = ()
    """For each stage; none at all where weights are not counted."""
    adapter_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each job the bytes of its gradient on every stage, which replicas exchange; else 0."""


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth: float = math.inf
    """Bytes per second."""
    latency: float = 0.0

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bandwidth


@dataclass(frozen=True, slots=True)
class PricedDevice:
    memory_bytes: int
    host: Link = Link()
    """To the host's memory, for Loads."""
    root: int = 0
    """The root complex that its host link hangs under."""


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link from one device to another, where it is not like all others."""

    sender: int
    receiver: int
    link: Link


@dataclass(frozen=True, slots=True)
class PricedCluster:
    devices: tuple[PricedDevice, ...]
    link: Link = Link()
    """Between any two devices that `pairs` does not name."""
    pairs: tuple[PairLink, ...] = ()
    roots: tuple[float, ...] = (math.inf,)
    """Bytes per second through each root complex, for all Loads that are under way there."""
    queued: bool = False
    """Whether such Loads go one after another, as they came, instead of in equal shares: who comes first is
    needed first, so a queue of copies keeps nobody waiting for what is needed later."""


def even_prices(microbatches: int, stages: int, forward: float = 1.0, backward: float = 1.0) -> Prices:
    """Every pass alike, and nothing but passes costs anything."""
    return Prices(((PassPrice(forward, backward, kept_bytes=1),) * stages,) * microbatches)


def free_cluster(devices: int) -> PricedCluster:
    """Memory without end and links that take no time."""
    return PricedCluster((PricedDevice(1 << 62),) * devices)


def stage_prices(rows: Sequence[Sequence[tuple[float, float]]]) -> Prices:
    """From (forward, backward) seconds for each microbatch and stage."""
    return Prices(tuple(tuple(PassPrice(f, b, kept_bytes=1) for f, b in row) for row in rows))
