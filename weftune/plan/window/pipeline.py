"""The planner of the next window (a few global batches of every job) of a pipeline: global batches are split
into microbatches, which are grouped and ordered.

Jobs form groups whose rounds (one global batch of every job) alternate, so that other groups fill the time in
which a job's batch waits for its optimizer step. A window ends with the round in which a job evaluates, since
later steps depend on the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from weftune.plan.pack.best import LIMITS, Limits
from weftune.plan.pack.merge import BatchSample, JobLengths, MergeRules, group_jobs, head_tail_groups, merge
from weftune.plan.pack.segments import pack_segments
from weftune.plan.program.check import check
from weftune.plan.program.handover import FINISHED, Unfinished, pass_counts
from weftune.plan.program.prices import PassPrice, PricedCluster, Prices
from weftune.plan.program.program import (
    NOTHING,
    Action,
    Evaluate,
    GlobalBatch,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Recompute,
    Reduce,
    Save,
    Score,
    SegmentPlan,
    Step,
    sample_groups,
)
from weftune.plan.program.simulate import simulate
from weftune.plan.window.orders import (
    Queue,
    Work,
    chunked_multi_job,
    cut_long_samples,
    cut_program,
    gpipe,
    insert_transfers,
    multi_job,
    one_forward_one_backward,
    template_order,
)
from weftune.plan.window.overlap import overlap_microbatches
from weftune.plan.window.pace import StagePace, attention_cost, pace_prices
from weftune.plan.window.replicas import Rounds, distribute_evaluation, distribute_samples, order_replicas
from weftune.plan.window.rounds import JobWindow, mismatched_segments

Groups = tuple[tuple[str, ...], ...]
SPLITS, FINER_SPLITS = (1, 2, 3, 4), (6, 8, 12, 16)
"""Factors by which the capacity is divided to get smaller microbatches, which may fill the pipeline better.
Finer splits are tried only after passes have been measured."""
PATIENT_SPLITS = 2
"""Number of consecutive microbatch sizes without improvement after which no smaller sizes are tried."""
GROUP_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of groups into which the planner of a pipeline tries to divide the jobs."""
MAX_SEARCH_MICROBATCHES = 2000
"""Limit on the search for divisions of the jobs into groups: the search ends when the simulated programs have
this many microbatches in total. The search is limited by a count, not by a clock, so that plans can be
repeated."""
CUT_GAIN = 1.02
"""Minimum predicted speedup of a window, as a ratio of seconds, for which samples are cut into chunks, or
into smaller chunks."""
PATIENCE = 1.02
"""Maximum ratio of the predicted seconds of two plans of a window at which the slower plan is chosen because
its devices wait less for the gradients of other replicas."""


class PipelineOrder(StrEnum):
    gpipe = "gpipe"
    alternating = "1f1b"
    multi_job = "multi-job"
    template = "template"


CUT_ORDERS = PipelineOrder.multi_job, PipelineOrder.alternating
"""Orders of passes with which a window (a few global batches of every job) can begin and end while
microbatches are in flight."""


