"""The output of `weftune plan`: memory on every device, a comparison of ways, and the worth of mechanisms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weftune.cli.plan_machine import train_flags
from weftune.cli.plan_numbers import stage_needs
from weftune.cli.plan_sweeps import SweepOutlook, collapsed, expected_seconds
from weftune.plan.cost.memory import gib
from weftune.report.words import duration_text, plural

if TYPE_CHECKING:
    from weftune.cli.plan import Wanted
    from weftune.jobs.store.scheduler import Admission
    from weftune.plan.outlook.forecast import Ablation, Forecast, Prediction
    from weftune.plan.outlook.shares import ShareOutlook
    from weftune.plan.outlook.streamed import StreamOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun


def show_run(console: Console, run: WholeRun, wanted: Wanted, source: str) -> None:
    """Print the time and memory of the whole run and of each job."""
    totals = wanted.totals
    least = "at least " if any(total.at_least for total in totals.values()) else ""
    whole = "the whole run"
    if any(one.halved for one in wanted.sweeps):
        whole += " if no trial leaves early"
    console.print(
        f"{plural(len(run.ends), 'job')} on {wanted.cluster.name}: {least}{span_text(run.seconds)} for "
        f"{whole}, {gib(run.need_bytes)} at its peak of the {gib(run.budget_bytes)} that it may take of a "
        f"device. Times are {source}.",
        highlight=False,
    )
    trials = {name for one in wanted.sweeps for name in one.listed}
    if others := [name for name in run.ends if name not in trials]:
        console.print(run_table(run, {name: totals[name] for name in totals if name in others}))
    show_sweeps(console, run, wanted.sweeps, totals)
    for sentence in (sentence for one in wanted.sweeps for sentence in one.warnings):
        console.print(f"warning: {sentence}", highlight=False, markup=False, soft_wrap=True)


def show_sweeps(
    console: Console, run: WholeRun, sweeps: Sequence[SweepOutlook], totals: Mapping[str, JobTotal]
) -> None:
    """Print the trials of each sweep as if none were dropped, then the expected time with halving."""
    for one in sweeps:
        console.print(
            run_table(run, {name: totals[name] for name in one.listed}, "trial", f"Sweep {one.name}")
        )
        console.print(one.sentence(), highlight=False, markup=False, soft_wrap=True)
    if any(one.halved or len(one.listed) < one.trials for one in sweeps):
        seconds = span_text(expected_seconds(run, sweeps, totals))
        console.print(f"Expected for the whole run with all of its trials: {seconds}.", highlight=False)


def run_table(
    run: WholeRun, totals: Mapping[str, JobTotal], kind: str = "job", title: str = "The run"
) -> Table:
    table = Table(kind, title=Text(title))
    for title in ("steps", "ends after", "memory of its own"):
        table.add_column(title, justify="right")
    for name, total in totals.items():
        if name in run.ends:
            steps = f"{'≥ ' if total.at_least else ''}{total.steps:,}"
            table.add_row(Text(name), steps, span_text(run.ends[name]), gib(total.state_bytes))
    return table


def span_text(seconds: float) -> str:
    """Format a duration in at most two units: `36 s`, `12 min`, `3 h 20 min`."""
    if seconds < 1:
        return "less than 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def show(console: Console, found: Prediction, wanted: Wanted) -> None:
    flags = train_flags(wanted, found.choice)
    told = f" Train with {flags}." if flags and wanted.asked.chooses else ""
    console.print(
        f"{plural(len(found.window.shapes), 'job')} on {wanted.cluster.name}: they fit, with a token "
        f"capacity of {found.program.capacity:,}. The base is {found.choice.why}.{told}",
        highlight=False,
        markup=False,
    )
    _show_window(console, found)
    show_sampled(console, wanted)
    console.print(stage_table(found, wanted))
    console.print(forecast_table(found.forecast, found.alternatives))


def _show_window(console: Console, found: Prediction) -> None:
    """Print the first window; its seconds only with a profile, since without one a run predicts none."""
    promise = found.window.promise
    time = "" if promise.seconds is None else f"{duration_text(promise.seconds)} and "
    rounds = plural(found.forecast.steps, "round")
    console.print(
        f"The first window, {rounds}: {time}{gib(promise.peak_bytes)}, as the run will promise.",
        highlight=False,
    )


def show_shares(console: Console, found: ShareOutlook, wanted: Wanted, flags: str) -> None:
    console.print(
        f"The base fits each device: train with {flags}, a share of the jobs on each and nothing "
        f"exchanged. {found.tokens_per_second:,.0f} tokens/s are predicted while all are at work.",
        highlight=False,
    )
    show_sampled(console, wanted)
    console.print(share_table(found, wanted))


def show_streams(console: Console, found: StreamOutlook, wanted: Wanted) -> None:
    """Print the plan of a streamed base; the sentence about the base is the one that the run will print."""
    choice, seconds = found.choice, found.forecast.seconds
    where = "read from its files" if choice.mapped else "streamed from the host's memory"
    flags = train_flags(wanted, choice)
    told = f" Train with {flags}." if flags and wanted.asked.pipeline is None else ""
    console.print(
        f"{plural(len(choice.aboard), 'job')} on {wanted.cluster.name}: the base does not fit with a job "
        f"aboard, so it is {where}. A round, a global batch of every job with the longest samples in it, "
        f"takes {seconds:.3g} s; in {choice.unhidden * seconds:.3g} s of them devices wait for the host: "
        f"transfers that compute does not hide, or passes not yet asked for.{told}",
        highlight=False,
    )
    console.print(f"The base is {choice.why}.", highlight=False, markup=False)
    if choice.mapped:
        console.print("How fast the files are is not known here: they are taken to be as fast as the link.")
    show_sampled(console, wanted)
    console.print(stream_table(found, wanted))
    title = "Predicted for such a round, each way with the same token capacity"
    console.print(forecast_table(found.forecast, found.alternatives, title))


def show_sampled(console: Console, wanted: Wanted) -> None:
    if sampled := _collapsed(wanted.sampled, wanted):
        console.print(f"Not tokenised yet, so the first rows stand for all: {', '.join(sampled)}.")


def _collapsed(names: Iterable[str], wanted: Wanted) -> list[str]:
    return collapsed(names, [one.sweep for one in wanted.sweeps])


def show_more(
    console: Console,
    wanted: Wanted,
    admission: Admission,
    sentences: Sequence[str],
    ablations: Sequence[Ablation],
) -> None:
    """Print the jobs that are not admitted, and what was requested besides the plan."""
    trials = {name: one.name for one in wanted.sweeps for name in one.listed}
    for name, reason in admission.waiting.items():
        if name not in trials:
            console.print(f"{name} waits: {reason}.", highlight=False, markup=False)
    for sweep in wanted.sweeps:
        waiting = [name for name in admission.waiting if trials.get(name) == sweep.name]
        if waiting:
            wait = plural(len(waiting), "trial")
            console.print(f"{wait} of {sweep.name} wait until seats get free.", markup=False)
    for name, reason in admission.too_large.items():
        console.print(f"{name} cannot run even alone: {reason}.", highlight=False, markup=False)
    for sentence in sentences:
        console.print(f"- {sentence}", highlight=False, markup=False)
    if ablations:
        console.print(ablation_table(ablations))


def share_table(found: ShareOutlook, wanted: Wanted) -> Table:
    table = Table("device", "jobs", "predicted", "tokens/s", "needs", "may take", title="Shares")
    for number, (share, part) in enumerate(zip(found.shares, found.parts, strict=True)):
        table.add_row(
            f"{number} {_device(wanted, number)}",
            ", ".join(_collapsed(share.jobs, wanted)),
            duration_text(share.seconds),
            f"{part.forecast.tokens_per_second:,.0f}",
            gib(part.window.promise.peak_bytes),
            gib(part.choice.memory.budget),
        )
    return table


def stage_table(found: Prediction, wanted: Wanted) -> Table:
    peak, capacity = gib(found.window.promise.peak_bytes), f"{found.program.capacity:,}"
    caption = (
        f"Needs at most: if every microbatch is filled to the token capacity of {capacity}. With the samples "
        f"of the first window the peak is {peak}."
    )
    table = Table(
        "device", "layers", "needs at most", "may take", title="Memory on every device", caption=caption
    )
    layout, layers = found.choice.layout, wanted.shape.layers
    needs = stage_needs(found)
    for number, (stage, need) in enumerate(zip(layout.stages, needs, strict=True)):
        first, last = stage.start == 0, stage.stop == layers
        table.add_row(
            f"{number} {_device(wanted, number)}",
            layers_text(stage.start + (not first), stage.stop + 1 + last, layers),
            gib(need),
            gib(found.choice.memory.budget),
        )
    return table


def stream_table(found: StreamOutlook, wanted: Wanted) -> Table:
    table = Table("device", "stages", "resident", "slots", "needs", "may take", "host needs", title="Memory")
    choice, layout = found.choice, found.choice.layout
    for worker in range(found.workers):
        own = layout.on(worker)
        table.add_row(
            f"{worker} {_device(wanted, worker)}",
            str(len(own.own)),
            str(len(own.own) - len(own.streamed)),
            str(own.slots),
            gib(choice.bytes),
            gib(found.case.device.budget),
            gib(choice.host_bytes) if worker == 0 else "",
        )
    return table


def _device(wanted: Wanted, number: int) -> str:
    """Return the name of a worker's device; several workers may share the last one."""
    devices = wanted.cluster.devices
    return devices[min(number, len(devices) - 1)].name


def layers_text(start: int, stop: int, layers: int) -> str:
    """Format a range of layers, in which 0 is the embedding and `layers` + 1 the head."""
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
    title: str = "Predicted for the first window, on the same devices",
) -> Table:
    several = chosen.devices > 1
    waits = ["bubbles"] if several else []
    table = Table("way", "step", "tokens/s", *waits, "microbatches", "capacity", "takes", title=title)
    for one in (chosen, *alternatives):
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
