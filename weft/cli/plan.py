"""`weft plan jobs.yaml --cluster 4xA100-80G`: what a cluster would make of the jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from weft.base.spec import BaseSpec
    from weft.jobs.scheduler import Admission
    from weft.plan.cluster import Cluster
    from weft.plan.estimate import JobOutline
    from weft.plan.fit import Ground
    from weft.plan.forecast import Forecast
    from weft.plan.outlook import Ablation, Outlook
    from weft.shapes import ModelShape


def plan(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    cluster: Annotated[
        str, typer.Option(help="4xA100-80G[:nvlink|pcie], a cluster file, or auto: this machine.")
    ] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="A sentence for each decision.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What switching each mechanism off costs.")
    ] = False,
    gantt: Annotated[Path | None, typer.Option(help="Draw the timeline as an HTML page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Say what a cluster would make of the jobs: memory, stages, groups, times. No weights are loaded."""
    from rich.console import Console

    from weft.base.config import read_tokenizer
    from weft.cli.plan_jobs import outline_jobs
    from weft.errors import UserError
    from weft.jobs.read import read_run
    from weft.plan.fit import make_ground
    from weft.plan.outlook import outlook

    if gantt is not None and gantt.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--gantt {gantt}: the timeline is drawn as an HTML page; write such as out.html")
    found = read_cluster(cluster)
    gpu = found.devices[0].is_gpu
    run = read_run(jobs, lambda base: described(base, gpu))
    shape = described(run.base, gpu)
    outlined = outline_jobs(run.jobs, read_tokenizer(run.base), shape)
    ground = make_ground(shape, found)
    company = [one.job for one in outlined]
    admission = admitted(ground, company)
    view = outlook(ground, [job for job in company if job.name in admission.admitted])
    console = Console()
    sampled = [one.job.name for one in outlined if one.sampled]
    show(console, view, admission, sampled, explain)
    ablations = show_ablations(console, view) if ablate else ()
    if gantt is not None:
        write_gantt(gantt, view)
    if json is not None:
        write_json(json, view, admission, ablations)


def described(base: BaseSpec, gpu: bool) -> ModelShape:
    """The base's sizes, from its config.json."""
    from weft.base.config import bytes_per_value, read_config
    from weft.plan.architecture import model_shape

    return model_shape(read_config(base), base.model, bytes_per_value(base, gpu))


def read_cluster(text: str) -> Cluster:
    from weft.errors import Mistake, PlanError
    from weft.plan.cluster import cluster_from, parse_cluster, this_machine

    if text == "auto":
        return this_machine()
    if not text.lower().endswith((".yaml", ".yml")):
        return parse_cluster(text)
    import yaml

    try:
        values = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--cluster {text}: the file cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise PlanError(Mistake(text, f"is no YAML: {' '.join(str(error).split())}")) from None
    return cluster_from(values, text)


def admitted(ground: Ground, jobs: Sequence[JobOutline]) -> Admission:
    """Who comes aboard first, by the scheduler's own rule; a job that never fits is refused."""
    from weft.jobs.scheduler import admit
    from weft.plan.fit import why_not
    from weft.plan.outlook import refuse

    refuse(ground, jobs)
    by_name = {job.name: job for job in jobs}
    return admit(
        [job.shape for job in jobs], [], lambda shapes: why_not(ground, [by_name[one.name] for one in shapes])
    )


def show(
    console: Console, found: Outlook, admission: Admission, sampled: Sequence[str], explained: bool
) -> None:
    from weft.plan.explain import explain
    from weft.report.words import plural

    ground = found.ground
    console.print(
        f"{plural(len(found.jobs), 'job')} on {ground.cluster.name}: they fit, with a token capacity of "
        f"{found.layout.capacity:,}. Times are {found.source}.",
        highlight=False,
    )
    if sampled:
        console.print(f"Not tokenised yet, so the first rows stand for all: {', '.join(sampled)}.")
    console.print(stage_table(found))
    groups = "; ".join(" + ".join(group) for group in found.scheme.groups)
    console.print(f"Fusion groups: {groups}", highlight=False, markup=False)
    console.print(forecast_table(found))
    for name, reason in admission.waiting.items():
        console.print(f"{name} waits: {reason}.", highlight=False, markup=False)
    for sentence in explain(found) if explained else ():
        console.print(f"- {sentence}", highlight=False, markup=False)


def stage_table(found: Outlook) -> Table:
    from rich.table import Table

    from weft.plan.memory import gib

    table = Table("device", "layers", "needs", "may take", title="Memory on every device")
    layout = found.layout
    for number, stage in enumerate(layout.stages):
        table.add_row(
            f"{number} {found.ground.cluster.devices[number].name}",
            layers_text(stage.start, stage.stop, found.ground.shape.layers),
            gib(layout.need_bytes[number]),
            gib(layout.budgets[number]),
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


def forecast_table(found: Outlook) -> Table:
    from rich.table import Table

    table = Table("way", "step", "tokens/s", "bubbles", "microbatches", "takes", title="Predicted")
    for one in (found.forecast, *found.alternatives):
        longer = one.seconds / found.forecast.seconds
        fits = one.fits(found.layout)
        table.add_row(
            one.name,
            f"{one.step_seconds:.3g} s",
            f"{one.tokens_per_second:,.0f}",
            f"{one.bubbles:.1%}",
            f"{one.microbatches}",
            f"{longer:.2f}×" if fits else f"{longer:.2f}×, and more memory than there is",
        )
    return table


def show_ablations(console: Console, found: Outlook) -> tuple[Ablation, ...]:
    from rich.table import Table

    from weft.plan.outlook import ablate

    table = Table("mechanism", "instead", "costs", "bubbles", title="What each mechanism is worth")
    rows = ablate(found)
    for row in rows:
        fits = row.forecast.fits(found.layout)
        cost = f"{row.cost:+.1%}" if fits else f"{row.cost:+.1%}, and more memory than there is"
        table.add_row(row.mechanism, row.instead, cost, f"{row.forecast.bubbles:.1%}")
    console.print(table)
    return rows


def write_gantt(file: Path, found: Outlook) -> None:
    from weft.report.gantt import gantt_page

    _write(file, gantt_page(found.run.timeline, found.run.program, found.ground.cluster.name))


def write_json(file: Path, found: Outlook, admission: Admission, ablations: Sequence[Ablation]) -> None:
    from json import dumps

    _write(file, dumps(numbers(found, admission, ablations), indent=2) + "\n")


def numbers(found: Outlook, admission: Admission, ablations: Sequence[Ablation]) -> Mapping[str, Any]:
    layout = found.layout
    return {
        "cluster": found.ground.cluster.name,
        "source": found.source,
        "capacity": layout.capacity,
        "stages": [
            {"layers": stage.stop - stage.start, "needs_bytes": need, "budget_bytes": budget}
            for stage, need, budget in zip(layout.stages, layout.need_bytes, layout.budgets, strict=True)
        ],
        "groups": found.scheme.groups,
        "order": found.scheme.order,
        "waiting": dict(admission.waiting),
        "forecast": forecast_numbers(found.forecast),
        "alternatives": [forecast_numbers(one) for one in found.alternatives],
        "ablations": [
            {"mechanism": row.mechanism, "instead": row.instead, "cost": row.cost} for row in ablations
        ],
    }


def forecast_numbers(one: Forecast) -> Mapping[str, Any]:
    return {
        "way": one.name,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "bubbles": one.bubbles,
        "microbatches": one.microbatches,
        "peak_bytes": one.peaks,
    }


def _write(file: Path, text: str) -> None:
    from weft.errors import OutputError

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}") from None
