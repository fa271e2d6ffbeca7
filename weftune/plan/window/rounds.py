"""The planner of a window (a few global batches of every job) that runs round by round, in any layout. A
round is one global batch of every job, followed by evaluations and saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weftune.plan.pack.best import LIMITS, Limits
from weftune.plan.pack.segments import pack_segments
from weftune.plan.program.check import check, check_slots
from weftune.plan.program.layout import Layout, WorkerLayout
from weftune.plan.program.program import (
    NOTHING,
    Action,
    Backward,
    Evaluate,
    Evict,
    Forward,
    GlobalBatch,
    Load,
    MicrobatchPlan,
    PlacedSample,
    Program,
    Recompute,
    Reduce,
    Save,
    Score,
    SegmentPlan,
    Step,
)
from weftune.plan.window.orders import insert_transfers


@dataclass(frozen=True, slots=True)
class JobWindow:
    """One job's part of a window: its next global batches, and the steps after which it evaluates or
    saves."""

    job: str
    step: int
    """Number of the last optimizer step that the job made before the window."""
    batches: tuple[GlobalBatch, ...]
    evaluation: tuple[PlacedSample, ...]
    evaluation_steps: frozenset[int]
    save_steps: frozenset[int]
    begins_run: bool = False
    """Whether the job starts in this window, so that it may evaluate and save before its first global
    batch."""
    scored_samples: tuple[PlacedSample, ...] = ()
    """Samples whose log-probabilities are computed with the job's current weights, before any batch is
    trained."""
    mismatched: tuple[PlacedSample, ...] = ()
    """Mismatched samples (prompts with the answers of other prompts), whose log-probabilities are computed
    before each evaluation, for the KL term of the evaluated loss."""

    def evaluates_at(self, step: int) -> bool:
        """Return whether the job's held-out samples are evaluated after this step."""
        return bool(self.evaluation) and step in self.evaluation_steps

    @property
    def starts_with_evaluation(self) -> bool:
        """Whether the job's held-out samples are evaluated before its first batch."""
        return self.begins_run and self.evaluates_at(self.step)


