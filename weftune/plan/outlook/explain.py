"""A plan in sentences: one for each decision, with the numbers that it depends on."""

from __future__ import annotations

from weftune.plan.cost.memory import gib
from weftune.plan.outlook.forecast import Prediction, shared_groups
from weftune.plan.outlook.streamed import StreamOutlook


def explain(found: Prediction, source: str) -> list[str]:
    """Return the sentences for a base that is resident on its devices."""
    sentences = [f"Times are {source}.", _capacity(found), _recompute(found), _stages(found), _groups(found)]
    return [*sentences, _optimizer(found)] if found.choice.layout.optimizer_offloaded else sentences


def _capacity(found: Prediction) -> str:
    choice, capacity = found.choice, found.program.capacity
    smaller = "" if capacity >= choice.capacity else f", since {choice.capacity:,} does not fit"
    need = found.window.promise.peak_bytes
    return (
        f"Token capacity {capacity:,}{smaller}: the first window needs {gib(need)} of the "
        f"{gib(choice.memory.budget)} that may be taken of the fullest device."
    )


def _recompute(found: Prediction) -> str:
    recompute = found.program.recompute
    if recompute.layers:
        return f"{recompute.layers} layers are recomputed in the backward: otherwise memory is short."
    if recompute.outputs:
        return "Outputs of norms and activations are recomputed in the backward: otherwise memory is short."
    return "Nothing is recomputed in the backward: memory suffices."


def _stages(found: Prediction) -> str:
    stages = found.choice.layout.stages
    if len(stages) == 1:
        return "One stage: the whole base fits a device."
    counts = " + ".join(str(stage.count) for stage in stages)
    return f"{len(stages)} stages of {counts} layers: the slowest is as fast as can be, both ends counted."


def _groups(found: Prediction) -> str:
    groups = shared_groups(found.program)
    names = "; ".join(" + ".join(group) for group in groups)
    microbatches = f"{found.forecast.microbatches} microbatches in {found.forecast.steps} rounds"
    return f"Jobs that share microbatches: {names}. {microbatches}."


def _optimizer(found: Prediction) -> str:
    choice = found.choice
    return (
        f"Master weights and moments live in host memory, which needs {gib(choice.host_bytes)}: they are "
        "copied to the device for Steps and back, beside passes of other jobs; the adapter weights that "
        "passes read and their gradients stay on the device."
    )


def explain_streams(found: StreamOutlook, source: str) -> list[str]:
    """Return the sentences for a streamed base; the choice's own sentence describes the cut."""
    choice, layout = found.choice, found.choice.layout
    seconds = found.forecast.seconds
    others = ", ".join(f"{one.name} {one.seconds / seconds - 1:+.1%}" for one in found.alternatives)
    adapters = "live in host memory and travel with their stage" if layout.travels else "stay on the device"
    inputs = "wait in host memory for the way back" if layout.offloads else "stay there"
    mapping = f" Stage j is on device j mod {found.workers}." if found.workers > 1 else ""
    return [
        f"Times are {source}.",
        "Streamed, since the base does not fit with a job. `weftune train` finds the same cut for the "
        f"same {len(choice.aboard)} of the jobs by the same search; others would take: {others}.{mapping}",
        f"Token capacity {choice.capacity:,}: the fullest device then needs {gib(choice.bytes)} of the "
        f"{gib(found.case.device.budget)} that may be taken, the host {gib(choice.host_bytes)}.",
        "Every layer is recomputed in the backward, save those of the last stage: of a microbatch a stage "
        "keeps its input only.",
        f"Adapters {adapters}. Inputs of stages {inputs}.",
        f"Uploads: {gib(found.uploaded_bytes)} of layers per round; devices wait for the host in "
        f"{choice.unhidden:.1%} of it.",
    ]
