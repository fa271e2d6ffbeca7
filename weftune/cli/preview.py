"""`weftune preview`: show the rows as the model sees them, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weftune.cli.early import JobsFile, check_row_files, read_jobs_file
from weftune.errors import DataError, Mistake, SpecError, UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from weftune.core.shapes import ModelShape
    from weftune.data.prepare import Prepared
    from weftune.data.samples import Samples
    from weftune.jobs.spec.spec import JobSpec, RunSpec
    from weftune.jobs.sweeps.spec import Sweep

SUPERVISED = "bold green"
MARKS = (">>>", "<<<")
"""Strings before and after supervised text, which are shown where there are no colours."""
UNSUPERVISED = "dim"
SIDES = ("chosen", "rejected")
BARS = 10
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class SharedSamples:
    """A set of samples, and the jobs that train on it."""

    jobs: tuple[str, ...]
    prepared: Prepared


def preview(
    file: JobsFile,
    job: Annotated[str | None, typer.Option(help="Show only this job or sweep.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of samples to show per dataset.")] = 3,
) -> None:
    """Show rows as the model sees them, supervised tokens coloured (in a pipe: between >>> and <<<), and the
    trials of sweeps. No weights are loaded."""
    run = read_jobs_file(file)
    chosen = select_jobs(run, job)
    check_row_files(chosen, includes_job_names=False)
    sweeps = [sweep for sweep in run.sweeps if job in (None, sweep.name)]

    from rich.console import Console
    from rich.text import Text

    from weftune.base.load import inspect, load_tokenizer
    from weftune.jobs.spec.checks import check_on_base, rope_warnings

    tokenizer = load_tokenizer(run.base)
    shape = inspect(run.base)
    if mistakes := check_on_base(chosen, shape, run.base, run.locate):
        # Trials share the line of a wrong target.
        raise SpecError(dict.fromkeys(mistakes))
    console = Console()
    marked = console.color_system is None or console.no_color
    found = prepare_all(chosen, tokenizer, shape.context)
    for shown in found:
        for part in draw_samples(shown, tokenizer, rows, sweeps, marked):
            console.print(part)
    if sweeps:
        _show_trials(console, run, sweeps)
    for sentence in (*collect_warnings(chosen, found, shape, sweeps), *rope_warnings(chosen, run.base)):
        console.print(Text(f"warning: {sentence}"), soft_wrap=True)


def select_jobs(run: RunSpec, name: str | None) -> tuple[JobSpec, ...]:
    if name is None:
        return run.jobs
    names = {name, *(trial.name for sweep in run.sweeps if sweep.name == name for trial in sweep.trials)}
    chosen = tuple(job for job in run.jobs if job.name in names)
    if not chosen:
        trials = {trial.name for sweep in run.sweeps for trial in sweep.trials}
        jobs = [job.name for job in run.jobs if job.name not in trials]
        known = ", ".join([*jobs, *(sweep.name for sweep in run.sweeps)])
        raise UserError(f"--job: there is no job {name}; the file has {known}.")
    return chosen


def prepare_all(jobs: Sequence[JobSpec], tokenizer: Any, context: int) -> list[SharedSamples]:
    """Return the tokenised samples of all jobs. Jobs with identical data share one entry. Raise one error
    that lists what is wrong with the rows of all jobs."""
    from weftune.core.files import cache_folder
    from weftune.data.prepare import SharedData
    from weftune.jobs.courses import truncate_data

    shared = SharedData(tokenizer, cache_folder() / "tokens", context)
    groups: dict[tuple[str, str, bool], SharedSamples] = {}
    mistakes: dict[Mistake, None] = {}
    for job in jobs:
        try:
            prepared = shared.prepare(truncate_data(job, context), job.eval, row_kind=job.objective.row_kind)
        except DataError as problem:
            mistakes.update(dict.fromkeys(problem.mistakes))
            continue
        held_out = prepared.evaluation.fingerprint if prepared.evaluation is not None else ""
        if job.objective.supervises_prompts:
            prepared = prepared.supervise_prompts()
        key = (prepared.train.fingerprint, held_out, job.objective.supervises_prompts)
        others = groups[key].jobs if key in groups else ()
        groups[key] = SharedSamples((*others, job.name), prepared)
    if mistakes:
        raise DataError(mistakes)
    return list(groups.values())


def collect_warnings(
    jobs: Sequence[JobSpec],
    sample_groups: Sequence[SharedSamples],
    shape: ModelShape,
    sweeps: Sequence[Sweep] = (),
) -> list[str]:
    """Return the warnings that `weftune train` will print."""
    from weftune.jobs.spec.checks import data_warnings, merge_repeated_sentences, warnings
    from weftune.jobs.sweeps.read import sweep_warnings

    prepared = {name: shown.prepared for shown in sample_groups for name in shown.jobs}
    sentences, steps = [], {}
    for job in jobs:
        train, seen = prepared[job.name].train, prepared[job.name].evaluates_training_rows
        steps[job.name] = job.total_steps(train.sample_order(job.batch_size, job.seed).steps_per_epoch)
        sentences += [(job.name, one) for one in data_warnings(job, train.rows, steps[job.name], seen)]
    of_sweeps = sweep_warnings(sweeps, {job.name: job for job in jobs}, steps)
    return [*warnings(jobs, shape), *merge_repeated_sentences(sentences), *of_sweeps]


def _show_trials(console: Console, run: RunSpec, sweeps: Sequence[Sweep]) -> None:
    """Print the sweeps' trials, with memory and time as `weftune plan` predicts them for this machine, if a
    prediction is possible."""
    from rich.table import Table
    from rich.text import Text

    from weftune.cli.plan import read_cluster
    from weftune.cli.plan_predict import predict
    from weftune.cli.plan_text import show_sweeps
    from weftune.launch.plan_case import read_case
    from weftune.trainer.options import Options

    try:
        plan = predict(read_case(run, read_cluster("auto"), Options(), on_this_machine=True))
    except UserError as error:
        for sweep in sweeps:
            table = Table("trial", title=Text(f"Sweep {sweep.name}"))
            for trial in sweep.trials:
                table.add_row(Text(trial.name))
            console.print(table)
        console.print(Text(f"Their memory and time cannot be predicted here: {error}"), soft_wrap=True)
        return
    names = {sweep.name for sweep in sweeps}
    outlooks = [one for one in plan.case.sweeps if one.name in names]
    show_sweeps(console, plan.run, outlooks, plan.case.totals)
    console.print(f"Times are {plan.source}.", highlight=False, markup=False, soft_wrap=True)


def draw_samples(
    group: SharedSamples, tokenizer: Any, rows: int, sweeps: Sequence[Sweep] = (), uses_marks: bool = False
) -> list[RenderableType]:
    """Render up to `rows` samples of one dataset for the terminal. Their text is never interpreted as markup.
    If `uses_marks`, supervised text is also shown between `MARKS`, for output without colours."""
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.text import Text

    from weftune.launch.plan_sweeps import collapse_trials

    train = group.prepared.train
    parts: list[RenderableType] = [Rule(Text(", ".join(collapse_trials(group.jobs, sweeps))))]
    for row in range(min(rows, train.rows)):
        panels = []
        for side in range(train.group_size):
            i = row * train.group_size + side
            name = f"sample {row + 1}" if train.group_size == 1 else f"pair {row + 1}, {SIDES[side]}"
            if train.desirable is not None:
                name = f"sample {row + 1}, {'desirable' if train.desirable[i] else 'undesirable'}"
            between = f", between {' and '.join(MARKS)}" if uses_marks else ""
            counts = f"{name}: {train.lengths[i]} tokens, {train.supervised[i]} supervised{between}"
            shown = colour_sample(train, i, tokenizer, uses_marks)
            panels.append(Panel(shown, title=Text(counts), title_align="left"))
        parts.append(panels[0] if len(panels) == 1 else side_by_side(panels))
    parts.append(Text(summary("training", train)))
    if group.prepared.evaluation is not None:
        parts.append(Text(summary("evaluation", group.prepared.evaluation)))
    parts.append(Text(histogram(train.lengths.tolist())))
    parts += [Text(f"note: {note}") for note in group.prepared.notes]
    return parts


def side_by_side(panels: Sequence[RenderableType]) -> RenderableType:
    """Return the panels of a preference pair in two columns of equal width."""
    from rich.table import Table

    table = Table.grid(expand=True)
    for _ in panels:
        table.add_column(ratio=1)
    table.add_row(*panels)
    return table


def colour_sample(samples: Samples, index: int, tokenizer: Any, uses_marks: bool = False) -> Text:
    """Return a sample's text, supervised parts in another colour; with `uses_marks`, also between `MARKS`."""
    from rich.text import Text

    text = Text()
    tokens, mask = samples.tokens(index).tolist(), samples.mask(index).tolist()
    start, printed = 0, ""
    for stop in range(1, len(tokens) + 1):
        if stop < len(tokens) and mask[stop] == mask[start]:
            continue
        # Decoded from the beginning each time: a run by itself may lose the space it starts with.
        so_far = tokenizer.decode(tokens[:stop], clean_up_tokenization_spaces=False)
        begin, end = MARKS if uses_marks and mask[start] else ("", "")
        shown = f"{begin}{escape_controls(so_far[len(printed) :])}{end}"
        text.append(shown, style=SUPERVISED if mask[start] else UNSUPERVISED)
        start, printed = stop, so_far
    return text


