"""A packing problem: the lengths of samples, the job of each sample, and the capacity of a microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Bins = list[list[int]]
"""Microbatches as lists of sample indices."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Samples for microbatches of `capacity` rows, where each job's rows are padded to `multiple`."""

    lengths: tuple[int, ...]
    jobs: tuple[int, ...]
    """Job of each sample, as a number; all 0 if nothing is padded, since the job does not matter then."""
    capacity: int
    """Rows per microbatch, a multiple of `multiple`: padded rows could not use the rest."""
    multiple: int

    def tokens(self, chosen: Iterable[int]) -> int:
        return sum(map(self.lengths.__getitem__, chosen))

    def load(self, chosen: Iterable[int]) -> int:
        """Return the rows of a microbatch with these samples, including padding."""
        if self.multiple == 1:
            return self.tokens(chosen)
        rows: dict[int, int] = {}
        for index in chosen:
            rows[self.jobs[index]] = rows.get(self.jobs[index], 0) + self.lengths[index]
        return sum(padded(count, self.multiple) for count in rows.values())

    @property
    def rows(self) -> int:
        """Fewest rows that can hold all samples, with each job padded once."""
        return self.load(range(len(self.lengths)))


def instance(
    lengths: Sequence[int], capacity: int, multiple: int = 1, jobs: Sequence[int] | None = None
) -> Instance:
    """Return an Instance. Without `jobs`, all samples belong to one job."""
    assert jobs is None or len(jobs) == len(lengths), "every sample has a job"
    usable = capacity // multiple * multiple
    assert all(0 < length <= usable for length in lengths), "a sample is longer than the capacity"
    whose = (0,) * len(lengths) if jobs is None or multiple == 1 else tuple(jobs)
    return Instance(tuple(lengths), whose, usable, multiple)


def padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
