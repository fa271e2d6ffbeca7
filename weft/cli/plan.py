"""`weft plan jobs.yaml --cluster 4xA100-80G`: what a cluster would make of the jobs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from weft.base.spec import BaseSpec
    from weft.jobs.scheduler import Admission
    from weft.plan.ablate import Ablation
    from weft.plan.cluster import Cluster
    from weft.plan.estimate import JobOutline, Speed
    from weft.plan.fit import Ground
    from weft.plan.forecast import Forecast, Run
    from weft.plan.outlook import Outlook
    from weft.plan.share_outlook import ShareOutlook
    from weft.plan.stream_choice import StreamChoice
    from weft.plan.stream_outlook import StreamOutlook
    from weft.shapes import ModelShape


def plan(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    cluster: Annotated[
        str,
        typer.Option(help="4xA100-80G[:nvlink|pcie], 2+2xRTX3090, a cluster file, or auto: this machine."),
    ] = "auto",
    explain: Annotated[bool, typer.Option("--explain", help="A sentence for each decision.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What each mechanism is worth: one off, or one added, at a time.")
    ] = False,
    gantt: Annotated[Path | None, typer.Option(help="Draw the timeline: out.html or out.png.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Say what a cluster would make of the jobs: memory, stages, groups, times. No weights are loaded."""
    from rich.console import Console

    from weft.plan.stream_outlook import must_stream

    if gantt is not None:
        refuse_picture(gantt)
    found = read_cluster(cluster)
    with _without_collector():
        wanted = read_wanted(jobs, found, cluster == "auto", explain, ablate)
        answer = streamed if must_stream(wanted.ground, wanted.company) else resident
        answered = answer(wanted, Console())
    if gantt is not None:
        write_gantt(gantt, answered.run, found.name)
    if json is not None:
        write_json(json, answered.numbers)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be planned for, and what is to be said."""

    ground: Ground
    company: Sequence[JobOutline]
    sampled: Sequence[str]
    steps: Mapping[str, int]
    """Of each job's whole run."""
    explained: bool
    ablated: bool

    def aboard(self, admission: Admission) -> list[JobOutline]:
        return [job for job in self.company if job.name in admission.admitted]


def read_wanted(jobs: Path, cluster: Cluster, here: bool, explained: bool, ablated: bool) -> Wanted:
    """The jobs file's jobs on a cluster; one that is `here` may have been measured."""
    from weft.base.config import read_tokenizer
    from weft.cli.plan_jobs import outline_jobs
    from weft.jobs.read import read_run
    from weft.plan.fit import make_ground

    gpu = cluster.devices[0].is_gpu
    run = read_run(jobs, lambda base: described(base, gpu))
    shape = described(run.base, gpu)
    outlined = outline_jobs(run.jobs, read_tokenizer(run.base), shape)
    return Wanted(
        make_ground(shape, cluster, measured_speeds(shape, cluster) if here else ()),
        [one.job for one in outlined],
        [one.job.name for one in outlined if one.sampled],
        {one.job.name: one.steps for one in outlined},
        explained,
        ablated,
    )


@dataclass(frozen=True, slots=True)
class Answered:
    run: Run
    numbers: Mapping[str, Any]


def resident(wanted: Wanted, console: Console) -> Answered:
    """The base lies on the devices: whole on each where it fits, else a stage."""
    from weft.cli.plan_show import ablation_table, show, show_sentences, show_shares, show_waiting
    from weft.plan.ablate import ablate
    from weft.plan.explain import explain
    from weft.plan.fit import why_not
    from weft.plan.outlook import outlook, refuse
    from weft.plan.share_outlook import share_outlook

    refuse(wanted.ground, wanted.company)
    admission = admitted(wanted, why_not)
    found = outlook(wanted.ground, wanted.aboard(admission))
    shared = share_outlook(wanted.ground, wanted.company, wanted.steps)
    if shared is not None:
        show_shares(console, shared, found)
    show(console, found, wanted.sampled)
    show_waiting(console, admission)
    show_sentences(console, explain(found) if wanted.explained else ())
    ablations = ablate(found) if wanted.ablated else ()
    if ablations:
        console.print(ablation_table(ablations))
    numbers = outlook_numbers(found) | share_numbers(shared) | common_numbers(found, admission, ablations)
    return Answered(found.run, numbers)


def streamed(wanted: Wanted, console: Console) -> Answered:
    """The base lies in the host's memory and comes in stages."""
    from weft.cli.plan_show import ablation_table, show_sentences, show_streams, show_waiting
    from weft.errors import PlanError
    from weft.plan.stream_explain import explain_streams
    from weft.plan.stream_outlook import ablate_streams, refuse_streamed, stream_outlook, why_not_streamed
    from weft.plan.stream_run import run_choice

    refuse_streamed(wanted.ground, wanted.company)
    admission = admitted(wanted, why_not_streamed)
    aboard = wanted.aboard(admission)
    found = stream_outlook(wanted.ground, aboard)
    chosen = None
    if len(wanted.ground.cluster.devices) == 1:  # a run streams through one
        try:
            chosen = run_choice(wanted.ground, aboard)
        except PlanError as error:
            console.print(f"`weft train` would refuse these jobs together: {error}.", markup=False)
    show_streams(console, found, chosen, wanted.sampled)
    show_waiting(console, admission)
    show_sentences(console, explain_streams(found) if wanted.explained else ())
    ablations = ablate_streams(found) if wanted.ablated else ()
    if ablations:
        console.print(ablation_table(ablations))
    numbers = stream_numbers(found) | common_numbers(found, admission, ablations)
    return Answered(found.run, numbers | ({} if chosen is None else {"run": run_numbers(chosen)}))


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


