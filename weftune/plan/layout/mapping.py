"""Mapping of stages to GPUs such that few simultaneous uploads share a PCIe root complex (Mobius, section
3.3).

A mapping is an order of the N GPUs: stage j runs on the GPU at position j mod N. GPUs under the same PCIe
root complex share its bandwidth from the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

EXACT_GPUS = 8
"""Maximum number of GPUs for which every mapping of stages to GPUs is tried."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPUs of a machine and their PCIe root complexes. GPUs are numbered from 0, root by root."""

    root_sizes: tuple[int, ...]
    """Number of GPUs under each PCIe root complex."""

    @property
    def gpus(self) -> int:
        return sum(self.root_sizes)

    @property
    def gpu_roots(self) -> tuple[int, ...]:
        return tuple(root for root, size in enumerate(self.root_sizes) for _ in range(size))


def sequential_order(topology: Topology) -> tuple[int, ...]:
    return tuple(range(topology.gpus))


def contention(order: Sequence[int], topology: Topology, stages: int) -> float:
    """Return the contention of uploads by Mobius's equation 13: the sum, over all pairs of stages under the
    same PCIe root complex, of the number of GPUs under it divided by the distance between the two stages in
    the order of the base.

    Pairs of stages on one GPU are excluded, since they are never uploaded at the same time.
    """
    gpu_roots = topology.gpu_roots
    roots = [gpu_roots[gpu] for gpu in order]
    return _contention(roots, topology, _proximity(topology.gpus, stages))


def least_contention_order(topology: Topology, stages: int) -> tuple[int, ...]:
    """Return the order of the GPUs with the least contention of uploads. For more than `EXACT_GPUS` GPUs,
    this order is only a local optimum."""
    nearness = _proximity(topology.gpus, stages)
    if topology.gpus > EXACT_GPUS:
        return _assign_gpus(_improve_by_swaps(topology, nearness), topology)
    roots = min(
        _root_orders(topology.root_sizes, ()), key=lambda roots: _contention(roots, topology, nearness)
    )
    return _assign_gpus(roots, topology)


def every_order(topology: Topology) -> Iterator[tuple[int, ...]]:
    """Yield all orders of the GPUs, without those that differ only by an exchange of GPUs under one root
    complex, or of root complexes of the same size."""
    for roots in _root_orders(topology.root_sizes, ()):
        yield _assign_gpus(roots, topology)


def _root_orders(sizes: tuple[int, ...], roots: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every complete sequence of PCIe root complexes (one entry per GPU) that begins with `roots`. Of
    unused roots of the same size, only the first is tried."""
    if len(roots) == sum(sizes):
        yield roots
        return
    untouched: set[int] = set()
    for root, size in enumerate(sizes):
        placed = roots.count(root)
        if placed == size or (not placed and size in untouched):
            continue
        if not placed:
            untouched.add(size)
        yield from _root_orders(sizes, (*roots, root))


def _assign_gpus(roots: Sequence[int], topology: Topology) -> tuple[int, ...]:
    under: list[list[int]] = [[] for _ in topology.root_sizes]
    for gpu, root in enumerate(topology.gpu_roots):
        under[root].append(gpu)
    return tuple(under[root].pop(0) for root in roots)


def _proximity(gpus: int, stages: int) -> list[list[float]]:
    """Return a symmetric matrix over the positions in the order of the GPUs: for every two positions, the sum
    of 1 / distance over all pairs of stages of which one runs at the first and one at the second position."""
    near = [[0.0] * gpus for _ in range(gpus)]
    for early, late in combinations(range(stages), 2):
        if early % gpus != late % gpus:
            near[early % gpus][late % gpus] += 1 / (late - early)
            near[late % gpus][early % gpus] += 1 / (late - early)
    return near


def _contention(roots: Sequence[int], topology: Topology, proximity: list[list[float]]) -> float:
    return sum(
        topology.root_sizes[roots[early]] * proximity[early][late]
        for early, late in combinations(range(len(roots)), 2)
        if roots[early] == roots[late]
    )


def _improve_by_swaps(topology: Topology, proximity: list[list[float]]) -> list[int]:
    """Return the root complex at each position of a locally optimal order. The search starts with an order in
    which root complexes alternate, and swaps two positions as long as that reduces the contention."""
    left = list(topology.root_sizes)
    roots: list[int] = []
    while any(left):
        for root, free in enumerate(left):
            if free:
                roots.append(root)
                left[root] -= 1
    least = _contention(roots, topology, proximity)
    improved = True
    while improved:
        improved = False
        for early, late in combinations(range(len(roots)), 2):
            if roots[early] == roots[late]:
                continue
            roots[early], roots[late] = roots[late], roots[early]
            now = _contention(roots, topology, proximity)
            if now < least * (1 - 1e-12):
                least, improved = now, True
            else:
                roots[early], roots[late] = roots[late], roots[early]
    return roots