def escape_controls(text: str) -> str:
    """Replace control characters, which could move the terminal's cursor or change its colours."""
    return "".join(
        mark if mark in "\n\t" or mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in text
    )


def summary(name: str, samples: Samples) -> str:
    tokens, taught = int(samples.lengths.sum()), int(samples.supervised.sum())
    counted = f"{samples.rows:,} pairs" if samples.group_size == 2 else f"{len(samples):,} samples"
    return (
        f"{name}: {counted}, {tokens:,} tokens, {taught:,} supervised "
        f"({taught / tokens:.0%}), longest {int(samples.lengths.max()):,}"
    )


def histogram(lengths: Sequence[int]) -> str:
    """Draw the number of samples by length in tokens, one bar per line."""
    shortest, longest = min(lengths), max(lengths)
    width = max(1, -(-(longest - shortest + 1) // BARS))
    counts = [0] * -(-(longest - shortest + 1) // width)
    for length in lengths:
        counts[(length - shortest) // width] += 1
    most = max(counts)
    lines = []
    for at, count in enumerate(counts):
        low = shortest + at * width
        bar = "█" * -(-count * BAR_WIDTH // most)
        lines.append(f"{low:>7}–{low + width - 1:<7} {bar} {count}".rstrip())
    return "\n".join(["tokens          samples", *lines])
