"""Checks that a streamed Program keeps to its slots: one stage per slot, present whenever it is used."""

from __future__ import annotations

from weftune.plan.program.layout import OnWorker
from weftune.plan.program.program import Backward, Evaluate, Evict, Forward, IllegalProgram, Load, Program


def check_slots(program: Program, part: OnWorker) -> None:
    """Raise IllegalProgram unless every streamed stage of a worker has its slot to itself while it is
    present.

    The program is assumed to pass `check`. The rules: resident stages are neither loaded nor evicted; a Load
    finds its slot empty; a pass and an Evict find their stage in its slot; the window begins and ends with
    `part.waiting` in the slots.
    """
    if len(program.stages) != len(part.stages):
        raise IllegalProgram(
            f"{len(program.stages)} stages are planned, but the layout has {len(part.stages)}"
        )
    slot_of = {stage: part.slot(stage) for stage in part.streamed}
    waiting = {slot_of[stage]: stage for stage in part.waiting}
    held = dict(waiting)
    for action in program.devices[part.worker]:
        match action:
            case Load(stage) | Evict(stage) if stage not in slot_of:
                raise IllegalProgram(f"{action} moves a resident stage")
            case Load(stage):
                if slot_of[stage] in held:
                    raise IllegalProgram(f"{action} finds stage {held[slot_of[stage]]} in its slot")
                held[slot_of[stage]] = stage
            case Evict(stage):
                if held.get(slot_of[stage]) != stage:
                    raise IllegalProgram(f"{action} gives up a stage that is not in its slot")
                del held[slot_of[stage]]
            case Forward(_, stage) | Backward(_, stage) | Evaluate(_, stage):
                if stage in slot_of and held.get(slot_of[stage]) != stage:
                    raise IllegalProgram(f"{action} uses a stage that is not in its slot")
    if held != waiting:
        raise IllegalProgram("the slots end with other stages than those that wait for the next window")
