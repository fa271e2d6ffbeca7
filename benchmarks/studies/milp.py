"""Packing of samples into bins (microbatches) as a mixed integer program that is solved by HiGHS.

The objective is the number of bins or the rows of the least full bin. No window is packed in this way, since
exchanges of samples leave the solver nothing to gain (`docs/benchmarks.md`, pipelines).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from weftune.plan.pack.best import Packing, pack_instance
from weftune.plan.pack.instance import Bins, Instance, pad_rows
from weftune.plan.pack.swap import least_load

MAX_CELLS, MAX_ROOM_CELLS = 64 * 8, 12 * 12
"""Maximum numbers of samples times bins for which the number of bins, and the rows of the least full bin, are
minimised. Larger programs take too long."""
MAX_NODES = 60

Entry = tuple[int, float]
"""Index of a variable (a column of the program) and its coefficient in a constraint."""


def pack_with_solver(case: Instance, leaves_room: bool = False) -> Packing:
    """Return the packing that a window would have, improved by the solver if the program is small enough.
    With `leaves_room`, the rows of the last microbatch are also minimised."""
    found = pack_instance(case, leaves_room)
    bins, proven = [list(chosen) for chosen in found.bins], found.is_optimal
    cells = len(case.lengths) * found.count
    if not proven and cells <= MAX_CELLS:
        bins, proven = minimise_bins(case, bins, found.lower_bound, MAX_NODES)
    if leaves_room and 0 < cells <= MAX_ROOM_CELLS:
        bins, _ = minimise_last_bin(case, bins, MAX_NODES)
    ordered = sorted(bins, key=lambda chosen: (-case.load(chosen), chosen))
    return replace(
        found, bins=tuple(map(tuple, ordered)), least_rows=least_load(case, ordered), is_optimal=proven
    )


def minimise_bins(case: Instance, bins: Bins, min_bins: int, max_nodes: int) -> tuple[Bins, bool]:
    """Minimise the number of bins, starting from `bins`, down to `min_bins`. Return the bins and whether the
    solver proved them optimal.

    The search ends after `max_nodes` nodes, never by the clock, so the result depends only on the input.
    """
    model = _Model(case, len(bins))
    used = [model.column(cost=1.0, lower=float(number < min_bins)) for number in range(len(bins))]
    for number, column in enumerate(used):
        model.row(-np.inf, 0.0, [*model.rows_in(number), (column, -float(case.capacity))])
    for number in range(1, len(bins)):
        model.row(0.0, np.inf, [(used[number - 1], 1.0), (used[number], -1.0)])
    return _solve(model, _in_order(case, bins), dict.fromkeys(used, 1.0), max_nodes)


def minimise_last_bin(case: Instance, bins: Bins, max_nodes: int) -> tuple[Bins, bool]:
    """Minimise the rows of the least full bin without changing the number of bins. Return the bins and
    whether the solver proved them optimal.

    Bins are interchangeable, so the last bin is the one that is minimised.
    """
    loads = [case.load(chosen) for chosen in bins]
    emptiest = loads.index(min(loads))
    others = [chosen for number, chosen in enumerate(bins) if number != emptiest]
    named = len(others)
    model = _Model(case, len(bins), named)
    for number in range(named):
        model.row(-np.inf, float(case.capacity), model.rows_in(number))
    # The last bin never becomes fuller than it is now.
    model.row(-np.inf, float(loads[emptiest]), model.rows_in(named))
    for column, rows in model.rows_in(named):
        model.cost[column] = rows
    return _solve(model, [*_in_order(case, others), bins[emptiest]], {}, max_nodes)


def _by_length(case: Instance) -> list[int]:
    return sorted(range(len(case.lengths)), key=lambda index: (-case.lengths[index], index))


def _in_order(case: Instance, bins: Bins) -> Bins:
    """Return the bins sorted by their longest sample, so that the s-th longest sample of all is in one of the
    first s bins."""
    position = {index: number for number, index in enumerate(_by_length(case))}
    return sorted(bins, key=lambda chosen: min(position[index] for index in chosen))


class _Model:
    """The integer program. One variable says whether a sample is in a bin; another is the number of rows of a
    job in a bin, in multiples of `case.multiple` (x and k in the paper).

    Bins are interchangeable, so the s-th longest sample is restricted to the first s bins: the bins of any
    packing can be numbered in this way. Only the bin whose rows are minimised may contain any sample.
    """

    def __init__(self, case: Instance, count: int, minimised_bin: int | None = None) -> None:
        self.case = case
        self.count = count
        self.cost: list[float] = []
        self.limits: list[tuple[float, float]] = []
        self.bounds: list[tuple[float, float]] = []
        self.rows: list[list[Entry]] = []
        self.held: list[dict[int, int]] = [{} for _ in range(count)]  # per bin: sample -> column
        self.multiples: list[dict[int, int]] = [{} for _ in range(count)]  # per bin: job -> column
        for position, index in enumerate(_by_length(case)):
            allowed = [number for number in range(count) if number <= position or number == minimised_bin]
            for number in allowed:
                self.held[number][index] = self.column()
            self.row(1.0, 1.0, [(self.held[number][index], 1.0) for number in allowed])
        if case.multiple > 1:
            for number in range(count):
                self._pad(number)

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0) -> int:
        """Add an integer variable and return its index."""
        self.cost.append(cost)
        self.limits.append((lower, upper))
        return len(self.cost) - 1

    def row(self, lower: float, upper: float, entries: list[Entry]) -> None:
        self.bounds.append((lower, upper))
        self.rows.append(entries)

    def rows_in(self, number: int) -> list[Entry]:
        """Return the number of rows of bin `number`, including padding, as a linear expression."""
        if self.case.multiple > 1:
            return [(column, float(self.case.multiple)) for column in self.multiples[number].values()]
        return [(column, float(self.case.lengths[index])) for index, column in self.held[number].items()]

    def start(self, bins: Bins) -> dict[int, float]:
        """Return the nonzero variables of a packing as a dict from the index of a variable to its value."""
        values: dict[int, float] = {}
        for number, chosen in enumerate(bins):
            values |= {self.held[number][index]: 1.0 for index in chosen}
            for job, column in self.multiples[number].items():
                tokens = self.case.tokens(index for index in chosen if self.case.jobs[index] == job)
                values[column] = float(pad_rows(tokens, self.case.multiple) // self.case.multiple)
        return values

    def bins(self, values: np.ndarray[Any, Any]) -> Bins:
        found = [[index for index, column in held.items() if values[column] > 0.5] for held in self.held]
        return [sorted(chosen) for chosen in found if chosen]

    def _pad(self, number: int) -> None:
        case = self.case
        for job in sorted(set(case.jobs)):
            column = self.column(upper=float(case.capacity // case.multiple))
            self.multiples[number][job] = column
            owned = [(c, float(case.lengths[i])) for i, c in self.held[number].items() if case.jobs[i] == job]
            self.row(-np.inf, 0.0, [*owned, (column, -float(case.multiple))])


def _solve(
    model: _Model, bins: Bins, more_start_values: dict[int, float], max_nodes: int
) -> tuple[Bins, bool]:
    import highspy

    solver = highspy.Highs()
    # One thread and no clock: the same input gives the same answer, however busy the machine is.
    for option, value in {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_max_nodes": max_nodes,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.999,
    }.items():
        solver.setOptionValue(option, value)
    solver.passModel(_linear_program(model))
    start = model.start(bins) | more_start_values
    columns = np.array(sorted(start), dtype=np.int32)
    solver.setSolution(len(columns), columns, np.array([start[column] for column in columns], dtype=float))
    solver.run()
    found = model.bins(np.array(solver.getSolution().col_value))
    legal = sorted(i for chosen in found for i in chosen) == list(range(len(model.case.lengths))) and all(
        model.case.load(chosen) <= model.case.capacity for chosen in found
    )
    proven = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return (found, proven) if legal else (bins, False)


def _linear_program(model: _Model) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.rows)
    lp.col_cost_ = np.array(model.cost)
    lp.col_lower_, lp.col_upper_ = (np.array(side) for side in zip(*model.limits, strict=True))
    lp.row_lower_, lp.row_upper_ = (np.array(side) for side in zip(*model.bounds, strict=True))
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(model.cost)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row) for row in model.rows)], dtype=np.int32)
    lp.a_matrix_.index_ = np.array([column for row in model.rows for column, _ in row], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([value for row in model.rows for _, value in row])
    return lp