@dataclass(frozen=True, slots=True)
class PipelineRules:
    """Rules for planning a window of a pipeline (a few global batches of every job): token capacity, speeds
    of the stages, order of passes, and limits."""

    capacity: int
    paces: tuple[StagePace, ...]
    """Speed of each stage: the time of its passes as a function of their rows."""
    order: PipelineOrder | None = None
    """Order of passes in the pipeline. None selects the order that is fastest in the simulator."""
    recompute: Recompute = NOTHING
    spare_microbatches: int = 0
    """Number of microbatches in flight in addition to those of the 1F1B schedule, on all stages but the last.
    Such microbatches reduce waits if links are slow or pass times vary."""
    replicas: int = 1
    """Number of copies of all stages, among which every global batch is divided. Several replicas always run
    in the multi-job order (each device runs whichever pass is ready), since no other order is predicted for
    all replicas together."""
    min_chunk_rows: int = 0
    """Minimum rows of the chunks into which long samples may be cut. 0 means that samples stay whole."""
    overlapped_layers: int = 0
    """Number of layers of the single stage if all-reduces over shards overlap with computation, otherwise
    0."""
    min_rows: int = 0
    """Minimum microbatch size that the planner tries, in rows. Sizes down to a quarter of the capacity are
    always tried, and no smaller ones if the value is 0."""

    searches_groups: bool = True
    """Whether divisions of the jobs into groups are compared by simulated time. Otherwise a formula divides
    them."""
    packing_limits: Limits = LIMITS
    """Limits on the effort of packing samples."""

    @property
    def stages(self) -> int:
        return len(self.paces)

    @property
    def cuts_samples(self) -> bool:
        """Whether long samples may be cut into chunks, each of which is a microbatch by itself."""
        # Layers that are recomputed would still keep what the attention of chunks has saved.
        keeps_layers = not self.recompute.recomputed_layers
        return self.min_chunk_rows > 0 and keeps_layers and self.order is None and self.replicas == 1

    @property
    def batch_distance(self) -> int:
        """Minimum distance, in microbatches, from the last microbatch of a job's global batch to the first
        microbatch of its next one. The exchange of gradients between replicas counts as one more stage."""
        return self.stages + (self.replicas > 1)


def plan_pipeline(
    windows: Sequence[JobWindow],
    rules: PipelineRules,
    inherited: Unfinished = FINISHED,
    hands_over: bool = False,
) -> Program:
    """Return a checked program that finishes the `inherited` global batches, which the previous window left
    unfinished, and trains the jobs' new batches up to the first evaluation.

    With `hands_over`, the last batches are left unfinished, so that the pipeline does not drain between two
    windows, unless a job evaluates at the end. Without new batches, the program only finishes the inherited
    batches.
    """
    step = {window.job: window.step for window in windows}
    starting_windows = [window for window in windows if window.begins_run]
    evaluating = [window for window in starting_windows if window.starts_with_evaluation]
    # A job that evaluates at its start needs the result before its first batch; no job trains meanwhile.
    parts = [] if evaluating else _window_batches(windows)
    hands_over = hands_over and _may_hand_over(parts, windows, rules)
    lists = ((),) * (rules.stages * rules.replicas)
    program = Program(rules.capacity, (), (), lists, tuple(range(rules.stages)), replicas=rules.replicas)
    scored = [SegmentPlan(one.job, one.step, one.scored_samples) for one in windows if one.scored_samples]
    if inherited.batches:
        # Where samples are scored first, by the weights after the last Steps, the pipeline drains before.
        joins = len(parts) == 1 and not scored and not mismatched_segments(parts[0])
        first = parts.pop() if joins else []
        program = _plan_training(first, windows, rules, inherited, hands_over and joins)
    program = _append_passes(program, Score, scored, rules)
    for batches in parts:
        program = _append_mismatched_scores(program, mismatched_segments(batches), rules)
        program = program.followed_by(_plan_training(batches, windows, rules, hands_over=hands_over))
    last = {batch.job: batch.step for batch in program.batches}
    evaluated = evaluating or [one for one in windows if one.evaluates_at(last.get(one.job, -1))]
    after = step | last
    held_out = [SegmentPlan(one.job, after[one.job], one.evaluation) for one in evaluated]
    for_held_out = [
        SegmentPlan(one.job, after[one.job], one.mismatched) for one in evaluated if one.mismatched
    ]
    program = _append_mismatched_scores(program, for_held_out, rules)
    program = _append_passes(program, Evaluate, held_out, rules)
    # A job that waits meanwhile begins in the next window, and must not save at the same step in both.
    program = _insert_saves(program, windows, evaluating or starting_windows)
    program = replace(program, recompute=rules.recompute)
    if rules.overlapped_layers:
        program = overlap_microbatches(program, rules.overlapped_layers)
    check(program, step | {batch.job: batch.step - 1 for batch in inherited.batches})
    return program