@dataclass(frozen=True, slots=True)
class TrainedMicrobatch:
    """A training microbatch of a round (one global batch of every job), and the optimizer steps (Steps) that
    follow the microbatch because it contains the last samples of their global batches."""

    microbatch: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a window: one global batch of every job that has batches left, with the computation of
    log-probabilities (scoring), evaluations and saves. The fields are in the order in which their contents
    run, mostly indices of microbatches."""

    scored_microbatches: tuple[int, ...]
    trained_microbatches: tuple[TrainedMicrobatch, ...]
    scored_for_evaluation: tuple[int, ...]
    evaluated_microbatches: tuple[int, ...]
    saves: tuple[Save, ...]


ForwardRun = tuple[type[Evaluate] | type[Score], list[int]]
"""The class of passes without backward, and the indices of the microbatches that run through all stages
together in such passes."""


@dataclass(frozen=True, slots=True)
class _RoundRuns:
    """The passes without backward that a round (one global batch of every job) runs before and after its
    training."""

    runs_before_training: tuple[ForwardRun, ...]
    runs_after_training: tuple[ForwardRun, ...]


class _LaidRounds:
    """The rounds of a window (each one global batch of every job), packed into microbatches, before the order
    of actions on each device is chosen.

    With `pads_to_ladder`, training microbatches are padded to few sizes, as captured CUDA graphs require.
    With several `groups`, only jobs of the same group share microbatches, and the optimizer steps of a group
    follow its last microbatch, so that transfers for these steps overlap with the passes of another group.
    """

    def __init__(
        self, windows: Sequence[JobWindow], capacity: int, pads_to_ladder: bool, groups: int, limits: Limits
    ) -> None:
        self.capacity, self.pads_to_ladder, self.limits = capacity, pads_to_ladder, limits
        tokens = {window.job: sum(batch.tokens for batch in window.batches) for window in windows}
        self.groups = even_groups(tokens, groups) if groups > 1 else []
        self.microbatches: list[MicrobatchPlan] = []
        self.rounds: list[Round] = []
        step = {window.job: window.step for window in windows}
        scored = [SegmentPlan(one.job, one.step, one.scored_samples) for one in windows if one.scored_samples]
        self._add_round([], [window for window in windows if window.begins_run], step, scored)
        for turn in range(max((len(window.batches) for window in windows), default=0)):
            moving = [window for window in windows if turn < len(window.batches)]
            batches = [window.batches[turn] for window in moving]
            mismatched = mismatched_segments(batches)
            step |= {batch.job: batch.step for batch in batches}
            self._add_round(batches, moving, step, mismatched)

    def _add_round(
        self,
        batches: Sequence[GlobalBatch],
        windows: Sequence[JobWindow],
        step: dict[str, int],
        scored_segments: Sequence[SegmentPlan] = (),
    ) -> None:
        """Add a round (one global batch of every job) with these batches to the window. `step` maps each job
        to the number of its last optimizer step after the round."""
        scored = self._add_packed(scored_segments)
        trained = self._add_training(batches)
        evaluating = [one for one in windows if one.evaluates_at(step[one.job])]
        mismatched = self._add_packed(
            SegmentPlan(one.job, step[one.job], one.mismatched) for one in evaluating if one.mismatched
        )
        evaluated = self._add_packed(
            SegmentPlan(one.job, step[one.job], one.evaluation) for one in evaluating
        )
        saves = tuple(Save(one.job, step[one.job]) for one in windows if step[one.job] in one.save_steps)
        self.rounds.append(Round(scored, trained, mismatched, evaluated, saves))

    def _add_packed(self, segments: Iterable[SegmentPlan]) -> tuple[int, ...]:
        return tuple(map(self._add_microbatch, pack_segments([*segments], self.capacity)))

    def _add_training(self, batches: Sequence[GlobalBatch]) -> tuple[TrainedMicrobatch, ...]:
        if len(self.groups) < 2:
            return self._add_group_training(batches)
        parts = [[batch for batch in batches if batch.job in group] for group in self.groups]
        found: list[TrainedMicrobatch] = []
        for group in (self._add_group_training(part) for part in parts if part):
            found += [replace(one, steps=()) for one in group]
            found[-1] = replace(group[-1], steps=tuple(step for one in group for step in one.steps))
        return tuple(found)

    def _add_group_training(self, batches: Sequence[GlobalBatch]) -> tuple[TrainedMicrobatch, ...]:
        segments = [SegmentPlan(batch.job, batch.step, batch.samples) for batch in batches]
        packed = pack_segments(segments, self.capacity, self.pads_to_ladder, self.limits)
        last = {job: index for index, microbatch in enumerate(packed) for job in microbatch.jobs}
        steps: list[list[Step]] = [[] for _ in packed]
        for batch in batches:
            steps[last[batch.job]].append(Step(batch.job, batch.step))
        return tuple(
            TrainedMicrobatch(self._add_microbatch(one), tuple(own))
            for one, own in zip(packed, steps, strict=True)
        )

    def _add_microbatch(self, microbatch: MicrobatchPlan) -> int:
        self.microbatches.append(microbatch)
        return len(self.microbatches) - 1


def mismatched_segments(batches: Iterable[GlobalBatch]) -> list[SegmentPlan]:
    """Return the mismatched samples (prompts with the answers of other prompts) for the KL terms of these
    batches' losses. Their log-probabilities are computed before the batches are trained."""
    return [SegmentPlan(one.job, one.step - 1, one.mismatched) for one in batches if one.mismatched]


def even_groups(tokens: Mapping[str, int], count: int) -> list[frozenset[str]]:
    """Return at most `count` groups of jobs with about equally many tokens. The largest jobs are assigned
    first."""
    groups: list[set[str]] = [set() for _ in range(max(1, min(count, len(tokens))))]
    sums = [0] * len(groups)
    for job in sorted(tokens, key=lambda job: -tokens[job]):
        # Among equal groups, choose the one with fewer jobs.
        at = min(range(len(groups)), key=lambda one: (sums[one], len(groups[one])))
        groups[at].add(job)
        sums[at] += tokens[job]
    return [frozenset(group) for group in groups]


