"""The text output of `weftune plan`: the run, memory per device, alternatives, benefits of optimisations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weftune.cli.plan_predict import Plan, device_needs_bytes
from weftune.launch.choice import division_sentence
from weftune.launch.plan_case import PlanCase
from weftune.launch.plan_sweeps import SweepOutlook, collapse_trials, expected_seconds
from weftune.plan.cost.memory import format_bytes
from weftune.plan.layout.division import SHOWN
from weftune.plan.outlook.forecast import Ablation, Forecast, Prediction, ShareOutlook
from weftune.plan.outlook.streamed import StreamOutlook
from weftune.plan.outlook.whole_run import JobTotal, WholeRun
from weftune.report.words import count_noun, duration_text


def show_plan(console: Console, plan: Plan) -> None:
    _show_plan_of_run(console, plan)
    if plan.shares is not None:
        _show_shares(console, plan, plan.shares)
    elif isinstance(plan.outlook, Prediction):
        _show_resident_plan(console, plan, plan.outlook)
    else:
        _show_streamed_plan(console, plan, plan.outlook)
    if plan.case.has_several_devices:
        _show_candidates(console, plan)
    _show_waiting_jobs(console, plan)
    for sentence in plan.sentences:
        console.print(f"- {sentence}", highlight=False, markup=False)
    if plan.ablations:
        console.print(ablation_table(plan.ablations, plan.measured_step_seconds))


def _show_plan_of_run(console: Console, plan: Plan) -> None:
    """Print the time and memory of the whole run and of each job."""
    case, run, totals = plan.case, plan.run, plan.case.totals
    least = "at least " if any(total.is_lower_bound for total in totals.values()) else ""
    whole = "the whole run"
    if any(one.has_halving for one in case.sweeps):
        whole += " if no trial leaves early"
    console.print(
        f"{count_noun(len(run.end_seconds), 'job')} on {case.cluster.name}: {least}"
        f"{format_span(run.seconds)} for {whole}, and a peak of {format_bytes(run.need_bytes)} of the "
        f"{format_bytes(run.budget_bytes)} available on each device. Times are {plan.source}.",
        highlight=False,
    )
    trials = {name for one in case.sweeps for name in one.known_trials}
    if others := {
        name: total for name, total in totals.items() if name in run.end_seconds and name not in trials
    }:
        console.print(run_table(run, others))
    show_sweeps(console, run, case.sweeps, totals)
    if plan.shares is not None and any(one.has_halving for one in case.sweeps):
        console.print("Shares wait for one another at every rung, which is not counted.", highlight=False)
    for sentence in (sentence for one in case.sweeps for sentence in one.warnings):
        console.print(f"warning: {sentence}", highlight=False, markup=False, soft_wrap=True)


def show_sweeps(
    console: Console, run: WholeRun, sweeps: Sequence[SweepOutlook], job_totals: Mapping[str, JobTotal]
) -> None:
    """Print when each trial (job) of the sweeps ends if no trial is dropped, and the expected time of the run
    if successive halving drops trials."""
    for one in sweeps:
        listed = {name: job_totals[name] for name in one.known_trials}
        console.print(run_table(run, listed, "trial", f"Sweep {one.name}"))
        console.print(one.sentence(), highlight=False, markup=False, soft_wrap=True)
    if any(one.has_halving or len(one.known_trials) < one.trials for one in sweeps):
        seconds = format_span(expected_seconds(run, sweeps, job_totals))
        console.print(f"Expected for the whole run with all of its trials: {seconds}.", highlight=False)


def run_table(
    run: WholeRun, job_totals: Mapping[str, JobTotal], kind: str = "job", title: str = "The run"
) -> Table:
    table = Table(kind, title=Text(title))
    for title in ("steps", "ends after", "own memory"):
        table.add_column(title, justify="right")
    for name, total in job_totals.items():
        if name in run.end_seconds:
            steps = f"{'≥ ' if total.is_lower_bound else ''}{total.steps:,}"
            table.add_row(
                Text(name), steps, format_span(run.end_seconds[name]), format_bytes(total.state_bytes)
            )
    return table


def format_span(seconds: float) -> str:
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


def _flags_sentence(plan: Plan) -> str:
    """Return the sentence that names the flags for `weftune train`; empty if the user already gave them."""
    options = plan.case.options
    chosen = plan.flags and options.pipeline is None and options.gpus is None
    return f" Train with {plan.flags}." if chosen else ""


def _show_resident_plan(console: Console, plan: Plan, prediction: Prediction) -> None:
    console.print(
        f"{count_noun(len(plan.window.shapes), 'job')} on {plan.case.cluster.name}: they fit, with a token "
        f"capacity of {prediction.program.capacity:,}. The base is "
        f"{plan.choice.reason}.{_flags_sentence(plan)}",
        highlight=False,
        markup=False,
    )
    # The seconds are known only with a profile: without one, a run predicts no time.
    expected, rounds = plan.window.prediction, count_noun(prediction.forecast.steps, "round")
    time = "" if expected.seconds is None else f"{duration_text(expected.seconds)} and "
    console.print(
        f"Predicted for the first window of {rounds}: {time}{format_bytes(expected.peak_bytes)}. The run "
        "records the same prediction.",
        highlight=False,
    )
    _show_sampling_note(console, plan.case)
    console.print(stage_table(prediction, plan.case))
    console.print(forecast_table(prediction.forecast, prediction.alternatives))


def _show_shares(console: Console, plan: Plan, outlook: ShareOutlook) -> None:
    workers = plan.choice.machine.division.workers_per_share
    owner = "device" if workers == 1 else f"team of {workers} devices"
    console.print(
        f"The base fits each {owner}: train with {plan.flags}, a share of the jobs on each and "
        f"nothing exchanged. {outlook.tokens_per_second:,.0f} tokens per second are predicted while all "
        "devices work.",
        highlight=False,
    )
    _show_sampling_note(console, plan.case)
    table = Table("device", "jobs", "predicted", "tokens/s", "needs", "available", title="Shares")
    for number, (share, part) in enumerate(zip(outlook.shares, outlook.parts, strict=True)):
        table.add_row(
            _device_text(plan.case, number),
            ", ".join(_collapse_trial_names(share.jobs, plan.case)),
            duration_text(share.seconds),
            f"{part.forecast.tokens_per_second:,.0f}",
            format_bytes(part.window.prediction.peak_bytes),
            format_bytes(part.choice.memory.budget_bytes),
        )
    console.print(table)


def _show_candidates(console: Console, plan: Plan) -> None:
    """Print the fastest layouts (ways to divide the model and the jobs among the devices), and why the first
    of them is chosen."""
    sentence = division_sentence(plan.case, plan.choice)
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    if not plan.choice.candidates:
        return
    columns = ("options", "tokens/s", "needs", "idle", "capacity", "limited by")
    table = Table(*columns, title="Fastest ways to divide the devices, predicted for the first window")
    for one in plan.choice.candidates[:SHOWN]:
        table.add_row(
            one.division.flags + (" (microbatches overlap)" if one.division.overlaps else ""),
            f"{one.tokens_per_second:,.0f}",
            format_bytes(one.needs_bytes),
            f"{one.idle_fraction:.1%}",
            f"{one.capacity:,}",
            one.limited_by,
        )
    console.print(table)


def _show_streamed_plan(console: Console, plan: Plan, outlook: StreamOutlook) -> None:
    """Print the plan for a base that is streamed to the devices from host memory or from its files."""
    choice, seconds = plan.choice, outlook.forecast.seconds
    source = "read from its files" if choice.reads_weight_files else "streamed from host memory"
    console.print(
        f"{count_noun(len(choice.attached_jobs), 'job')} on {plan.case.cluster.name}: the base does not fit "
        "together "
        f"with a job, so it is {source}. A round (a global batch of every job, with the longest samples) "
        f"takes {seconds:.3g} s; in {choice.waiting_fraction * seconds:.3g} s of them devices wait for the "
        "host: "
        f"transfers that compute does not hide, or passes not yet launched.{_flags_sentence(plan)}",
        highlight=False,
    )
    console.print(f"The base is {choice.reason}.", highlight=False, markup=False)
    if choice.reads_weight_files:
        console.print("The speed of the files is not known here; it is assumed to be that of the link.")
    _show_sampling_note(console, plan.case)
    table = Table("device", "stages", "resident", "slots", "needs", "available", "host needs", title="Memory")
    for number in range(outlook.forecast.devices):
        own = choice.layout.for_worker(number // choice.layout.shards)
        table.add_row(
            _device_text(plan.case, number),
            str(len(own.own_stages)),
            str(len(own.own_stages) - len(own.streamed_stages)),
            str(own.slot_count),
            format_bytes(choice.peak_device_bytes),
            format_bytes(outlook.case.device.budget_bytes),
            format_bytes(choice.host_bytes) if number == 0 else "",
        )
    console.print(table)
    title = "Predicted for such a round, with the same token capacity"
    console.print(forecast_table(outlook.forecast, outlook.alternatives, title))


def _show_sampling_note(console: Console, case: PlanCase) -> None:
    if sampled := _collapse_trial_names((one.name for one in case.jobs if one.is_sampled), case):
        console.print(f"Not tokenised yet, and estimated from the first rows: {', '.join(sampled)}.")


def _show_waiting_jobs(console: Console, plan: Plan) -> None:
    """Print the jobs that are not admitted when the run starts, with the reasons."""
    sweeps, admission = plan.case.sweeps, plan.admission
    trials = {name: one.name for one in sweeps for name in one.known_trials}
    for name, reason in admission.wait_reasons.items():
        if name not in trials:
            console.print(f"{name} waits: {reason}.", highlight=False, markup=False)
    for sweep in sweeps:
        if waiting := [name for name in admission.wait_reasons if trials.get(name) == sweep.name]:
            count = count_noun(len(waiting), "trial")
            console.print(f"{count} of {sweep.name} wait until seats become free.", markup=False)
    for name, reason in admission.misfit_reasons.items():
        console.print(f"{name} cannot run even alone: {reason}.", highlight=False, markup=False)


def _collapse_trial_names(names: Iterable[str], case: PlanCase) -> list[str]:
    return collapse_trials(names, [one.sweep for one in case.sweeps])


def _device_text(case: PlanCase, number: int) -> str:
    """Return the index and name of a worker's device; the last device may have several workers."""
    devices = case.cluster.devices
    return f"{number} {devices[min(number, len(devices) - 1)].name}"