def _may_hand_over(
    parts: Sequence[Sequence[GlobalBatch]], windows: Sequence[JobWindow], rules: PipelineRules
) -> bool:
    """Return whether the window may leave global batches unfinished: if new batches begin, the order of
    passes allows it, and nothing at the end of the window needs the results of these batches."""
    if len(parts) != 1 or rules.order not in (None, *CUT_ORDERS):
        return False
    by_job = {window.job: window for window in windows}
    return not any(batch.mismatched or by_job[batch.job].evaluates_at(batch.step) for batch in parts[0])


def _window_batches(windows: Sequence[JobWindow]) -> list[list[GlobalBatch]]:
    """Return the global batches of the window in the order of rounds (one global batch of every job), up to
    and including the first round in which a job evaluates. The result is a list of parts. A new part begins
    at every round with mismatched samples (for a KL term), because the log-probabilities of these samples are
    computed with the weights after the previous round."""
    found: list[list[GlobalBatch]] = []
    for turn in range(max((len(window.batches) for window in windows), default=0)):
        moving = [window for window in windows if turn < len(window.batches)]
        if not found or any(window.batches[turn].mismatched for window in moving):
            found.append([])
        found[-1] += [window.batches[turn] for window in moving]
        if any(window.evaluates_at(window.batches[turn].step) for window in moving):
            break
    return found


# -- training -------------------------------------------------------------------------------------------


def _plan_training(
    batches: Sequence[GlobalBatch],
    windows: Sequence[JobWindow],
    rules: PipelineRules,
    inherited: Unfinished = FINISHED,
    hands_over: bool = False,
) -> Program:
    """Return the program that trains these global batches and finishes the `inherited` ones, which the
    previous window left unfinished. Long samples are whole or cut into chunks, whichever is faster in the
    simulator."""
    whole = _plan_whole(batches, windows, rules, inherited, hands_over)
    if not batches or not rules.cuts_samples:
        return whole.program
    if (rows := _choose_chunk_rows(batches, windows, rules)) is None:
        return whole.program
    cut = _plan_cut(batches, windows, rules, rows)
    if inherited.batches:
        # Chunks begin with an empty pipeline, and leave none in flight.
        program = _plan_whole((), windows, rules, inherited).program.followed_by(cut.program)
        cut = Timed(program, window_seconds(program, pace_prices(program.microbatches, rules.paces)))
    # What a window leaves in flight is charged as if no device waited in it, so that only windows that drain
    # can be compared.
    is_faster = whole.program.hands_over or CUT_GAIN * cut.seconds <= whole.seconds
    return cut.program if is_faster else whole.program


def _plan_whole(
    batches: Sequence[GlobalBatch],
    windows: Sequence[JobWindow],
    rules: PipelineRules,
    inherited: Unfinished = FINISHED,
    hands_over: bool = False,
) -> Timed:
    """Return the program without chunks that is fastest in the simulator, among several sizes of
    microbatches, divisions of the jobs into groups, and orders of passes. Microbatches that the previous
    window left unfinished are not changed."""
    search = _WindowSearch(batches, [window.job for window in windows], rules, inherited, hands_over)
    size = search.choose_size()
    if rules.searches_groups and rules.stages > 1 and rules.replicas == 1 and rules.order is None and batches:
        search.choose_groups(size)
    return search.best


