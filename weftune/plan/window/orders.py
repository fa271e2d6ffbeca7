"""Orders for a pipeline of one stage per device: GPipe, 1F1B, and the multi-job 1F1B of mLoRA.

The first two follow from the list of microbatches alone. In the last every device takes what is ready, as
the prices foresee it, so that microbatches of independent jobs fill each other's waits.
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
"""For each device its passes in order: an order before Steps, Sends and Recvs are put in."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a window trains, its microbatches in the order in which they would like to run."""

    capacity: int
    microbatches: tuple[MicrobatchPlan, ...]
    batches: tuple[GlobalBatch, ...]

    @property
    def filled(self) -> list[int]:
        """The microbatches that hold rows; the others only keep a place free."""
        return [number for number, one in enumerate(self.microbatches) if one.segments]


def gpipe(work: Work, stages: int) -> Program:
    return assemble(work, gpipe_passes(work, stages))


def one_forward_one_backward(work: Work, stages: int) -> Program:
    return assemble(work, alternating_passes(work, stages))


def multi_job(work: Work, stages: int, prices: Prices, spare: int = 0) -> Program:
    return assemble(work, multi_job_passes(work, stages, prices, spare))


def gpipe_passes(work: Work, stages: int) -> Passes:
    """All forwards of a round, then all its backwards; a round ends where a job begins its next batch."""
    lists: Passes = [[] for _ in range(stages)]
    for number in rounds(work):
        for stage, actions in enumerate(lists):
            actions += [Forward(one, stage) for one in number]
            actions += [Backward(one, stage) for one in number]
    return lists


def alternating_passes(work: Work, stages: int) -> Passes:
    """1F1B: stage s has up to `stages` − s microbatches in flight, and forwards go first until then.

    Where a microbatch needs a Step that is not made yet, the backwards that lead to it go first. With one
    job that drains the pipeline after every batch; where the bubble lemma holds it never does.
    """
    left = rows_left(work.microbatches)
    return [_alternate(work, stage, stages - stage, left.copy()) for stage in range(stages)]


def multi_job_passes(work: Work, stages: int, prices: Prices, spare: int = 0) -> Passes:
    """mLoRA's order: the first device prefers forwards, all others backwards, within what 1F1B has in flight.

    A job whose Step is due lets the next ready microbatch pass, whosever it is. `spare` more may be in flight
    on all stages but the last: with `stages` − 1, hops no longer than a pass are hidden behind compute.
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
    """Consecutive microbatches in which no job has two batches."""
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
    """A checked Program from the passes of every device: Steps, Sends and Recvs are put where they belong.

    `homes` is the device of every stage; without it stage s lives on device s. `chunk` is as in Program.
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
    """Microbatches of held-out samples on one stage: forwards only, with what passes between neighbours.

    `homes` is the device of every stage.
    """
    return list(transported((Evaluate(number, stage) for number in numbers), homes))


def placed(work: Work, passes: Iterable[Action], device: int, homes: Sequence[int]) -> list[Action]:
    """One device's list: its passes with the Steps, Reduces, Sends and Recvs that belong to them.

    `homes` is the device of every stage.
    """
    stages = Counter(homes)
    if len(stages) > 1:
        return list(transported(_reduced(work, passes, device, stages[device]), homes))
    return list(transported(_stepped(work, passes, stages[device]), homes))


def _alternate(work: Work, stage: int, most: int, left: Counter[tuple[str, int]]) -> list[Action]:
    """`left` are the samples of each batch that are still to be trained."""
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
    """A job's Step right behind the last Backward of its batch, on a device that has so many stages."""
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
    """A job's Reduce right behind the last Backward of its batch on a device that has so many stages, and
    there on the first device its Step too.

    On the others the Step comes as late as it may, before the job's next Forward or at the end: until then
    the first device's decision is on its way, and nobody waits for it.
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
    """What another device made is received right before use, and sent there once made."""
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
