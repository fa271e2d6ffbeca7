"""Speeds ("paces") of stages and windows, and the predicted timeline and number of rounds of a window.

A window is the part of a run that is planned at a time, and a round is one global batch of every job. A
window has only as many rounds as are predicted to end soon, since jobs join, leave and are interrupted
between windows. The prediction uses the pace that the run has recorded or, at first, a profile or data sheet.
The clock is never used, so a resumed run plans the same windows as an uninterrupted one.

Workers wait for one another, and time lost in a slow pass is not regained in a quick one. Timelines that are
predicted from mean times therefore have too few bubbles (idle times), and other timelines are predicted with
times that vary as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, repeat
from random import Random

import numpy as np

from weftune.core.shapes import ModelShape
from weftune.errors import PlanError
from weftune.plan.cost.cluster import detect_cluster
from weftune.plan.cost.estimate import Speed, data_sheet_speed
from weftune.plan.cost.fitted import EVALUATION_SHARE
from weftune.plan.cost.time import CostModel, Line, PassWork
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, Prices
from weftune.plan.program.program import Backward, Compute, Forward, MicrobatchPlan, Program
from weftune.plan.program.simulate import Timeline, simulate
from weftune.plan.window.rounds import JobWindow

WINDOW_SECONDS = 10.0
"""Maximum predicted seconds of a window, unless a single round (one global batch of every job) takes
longer."""
ROW_FLOPS = 4
"""FLOPs per parameter of the base and row (token): two for the forward and two for the backward."""
DRAWS = 4
"""Number of simulations per window (a few global batches of every job) in which the times of passes vary as
much as measured ones."""
BACKWARD_GUESS = 1.5
"""Assumed ratio of the time of a backward to that of a forward, until both have been measured."""


@dataclass(frozen=True, slots=True)
class StagePace:
    """Seconds of a pass on one stage, as a linear function of the pass's rows (tokens) and of its attention,
    and seconds of an optimizer step."""

    forward: Line
    backward: Line
    step_seconds: float = 0.0
    """Duration of one job's optimizer step, in seconds."""
    spread: tuple[float, ...] = ()
    """Ratios of measured to predicted pass times, in the order of the passes."""
    forward_per_square: float = 0.0
    """Seconds of a forward per unit of `squares` (the samples' squared lengths, to which the cost of
    attention is proportional), in addition to the time of its rows. 0 while all samples are whole, since the
    time per row then includes attention."""
    backward_per_square: float = 0.0

    def forward_seconds(self, plan: MicrobatchPlan) -> float:
        return self.forward(plan.rows) + self.forward_per_square * plan.squares

    def backward_seconds(self, plan: MicrobatchPlan) -> float:
        return self.backward(plan.rows) + self.backward_per_square * plan.squares


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """The size and the duration of one pass over one stage."""

    rows: int
    seconds: float
    start: float = 0.0
    squares: int = 0
    """Sum of the squared lengths of the pass's samples, to which the cost of attention is proportional."""


def fit_line(passes: Sequence[MeasuredPass]) -> Line:
    """Return the duration of passes as a linear function of their rows, fitted by least squares. Neither
    offset nor slope is negative."""
    rows = np.array([one.rows for one in passes], dtype=float)
    seconds = np.array([one.seconds for one in passes], dtype=float)
    through_origin = Line(0.0, float(rows @ seconds / max(rows @ rows, 1.0)))
    if np.ptp(rows) == 0:
        return through_origin
    per_row, fixed = np.polyfit(rows, seconds, 1)
    if fixed < 0:
        return through_origin
    return Line(float(fixed), float(per_row)) if per_row >= 0 else Line(float(seconds.mean()), 0.0)