def stage_table(prediction: Prediction, case: PlanCase) -> Table:
    peak, capacity = format_bytes(prediction.window.prediction.peak_bytes), f"{prediction.program.capacity:,}"
    caption = (
        f"The most that is needed if every microbatch has {capacity} tokens, the token capacity. With the "
        f"samples of the first window, the peak is {peak}."
    )
    columns = ("device", "layers", "needs at most", "available")
    table = Table(*columns, title="Memory on every device", caption=caption)
    layout, layers = prediction.choice.layout, case.shape.layers
    for number, (stage, need) in enumerate(zip(layout.stages, device_needs_bytes(prediction), strict=True)):
        first, last = stage.start == 0, stage.stop == layers
        table.add_row(
            _device_text(case, number),
            layers_text(stage.start + (not first), stage.stop + 1 + last, layers),
            format_bytes(need),
            format_bytes(prediction.choice.memory.budget_bytes),
        )
    return table


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
    chosen_forecast: Forecast,
    alternatives: Sequence[Forecast],
    title: str = "Predicted for the first window, on the same devices",
) -> Table:
    several = chosen_forecast.devices > 1
    waits = ["bubbles"] if several else []
    columns = ("schedule", "step", "tokens/s", *waits, "microbatches", "capacity", "relative time")
    table = Table(*columns, title=title)
    for one in (chosen_forecast, *alternatives):
        table.add_row(
            one.name,
            f"{one.step_seconds:.3g} s",
            f"{one.tokens_per_second:,.0f}",
            *([f"{one.bubbles:.1%}"] if several else []),
            f"{one.microbatches}",
            f"{one.capacity:,}",
            _add_memory_note(f"{one.seconds / chosen_forecast.seconds:.2f}×", one),
        )
    return table


