"""`weftune plan jobs.yaml --cluster 4xA100-80G`: what a cluster would make of the jobs."""

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

    from weftune.base.spec import BaseSpec
    from weftune.cli.plan_single import Single
    from weftune.core.shapes import JobShape, ModelShape
    from weftune.jobs.store.scheduler import Admission
    from weftune.plan.cost.cluster import Cluster
    from weftune.plan.cost.estimate import JobOutline, Speed
    from weftune.plan.outlook.fit import Ground
    from weftune.plan.outlook.split import ShareOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun
    from weftune.plan.program.program import Program
    from weftune.plan.program.timeline import Timeline


def plan(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    cluster: Annotated[
        str,
        typer.Option(help="4xA100-80G[:nvlink|pcie], 2+2xRTX3090, a cluster file, or auto: this machine."),
    ] = "auto",
    gpu_memory: Annotated[
        str | None, typer.Option(help="What the run may take of each GPU, as `weftune train` is told.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="A sentence for each decision.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What each mechanism is worth: one off, or one added, at a time.")
    ] = False,
    gantt: Annotated[Path | None, typer.Option(help="Draw the timeline: out.html or out.png.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Say what a cluster would make of the jobs: memory, stages, groups, times. No weights are loaded."""
    from weftune.cli.early import read_early, refuse_rows
    from weftune.cli.options import bytes_of

    if gantt is not None:
        refuse_picture(gantt)
    limit = None if gpu_memory is None else bytes_of(gpu_memory, "--gpu-memory")
    asked = PlanAsked(cluster == "auto", limit, explain, ablate)
    refuse_rows(read_early(jobs).jobs, named=True)
    found = read_cluster(cluster, limit)

    from rich.console import Console

    with _without_collector():
        answered = answer(read_wanted(jobs, found, asked), Console())
    if gantt is not None:
        write_gantt(gantt, answered.picture(), found.name)
    if json is not None:
        write_json(json, answered.numbers)


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """What the command line says."""

    here: bool
    """Whether the cluster is this machine, which may have been measured."""
    limit: int | None
    """Bytes that the run may take of a GPU; on a CPU one is pretended then."""
    explained: bool
    ablated: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be planned for, and what is to be said."""

    asked: PlanAsked
    base: BaseSpec
    ground: Ground
    company: Sequence[JobOutline]
    sampled: Sequence[str]
    totals: Mapping[str, JobTotal]

    @property
    def steps(self) -> Mapping[str, int]:
        """Of each job's whole run."""
        return {name: total.steps for name, total in self.totals.items()}

    def aboard(self, admission: Admission) -> list[JobOutline]:
        return [job for job in self.company if job.name in admission.admitted]


def read_wanted(jobs: Path, cluster: Cluster, asked: PlanAsked) -> Wanted:
    """The jobs file's jobs on a cluster."""
    from weftune.base.config import read_tokenizer
    from weftune.cli.plan_jobs import outline_jobs
    from weftune.jobs.spec.read import read_run
    from weftune.plan.outlook.fit import make_ground

    gpu = cluster.devices[0].is_gpu
    run = read_run(jobs, lambda base: described(base, gpu))
    shape = described(run.base, gpu)
    outlined = outline_jobs(run.jobs, read_tokenizer(run.base), shape)
    return Wanted(
        asked,
        run.base,
        make_ground(shape, cluster, measured_speeds(shape, cluster) if asked.here else ()),
        [one.job for one in outlined],
        [one.job.name for one in outlined if one.sampled],
        {one.job.name: one.total for one in outlined},
    )


@dataclass(frozen=True, slots=True)
class Picture:
    """What a Gantt chart is drawn from."""

    program: Program
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Answered:
    numbers: Mapping[str, Any]
    picture: Callable[[], Picture]


def answer(wanted: Wanted, console: Console) -> Answered:
    """Through one device a base is streamed as a run would do it; over several by Mobius's recurrence."""
    from weftune.cli.plan_single import choose_single
    from weftune.plan.outlook.streamed import must_stream

    if len(wanted.ground.cluster.devices) > 1:
        return (streamed if must_stream(wanted.ground, wanted.company) else resident)(wanted, console)
    chosen = choose_single(wanted)
    return resident(wanted, console) if chosen is None else single(wanted, chosen, console)


def resident(wanted: Wanted, console: Console) -> Answered:
    """The base lies on the devices: whole on each where it fits, else a stage."""
    from weftune.cli.plan_numbers import common_numbers, outlook_numbers, run_numbers, share_numbers
    from weftune.cli.plan_show import show, show_more, show_run, show_shares
    from weftune.plan.outlook.ablate import ablate
    from weftune.plan.outlook.explain import explain
    from weftune.plan.outlook.fit import why_not
    from weftune.plan.outlook.outlook import outlook, refuse
    from weftune.plan.outlook.split import share_outlook
    from weftune.plan.outlook.whole_run import WholeRun, at_rate, endings

    refuse(wanted.ground, wanted.company)
    admission = admitted(wanted, by_outlines(wanted, why_not))
    found = outlook(wanted.ground, wanted.aboard(admission))
    shared = share_outlook(wanted.ground, wanted.company, wanted.steps)
    totals, rate = wanted.totals, found.forecast.tokens_per_second
    ends = endings(totals, admission.admitted, admission.waiting, at_rate(totals, rate))
    run = WholeRun(ends, max(found.need_bytes), max(found.layout.budgets))
    if shared is not None:
        run = run_of_shares(shared, totals)
    show_run(console, found.ground.cluster.name, run, totals, found.source)
    if shared is not None:
        show_shares(console, shared, found)
    show(console, found, wanted.sampled)
    ablations = ablate(found) if wanted.asked.ablated else ()
    show_more(console, admission, explain(found) if wanted.asked.explained else (), ablations)
    numbers = outlook_numbers(found) | share_numbers(shared) | common_numbers(found, admission, ablations)
    numbers |= run_numbers(run, totals)
    return Answered(numbers, lambda: Picture(found.run.program, found.run.timeline))


def streamed(wanted: Wanted, console: Console) -> Answered:
    """The base lies in the host's memory and comes to several devices in stages."""
    from weftune.cli.plan_numbers import common_numbers, run_numbers, stream_numbers
    from weftune.cli.plan_show import show_more, show_run, show_streams
    from weftune.plan.outlook.streamed import (
        ablate_streams,
        refuse_streamed,
        stream_outlook,
        why_not_streamed,
    )
    from weftune.plan.outlook.streamed_explain import explain_streams
    from weftune.plan.outlook.whole_run import WholeRun, endings

    refuse_streamed(wanted.ground, wanted.company)
    admission = admitted(wanted, by_outlines(wanted, why_not_streamed))
    found = stream_outlook(wanted.ground, wanted.aboard(admission))
    seconds, layout = found.forecast.step_seconds, found.chosen.layout
    ends = endings(wanted.totals, admission.admitted, admission.waiting, lambda _: seconds)
    run = WholeRun(ends, max(layout.need_bytes), max(layout.budgets))
    show_run(console, found.ground.cluster.name, run, wanted.totals, found.source)
    show_streams(console, found, wanted.sampled)
    ablations = ablate_streams(found) if wanted.asked.ablated else ()
    show_more(console, admission, explain_streams(found) if wanted.asked.explained else (), ablations)
    numbers = stream_numbers(found) | common_numbers(found, admission, ablations)
    numbers |= run_numbers(run, wanted.totals)
    return Answered(numbers, lambda: Picture(found.run.program, found.run.timeline))


def single(wanted: Wanted, chosen: Single, console: Console) -> Answered:
    """The base lies in the host's memory and comes to one device as a run would have it come."""
    from weftune.cli.plan_numbers import common_numbers, run_numbers, single_numbers
    from weftune.cli.plan_show import show_more, show_run, show_single
    from weftune.plan.outlook.one_device import ablate_single, first_window, single_memory, single_outlook
    from weftune.plan.outlook.streamed_explain import explain_single
    from weftune.plan.outlook.whole_run import WholeRun, endings

    memory = single_memory(wanted.ground, chosen.company.choice, chosen.place)
    admission = admitted(wanted, memory.why_not)
    aboard = wanted.aboard(admission)
    found = single_outlook(wanted.ground, aboard, chosen.company, chosen.place, chosen.source)
    seconds = found.choice.step_seconds
    ends = endings(wanted.totals, admission.admitted, admission.waiting, lambda _: seconds)
    run = WholeRun(ends, found.choice.device_bytes, found.case.device.budget)
    show_run(console, found.ground.cluster.name, run, wanted.totals, found.source)
    show_single(console, found, wanted.sampled)
    ablations = ablate_single(found) if wanted.asked.ablated else ()
    show_more(console, admission, explain_single(found) if wanted.asked.explained else (), ablations)
    numbers = single_numbers(found) | common_numbers(found, admission, ablations)
    numbers |= run_numbers(run, wanted.totals)

    def picture() -> Picture:
        window = first_window(found)
        return Picture(window.program, window.timeline)

    return Answered(numbers, picture)


def run_of_shares(shared: ShareOutlook, totals: Mapping[str, JobTotal]) -> WholeRun:
    """Every device goes through its own jobs."""
    from weftune.plan.outlook.whole_run import WholeRun, at_rate, endings

    ends: dict[str, float] = {}
    for share, part in zip(shared.shares, shared.parts, strict=True):
        aboard = [job.name for job in part.jobs]
        waiting = [name for name in share.jobs if name not in aboard]
        ends |= endings(totals, aboard, waiting, at_rate(totals, part.forecast.tokens_per_second))
    needs = max(part.need_bytes[0] for part in shared.parts)
    return WholeRun(ends, needs, max(part.layout.budgets[0] for part in shared.parts))


def described(base: BaseSpec, gpu: bool) -> ModelShape:
    """The base's sizes, from its config.json."""
    from weftune.base.architecture import model_shape
    from weftune.base.config import bytes_per_value, read_config

    return model_shape(read_config(base), base.model, bytes_per_value(base, gpu))


def read_cluster(text: str, limit: int | None = None) -> Cluster:
    """`limit` is for GPUs: what else a run may take of a CPU's memory does not depend on it."""
    from weftune.plan.cost.cluster import limited

    cluster = _cluster(text)
    return limited(cluster, limit) if limit is not None and cluster.devices[0].is_gpu else cluster


def _cluster(text: str) -> Cluster:
    from weftune.errors import Mistake, PlanError
    from weftune.plan.cost.cluster import cluster_from, parse_cluster, this_machine

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
    """From a profile of this machine for this base, where `weftune doctor --profile` has made one."""
    from weftune.plan.cost.cluster import gpu_here
    from weftune.plan.cost.profile import profile_here
    from weftune.plan.cost.profile_cost import speed_of

    profile = profile_here(shape, gpu_here() if machine.devices[0].is_gpu else None)
    return [speed_of(profile, shape)] * len(machine.devices) if profile else ()


def admitted(wanted: Wanted, why_not: Callable[[Sequence[JobShape]], str | None]) -> Admission:
    """Who comes aboard first, by the scheduler's own rule."""
    from weftune.jobs.store.scheduler import admit

    return admit([job.shape for job in wanted.company], [], why_not)


def by_outlines(
    wanted: Wanted, why_not: Callable[[Ground, Sequence[JobOutline]], str | None]
) -> Callable[[Sequence[JobShape]], str | None]:
    """The same question, asked of shapes."""
    by_name = {job.name: job for job in wanted.company}
    return lambda some: why_not(wanted.ground, [by_name[one.name] for one in some])


def refuse_picture(file: Path) -> None:
    """Before anything is planned: an ending that is not drawn, or a drawing library that is not there."""
    from weftune.errors import UserError

    ending = file.suffix.lower()
    if ending not in (".html", ".htm", ".png"):
        raise UserError(f"--gantt {file}: the timeline is drawn as .html or .png; write such as out.html")
    if ending == ".png":
        from weftune.report.gantt_png import require_pillow

        require_pillow()


def write_gantt(file: Path, picture: Picture, title: str) -> None:
    if file.suffix.lower() == ".png":
        from weftune.report.gantt_png import gantt_png

        _write(file, gantt_png(picture.timeline, picture.program, title))
        return
    from weftune.report.gantt import gantt_page

    _write(file, gantt_page(picture.timeline, picture.program, title).encode())


def write_json(file: Path, numbers: Mapping[str, Any]) -> None:
    from json import dumps

    _write(file, (dumps(numbers, indent=2) + "\n").encode())


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
    from weftune.errors import OutputError

    try:
        file.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}") from None
