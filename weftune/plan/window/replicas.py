"""Replicas of a pipeline: which samples each replica trains, and when the gradients of a global batch are
summed.

Replicas divide the samples of each global batch, and every optimizer step waits for all replicas. The order
of passes is predicted for all replicas together, so that gradients are summed (by a Reduce) when the last
replica is expected to have finished, and no replica waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weftune.plan.pack.merge import BatchSample
from weftune.plan.program.prices import Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    Forward,
    MicrobatchPlan,
    Program,
    Reduce,
    Step,
    batch_samples,
)
from weftune.plan.window.dispatch import BatchClosed, Dispatch, PassBegan
from weftune.plan.window.orders import Work, arrived_inputs, insert_transfers, multi_job_rules

Rounds = list[list[BatchSample]]


def distribute_samples(
    rounds: Sequence[Sequence[BatchSample]], inherited_tokens: Sequence[int]
) -> list[Rounds]:
    """Return, for each replica, its samples of each round (one global batch of every job). All replicas get
    about equally many tokens in total. `inherited_tokens` contains, for each replica, the number of tokens of
    unfinished microbatches from the previous window."""
    tokens = list(inherited_tokens)
    dealt: list[Rounds] = [[] for _ in tokens]
    for samples in rounds:
        home = _assign_to_replicas([one.length for one in samples], tokens)
        for replica, own in enumerate(dealt):
            part = [one for one, where in zip(samples, home, strict=True) if where == replica]
            own += [part] if part else []
    return dealt


def _assign_to_replicas(sizes: Sequence[int], totals: list[int]) -> list[int]:
    """Return the replica to which each item is assigned, and add the sizes to the replicas' `totals` in
    place. The largest items are assigned first, each to the replica with the smallest total."""
    home = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        home[index] = totals.index(min(totals))
        totals[home[index]] += sizes[index]
    return home


def distribute_evaluation(microbatches: Sequence[MicrobatchPlan], replicas: int) -> list[list[int]]:
    """Return, for each replica, the indices of the evaluation microbatches that it runs. Their rows are
    divided evenly."""
    home = _assign_to_replicas([one.rows for one in microbatches], [0] * replicas)
    return [[index for index, where in enumerate(home) if where == one] for one in range(replicas)]


def order_replicas(
    work: Work,
    stages: int,
    prices: Prices,
    spare_microbatches: int = 0,
    delays_gradient_sums: bool = False,
) -> Program:
    """Return a program in which all replicas use the multi-job schedule, in which each device runs whichever
    pass is ready, with the Reduces (sums over replicas) and Steps (optimizer steps) that they need.

    With `delays_gradient_sums`, replicas sum the gradients of a global batch about one pass later, so that
    slow links cause fewer waits.
    """
    forwards = [one.forward for number in work.filled_microbatches for one in prices.passes[number]]
    lag = sum(forwards) / len(forwards) if delays_gradient_sums else 0.0
    rules = replace(multi_job_rules(stages, spare_microbatches), exchange_seconds=lag)
    dispatch = Dispatch(work.microbatches, work.by_replica, prices, rules, work.inherited)
    dispatch.run()
    lists, arrived = _StepInserter(work, stages).insert_steps(dispatch.log), arrived_inputs(work, stages)
    return Program(
        capacity=work.capacity,
        microbatches=work.microbatches,
        batches=work.batches,
        devices=tuple(
            tuple(
                insert_transfers(
                    actions, range(device - device % stages, device - device % stages + stages), arrived
                )
            )
            for device, actions in enumerate(lists)
        ),
        stages=tuple(range(stages)),
        replicas=len(work.by_replica),
        inherited=work.inherited,
    )


class _StepInserter:
    """Inserts Reduces (sums over replicas) and Steps (optimizer steps) between the passes of all devices, in
    the order of simulated events. Deadlocks are impossible, since everything that an action waits for comes
    earlier in this order."""

    def __init__(self, work: Work, stages: int) -> None:
        self.work, self.microbatches, self.stages = work, work.microbatches, stages
        self.lists: list[list[Action]] = [[] for _ in range(len(work.by_replica) * stages)]
        sample_counts = [
            batch_samples(self.microbatches[number] for number in work.replica_microbatches(replica))
            for replica in range(len(work.by_replica))
        ]
        self.replica_batches = [frozenset(counts) for counts in sample_counts]
        """For each replica, the global batches of which it trains at least one sample."""
        self.remaining = [sample_counts[device // stages].copy() for device in range(len(self.lists))]
        """For each device, the number of samples of each global batch that still need a backward."""
        self.pending: list[dict[str, Step]] = [{} for _ in self.lists]
        """For each device, the Steps (optimizer steps) that are not inserted yet, by job. Steps are inserted
        as late as possible."""

    def insert_steps(self, log: Iterable[PassBegan | BatchClosed]) -> list[list[Action]]:
        """Return the actions of every device: the passes in the log, with Reduces (sums over replicas) and
        Steps (optimizer steps)."""
        self._begin_window()
        for moment in log:
            match moment:
                case PassBegan(device, Forward() as action):
                    self._insert_forward(device, action)
                case PassBegan(device, Backward() as action):
                    self._insert_backward(device, action)
                case BatchClosed(stage, job, step):
                    self._close_batch(stage, job, step)
        for device, pending in enumerate(self.pending):
            self.lists[device] += pending.values()
        return self.lists

    def _begin_window(self) -> None:
        """Add the Reduces (sums of gradients over replicas) of the global batches whose last backward on a
        device was in the previous window."""
        for number, progress in enumerate(self.work.inherited):
            for stage in range(self.stages):
                if progress.has_backward(stage, self.stages):
                    remaining = self.remaining[progress.replica * self.stages + stage]
                    for segment in self.microbatches[number].segments:
                        remaining[segment.job, segment.step] -= len(segment.samples)
        for device, remaining in enumerate(self.remaining):
            for key, count in remaining.items():
                if not count:
                    self.lists[device].append(Reduce(*key, "gradient"))
        for batch in self.work.batches:
            key = batch.job, batch.step
            for stage in reversed(range(self.stages)):
                if not any(one[key] for one in self.remaining[stage :: self.stages]):
                    self._close_batch(stage, *key)

    def _insert_forward(self, device: int, action: Forward) -> None:
        for segment in self.microbatches[action.microbatch].segments:
            if action.stage == 0:
                # Replicas without samples of this batch execute the previous Step once the others have begun.
                for other in range(len(self.lists)):
                    if (segment.job, segment.step) not in self.replica_batches[other // self.stages]:
                        self._insert_step(other, segment.job)
            self._insert_step(device, segment.job)
        self.lists[device].append(action)

    def _insert_backward(self, device: int, action: Backward) -> None:
        """Add a Backward to the device's actions. If this is the last Backward of a global batch on the
        device, also add the Reduce that sends the gradient to other replicas."""
        self.lists[device].append(action)
        for segment in self.microbatches[action.microbatch].segments:
            key = segment.job, segment.step
            self.remaining[device][key] -= len(segment.samples)
            if not self.remaining[device][key]:
                self.lists[device].append(Reduce(*key, "gradient"))

    def _close_batch(self, stage: int, job: str, step: int) -> None:
        """Add the Reduces that sum the gradients of a global batch over the replicas, all of which have run
        its last backward."""
        for device in range(stage, len(self.lists), self.stages):
            self.lists[device].append(Reduce(job, step))
            self.pending[device][job] = Step(job, step)
        if stage == 0:
            self._insert_step(0, job)

    def _insert_step(self, device: int, job: str) -> None:
        if (step := self.pending[device].pop(job, None)) is not None:
            self.lists[device].append(step)
