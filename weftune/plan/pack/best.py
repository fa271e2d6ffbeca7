"""The best packing within a bounded effort, and how it was found.

Best fit runs first. If it needs more microbatches than the bound, exchanges, random repacking of a few bins
and, on small instances, the solver follow. All are limited by counts, not by seconds, so a packing is a pure
function of its input (and, if the solver decides, of the solver's version).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weftune.plan.pack import milp
from weftune.plan.pack.instance import Bins, Instance, bound_of, instance, pack_padded
from weftune.plan.pack.swap import emptiest, least_possible, shake, swap

How = Literal["greedy", "swap", "shake", "solver"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the effort of a packing."""

    tries: int = 4000
    """Maximum number of exchanges between two bins."""
    kicks: int = 400
    """Maximum number of random repackings of a few bins."""
    solver_cells: int = 64 * 8
    """Maximum of samples times bins for the solver, which cannot decide larger instances in time."""
    room_cells: int = 12 * 12
    """Maximum of samples times bins for the solver if the number of bins is fixed and only room is gained."""
    solver_nodes: int = 60


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Packing:
    """Microbatches as indices of samples, the fullest first, and the quality of the packing."""

    bins: tuple[tuple[int, ...], ...]
    greedy: int
    """Number of microbatches that best fit alone needs."""
    bound: int
    """Lower bound on the number of microbatches; the fewest possible may be more."""
    emptiest: int
    """Rows of the least full microbatch, which is the last."""
    how: How
    proven: bool
    """Whether the bound or the solver proves that fewer microbatches are impossible."""

    @property
    def count(self) -> int:
        return len(self.bins)


def pack_best(
    lengths: Sequence[int],
    capacity: int,
    multiple: int = 1,
    jobs: Sequence[int] | None = None,
    leave_room: bool = False,
    limits: Limits = LIMITS,
) -> Packing:
    """Pack into at most as many microbatches as best fit. With `leave_room`, also minimise the last, for a
    merge.

    `multiple` pads each job's rows in a microbatch; `jobs` gives the job of each sample (one job without it).
    """
    return pack_instance(instance(lengths, capacity, multiple, jobs), leave_room, limits)


def pack_instance(case: Instance, leave_room: bool = False, limits: Limits = LIMITS) -> Packing:
    greedy, fewest = pack_padded(case), bound_of(case)
    attempt = _Attempt(case, fewest, limits, greedy)
    if len(attempt.bins) > fewest:
        attempt.swap()
    if len(attempt.bins) > fewest:
        attempt.shake()
    if len(attempt.bins) > fewest and attempt.solvable(limits.solver_cells):
        attempt.solve()
    if leave_room:
        attempt.leave_room()
    ordered = sorted((sorted(chosen) for chosen in attempt.bins), key=lambda one: (-case.load(one), one))
    return Packing(
        bins=tuple(tuple(chosen) for chosen in ordered),
        greedy=len(greedy),
        bound=fewest,
        emptiest=emptiest(case, ordered),
        how=attempt.how,
        proven=attempt.proven or len(ordered) == fewest,
    )


class _Attempt:
    """A packing under improvement; `how` names what last improved it."""

    def __init__(self, case: Instance, fewest: int, limits: Limits, bins: Bins) -> None:
        self.case, self.fewest, self.limits, self.bins = case, fewest, limits, bins
        self.how: How = "greedy"
        self.proven = False

    def swap(self) -> None:
        self._keep(swap(self.case, self.bins, self.fewest, self.limits.tries), "swap")

    def shake(self) -> None:
        limits = self.limits
        self._keep(shake(self.case, self.bins, self.fewest, limits.kicks, limits.tries), "shake")

    def solvable(self, cells: int) -> bool:
        return 0 < len(self.case.lengths) * len(self.bins) <= cells and milp.available()

    def solve(self) -> None:
        found, self.proven = milp.fewest_bins(self.case, self.bins, self.fewest, self.limits.solver_nodes)
        self._keep(found, "solver")

    def leave_room(self) -> None:
        """Empty the last microbatch if that makes room for at least one more sample."""
        if self._gain():
            self.swap()
        if self._gain() and self.solvable(self.limits.room_cells):
            found, _ = milp.emptiest_bin(self.case, self.bins, self.limits.solver_nodes)
            self._keep(found, "solver")

    def _gain(self) -> bool:
        """Return whether the least full bin may shrink by a sample or more: less makes room for none."""
        shortest = min(self.case.lengths, default=1)
        spare = emptiest(self.case, self.bins) - least_possible(self.case, len(self.bins))
        return spare >= shortest

    def _keep(self, found: Bins, how: How) -> None:
        now, before = len(found), len(self.bins)
        if now < before or (now == before and emptiest(self.case, found) < emptiest(self.case, self.bins)):
            self.bins, self.how = found, how