def plan_rounds(
    windows: Sequence[JobWindow],
    layout: Layout,
    capacity: int,
    pads_to_ladder: bool = False,
    recompute: Recompute = NOTHING,
    packing_limits: Limits = LIMITS,
) -> Program:
    """Return a checked program that trains every job's batches round by round (a round is one global batch of
    every job). A stage runs all microbatches of a round before the next stage begins, so that a streamed
    stage is loaded only once for all of them.

    Microbatches and their order on each stage are the same in every layout, so losses are bitwise equal. With
    several workers or shards, a window ends with the round in which a job evaluates, since later steps depend
    on the result, which only the first worker knows. At the start and at the end of a window, each worker's
    slots (places for streamed stages in device memory) hold the stages that the worker needs first.
    """
    done = {window.job: window.step for window in windows}
    windows = _cut_after_evaluation(windows) if layout.workers * layout.shards > 1 else windows
    laid = _LaidRounds(windows, capacity, pads_to_ladder, layout.job_group_count, packing_limits)
    room = _evaluation_rows(laid, layout, capacity)
    runs = [_list_forward_runs(one, laid, room) for one in laid.rounds]
    program = Program(
        capacity,
        tuple(laid.microbatches),
        tuple(batch for window in windows for batch in window.batches),
        devices=tuple(
            _list_actions(laid, runs, layout.for_worker(worker)) for worker in range(layout.workers)
        ),
        stages=layout.stage_workers,
        recompute=recompute,
    )
    check(program, done)
    for worker in range(layout.workers):
        check_slots(program, layout.for_worker(worker))
    return program


def _cut_after_evaluation(windows: Sequence[JobWindow]) -> list[JobWindow]:
    """Return the jobs' parts of the window without the rounds (one global batch of every job each) that
    follow the first evaluation. If a job evaluates before its first batch, no job trains in this window, but
    samples are still scored."""
    if any(window.starts_with_evaluation for window in windows):
        return [
            replace(window, batches=())
            for window in windows
            if window.starts_with_evaluation or window.scored_samples
        ]
    rounds = [
        turn
        for window in windows
        for turn, batch in enumerate(window.batches, start=1)
        if window.evaluates_at(batch.step)
    ]
    if not rounds:
        return [*windows]
    return [replace(window, batches=window.batches[: min(rounds)]) for window in windows]


def _evaluation_rows(laid_rounds: _LaidRounds, layout: Layout, capacity: int) -> int:
    """Return the maximum number of rows that pass a stage without backward before the next stage begins. With
    this number, the inputs of stages need no more memory than in training."""
    rounds = (
        sum(laid_rounds.microbatches[one.microbatch].rows for one in each.trained_microbatches)
        for each in laid_rounds.rounds
    )
    largest = max(rounds, default=0)
    if layout.offloads_inputs:
        part = layout.for_worker(0)
        return part.rounds_on_device * largest + (part.extra_microbatches_on_device - 1) * capacity
    return len(layout.stages) // layout.workers * max(capacity, largest)


def _list_forward_runs(one: Round, laid_rounds: _LaidRounds, max_rows: int) -> _RoundRuns:
    before, scored, evaluated = (
        _split_runs(numbers, laid_rounds, max_rows)
        for numbers in (one.scored_microbatches, one.scored_for_evaluation, one.evaluated_microbatches)
    )
    first: list[ForwardRun] = [(Score, run) for run in before]
    after: list[ForwardRun] = [(Score, run) for run in scored]
    after += [(Evaluate, run) for run in evaluated]
    return _RoundRuns(tuple(first), tuple(after))


def _split_runs(numbers: Sequence[int], laid_rounds: _LaidRounds, max_rows: int) -> list[list[int]]:
    """Return the microbatches split into lists of at most `max_rows` rows. Streamed stages are loaded once
    for each list."""
    runs: list[list[int]] = []
    taken = max_rows
    for number in numbers:
        rows = laid_rounds.microbatches[number].rows
        if taken + rows > max_rows:
            runs.append([])
            taken = 0
        runs[-1].append(number)
        taken += rows
    return runs


