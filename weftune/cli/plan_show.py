"""What `weftune plan` prints: memory on every device, the ways compared, and what each mechanism is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weftune.plan.cost.memory import gib
from weftune.report.words import duration_text, plural

if TYPE_CHECKING:
    from weftune.jobs.store.scheduler import Admission
    from weftune.plan.outlook.ablate import Ablation
    from weftune.plan.outlook.forecast import Forecast
    from weftune.plan.outlook.one_device import SingleOutlook
    from weftune.plan.outlook.outlook import Outlook
    from weftune.plan.outlook.split import ShareOutlook
    from weftune.plan.outlook.streamed import StreamOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun

PIPELINES = ("1F1B per job", "mLoRA")
"""Ways that say nothing new of a single device."""


def show_run(
    console: Console, cluster: str, run: WholeRun, totals: Mapping[str, JobTotal], source: str
) -> None:
    """First of all: how long, and how much memory, for all and for each."""
    least = "at least " if any(total.at_least for total in totals.values()) else ""
    console.print(
        f"{plural(len(run.ends), 'job')} on {cluster}: {least}{span_text(run.seconds)} for the whole run, "
        f"{gib(run.need_bytes)} of the {gib(run.budget_bytes)} that it may take of a device. "
        f"Times are {source}.",
        highlight=False,
    )
    console.print(run_table(run, totals))


def run_table(run: WholeRun, totals: Mapping[str, JobTotal]) -> Table:
    table = Table("job", title="The run")
    for title in ("steps", "ends after", "memory of its own"):
        table.add_column(title, justify="right")
    for name, total in totals.items():
        if name in run.ends:
            steps = f"{'≥ ' if total.at_least else ''}{total.steps:,}"
            table.add_row(Text(name), steps, span_text(run.ends[name]), gib(total.state_bytes))
    return table


def span_text(seconds: float) -> str:
    """`36 s`, `12 min`, `3 h 20 min`: the two units that matter."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def show(console: Console, found: Outlook, sampled: Sequence[str]) -> None:
    console.print(
        f"{plural(len(found.jobs), 'job')} on {found.ground.cluster.name}: they fit, with a token capacity "
        f"of {found.layout.capacity:,}.",
        highlight=False,
    )
    show_sampled(console, sampled)
    console.print(stage_table(found))
    groups = "; ".join(" + ".join(group) for group in found.scheme.groups)
    console.print(f"Fusion groups: {groups}", highlight=False, markup=False)
    console.print(forecast_table(found.forecast, found.alternatives))


def show_shares(console: Console, found: ShareOutlook, cut: Outlook) -> None:
    """First, since it is what training prefers; the cut base is shown below for comparison."""
    count, rate = len(found.shares), found.tokens_per_second
    more = rate / cut.forecast.tokens_per_second
    console.print(
        f"The base fits each device: train with --gpus {count}, a share of the jobs on each and nothing "
        f"exchanged. {rate:,.0f} tokens/s are predicted while all are at work, {more:.2f} times those of the "
        f"base cut into {len(cut.layout.stages)} stages, which follows.",
        highlight=False,
    )
    console.print(share_table(found))


def show_streams(console: Console, found: StreamOutlook, sampled: Sequence[str]) -> None:
    chosen, steps = found.chosen, found.forecast.steps
    console.print(
        f"{plural(len(found.jobs), 'job')} on {found.ground.cluster.name}: the base does not fit with a job "
        f"aboard, so it is streamed from the host's memory in {len(chosen.streams.stages)} stages, with a "
        f"token capacity of {found.forecast.capacity:,}. A step takes {found.forecast.step_seconds:.3g} s, "
        f"of which {chosen.unhidden / steps:.3g} s are transfers that compute does not hide.",
        highlight=False,
    )
    show_sampled(console, sampled)
    console.print(stream_table(found))
    console.print(forecast_table(found.forecast, found.alternatives))


def show_single(console: Console, found: SingleOutlook, sampled: Sequence[str]) -> None:
    """The base's own sentence is the one that the run will say."""
    choice = found.choice
    where = "read from its files" if choice.mapped else "streamed from the host's memory"
    console.print(
        f"{plural(len(found.jobs), 'job')} on {found.ground.cluster.name}: the base does not fit with a job "
        f"aboard, so it is {where}. A round, a global batch of every job with the longest samples in it, "
        f"takes {choice.step_seconds:.3g} s; in {choice.unhidden * choice.step_seconds:.3g} s of them the "
        f"device waits for the host: transfers that compute does not hide, or passes not yet asked for.",
        highlight=False,
    )
    console.print(f"The base is {choice.why}.", highlight=False, markup=False)
    if choice.mapped:
        console.print("How fast the files are is not known here: they are taken to be as fast as the link.")
    show_sampled(console, sampled)
    console.print(single_table(found))
    title = "Predicted for such a round, each way with the same token capacity"
    console.print(forecast_table(found.forecast, found.alternatives, title))