def measured_speeds(shape: ModelShape, machine: Cluster) -> Sequence[Speed]:
    """From a profile of this machine for this base, where `weft doctor --profile` has made one."""
    from weft.plan.cluster import gpu_here
    from weft.plan.profile import profile_here
    from weft.plan.profile_cost import speed_of

    profile = profile_here(shape, gpu_here() if machine.devices[0].is_gpu else None)
    return [speed_of(profile, shape)] * len(machine.devices) if profile else ()


def admitted(wanted: Wanted, why_not: Callable[[Ground, Sequence[JobOutline]], str | None]) -> Admission:
    """Who comes aboard first, by the scheduler's own rule."""
    from weft.jobs.scheduler import admit

    by_name = {job.name: job for job in wanted.company}
    shapes = [job.shape for job in wanted.company]
    return admit(shapes, [], lambda some: why_not(wanted.ground, [by_name[one.name] for one in some]))


def refuse_picture(file: Path) -> None:
    """Before anything is planned: an ending that is not drawn, or a drawing library that is not there."""
    from weft.errors import UserError

    ending = file.suffix.lower()
    if ending not in (".html", ".htm", ".png"):
        raise UserError(f"--gantt {file}: the timeline is drawn as .html or .png; write such as out.html")
    if ending == ".png":
        from weft.report.gantt_png import require_pillow

        require_pillow()


def write_gantt(file: Path, run: Run, title: str) -> None:
    if file.suffix.lower() == ".png":
        from weft.report.gantt_png import gantt_png

        _write(file, gantt_png(run.timeline, title))
        return
    from weft.report.gantt import gantt_page

    _write(file, gantt_page(run.timeline, run.program, title).encode())


def write_json(file: Path, numbers: Mapping[str, Any]) -> None:
    from json import dumps

    _write(file, (dumps(numbers, indent=2) + "\n").encode())


def outlook_numbers(found: Outlook) -> dict[str, Any]:
    layout = found.layout
    return {
        "streamed": False,
        "stages": [
            {"layers": stage.stop - stage.start, "needs_bytes": need, "budget_bytes": budget}
            for stage, need, budget in zip(layout.stages, found.need_bytes, layout.budgets, strict=True)
        ],
        "groups": found.scheme.groups,
        "order": found.scheme.order,
    }


def share_numbers(found: ShareOutlook | None) -> dict[str, Any]:
    if found is None:
        return {"shares": None}
    return {
        "shares": [
            {
                "jobs": share.jobs,
                "predicted_seconds": share.seconds,
                "tokens_per_second": part.forecast.tokens_per_second,
                "needs_bytes": part.need_bytes[0],
                "budget_bytes": part.layout.budgets[0],
            }
            for share, part in zip(found.shares, found.parts, strict=True)
        ]
    }


def stream_numbers(found: StreamOutlook) -> dict[str, Any]:
    chosen, steps = found.chosen, found.forecast.steps
    return {
        "streamed": True,
        "stages": [
            {"layers": stage.stop - stage.start, "device": home, "resident": stays}
            for stage, home, stays in zip(
                chosen.streams.stages, chosen.streams.homes, chosen.streams.resident, strict=True
            )
        ],
        "needs_bytes": chosen.layout.need_bytes,
        "budget_bytes": chosen.layout.budgets,
        "mapping": chosen.mapping,
        "unhidden_seconds": chosen.unhidden / steps,
        "uploaded_bytes": chosen.uploaded_bytes // steps,
    }


def run_numbers(chosen: StreamChoice) -> dict[str, Any]:
    """What a run would choose."""
    return {
        "stages": [
            {"layers": stage.stop - stage.start, "resident": stage.resident} for stage in chosen.cut.stages
        ],
        "slots": chosen.cut.slots,
        "adapters_travel": chosen.cut.travels,
        "inputs_offloaded": chosen.cut.offloads,
        "capacity": chosen.capacity,
        "device_bytes": chosen.device_bytes,
        "host_bytes": chosen.host_bytes,
        "round_seconds": chosen.step_seconds,
        "unhidden": chosen.unhidden,
    }


def common_numbers(
    found: Outlook | StreamOutlook, admission: Admission, ablations: Sequence[Ablation]
) -> dict[str, Any]:
    return {
        "cluster": found.ground.cluster.name,
        "source": found.source,
        "capacity": found.forecast.capacity,
        "waiting": dict(admission.waiting),
        "forecast": forecast_numbers(found.forecast),
        "alternatives": [forecast_numbers(one) for one in found.alternatives],
        "ablations": [
            {
                "mechanism": row.mechanism,
                "instead": row.instead,
                "added": row.added,
                "cost": row.cost,
                "step_seconds": row.forecast.step_seconds,
            }
            for row in ablations
        ],
    }


def forecast_numbers(one: Forecast) -> Mapping[str, Any]:
    return {
        "way": one.name,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "bubbles": one.bubbles,
        "microbatches": one.microbatches,
        "capacity": one.capacity,
        "peak_bytes": one.peaks,
        "fits": one.fits,
    }


@contextmanager
def _without_collector() -> Iterator[None]:
    """A plan makes hundreds of thousands of records and hardly a cycle; to look for some takes an eighth of
    its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _write(file: Path, content: bytes) -> None:
    from weft.errors import OutputError

    try:
        file.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}") from None
