"""Orders for a pipeline of one stage per device: GPipe, 1F1B, and the multi-job 1F1B of mLoRA.

The first two follow from the list of microbatches alone. In the last, every device takes what is ready, as
predicted from the prices, so that microbatches of independent jobs fill each other's waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weftune.plan.program.check import check
from weftune.plan.program.prices import Prices
from weftune.plan.program.program import (
    Action,
    Backward,
    Evaluate,
    Forward,
    GlobalBatch,
    MicrobatchPlan,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.plan.window.dispatch import Dispatch, DispatchRules, rows_left

Passes = list[list[Action]]
"""Passes of each device in order, before Steps, Sends and Recvs are inserted."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a window, with its microbatches in the preferred order."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]

    @property
    def filled(self) -> list[int]:
        """Numbers of the microbatches that hold rows; the others only keep a place free."""
        return [number for number, one in enumerate(self.microbatches) if one.segments]


def gpipe(work: Work, stages: int) -> Program:
    return assemble(work, gpipe_passes(work, stages))


def one_forward_one_backward(work: Work, stages: int) -> Program:
    return assemble(work, alternating_passes(work, stages))


def multi_job(work: Work, stages: int, prices: Prices, spare: int = 0) -> Program:
    return assemble(work, multi_job_passes(work, stages, prices, spare))


def gpipe_passes(work: Work, stages: int) -> Passes:
    """Return all forwards of a round, then all its backwards. A round ends when a job begins another
    batch."""
    lists: Passes = [[] for _ in range(stages)]
    for number in rounds(work):
        for stage, actions in enumerate(lists):
            actions += [Forward(one, stage) for one in number]
            actions += [Backward(one, stage) for one in number]
    return lists


def alternating_passes(work: Work, stages: int) -> Passes:
    """Return the 1F1B order: stage s has up to `stages` − s microbatches in flight; until then forwards go
    first.

    If a microbatch needs a Step that has not run yet, the backwards that lead to it go first. With one job
    that drains the pipeline after every batch; where the bubble lemma holds it never does.
    """
    left = rows_left(work.microbatches)
    return [_alternate(work, stage, stages - stage, left.copy()) for stage in range(stages)]


def multi_job_passes(work: Work, stages: int, prices: Prices, spare: int = 0) -> Passes:
    """Return mLoRA's order: the first device prefers forwards, all others backwards, with as many in flight
    as in 1F1B.

    While a job waits for its Step, the next ready microbatch of any job goes first. `spare` more may be in
    flight on all stages but the last: with `stages` − 1, hops no longer than a pass are hidden behind
    compute.
    """
    rules = multi_job_rules(stages, spare)
    return Dispatch(work.microbatches, [work.filled], prices, rules).run()


def multi_job_rules(stages: int, spare: int = 0) -> DispatchRules:
    last = stages - 1
    return DispatchRules(
        flights=tuple(stages - stage + (spare if stage < last else 0) for stage in range(stages)),
        forward_first=tuple(stage == 0 and stages > 1 for stage in range(stages)),
    )


def rounds(work: Work) -> list[list[int]]:
    """Return runs of consecutive microbatches in which no job has two batches."""
    found: list[list[int]] = []
    steps: dict[str, int] = {}
    for number in work.filled:
        segments = work.microbatches[number].segments
        if not found or any(steps.get(segment.job, segment.step) != segment.step for segment in segments):
            found.append([])
            steps = {}
        found[-1].append(number)
        steps |= {segment.job: segment.step for segment in segments}
    return found


def assemble(
    work: Work, lists: Sequence[Iterable[Action]], homes: Sequence[int] = (), chunk: int = 0
) -> Program:
    """Return a checked Program from the passes of every device, with Steps, Sends and Recvs inserted.

    `homes` is the device of every stage; without it stage s is on device s. `chunk` is as in Program.
    """
    stages = tuple(homes) or tuple(range(len(lists)))
    program = Program(
        capacity=work.capacity,
        microbatches=work.microbatches,
        batches=work.batches,
        devices=tuple(tuple(placed(work, actions, device, stages)) for device, actions in enumerate(lists)),
        stages=stages,
        chunk=chunk,
    )
    check(program)
    return program