def _list_actions(
    laid_rounds: _LaidRounds, runs: Sequence[_RoundRuns], part: WorkerLayout
) -> tuple[Action, ...]:
    """Return the actions of one worker in order. `runs` contains the passes without backward of each round
    (one global batch of every job)."""
    visits = [list(_visits(one, run, part)) for one, run in zip(laid_rounds.rounds, runs, strict=True)]
    moved = slot_moves([stage for each in visits for stage, _ in each], part)
    actions: list[Action] = []
    for one, each in zip(laid_rounds.rounds, visits, strict=True):
        for _, passes in each:
            actions += [*passes, *next(moved)]
        actions += one.saves
    ordered = actions if part.worker == 0 else _delay_steps(actions, laid_rounds)
    return tuple(insert_transfers(ordered, part.layout.stage_workers))


def _visits(round_plan: Round, runs: _RoundRuns, part: WorkerLayout) -> Iterator[tuple[int, list[Action]]]:
    """Yield (stage, actions) for each time that a worker runs a stage in a round (one global batch of every
    job).

    Score passes (which compute log-probabilities) come first, then forwards through the worker's stages, then
    backwards and Steps (optimizer steps) through the stages in reverse order, and finally the other passes
    without backward. The last stage of the base runs each backward right after its forward.
    """
    yield from _forward_visits(runs.runs_before_training, part)
    last, numbers = len(part.stages) - 1, [trained.microbatch for trained in round_plan.trained_microbatches]
    if numbers:
        for stage in (stage for stage in part.own_stages if stage < last):
            yield stage, [Forward(number, stage) for number in numbers]
        for stage in reversed(part.own_stages):
            actions: list[Action] = []
            for trained in round_plan.trained_microbatches:
                actions += [Forward(trained.microbatch, stage)] if stage == last else []
                actions += [Backward(trained.microbatch, stage)]
                if stage == part.own_stages[0]:
                    # Several workers agree on every Step by a Reduce.
                    agreed = trained.steps if part.layout.workers > 1 else ()
                    actions += [*(Reduce(step.job, step.step) for step in agreed), *trained.steps]
            yield stage, actions
    yield from _forward_visits(runs.runs_after_training, part)


def _forward_visits(runs: Iterable[ForwardRun], part: WorkerLayout) -> Iterator[tuple[int, list[Action]]]:
    for kind, run in runs:
        for stage in part.own_stages:
            yield stage, [kind(number, stage) for number in run]


def slot_moves(stages: Sequence[int], part: WorkerLayout) -> Iterator[tuple[Action, ...]]:
    """Yield the Evict and Load actions that follow each run of a stage in `stages`. A stage is evicted if its
    slot (a place in device memory) is needed for another stage, which is then loaded immediately."""
    streamed = set(part.streamed_stages)
    needed = {part.slot_of_stage(stage): stage for stage in part.initial_stages}
    found: list[tuple[Action, ...]] = []
    for stage in reversed(stages):
        found.append(())
        if stage in streamed:
            slot = part.slot_of_stage(stage)
            if needed[slot] != stage:
                found[-1] = Evict(stage), Load(needed[slot])
            needed[slot] = stage
    return reversed(found)


def _delay_steps(actions: Iterable[Action], laid_rounds: _LaidRounds) -> Iterator[Action]:
    """Yield the actions with each Step (optimizer step) moved as late as possible, since a Step waits for the
    decision of the first worker."""
    pending: dict[str, Step] = {}
    for action in actions:
        match action:
            case Step(job):
                pending[job] = action
                continue
            case Forward(number) | Evaluate(number) | Score(number):
                needed: Iterable[str] = laid_rounds.microbatches[number].jobs
            case Save(job):
                needed = (job,)
            case _:
                needed = ()
        yield from [pending.pop(job) for job in needed if job in pending]
        yield action
    yield from pending.values()