class _WindowSearch:
    """A search for the fastest program of a window (a few global batches of every job). Programs are compared
    by simulated seconds."""

    def __init__(
        self,
        batches: Sequence[GlobalBatch],
        jobs: Sequence[str],
        rules: PipelineRules,
        inherited: Unfinished,
        hands_over: bool,
    ) -> None:
        self.batches, self.rules, self.inherited = batches, rules, inherited
        self.hands_over = hands_over
        self.lengths = _job_lengths(batches, jobs, rules)
        self._best: Timed | None = None
        self.microbatches = 0
        """Number of microbatches in all simulated programs together."""

    @property
    def best(self) -> Timed:
        assert self._best is not None
        return self._best

    def choose_size(self) -> int:
        """Return the size of microbatches, in rows, with which the window is fastest in simulation, for
        groups of jobs that a formula has chosen."""
        best_size, unimproved = self.rules.capacity, 0
        for size in self._candidate_sizes():
            groups = group_jobs(self.lengths, size, self.rules.batch_distance).groups if self.batches else ()
            if self._keep_if_faster(self._fastest_in_any_order(groups, size)):
                best_size, unimproved = size, 0
            else:
                unimproved += 1
            if unimproved == PATIENT_SPLITS or not self.batches:
                break
        return best_size

    def choose_groups(self, size: int) -> None:
        """Try plans with other numbers of groups of jobs, in which either whole rounds of the groups (one
        global batch of each of their jobs) or single microbatches alternate."""
        for count in GROUP_COUNTS:
            if count > len(self.lengths) or self.microbatches > MAX_SEARCH_MICROBATCHES:
                break
            groups = tuple(
                tuple(job.job for job in members) for members in head_tail_groups(self.lengths, count)
            )
            for turns in order_turns(groups, self.batches, self.inherited):
                self._keep_if_faster(self._plan_in_order(turns, size, PipelineOrder.multi_job))
            if count > 1:
                self._keep_if_faster(self._plan_mixed_groups(groups, size))

    def _candidate_sizes(self) -> Iterator[int]:
        """Yield the sizes of microbatches, in rows, that the search tries, the largest first."""
        longest = max(
            (_token_count(run) for one in self.batches for run in sample_groups(one.samples)), default=0
        )
        tried = [-(-self.rules.capacity // factor) for factor in SPLITS]
        if self.rules.min_rows:
            finer = (-(-self.rules.capacity // factor) for factor in FINER_SPLITS)
            tried += [rows for rows in finer if rows >= self.rules.min_rows]
        yield from dict.fromkeys(max(longest, rows) for rows in tried)

    def _fastest_in_any_order(self, groups: Groups, size: int) -> Timed:
        """Return the fastest program for these groups of jobs, among all orders of the groups and of the
        passes."""
        orders = CUT_ORDERS if self.rules.order is None else (self.rules.order,)
        if self.rules.replicas > 1:
            orders = (PipelineOrder.multi_job,)
        all_turns = order_turns(groups, self.batches, self.inherited)
        return min(
            (self._plan_in_order(turns, size, order) for turns in all_turns for order in orders),
            key=lambda one: one.seconds,
        )

    def _plan_in_order(self, groups: Groups, size: int, order: PipelineOrder) -> Timed:
        work = divide_into_microbatches(self.batches, groups, size, self.rules, self.inherited)
        return self._simulate_work(work, groups, order)

    def _plan_mixed_groups(self, groups: Groups, size: int) -> Timed:
        (turns, *_) = order_turns(groups, self.batches, self.inherited)
        work = divide_into_microbatches(
            self.batches, turns, size, self.rules, self.inherited, moves_samples=False
        )
        return self._simulate_work(mix_groups(work, turns), turns, PipelineOrder.multi_job)

    def _simulate_work(self, work: Work, groups: Groups, order: PipelineOrder) -> Timed:
        self.microbatches += len(work.microbatches)
        prices, rules = pace_prices(work.microbatches, self.rules.paces), self.rules
        if rules.replicas == 1:
            return self._cut_and_simulate(order_passes(order, work, prices, groups, rules), prices)
        spare = rules.spare_microbatches
        patient, eager = (
            self._cut_and_simulate(order_replicas(work, rules.stages, prices, spare, is_patient), prices)
            for is_patient in (True, False)
        )
        # The patient order hides links that the prices omit, unless waiting itself costs time.
        return patient if patient.seconds <= PATIENCE * eager.seconds else eager

    def _cut_and_simulate(self, program: Program, prices: Prices) -> Timed:
        if self.hands_over:
            program = cut_program(program, prices)
        return Timed(program, window_seconds(program, prices))

    def _keep_if_faster(self, candidate: Timed) -> bool:
        """Record a program as the best one if it is faster than all others so far. Return whether it is."""
        is_faster = self._best is None or candidate.seconds < self._best.seconds
        if is_faster:
            self._best = candidate
        return is_faster


@dataclass(frozen=True, slots=True)
class Timed:
    """A program with its simulated seconds."""

    program: Program
    seconds: float


def _choose_chunk_rows(
    batches: Sequence[GlobalBatch], windows: Sequence[JobWindow], rules: PipelineRules
) -> int | None:
    """Return the maximum rows per chunk of a sample with which the first round (one global batch of every
    job) would be fastest in the simulator if it were repeated. Return None if whole samples are about as
    fast."""
    first: dict[str, GlobalBatch] = {}
    for batch in batches:
        first.setdefault(batch.job, batch)
    round_batches = list(first.values())
    runs = [(batch, together) for batch in batches for together in sample_groups(batch.samples)]
    longest = max((_token_count(together) for batch, together in runs if batch.may_be_cut), default=0)
    longest_whole = max(
        (_token_count(together) for batch, together in runs if not batch.may_be_cut), default=0
    )
    # The rows that an adapter inserts before a sample are all in its first chunk.
    inserted = max(batch.prefix_rows // len(batch.samples) for batch in batches)
    least = max(rules.min_chunk_rows, longest_whole, inserted + 1)
    chosen, rows = None, -(-longest // 2)
    if rows < least:
        return None
    best_seconds = _round_seconds(round_batches, lambda own: _plan_whole(own, windows, rules))
    while rows >= least:
        seconds = _round_seconds(round_batches, lambda own: _plan_cut(own, windows, rules, rows))  # noqa: B023
        if CUT_GAIN * seconds > best_seconds:
            break
        chosen, best_seconds, rows = rows, seconds, -(-rows // 2)
    return chosen


def _round_seconds(batches: Sequence[GlobalBatch], plan: Callable[[Sequence[GlobalBatch]], Timed]) -> float:
    """Return the simulated seconds by which a second round of these batches (one global batch of each job)
    makes a window longer. The time to fill and drain the pipeline is included only if every round repeats it,
    as with a single job."""
    again = [replace(batch, step=batch.step + 1) for batch in batches]
    return plan([*batches, *again]).seconds - plan(batches).seconds


def _plan_cut(
    batches: Sequence[GlobalBatch], windows: Sequence[JobWindow], rules: PipelineRules, rows: int
) -> Timed:
    """Return the program in which samples of more than `rows` rows are cut into chunks of `rows` rows on
    average, with its simulated seconds."""
    longest = max(_token_count(together) for batch in batches for together in sample_groups(batch.samples))
    groups = choose_groups(batches, [window.job for window in windows], rows, rules)
    whole = divide_into_microbatches(batches, groups, rows, rules)
    work = cut_long_samples(whole, rows, attention_cost(rules.paces))
    prices = pace_prices(work.microbatches, rules.paces)
    program = chunked_multi_job(work, rules.stages, prices, max(longest, rows))
    return Timed(program, window_seconds(program, prices))


def window_seconds(program: Program, prices: Prices) -> float:
    """Return the simulated seconds of a window (a few global batches of every job). If the window leaves
    passes to the next window, their time is included as if no device waited during these passes."""
    timeline = simulate(program, prices, PricedCluster(len(program.devices)))
    if not program.hands_over:
        return timeline.makespan
    devices, stages = range(len(program.devices)), len(program.stages)
    seconds = sum(max((one.stop for one in timeline.events_of(device)), default=0.0) for device in devices)
    forwards, backwards = pass_counts(program)
    for number, passes in enumerate(prices.passes):
        seconds += sum(one.forward for one in passes[forwards[number] :])
        seconds += sum(one.backward for one in passes[: stages - backwards[number]])
    return seconds / len(devices)


def choose_groups(
    batches: Sequence[GlobalBatch], jobs: Sequence[str], capacity: int, rules: PipelineRules
) -> Groups:
    """Return the groups of jobs whose rounds (one global batch of each job of the group) alternate. The jobs
    are divided by a formula and not by simulation."""
    return group_jobs(_job_lengths(batches, jobs, rules), capacity, rules.batch_distance).groups


def _job_lengths(
    batches: Sequence[GlobalBatch], jobs: Sequence[str], rules: PipelineRules
) -> list[JobLengths]:
    """Return the mean sample length and the batch size of each job in tokens, for dividing jobs into groups.
    The batch size is that of the part of the job's first global batch that one replica trains."""
    firsts: dict[str, GlobalBatch] = {}
    for batch in batches:
        firsts.setdefault(batch.job, batch)
    return [
        JobLengths(
            job, firsts[job].tokens / len(firsts[job].samples), -(-firsts[job].tokens // rules.replicas)
        )
        for job in jobs
        if job in firsts
    ]


def mix_groups(work: Work, groups: Groups) -> Work:
    """Return the work with the microbatches of all groups of jobs mixed evenly, instead of alternating whole
    rounds (one global batch of each job of a group). No microbatch may have samples of two groups."""
    home = {job: number for number, members in enumerate(groups) for job in members}
    begun = len(work.inherited)
    lists: list[list[int]] = [[] for _ in groups]
    for number in work.filled_microbatches:
        if number >= begun:
            lists[home[work.microbatches[number].jobs[0]]].append(number)
    # Groups begin at different times, so that their rounds do not end together.
    places = {
        number: ((at + (group + 1) / (len(lists) + 1)) / len(own), group)
        for group, own in enumerate(lists)
        for at, number in enumerate(own)
    }
    order = sorted(places, key=places.__getitem__)
    microbatches = (*work.microbatches[:begun], *(work.microbatches[number] for number in order))
    return Work(work.capacity, microbatches, work.batches, inherited=work.inherited)


def order_turns(groups: Groups, batches: Sequence[GlobalBatch], inherited: Unfinished) -> list[Groups]:
    """Return one or two orders in which groups of jobs take turns in the next rounds (one global batch of
    every job each).

    In the first order, groups with unfinished batches come last, in the order of their last microbatches. The
    second order is returned only if batches are inherited from the previous window. This order divides the
    jobs into equally many new groups, each of jobs that may begin at about the same time.
    """
    last = {job: number for number, plan in enumerate(inherited.microbatches) for job in plan.jobs}
    found = [tuple(sorted(groups, key=lambda members: max(last.get(job, -1) for job in members)))]
    if last and len(groups) > 1:
        tokens = Counter({batch.job: 0 for batch in batches})
        for batch in batches:
            tokens[batch.job] += batch.tokens
        alike: list[list[str]] = [[] for _ in groups]
        before, total = 0, sum(tokens.values())
        for job in sorted(tokens, key=lambda job: last.get(job, -1)):
            alike[(before + tokens[job] // 2) * len(groups) // total].append(job)
            before += tokens[job]
        found.append(tuple(tuple(members) for members in alike if members))
    return found


def divide_into_microbatches(
    batches: Sequence[GlobalBatch],
    groups: Groups,
    max_tokens: int,
    rules: PipelineRules,
    inherited: Unfinished = FINISHED,
    moves_samples: bool = True,
) -> Work:
    """Return the batches divided into microbatches of at most `max_tokens` tokens, which the jobs of a group
    share. A longer sample has its own microbatch. The microbatches of each replica are ordered so that the
    global batches of a job are far enough apart to fill the pipeline in between. With `moves_samples`,
    samples may move into the last microbatch of another group's round (one global batch of each of its
    jobs)."""
    # A bucket of the template runs in one piece, so no sample may go into another group's round. With
    # replicas, two microbatches could each hold a sample that waits for the other's round.
    shift = moves_samples and rules.order is not PipelineOrder.template and rules.replicas == 1
    merging = MergeRules(max_tokens, rules.batch_distance, limits=rules.packing_limits)
    previous: list[list[tuple[BatchSample, ...]]] = [[] for _ in range(rules.replicas)]
    tokens = [0] * rules.replicas
    for plan, progress in zip(inherited.microbatches, inherited.progress, strict=True):
        segments = (BatchSample(one.job, one.step, 0, one.tokens) for one in plan.segments)
        previous[progress.replica].append(tuple(segments))
        tokens[progress.replica] += plan.tokens if progress.backwards < rules.stages else 0
    rounds = distribute_samples(_group_rounds(batches, groups, max_tokens), tokens)
    laid = [
        merge(own, merging, before, moves_samples=shift).microbatches
        for own, before in zip(rounds, previous, strict=True)
    ]
    starts = accumulate((len(one) for one in laid), initial=len(inherited.microbatches))
    numbers = tuple(
        tuple(start + index for index, samples in enumerate(one) if samples)
        for start, one in zip(starts, laid, strict=False)
    )
    microbatches = _microbatches([samples for one in laid for samples in one], batches)
    return Work(
        rules.capacity,
        (*inherited.microbatches, *microbatches),
        (*inherited.batches, *batches),
        numbers,
        inherited.progress,
    )


def _group_rounds(batches: Sequence[GlobalBatch], groups: Groups, max_tokens: int) -> Rounds:
    """Return rounds, each of which contains the samples of one global batch of every job of a group. The
    rounds of the groups alternate. Samples of more than `max_tokens` tokens count as `max_tokens`."""
    by_job: dict[str, list[GlobalBatch]] = {}
    for batch in batches:
        by_job.setdefault(batch.job, []).append(batch)
    rounds: Rounds = []
    for turn in range(max((len(found) for found in by_job.values()), default=0)):
        for members in groups:
            turns = [by_job[job][turn] for job in members if turn < len(by_job[job])]
            samples = [
                BatchSample(batch.job, batch.step, number, min(_token_count(together), max_tokens))
                for batch in turns
                for number, together in enumerate(sample_groups(batch.samples))
            ]
            rounds += [samples] if samples else []
    return rounds


def _token_count(samples: Iterable[PlacedSample]) -> int:
    return sum(placed.length for placed in samples)


def _microbatches(
    packed: Sequence[Sequence[BatchSample]], batches: Sequence[GlobalBatch]
) -> tuple[MicrobatchPlan, ...]:
    placed = {(batch.job, batch.step): sample_groups(batch.samples) for batch in batches}
    microbatches = []
    for samples in packed:
        segments: dict[tuple[str, int], list[int]] = {}
        for one in samples:
            segments.setdefault((one.job, one.batch), []).append(one.sample)
        microbatches.append(
            MicrobatchPlan(
                tuple(
                    SegmentPlan(*key, tuple(one for number in sorted(chosen) for one in placed[key][number]))
                    for key, chosen in segments.items()
                )
            )
        )
    return tuple(microbatches)


def order_passes(
    order: PipelineOrder, work: Work, prices: Prices, groups: Groups, rules: PipelineRules
) -> Program:
    stages = rules.stages
    match order:
        case PipelineOrder.gpipe:
            return gpipe(work, stages)
        case PipelineOrder.alternating:
            return one_forward_one_backward(work, stages)
        case PipelineOrder.multi_job:
            return multi_job(work, stages, prices, rules.spare_microbatches)
        case PipelineOrder.template:
            return template_order(work, _template_queues(work, prices, groups, stages)).program


def _template_queues(work: Work, prices: Prices, groups: Groups, stages: int) -> list[Queue]:
    """Return one bucket per group of jobs for MuxTune's template, which repeats one order of passes. All
    microbatches of a bucket get their mean cost, since the template requires equal costs."""
    home = {job: number for number, members in enumerate(groups) for job in members}
    queued: dict[int, list[int]] = {}
    for number in work.filled_microbatches:
        queued.setdefault(home[work.microbatches[number].jobs[0]], []).append(number)

    def mean(numbers: Sequence[int], stage: int) -> PassPrice:
        passes = [prices.passes[number][stage] for number in numbers]
        forward, backward = sum(one.forward for one in passes), sum(one.backward for one in passes)
        return PassPrice(forward / len(passes), backward / len(passes))

    return [
        Queue(tuple(numbers), tuple(mean(numbers, stage) for stage in range(stages)))
        for numbers in queued.values()
    ]


# -- evaluation and checkpoints --------------------------------------------------------------------------


def _append_passes(
    program: Program,
    kind: type[Evaluate] | type[Score],
    segments: Sequence[SegmentPlan],
    rules: PipelineRules,
) -> Program:
    """Return the program with additional passes of the class `kind`, which have no backward, after all other
    actions. The samples are divided among the replicas."""
    packed = pack_segments(segments, _evaluation_capacity(segments, rules))
    before = len(program.microbatches)
    shares = distribute_evaluation(packed, rules.replicas)
    passes = [[before + index for index in own] for own in shares]
    devices: list[tuple[Action, ...]] = []
    for device, actions in enumerate(program.devices):
        replica, stage = divmod(device, rules.stages)
        added = (kind(one, stage) for one in passes[replica])
        sent = tuple(insert_transfers(added, program.stage_devices(replica)))
        devices.append((*actions, *sent))
    return replace(program, microbatches=(*program.microbatches, *packed), devices=tuple(devices))


def _append_mismatched_scores(
    program: Program, segments: Sequence[SegmentPlan], rules: PipelineRules
) -> Program:
    """Return the program followed by passes that compute log-probabilities (scores) of mismatched samples
    (prompts with the answers of other prompts), and by the exchange of the summed scores between replicas."""
    program = _append_passes(program, Score, segments, rules)
    if rules.replicas == 1:
        return program
    sent = [Reduce(one.job, one.step, "scores") for one in segments]
    added = [Reduce(one.job, one.step, "kl") for one in segments]
    last = set(program.same_stage_devices(rules.stages - 1))
    devices = (
        (*actions, *sent, *added) if device in last else actions
        for device, actions in enumerate(program.devices)
    )
    return replace(program, devices=tuple(devices))


def _evaluation_capacity(segments: Sequence[SegmentPlan], rules: PipelineRules) -> int:
    """Return a microbatch capacity, in tokens, that is small enough to divide the samples among all
    replicas."""
    if rules.replicas == 1 or not segments:
        return rules.capacity
    longest = max(
        _token_count(together) for segment in segments for together in sample_groups(segment.samples)
    )
    even = -(-sum(segment.tokens for segment in segments) // rules.replicas)
    return min(rules.capacity, max(longest, even))


def _insert_saves(
    program: Program, windows: Sequence[JobWindow], starting_windows: Sequence[JobWindow]
) -> Program:
    """Return the program with each Save (checkpoint of a job) right after the optimizer step (Step) that it
    saves. A job that begins is also saved at its current step. Only the devices of the first replica save,
    since all replicas hold the same weights."""
    at = {window.job: window.save_steps for window in windows}
    begin = [Save(window.job, window.step) for window in starting_windows if window.step in window.save_steps]

    def insert_saves(actions: Sequence[Action]) -> tuple[Action, ...]:
        found: list[Action] = [*begin]
        for action in actions:
            found.append(action)
            if isinstance(action, Step) and action.step in at[action.job]:
                found.append(Save(action.job, action.step))
        return tuple(found)

    saving, others = (
        program.devices[: program.devices_per_replica],
        program.devices[program.devices_per_replica :],
    )
    return replace(program, devices=(*(insert_saves(actions) for actions in saving), *others))