def evaluated(numbers: Iterable[int], stage: int, homes: Sequence[int]) -> list[Action]:
    """Return one stage's forwards of held-out microbatches, with the Sends and Recvs between neighbours.

    `homes` is the device of every stage.
    """
    return list(transported((Evaluate(number, stage) for number in numbers), homes))


def placed(work: Work, passes: Iterable[Action], device: int, homes: Sequence[int]) -> list[Action]:
    """Return one device's actions: its passes with the Steps, Reduces, Sends and Recvs that belong to them.

    `homes` is the device of every stage.
    """
    stages = Counter(homes)
    if len(stages) > 1:
        return list(transported(_reduced(work, passes, device, stages[device]), homes))
    return list(transported(_stepped(work, passes, stages[device]), homes))


def _alternate(work: Work, stage: int, most: int, left: Counter[tuple[str, int]]) -> list[Action]:
    """Return the 1F1B order of one stage. `left` has the samples of each batch still to be trained."""
    waiting = work.filled[::-1]
    flying: list[int] = []
    actions: list[Action] = []
    back = 0

    def blocked(number: int) -> bool:
        segments = work.microbatches[number].segments
        return any(left[segment.job, segment.step - 1] > 0 for segment in segments)

    while waiting or back < len(flying):
        if waiting and len(flying) - back < most and not blocked(waiting[-1]):
            flying.append(waiting.pop())
            actions.append(Forward(flying[-1], stage))
            continue
        assert back < len(flying), "a microbatch waits for a batch that comes after it"
        actions.append(Backward(flying[back], stage))
        for segment in work.microbatches[flying[back]].segments:
            left[segment.job, segment.step] -= len(segment.samples)
        back += 1
    return actions


def _stepped(work: Work, actions: Iterable[Action], stages: int) -> Iterable[Action]:
    """Yield the actions of a device with `stages` stages, with a job's Step right after the last Backward of
    its batch."""
    left = {key: stages * rows for key, rows in rows_left(work.microbatches).items()}
    for action in actions:
        yield action
        if isinstance(action, Backward):
            for segment in work.microbatches[action.microbatch].segments:
                key = segment.job, segment.step
                left[key] -= len(segment.samples)
                if not left[key]:
                    yield Step(*key)


def _reduced(work: Work, actions: Iterable[Action], device: int, stages: int) -> Iterable[Action]:
    """Yield the actions of a device with `stages` stages, with a job's Reduce right after the last Backward
    of its batch, and on the first device its Step too.

    On the others the Step comes as late as possible, before the job's next Forward or at the end: until then
    the first device's decision is on its way, and no device waits for it.
    """
    left = {key: stages * rows for key, rows in rows_left(work.microbatches).items()}
    due: dict[str, Step] = {}
    for action in actions:
        if isinstance(action, Forward):
            for job in work.microbatches[action.microbatch].jobs:
                if job in due:
                    yield due.pop(job)
        yield action
        if isinstance(action, Backward):
            for segment in work.microbatches[action.microbatch].segments:
                key = segment.job, segment.step
                left[key] -= len(segment.samples)
                if not left[key]:
                    yield Reduce(*key)
                    due[segment.job] = Step(*key)
            if device == 0:
                yield from due.values()
                due.clear()
    yield from due.values()


def transported(actions: Iterable[Action], homes: Sequence[int]) -> Iterable[Action]:
    """Yield the actions with Recvs right before data of another device is used, and Sends once data for it is
    computed."""
    for action in actions:
        match action:
            case Forward(number, stage) | Evaluate(number, stage):
                if stage > 0 and homes[stage - 1] != homes[stage]:
                    yield Recv(number, stage, "activation", homes[stage - 1])
                yield action
                if stage + 1 < len(homes) and homes[stage + 1] != homes[stage]:
                    yield Send(number, stage + 1, "activation", homes[stage + 1])
            case Backward(number, stage):
                if stage + 1 < len(homes) and homes[stage + 1] != homes[stage]:
                    yield Recv(number, stage, "gradient", homes[stage + 1])
                yield action
                if stage > 0 and homes[stage - 1] != homes[stage]:
                    yield Send(number, stage - 1, "gradient", homes[stage - 1])
            case _:
                yield action
