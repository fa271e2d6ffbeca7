"""A streamed outlook in sentences: one for each decision, with the numbers that it hangs on."""

from __future__ import annotations

from weftune.plan.cost.memory import gib
from weftune.plan.outlook.one_device import SingleOutlook
from weftune.plan.outlook.streamed import SEQUENTIAL, StreamOutlook


def explain_streams(found: StreamOutlook) -> list[str]:
    return [
        f"Times are {found.source}.",
        "Streamed, because the base does not fit the cluster with a job aboard: its layers lie in the host's "
        "memory and come in stages when needed. This forecast is Mobius's; `weftune train --pipeline "
        f"{len(found.ground.cluster.devices)} --gpu-memory` chooses a cut of its own.",
        _capacity(found),
        "Every layer is made again in the backward: of a microbatch a stage keeps its input only.",
        _cut(found),
        _mapping(found),
        _uploads(found),
        f"Packing: {found.run.merged.why()}.",
    ]


def explain_single(found: SingleOutlook) -> list[str]:
    """The cut itself is told by the choice's own sentence."""
    choice, case = found.choice, found.case
    seconds = found.forecast.seconds
    others = ", ".join(f"{one.name} {one.seconds / seconds - 1:+.1%}" for one in found.alternatives)
    stay, travel = "Adapters stay on the device.", "Adapters live in host memory and travel with their stage."
    keep, offload = "Inputs of stages stay there.", "Inputs of stages wait in host memory for the way back."
    return [
        f"Times are {found.source}.",
        f"Streamed, since the base does not fit the device with a job aboard. `weftune train` finds the same "
        f"cut for the same {len(case.jobs)} of the jobs by the same search; others would take: {others}.",
        f"Token capacity {choice.capacity:,}: the device then needs {gib(choice.device_bytes)} of the "
        f"{gib(case.device.budget)} that may be taken, the host {gib(choice.host_bytes)}.",
        "Every layer is made again in the backward, save those of the last stage: of a microbatch a stage "
        "keeps its input only.",
        f"{travel if case.travels else stay} {offload if case.offloads else keep}",
        f"Uploads: {gib(found.uploaded_bytes)} of layers a round; the device waits for the host in "
        f"{choice.unhidden:.1%} of it.",
    ]


def _capacity(found: StreamOutlook) -> str:
    layout = found.chosen.layout
    return (
        f"Token capacity {found.forecast.capacity:,}: the fullest device then needs "
        f"{gib(max(layout.need_bytes))} of the {gib(min(layout.budgets))} that may be taken."
    )


def _cut(found: StreamOutlook) -> str:
    chosen = found.chosen
    sizes = [stage.stop - stage.start for stage in chosen.streams.stages]
    others = [one for one in found.tried if one.mapping == chosen.mapping and one.cut != chosen.cut]
    slower = "; ".join(f"{one.cut} take {one.seconds / chosen.seconds - 1:+.1%}" for one in others)
    return (
        f"{len(sizes)} stages of {min(sizes)} to {max(sizes)} layers, {sum(chosen.streams.resident)} of them "
        f"resident ({chosen.cut}){': ' + slower if slower else ''}."
    )


def _mapping(found: StreamOutlook) -> str:
    chosen, roots = found.chosen, found.ground.cluster.roots
    if len(roots) == 1:
        return f"Mapping: stage j on device j mod {roots[0]}, as all devices hang under one root complex."
    order = ", ".join(map(str, chosen.streams.order))
    others = [one for one in found.tried if one.cut == chosen.cut and one.mapping != chosen.mapping]
    slower = "; ".join(f"{one.mapping} takes {one.seconds / chosen.seconds - 1:+.1%}" for one in others)
    why = f" ({slower})" if slower else ""
    name = "in sequence" if chosen.mapping == SEQUENTIAL else f"by {chosen.mapping}"
    return f"Mapping {name}: stages take turns on devices {order}{why}."


def _uploads(found: StreamOutlook) -> str:
    chosen, steps = found.chosen, found.forecast.steps
    return (
        f"Uploads: {gib(chosen.uploaded_bytes / steps)} a step, of which {chosen.unhidden / steps:.3g} s are "
        f"not hidden behind compute ({chosen.unhidden / chosen.seconds:.1%} of the step)."
    )