PLANNER_NOTE = (
    "Mechanisms of a pipeline's planner (packing, order, groups, hand-over, chunks) are predicted for two "
    "later windows, the others for the first one."
)


def ablation_table(rows: Sequence[Ablation], measured_seconds: tuple[float, float] | None = None) -> Table:
    """Return the table of a plan's ablations, in which one optimisation each is disabled. `measured_seconds`
    are the seconds per round (one global batch of every job) of the plan itself, measured before and after
    the ablations."""
    several = any(row.forecast.devices > 1 for row in rows)
    titles = ["mechanism", "instead", "step", "costs", *(["bubbles"] if several else [])]
    notes = [PLANNER_NOTE] if several and any("mechanisms" in row.options for row in rows) else []
    if measured_seconds is not None:
        titles += ["measured step", "measured costs"]
        before, after = (f"{one:.3g} s" for one in measured_seconds)
        notes.append(f"A step of the plan itself took {before} before the others and {after} after them.")
    table = Table(*titles, title="Cost of leaving out each mechanism", caption=" ".join(notes) or None)
    for row in sorted(rows, key=lambda one: one.is_added):
        one = row.forecast
        name = f"left out: {row.mechanism}" if row.is_added else row.mechanism
        cells = [name, row.alternative, f"{one.step_seconds:.3g} s"]
        cells.append(_add_memory_note(f"{row.relative_cost:+.1%}", one))
        cells += [f"{one.bubbles:.1%}"] if several else []
        if measured_seconds is not None and row.measured_step_seconds is not None:
            cost = row.measured_step_seconds / (sum(measured_seconds) / 2) - 1
            cells += [f"{row.measured_step_seconds:.3g} s", f"{cost:+.1%}"]
        table.add_row(*cells)
    return table


def _add_memory_note(text: str, forecast: Forecast) -> str:
    return text if forecast.fits else f"{text}, more memory than available"
