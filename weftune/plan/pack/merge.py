"""Packing of consecutive rounds (one global batch of every job of a group), in which the last microbatch of a
round is filled with samples of the next round.

 In a pipeline, a job's next batch must wait until the backward of its previous batch has reached the first
stage (the bubble lemma). Rounds of other groups of jobs fill this time. Where no microbatch is allowed to
run, the sequence contains a no-op (an empty microbatch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weftune.plan.pack.best import LIMITS, Limits, Packing, pack_instance
from weftune.plan.pack.instance import Instance, make_instance, pad_rows
from weftune.plan.pack.swap import find_best_fill
from weftune.plan.program.program import IllegalProgram


@dataclass(frozen=True, slots=True)
class BatchSample:
    """A sample with its length, its job and the global batch to which it belongs."""

    job: str
    batch: int
    sample: int
    length: int


Microbatch = tuple[BatchSample, ...]
NO_OP: Microbatch = ()


@dataclass(frozen=True, slots=True)
class Merged:
    """The microbatches of a sequence of rounds (one global batch of every job of a group), in the order of
    their forward passes."""

    microbatches: tuple[Microbatch, ...]
    moved_samples: int
    """Number of samples that were moved into the last microbatch of the previous round (one global batch of
    every job of a group)."""
    separate_count: int
    """Number of microbatches if each round (one global batch of every job of a group) is packed
    separately."""

    @property
    def no_ops(self) -> int:
        return sum(not microbatch for microbatch in self.microbatches)


@dataclass(frozen=True, slots=True)
class MergeRules:
    """The rules for microbatches: their capacity in rows, the minimum distance in microbatches between two
    global batches of a job (`stages`), and the multiple to which the rows of a job are padded."""

    capacity: int
    stages: int = 1
    multiple: int = 1
    limits: Limits = LIMITS


def merge(
    rounds: Sequence[Sequence[BatchSample]],
    rules: MergeRules,
    previous_microbatches: Sequence[Microbatch] = (),
    moves_samples: bool = True,
) -> Merged:
    """Pack each round (one global batch of every job of a group) into microbatches and concatenate the
    rounds. `previous_microbatches` come before the rounds and do not change.

    With `moves_samples`, samples may move into the last microbatch of the previous round, unless the sequence
    becomes longer. The sequence can become longer because a shorter round brings a job's next batch closer to
    its previous one, which may require no-ops.
    """
    alone = [_pack_samples(samples, rules) for samples in rounds]
    plain = _concatenate_rounds(rounds, alone, rules, previous_microbatches, moves_samples=False)
    merged = (
        _concatenate_rounds(rounds, alone, rules, previous_microbatches, moves_samples=True)
        if moves_samples
        else plain
    )
    best = merged if len(merged.microbatches) <= len(plain.microbatches) else plain
    verify_microbatches(rounds, best.microbatches, rules, previous_microbatches)
    return best


def verify_microbatches(
    rounds: Sequence[Sequence[BatchSample]],
    microbatches: Sequence[Microbatch],
    rules: MergeRules,
    previous_microbatches: Sequence[Microbatch] = (),
) -> None:
    """Raise IllegalProgram unless every sample of the rounds is in exactly one microbatch, no microbatch
    exceeds the capacity, and the global batches of a job are far enough apart (see `earliest_microbatch`)."""
    planned = Counter(one for samples in rounds for one in samples)
    if Counter(one for microbatch in microbatches for one in microbatch) != planned:
        raise IllegalProgram("the samples of the rounds are not trained exactly once each")
    ends: dict[tuple[str, int], int] = {}
    newest: dict[str, int] = {}
    for number, microbatch in enumerate(
        [*previous_microbatches, *microbatches], start=-len(previous_microbatches)
    ):
        if number >= 0 and _padded_rows(microbatch, rules.multiple) > rules.capacity:
            raise IllegalProgram(f"microbatch {number} is over the capacity of {rules.capacity}")
        for one in microbatch:
            if one.batch < newest.setdefault(one.job, one.batch):
                raise IllegalProgram(
                    f"microbatch {number} holds batch {one.batch} of {one.job} after a later one"
                )
            end = ends.get((one.job, one.batch - 1))
            if end is not None and number < earliest_microbatch(end, rules.stages):
                raise IllegalProgram(f"microbatch {number} holds batch {one.batch} of {one.job} too early")
            newest[one.job] = one.batch
            ends[one.job, one.batch] = number


def _concatenate_rounds(
    rounds: Sequence[Sequence[BatchSample]],
    packed_rounds: Sequence[Sequence[Microbatch]],
    rules: MergeRules,
    previous_microbatches: Sequence[Microbatch],
    moves_samples: bool,
) -> Merged:
    """Return the microbatches of all rounds (one global batch of every job of a group) in sequence.
    `packed_rounds` contains the microbatches of each round, packed separately. With `moves_samples`, samples
    may move into the last microbatch of the previous round."""
    line = _Sequence(rules, previous_microbatches)
    moved = 0
    for samples, packed in zip(rounds, packed_rounds, strict=True):
        laid = packed
        if moves_samples and len(line.microbatches) > len(previous_microbatches):
            chosen = line.find_best_fill(samples)
            taken = set(chosen)
            rest = _pack_samples([one for one in samples if one not in taken], rules)
            if len(rest) <= len(packed):
                line.microbatches[-1] += tuple(chosen)
                line.record_batches(chosen)
                moved += len(chosen)
                laid = rest
        line.append_round(laid)
    return Merged(tuple(line.microbatches[len(previous_microbatches) :]), moved, sum(map(len, packed_rounds)))


class _Sequence:
    """A sequence of microbatches that is being built, with the position of each global batch's last
    microbatch."""

    def __init__(self, rules: MergeRules, previous_microbatches: Sequence[Microbatch]) -> None:
        self.rules = rules
        self.microbatches: list[Microbatch] = []
        self.ends: dict[tuple[str, int], int] = {}
        for microbatch in previous_microbatches:
            self._append_microbatch(microbatch)

    def find_best_fill(self, samples: Sequence[BatchSample]) -> list[BatchSample]:
        """Return the samples that fill the last microbatch best, chosen among those samples that may run in
        this microbatch."""
        free = [one for one in samples if self._may_run(one, len(self.microbatches) - 1)]
        room = self.rules.capacity - _padded_rows(self.microbatches[-1], self.rules.multiple)
        case = _packing_instance(free, self.rules)
        return [free[index] for index in find_best_fill(case, range(len(free)), room)]

    def record_batches(self, samples: Sequence[BatchSample]) -> None:
        for one in samples:
            self.ends[one.job, one.batch] = len(self.microbatches) - 1

    def append_round(self, microbatches: Sequence[Microbatch]) -> None:
        """Append the microbatches of a round (one global batch of every job of a group). Each position gets
        the first microbatch that is allowed to run there, or a no-op (an empty microbatch) if there is
        none."""
        remaining = list(microbatches)
        while remaining:
            number = len(self.microbatches)
            ready = (one for one in remaining if all(self._may_run(sample, number) for sample in one))
            chosen = next(ready, NO_OP)
            if chosen:
                remaining.remove(chosen)
            self._append_microbatch(chosen)

    def _may_run(self, sample: BatchSample, number: int) -> bool:
        """Return whether a sample may run in microbatch `number`, which must come long enough after the job's
        previous global batch."""
        end = self.ends.get((sample.job, sample.batch - 1))
        return end is None or number >= earliest_microbatch(end, self.rules.stages)

    def _append_microbatch(self, microbatch: Microbatch) -> None:
        self.microbatches.append(microbatch)
        self.record_batches(microbatch)


def _pack_samples(samples: Sequence[BatchSample], rules: MergeRules) -> list[Microbatch]:
    packing = _find_packing(_packing_instance(samples, rules), rules.limits)
    return [tuple(samples[index] for index in chosen) for chosen in packing.bins]


@lru_cache(maxsize=1024)
def _find_packing(case: Instance, limits: Limits) -> Packing:
    """Return a packing of samples into few microbatches. Results are cached, since the planner compares many
    plans that contain the same samples."""
    return pack_instance(case, leaves_room=True, limits=limits)


def _packing_instance(samples: Sequence[BatchSample], rules: MergeRules) -> Instance:
    names = {job: number for number, job in enumerate(dict.fromkeys(one.job for one in samples))}
    jobs = [names[one.job] for one in samples]
    return make_instance([one.length for one in samples], rules.capacity, rules.multiple, jobs)


def _padded_rows(microbatch: Microbatch, multiple: int) -> int:
    rows: Counter[str] = Counter()
    for one in microbatch:
        rows[one.job] += one.length
    return sum(pad_rows(count, multiple) for count in rows.values())


@dataclass(frozen=True, slots=True)
class JobLengths:
    """Sample lengths of one job, by which jobs are divided into groups."""

    job: str
    mean: float
    """Average number of tokens per sample."""
    tokens: int
    """Number of tokens per global batch."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """A division of the jobs into groups whose rounds (one global batch of each job of the group) alternate
    in a pipeline."""

    groups: tuple[tuple[str, ...], ...]
    """Names of the jobs of each group, in the order in which the groups take turns."""
    microbatches: tuple[int, ...]
    """Minimum number of microbatches that each group of jobs must have in a round (one global batch of every
    job in the group)."""
    no_ops: int
    """Number of no-ops (empty microbatches) per cycle, in which each group of jobs has one round (one global
    batch of each of its jobs)."""


def earliest_microbatch(last: int, stages: int) -> int:
    """Return the index of the first microbatch in which global batch j + 1 of a job may begin if its batch j
    ends in microbatch `last` (the bubble lemma).

    The reason is that, in plain 1F1B, the first of the `stages` stages runs the backward of microbatch k
    right before the forward of microbatch k + `stages`.
    """
    return last + stages


def no_ops_per_round(microbatches: Sequence[int], stages: int) -> int:
    """Return the number of no-ops (empty microbatches) per cycle, in which each group of jobs has one round
    (one global batch of each of its jobs). `microbatches` contains the number of microbatches in a round of
    each group.

    Two consecutive rounds of a group need at least `stages` − 1 microbatches of other groups or no-ops
    between them, since a job's next batch waits for the backward of its previous one (the bubble lemma).
    """
    between = min((sum(microbatches) - own for own in microbatches), default=stages)
    return max(0, stages - 1 - between)


def head_tail_groups(jobs: Sequence[JobLengths], count: int) -> tuple[tuple[JobLengths, ...], ...]:
    """Return `count` groups of jobs. Each group consists of pairs of a job with short samples and a job with
    long samples, or of a single job."""
    assert 1 <= count <= len(jobs), "every group has a job"
    ordered = sorted(jobs, key=lambda job: (job.mean, job.job))
    groups: list[list[JobLengths]] = [[] for _ in range(count)]
    turn = 0
    while ordered:
        # If more groups are empty than pairs remain, a group gets a single job, so that none stays empty.
        alone = len(ordered) == 1 or len(ordered) <= sum(not group for group in groups)
        pair = [ordered.pop()] if alone else [ordered.pop(0), ordered.pop()]
        groups[turn % count] += pair
        turn += 1
    return tuple(tuple(group) for group in groups)


def group_jobs(jobs: Sequence[JobLengths], capacity: int, stages: int) -> Grouping:
    """Return the division of the jobs into groups (see `head_tail_groups`) with the fewest microbatches and
    no-ops (empty microbatches) per round, which is one global batch of every job, and, among these, with the
    fewest groups.

    Fewer groups pack better, and more groups need fewer no-ops. With one stage, all jobs form one group.
    """
    assert jobs, "there is a job to group"
    choices = [
        _evaluate_groups(head_tail_groups(jobs, count), capacity, stages) for count in range(1, len(jobs) + 1)
    ]
    return min(choices, key=lambda one: (sum(one.microbatches) + one.no_ops, len(one.groups)))


def _evaluate_groups(groups: Sequence[Sequence[JobLengths]], capacity: int, stages: int) -> Grouping:
    needed = tuple(-(-sum(job.tokens for job in members) // capacity) for members in groups)
    return Grouping(
        groups=tuple(tuple(job.job for job in members) for members in groups),
        microbatches=needed,
        no_ops=no_ops_per_round(needed, stages),
    )