def show_sampled(console: Console, sampled: Sequence[str]) -> None:
    if sampled:
        console.print(f"Not tokenised yet, so the first rows stand for all: {', '.join(sampled)}.")


def show_more(
    console: Console, admission: Admission, sentences: Sequence[str], ablations: Sequence[Ablation]
) -> None:
    """Who is not aboard, and what was asked for beside the plan."""
    for name, reason in admission.waiting.items():
        console.print(f"{name} waits: {reason}.", highlight=False, markup=False)
    for name, reason in admission.too_large.items():
        console.print(f"{name} cannot run even alone: {reason}.", highlight=False, markup=False)
    for sentence in sentences:
        console.print(f"- {sentence}", highlight=False, markup=False)
    if ablations:
        console.print(ablation_table(ablations))


def share_table(found: ShareOutlook) -> Table:
    table = Table("device", "jobs", "predicted", "tokens/s", "needs", "may take", title="Shares")
    for number, (share, part) in enumerate(zip(found.shares, found.parts, strict=True)):
        table.add_row(
            f"{number} {part.ground.cluster.devices[0].name}",
            ", ".join(share.jobs),
            duration_text(share.seconds),
            f"{part.forecast.tokens_per_second:,.0f}",
            gib(part.need_bytes[0]),
            gib(part.layout.budgets[0]),
        )
    return table


def stage_table(found: Outlook) -> Table:
    table = Table("device", "layers", "needs", "may take", title="Memory on every device")
    layout = found.layout
    for number, stage in enumerate(layout.stages):
        table.add_row(
            f"{number} {found.ground.cluster.devices[number].name}",
            layers_text(stage.start, stage.stop, found.ground.shape.layers),
            gib(found.need_bytes[number]),
            gib(layout.budgets[number]),
        )
    return table


def stream_table(found: StreamOutlook) -> Table:
    table = Table(
        "device", "stages", "layers", "resident", "needs", "may take", title="Memory on every device"
    )
    streams, layout = found.chosen.streams, found.chosen.layout
    for number, device in enumerate(found.ground.cluster.devices):
        own = [stage for stage, home in enumerate(streams.homes) if home == number]
        table.add_row(
            f"{number} {device.name}",
            str(len(own)),
            str(sum(streams.stages[stage].stop - streams.stages[stage].start for stage in own)),
            str(sum(streams.resident[stage] for stage in own)),
            gib(layout.need_bytes[number]),
            gib(layout.budgets[number]),
        )
    return table


def single_table(found: SingleOutlook) -> Table:
    table = Table("device", "stages", "resident", "slots", "needs", "may take", "host needs", title="Memory")
    cut = found.choice.cut
    table.add_row(
        found.ground.cluster.devices[0].name,
        str(len(cut.stages)),
        str(sum(stage.resident for stage in cut.stages)),
        str(cut.slots[0]),
        gib(found.choice.device_bytes),
        gib(found.case.device.budget),
        gib(found.choice.host_bytes),
    )
    return table


def layers_text(start: int, stop: int, layers: int) -> str:
    """Places 0 and `layers` + 1 are the embedding and the head."""
    inside = range(max(start, 1), min(stop, layers + 1))
    parts = [
        "embedding" if start == 0 else "",
        f"{inside[0] - 1}–{inside[-1] - 1}" if inside else "",
        "head" if stop == layers + 2 else "",
    ]
    return ", ".join(filter(None, parts))


def forecast_table(
    chosen: Forecast,
    alternatives: Sequence[Forecast],
    title: str = "Predicted, each way with the token capacity that suits it best",
) -> Table:
    several = chosen.devices > 1
    waits = ["bubbles"] if several else []
    table = Table("way", "step", "tokens/s", *waits, "microbatches", "capacity", "takes", title=title)
    for one in (chosen, *alternatives):
        if several or one.name not in PIPELINES:
            table.add_row(
                one.name,
                f"{one.step_seconds:.3g} s",
                f"{one.tokens_per_second:,.0f}",
                *([f"{one.bubbles:.1%}"] if several else []),
                f"{one.microbatches}",
                f"{one.capacity:,}",
                _with_room(f"{one.seconds / chosen.seconds:.2f}×", one),
            )
    return table


def ablation_table(rows: Sequence[Ablation]) -> Table:
    several = any(row.forecast.devices > 1 for row in rows)
    titles = ("mechanism", "instead", "step", "costs", *(["bubbles"] if several else []))
    table = Table(*titles, title="What each mechanism is worth")
    for row in sorted(rows, key=lambda one: one.added):
        one = row.forecast
        name = f"left out: {row.mechanism}" if row.added else row.mechanism
        cost = _with_room(f"{row.cost:+.1%}", one)
        bubbles = [f"{one.bubbles:.1%}"] if several else []
        table.add_row(name, row.instead, f"{one.step_seconds:.3g} s", cost, *bubbles)
    return table


def _with_room(text: str, one: Forecast) -> str:
    return text if one.fits else f"{text}, and more memory than there is"