def fit_with_attention(passes: Sequence[MeasuredPass]) -> tuple[Line, float]:
    """Return the duration of passes as a linear function of their rows and their `squares` (sums of squared
    sample lengths, for attention), fitted by least squares: the line for the rows, and the seconds per unit
    of `squares`. No coefficient is negative."""
    terms = np.array([(1.0, one.rows, one.squares) for one in passes])
    seconds = np.array([one.seconds for one in passes])
    scales = terms.max(axis=0).clip(min=1.0)
    best, least, noise = np.zeros(3), math.inf, 1e-9 * float(seconds @ seconds)
    # Of terms that fit about equally well, the first ones are taken.
    for used in ([1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        fitted, *_ = np.linalg.lstsq(terms[:, used] / scales[used], seconds, rcond=None)
        error = float(np.square(terms[:, used] / scales[used] @ fitted - seconds).sum())
        if fitted.min() >= 0 and error < least - noise:
            best, least = np.zeros(3), error
            best[used] = fitted / scales[used]
    fixed, per_row, per_square = best.tolist()
    return Line(fixed, per_row), per_square


def attention_cost(paces: Sequence[StagePace]) -> float:
    """Return the time per unit of a sample's squared length (the cost of attention) relative to the time per
    row, over all stages."""
    rows = sum(pace.forward.per_token + pace.backward.per_token for pace in paces)
    return sum(pace.forward_per_square + pace.backward_per_square for pace in paces) / rows if rows else 0.0


def simulated_paces(program: Program, timeline: Timeline) -> tuple[StagePace, ...]:
    """Return the pace of each stage (the time of its passes as a function of their rows), computed from
    simulated instead of measured passes. Every device must have one stage."""

    def line(stage: int, kind: type[Forward] | type[Backward]) -> Line:
        return fit_line(
            [
                MeasuredPass(program.microbatches[one.action.microbatch].rows, one.stop - one.start)
                for one in timeline.events_of(stage)
                if isinstance(one.action, kind)
            ]
        )

    return tuple(
        StagePace(line(stage, Forward), line(stage, Backward)) for stage in range(len(program.stages))
    )


def guess_pace(layers: int) -> StagePace:
    """Return the guessed pace of a stage with this number of layers (the time of its passes as a function of
    their rows), for use before anything is measured. Times are proportional to the number of layers and have
    no unit."""
    return StagePace(Line(0.0, float(layers)), Line(0.0, BACKWARD_GUESS * layers))


@dataclass(frozen=True, slots=True)
class LoadPace:
    """Weight bytes of the stages, and the speed of the links over which they are loaded from the host."""

    stage_bytes: tuple[int, ...]
    bandwidth: float
    """Bytes per second of each device's link."""


def predict_timeline(program: Program, paces: Sequence[StagePace], loads: LoadPace | None = None) -> Timeline:
    """Return the simulated timeline of a window (a few global batches of every job), given the pace of each
    stage: the time of its passes as a function of their rows. Transfers between devices are assumed to take
    no time."""
    return simulate_timeline(program, pace_prices(program.microbatches, paces), loads)


def simulate_timeline(
    program: Program, prices: Prices, loads: LoadPace | None = None, link: Link | None = None
) -> Timeline:
    """Return the simulated timeline of a window (a few global batches of every job). Without `link`,
    transfers between devices take no time."""
    host = Link()
    if loads is not None:
        prices, host = replace(prices, weight_bytes=loads.stage_bytes), Link(loads.bandwidth)
    return simulate(program, prices, PricedCluster(len(program.devices), link or Link(), host))


def pace_prices(microbatches: Sequence[MicrobatchPlan], paces: Sequence[StagePace]) -> Prices:
    return Prices(
        tuple(
            tuple(
                PassPrice(pace.forward_seconds(one), pace.backward_seconds(one), kept_bytes=one.rows)
                for pace in paces
            )
            for one in microbatches
        ),
        step=sum(pace.step_seconds for pace in paces) / len(paces),
    )


def vary_timelines(
    program: Program, paces: Sequence[StagePace], loads: LoadPace | None = None, draws: int = DRAWS
) -> list[Timeline]:
    """Return `draws` simulated timelines of a window (a few global batches of every job) in which the times
    of passes vary as much as measured ones. The random seed is fixed, so the result is reproducible."""
    prices, drawn = pace_prices(program.microbatches, paces), Random(0)
    return [
        simulate_timeline(program, _vary_prices(program, prices, paces, drawn), loads) for _ in range(draws)
    ]


def _vary_prices(program: Program, prices: Prices, paces: Sequence[StagePace], random: Random) -> Prices:
    passes = [list(row) for row in prices.passes]
    moment = random.random()
    for actions in program.devices:
        factors = [_time_factors(pace.spread, moment) for pace in paces]
        for action in actions:
            if isinstance(action, Compute):
                price, factor = passes[action.microbatch][action.stage], next(factors[action.stage])
                passes[action.microbatch][action.stage] = (
                    replace(price, backward=price.backward * factor)
                    if isinstance(action, Backward)
                    else replace(price, forward=price.forward * factor)
                )
    return replace(prices, passes=tuple(tuple(row) for row in passes))


def _time_factors(spread: Sequence[float], moment: float) -> Iterator[float]:
    """Return an endless iterator over `spread`, the measured ratios of actual to predicted pass times, in
    order.

    The iterator starts at the fraction `moment`, from 0 to 1, of `spread`. All stages should use the same
    `moment`, since slow passes occur in a row and often on several stages at once."""
    if not spread:
        return repeat(1.0)
    start = int(moment * len(spread))
    return cycle([*spread[start:], *spread[:start]])


@dataclass(frozen=True, slots=True)
class WindowPace:
    """Predicted speed of training: the seconds per row (token), and the minimum seconds per round (one global
    batch of every job). Both are 0 if nothing is known."""

    row_seconds: float = 0.0
    """Seconds per trained row (token)."""
    round_seconds: float = 0.0
    """Minimum seconds per round (one global batch of every job), for example to load all streamed stages."""


def shorten_windows(windows: Sequence[JobWindow], pace: WindowPace) -> list[JobWindow]:
    """Return the jobs' parts of a window, shortened to as many rounds (one global batch of every job) as are
    predicted to take at most `WINDOW_SECONDS`, but at least one. The samples whose log-probabilities are to
    be computed are limited to the same time; those of the first jobs take precedence."""
    rounds, scored_rows = count_fitting_rounds(windows, pace), 0.0
    max_rows = WINDOW_SECONDS / (EVALUATION_SHARE * pace.row_seconds) if pace.row_seconds else math.inf
    cut = []
    for window in windows:
        scored = []
        for placed in window.scored_samples:
            if scored_rows and scored_rows + placed.length > max_rows:
                break
            scored.append(placed)
            scored_rows += placed.length
        cut.append(replace(window, batches=window.batches[:rounds], scored_samples=tuple(scored)))
    return cut


def count_fitting_rounds(windows: Sequence[JobWindow], pace: WindowPace) -> int:
    """Return the number of rounds (one global batch of every job) that are predicted to end within
    `WINDOW_SECONDS`, but at least 1."""
    longest = max((len(window.batches) for window in windows), default=0)
    ends = accumulate(_round_seconds(windows, turn, pace) for turn in range(longest))
    return max(1, sum(end <= WINDOW_SECONDS for end in ends))


def _round_seconds(windows: Sequence[JobWindow], turn: int, pace: WindowPace) -> float:
    moving = [(window, window.batches[turn]) for window in windows if turn < len(window.batches)]
    rows = sum(batch.tokens for _, batch in moving)
    evaluating = [window for window, batch in moving if window.evaluates_at(batch.step)]
    evaluated = sum(
        placed.length for window in evaluating for placed in (*window.evaluation, *window.mismatched)
    )
    evaluated += sum(placed.length for _, batch in moving for placed in batch.mismatched)
    return max(pace.round_seconds, pace.row_seconds * (rows + EVALUATION_SHARE * evaluated))


def first_pace(cost: CostModel, shape: ModelShape, on_gpu: bool, max_tokens: int) -> WindowPace:
    """Return the speed of training that is predicted before the run has measured anything: from a profile,
    for passes of `max_tokens` tokens, or else from the data sheet of the device."""
    if cost.is_measured:
        full = PassWork(
            tokens=max_tokens, squares=max_tokens**2, samples=1, supervised=max_tokens, adapted=0, segments=1
        )
        return WindowPace(cost.pass_seconds(full) / max_tokens)
    speed = data_sheet_device_speed(on_gpu)
    return pace_from_data_sheet(shape, speed.flops) if speed else WindowPace()


def pace_from_data_sheet(shape: ModelShape, flops: float) -> WindowPace:
    """Return the predicted speed of training on devices that together reach `flops` FLOP/s."""
    return WindowPace(ROW_FLOPS * shape.active_parameters / flops)


def data_sheet_link() -> Link | None:
    """Return the link between this machine's GPUs from their data sheet. Return None if there is no GPU, or
    if its data sheet is unknown."""
    try:
        cluster = detect_cluster()
    except PlanError:
        return None
    return cluster.link if cluster.devices[0].is_gpu else None


def data_sheet_device_speed(on_gpu: bool) -> Speed | None:
    """Return the speed of this machine's devices from their data sheet, or None if no data sheet is known."""
    try:
        sheet = detect_cluster().devices[0]
    except PlanError:
        return None
    return data_sheet_speed(sheet) if sheet.is_gpu == on_gpu else None
