"""An outlook in sentences: one for each decision, with the numbers that it hangs on."""

from __future__ import annotations

from weftune.plan.cost.memory import gib
from weftune.plan.outlook.outlook import Outlook


def explain(found: Outlook) -> list[str]:
    return [
        f"Times are {found.source}.",
        _capacity(found),
        _again(found),
        _stages(found),
        _groups(found),
        f"Packing: {found.run.merged.why()}.",
        _order(found),
    ]


def _capacity(found: Outlook) -> str:
    layout = found.layout
    tight = max(
        range(len(layout.stages)), key=lambda number: found.need_bytes[number] / layout.budgets[number]
    )
    which = f"device {tight}, the fullest," if len(layout.stages) > 1 else "the device"
    return (
        f"Token capacity {layout.capacity:,}{_why_smaller(found)}: {which} then needs "
        f"{gib(found.need_bytes[tight])} of the {gib(layout.budgets[tight])} that may be taken."
    )


def _again(found: Outlook) -> str:
    recompute = found.ground.recompute
    if recompute.layers:
        return (
            "Every layer is made again in the backward, which costs its forward: otherwise memory is short."
        )
    if recompute.outputs:
        return "Outputs of norms and activations are made again in the backward: otherwise memory is short."
    return "Nothing is made again in the backward: memory suffices."


def _why_smaller(found: Outlook) -> str:
    capacity, most = found.layout.capacity, found.ground.most
    if capacity >= most:
        return ""
    if most not in found.by_capacity:
        return f", since {most:,} does not fit" + ("" if len(found.by_capacity) == 1 else " or is slower")
    longer = found.by_capacity[most] / found.by_capacity[capacity] - 1
    return f", since {most:,} takes {longer:.1%} longer in all"


def _stages(found: Outlook) -> str:
    stages = found.layout.stages
    if len(stages) == 1:
        return "One stage: there is one device, and the whole base fits on it."
    slowest = max(stages, key=lambda stage: stage.seconds)
    even = sum(stage.seconds for stage in stages) / len(stages)
    counts = ", ".join(str(stage.stop - stage.start) for stage in stages)
    return (
        f"{len(stages)} stages of {counts} layers, embedding and head counted as one each: the slowest takes "
        f"{slowest.seconds / even - 1:.1%} longer for a full microbatch than the average."
    )


def _groups(found: Outlook) -> str:
    groups = "; ".join(" + ".join(group) for group in found.scheme.groups)
    if len(found.scheme.groups) == 1:
        alone = len(found.layout.stages) == 1
        why = "one device has no waits" if alone else "their rounds are too short to take turns"
        return f"Fusion groups: all jobs in one, {groups}; {why}."
    return f"Fusion groups by {found.candidate.mechanism}: {groups}. {_upper(found.candidate.reason)}."


def _order(found: Outlook) -> str:
    order = found.scheme.order
    if len(found.layout.stages) == 1:
        return "Order: every microbatch forward and backward at once, as one device has nothing to wait for."
    rest = [one for one in found.tried if (one.candidate, one.scheme.order) != (found.candidate, order)]
    if not rest:
        return f"Order: {order}; no other way could be faster, by the least time that its stages need."
    second = min(rest, key=lambda one: one.seconds)
    slower = second.seconds / found.forecast.seconds - 1
    return (
        f"Order: {order}; the next best of {len(found.tried)} ways simulated at this capacity, "
        f"{second.candidate.mechanism} with {second.scheme.order}, takes {slower:.1%} longer."
    )


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
