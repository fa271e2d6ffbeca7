"""Stages to GPUs, so that uploads that fall together share no root complex (Mobius 3.3, cross mapping).

A mapping is an order of the GPUs: stage j runs on the GPU at place j mod N of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

EXACT_GPUS = 8
"""Up to so many GPUs every order is looked at, save those that only swap what is alike."""


@dataclass(frozen=True, slots=True)
class Topology:
    """GPUs numbered from 0 on, root complex after root complex."""

    roots: tuple[int, ...]
    """How many GPUs hang under each."""

    @property
    def gpus(self) -> int:
        return sum(self.roots)

    @property
    def root_of(self) -> tuple[int, ...]:
        return tuple(root for root, size in enumerate(self.roots) for _ in range(size))


def sequential_order(topology: Topology) -> tuple[int, ...]:
    return tuple(range(topology.gpus))


def contention(order: Sequence[int], topology: Topology, stages: int) -> float:
    """Eq 13: over all pairs of stages, the GPUs under their common root over their distance.

    Pairs on one GPU are left out: they never upload at the same time.
    """
    root_of = topology.root_of
    roots = [root_of[gpu] for gpu in order]
    return _contention(roots, topology, _nearness(topology.gpus, stages))


def cross_order(topology: Topology, stages: int) -> tuple[int, ...]:
    """The order of least contention: exact for up to EXACT_GPUS GPUs, above that no swap improves it."""
    nearness = _nearness(topology.gpus, stages)
    if topology.gpus > EXACT_GPUS:
        return _order(_swapped(topology, nearness), topology)
    roots = min(_root_orders(topology.roots, ()), key=lambda roots: _contention(roots, topology, nearness))
    return _order(roots, topology)


def every_order(topology: Topology) -> Iterator[tuple[int, ...]]:
    """One order of each kind: GPUs under one root are alike, and so are roots of one size."""
    for roots in _root_orders(topology.roots, ()):
        yield _order(roots, topology)


def _root_orders(sizes: tuple[int, ...], roots: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to go on after `roots`; of roots alike and still untouched only the first is taken."""
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


def _order(roots: Sequence[int], topology: Topology) -> tuple[int, ...]:
    under: list[list[int]] = [[] for _ in topology.roots]
    for gpu, root in enumerate(topology.root_of):
        under[root].append(gpu)
    return tuple(under[root].pop(0) for root in roots)


def _nearness(gpus: int, stages: int) -> list[list[float]]:
    """For two places of an order: the sum of 1/distance over the pairs of stages that run there."""
    near = [[0.0] * gpus for _ in range(gpus)]
    for early, late in combinations(range(stages), 2):
        if early % gpus != late % gpus:
            near[early % gpus][late % gpus] += 1 / (late - early)
            near[late % gpus][early % gpus] += 1 / (late - early)
    return near


def _contention(roots: Sequence[int], topology: Topology, nearness: list[list[float]]) -> float:
    return sum(
        topology.roots[roots[early]] * nearness[early][late]
        for early, late in combinations(range(len(roots)), 2)
        if roots[early] == roots[late]
    )


def _swapped(topology: Topology, nearness: list[list[float]]) -> list[int]:
    """From a deal around the roots, swaps that help until none does."""
    left = list(topology.roots)
    roots: list[int] = []
    while any(left):
        for root, free in enumerate(left):
            if free:
                roots.append(root)
                left[root] -= 1
    least = _contention(roots, topology, nearness)
    improved = True
    while improved:
        improved = False
        for early, late in combinations(range(len(roots)), 2):
            if roots[early] == roots[late]:
                continue
            roots[early], roots[late] = roots[late], roots[early]
            now = _contention(roots, topology, nearness)
            if now < least * (1 - 1e-12):
                least, improved = now, True
            else:
                roots[early], roots[late] = roots[late], roots[early]
    return roots
