"""Explanation of a plan: a sentence for each decision, with the numbers on which the decision depends."""

from __future__ import annotations

from weftune.plan.cost.memory import format_bytes
from weftune.plan.outlook.forecast import Prediction, shared_groups
from weftune.plan.outlook.streamed import StreamOutlook
from weftune.plan.program.program import Recompute


def explain_resident_plan(prediction: Prediction, source: str) -> list[str]:
    """Return the sentences that explain a plan whose base stays on the devices. `source` describes where the
    predicted times come from."""
    choice, program, forecast = prediction.choice, prediction.program, prediction.forecast
    smaller = "" if program.capacity >= choice.capacity else f", since {choice.capacity:,} does not fit"
    stages, cut = choice.layout.stages, "One stage: the whole base fits a device."
    if len(stages) > 1:
        counts = " + ".join(str(stage.layer_count) for stage in stages)
        cut = f"{len(stages)} stages of {counts} layers: the slowest is as fast as can be, both ends counted."
    elif (shards := choice.layout.shards) > 1:
        cut = f"One stage, with every layer divided among {shards} devices."
    groups = "; ".join(" + ".join(group) for group in shared_groups(program))
    sentences = [
        f"Times are {source}.",
        f"Token capacity {program.capacity:,}{smaller}: the first window needs "
        f"{format_bytes(prediction.window.prediction.peak_bytes)} of the "
        f"{format_bytes(choice.memory.budget_bytes)} that may be taken "
        "of the fullest device.",
        recomputed_sentence(program.recompute),
        cut,
        f"Jobs that share microbatches: {groups}. {forecast.microbatches} microbatches in {forecast.steps} "
        "rounds.",
    ]
    if choice.layout.offloads_optimizer:
        sentences.append(
            "Master weights and moments live in host memory, which needs "
            f"{format_bytes(choice.host_bytes)}: they are "
            "copied to the device for Steps and back, beside passes of other jobs; the adapter weights that "
            "passes read and their gradients stay on the device."
        )
    return sentences


def recomputed_sentence(recompute: Recompute) -> str:
    """Return a sentence for the user that says which activations the backward recomputes."""
    if not (recompute.recomputed_layers or recompute.recomputes_outputs):
        return "Nothing is recomputed in the backward: memory suffices."
    what = "Outputs of norms and activations are recomputed in the backward"
    if recompute.recomputed_layers:
        what = f"{recompute.recomputed_layers} layers are recomputed in the backward"
    if recompute.tile_rows:
        what += f", in tiles of up to {recompute.tile_rows:,} rows"
        if recompute.recomputed_layers:
            what += (
                ", but not their attention" if recompute.keeps_attention else ", and so is their attention"
            )
    if recompute.offloaded_layers:
        what += f"; {recompute.offloaded_layers} of them keep what they need for that in host memory"
    return f"{what}: otherwise memory is short."


def explain_streamed_plan(outlook: StreamOutlook, source: str) -> list[str]:
    """Return the sentences that explain a plan whose base is streamed from host memory, except for the
    sentence about its stages. `source` describes where the predicted times come from."""
    choice, layout = outlook.choice, outlook.choice.layout
    seconds = outlook.forecast.seconds
    others = ", ".join(f"{one.name} {one.seconds / seconds - 1:+.1%}" for one in outlook.alternatives)
    adapters = (
        "live in host memory and travel with their stage" if layout.adapters_travel else "stay on the device"
    )
    inputs = "wait in host memory for the way back" if layout.offloads_inputs else "stay there"
    place = "device" if layout.shards == 1 else f"the {layout.shards} devices of worker"
    mapping = f" Stage j is on {place} j mod {outlook.workers}." if outlook.workers > 1 else ""
    if layout.shards > 1:
        mapping += f" Every layer is divided among {layout.shards} devices."
    return [
        f"Times are {source}.",
        "Streamed, since the base does not fit with a job. `weftune train` finds the same cut for the "
        f"same {len(choice.attached_jobs)} of the jobs by the same search; others would take: "
        f"{others}.{mapping}",
        f"Token capacity {choice.capacity:,}: the fullest device then needs "
        f"{format_bytes(choice.peak_device_bytes)} of the "
        f"{format_bytes(outlook.case.device.budget_bytes)} that may be taken, the host "
        f"{format_bytes(choice.host_bytes)}.",
        "Every layer is recomputed in the backward, save those of the last stage: of a microbatch a stage "
        "keeps its input only.",
        f"Adapters {adapters}. Inputs of stages {inputs}.",
        f"Uploads: {format_bytes(outlook.uploaded_bytes)} of layers per round; devices wait for the host in "
        f"{choice.waiting_fraction:.1%} of it.",
    ]
