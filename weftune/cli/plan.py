"""`weftune plan jobs.yaml --cluster 4xA100-80G`: predict what a run of the jobs would do on a machine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from weftune.base.spec import BaseSpec
    from weftune.cli.plan_jobs import Outlined
    from weftune.cli.plan_sweeps import SweepOutlook
    from weftune.core.shapes import JobShape, ModelShape
    from weftune.jobs.store.scheduler import Admission
    from weftune.plan.cost.cluster import Cluster
    from weftune.plan.cost.estimate import Speed
    from weftune.plan.layout.choose import Choice, Machine
    from weftune.plan.outlook.forecast import Ablation, Prediction
    from weftune.plan.outlook.shares import ShareOutlook
    from weftune.plan.outlook.whole_run import JobTotal, WholeRun
    from weftune.plan.program.program import Program
    from weftune.plan.program.timeline import Timeline
    from weftune.plan.window.rounds import JobWindow


ALL = 0
"""The number of devices that stands for all of the cluster."""


def plan(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file.")],
    cluster: Annotated[
        str,
        typer.Option(help="4xA100-80G[:nvlink|pcie], 2+2xRTX3090, a cluster file, or auto: this machine."),
    ] = "auto",
    gpu_memory: Annotated[
        str | None, typer.Option(help="What the run may take of each GPU, as `weftune train` is told.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What the run may take, such as 8GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="On this machine: cuda or cpu; else the best.")] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="In so many stages, as `weftune train` is told."),
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="So many copies of the base, or of its stages, share every batch.")
    ] = 1,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="The whole base on each of so many devices, as `weftune train`."),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="End every job after so many steps.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="A sentence for each decision.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="What each mechanism is worth: one off, or one added, at a time.")
    ] = False,
    gantt: Annotated[Path | None, typer.Option(help="Draw the timeline: out.html or out.png.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    """Say what `weftune train` would do with the jobs: layout, memory, times. No weights are loaded."""
    from weftune.cli.early import one_of_each, read_early, refuse_device, refuse_rows
    from weftune.cli.options import bytes_of
    from weftune.cli.train import gpus_of, refuse_beside_gpu_memory, refuse_beside_gpus, stages_of
    from weftune.jobs.sweeps.read import refuse_shares

    if gantt is not None:
        refuse_picture(gantt)
    refuse_device(device)
    limit = None if gpu_memory is None else bytes_of(gpu_memory, "--gpu-memory")
    if gpu_memory is not None:
        refuse_beside_gpu_memory(gpu_memory, pipeline, gpus, replicas)
    if gpus is not None:
        refuse_beside_gpus(gpus, pipeline, replicas, None)
    asked = PlanAsked(
        here=cluster == "auto",
        limit=limit,
        memory=None if memory is None else bytes_of(memory, "--memory"),
        pipeline=None if pipeline is None else stages_of(pipeline),
        replicas=replicas,
        gpus=None if gpus is None else gpus_of(gpus) or ALL,
        max_steps=max_steps,
        explained=explain,
        ablated=ablate,
    )
    run = read_early(jobs)
    if asked.gpus not in (None, 1):
        refuse_shares(run.sweeps)
    refuse_rows(one_of_each(run), named=True)
    found = read_cluster(cluster, limit, on_cpu=device == "cpu")

    from rich.console import Console

    with _without_collector():
        answered = answer(read_wanted(jobs, found, asked), Console())
    if gantt is not None:
        write_gantt(gantt, answered.picture(), found.name)
    if json is not None:
        write_json(json, answered.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAsked:
    """Options of the command line."""

    here: bool
    """Whether the cluster is this machine, which may have been measured."""
    limit: int | None = None
    """Bytes that the run may take of a GPU. On a CPU, a limit simulates a GPU."""
    memory: int | None = None
    """Bytes that the run may take in total."""
    pipeline: int | None = None
    """Number of workers; 0 lets the planner choose."""
    replicas: int = 1
    gpus: int | None = None
    """Number of devices that each hold the base and train a share of the jobs; `ALL` means every device."""
    max_steps: int | None = None
    explained: bool = False
    ablated: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses how many devices train, and how."""
        return self.pipeline is None and self.gpus is None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A plan request: the options, the base, the cluster and the jobs."""

    asked: PlanAsked
    base: BaseSpec
    shape: ModelShape
    cluster: Cluster
    speeds: Sequence[Speed]
    """Speed of each device, from its data sheet or from a profile."""
    jobs: Sequence[Outlined]
    sweeps: Sequence[SweepOutlook] = ()

    @property
    def shapes(self) -> list[JobShape]:
        return [one.shape for one in self.jobs]

    @property
    def totals(self) -> Mapping[str, JobTotal]:
        return {one.name: one.total for one in self.jobs}

    @property
    def sampled(self) -> list[str]:
        return [one.name for one in self.jobs if one.sampled]

    def course(self, name: str, rounds: int, begins: bool = True) -> JobWindow:
        """Return a job's part of the first window, beginning with an evaluation if it has samples for one."""
        return next(one for one in self.jobs if one.name == name).curriculum.course(0, rounds, begins)


def read_wanted(jobs: Path, cluster: Cluster, asked: PlanAsked) -> Wanted:
    """Read the jobs file and return the request to plan its jobs on a cluster."""
    from weftune.base.config import read_tokenizer
    from weftune.cli.plan_jobs import outline_jobs
    from weftune.cli.plan_sweeps import averaged_trials, sweep_outlooks
    from weftune.jobs.spec.read import read_run

    gpu = cluster.devices[0].is_gpu
    run = read_run(jobs, lambda base: described(base, gpu))
    shape = described(run.base, gpu)
    averaged = averaged_trials(run.sweeps)
    outlined = outline_jobs(run.jobs, read_tokenizer(run.base), shape, asked.max_steps, averaged)
    sweeps = sweep_outlooks(run.sweeps, run.jobs, {one.name: one.total for one in outlined})
    return Wanted(asked, run.base, shape, cluster, speeds_of(cluster), outlined, sweeps)


@dataclass(frozen=True, slots=True)
class Picture:
    """The program and the timeline that a Gantt chart is drawn from."""

    program: Program
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Answered:
    numbers: Mapping[str, Any]
    picture: Callable[[], Picture]
    run: WholeRun


def answer(wanted: Wanted, console: Console) -> Answered:
    """Choose as `weftune train` would, predict the first window, and print the plan."""
    from weftune.cli.plan_machine import machine_of
    from weftune.plan.layout.choose import choose

    choice = choose(wanted.shape, wanted.shapes, machine_of(wanted))
    if choice.machine.shares > 1:
        return shared(with_shared_cores(wanted, choice.machine.shares), choice, console)
    return (streamed if choice.streamed else resident)(wanted, choice, console)


def resident(wanted: Wanted, choice: Choice, console: Console) -> Answered:
    """Plan with the base resident on the devices."""
    from weftune.cli.plan_machine import source_of
    from weftune.cli.plan_numbers import common_numbers, resident_numbers, run_numbers
    from weftune.cli.plan_show import show, show_more, show_run
    from weftune.plan.outlook.explain import explain
    from weftune.plan.outlook.whole_run import WholeRun, at_rate, endings

    admission = admitted(wanted.shapes, choice)
    found, source = foreseen(wanted, choice, admission), source_of(wanted, choice)
    totals, rate = wanted.totals, found.forecast.tokens_per_second
    ends = endings(totals, admission.admitted, admission.waiting, at_rate(totals, rate))
    run = WholeRun(ends, found.window.promise.peak_bytes, choice.memory.budget)
    show_run(console, run, wanted, source)
    show(console, found, wanted)
    ablations = studied(wanted, admission) if wanted.asked.ablated else ()
    show_more(console, wanted, admission, explain(found, source) if wanted.asked.explained else (), ablations)
    numbers = resident_numbers(found) | {"shares": None}
    numbers |= common_numbers(wanted, choice, found.forecast, found.alternatives, source)
    numbers |= told(admission, ablations) | run_numbers(run, totals) | {"first_window": found.window.numbers}
    return Answered(numbers | swept(wanted, run), lambda: Picture(found.program, found.timeline), run)


def streamed(wanted: Wanted, choice: Choice, console: Console) -> Answered:
    """Plan with the base in host memory, streamed to one or several devices in stages."""
    from weftune.cli.plan_machine import source_of
    from weftune.cli.plan_numbers import common_numbers, run_numbers, stream_numbers
    from weftune.cli.plan_show import show_more, show_run, show_streams
    from weftune.plan.outlook.explain import explain_streams
    from weftune.plan.outlook.promise import first_window
    from weftune.plan.outlook.streamed import ablate_streams, round_timeline, stream_outlook
    from weftune.plan.outlook.whole_run import WholeRun, endings

    admission, source = admitted(wanted.shapes, choice), source_of(wanted, choice)
    found = stream_outlook(choice)
    window = first_window(choice, aboard(wanted, admission), wanted.course)
    seconds = found.forecast.seconds
    ends = endings(wanted.totals, admission.admitted, admission.waiting, lambda _: seconds)
    run = WholeRun(ends, choice.bytes, found.case.device.budget)
    show_run(console, run, wanted, source)
    show_streams(console, found, wanted)
    ablations = ablate_streams(found) if wanted.asked.ablated else ()
    sentences = explain_streams(found, source) if wanted.asked.explained else ()
    show_more(console, wanted, admission, sentences, ablations)
    numbers = stream_numbers(found, window)
    numbers |= common_numbers(wanted, choice, found.forecast, found.alternatives, source)
    numbers |= told(admission, ablations) | run_numbers(run, wanted.totals)
    numbers |= swept(wanted, run)
    program = window.program
    return Answered(
        numbers, lambda: Picture(program, round_timeline(found.case, choice.layout, program)), run
    )


def shared(wanted: Wanted, choice: Choice, console: Console) -> Answered:
    """Plan with the whole base on every device and a share of the jobs on each."""
    from weftune.cli.plan_machine import source_of, train_flags
    from weftune.cli.plan_numbers import common_numbers, resident_numbers, run_numbers, share_numbers
    from weftune.cli.plan_show import show_more, show_run, show_shares
    from weftune.plan.layout.choose import choose
    from weftune.plan.outlook.explain import explain
    from weftune.plan.outlook.shares import share_outlook

    machine, source = choice.machine, source_of(wanted, choice)

    def alone(jobs: Sequence[JobShape]) -> Prediction:
        own = choose(wanted.shape, jobs, machine)
        return foreseen(wanted, own, admitted(jobs, own))

    everyone = admitted(wanted.shapes, choice)
    found = share_outlook(wanted.shapes, job_seconds_of(wanted, machine), machine.shares, alone)
    run = run_of_shares(found, wanted.totals)
    show_run(console, run, wanted, source)
    show_shares(console, found, wanted, train_flags(wanted, choice))
    first = found.parts[0]
    ablations = studied(wanted, everyone) if wanted.asked.ablated else ()
    show_more(console, wanted, everyone, explain(first, source) if wanted.asked.explained else (), ablations)
    numbers = resident_numbers(first) | share_numbers(found)
    numbers |= common_numbers(wanted, choice, first.forecast, first.alternatives, source)
    numbers |= told(everyone, ablations) | run_numbers(run, wanted.totals)
    numbers |= {"first_window": first.window.numbers}
    return Answered(numbers | swept(wanted, run), lambda: Picture(first.program, first.timeline), run)


def with_shared_cores(wanted: Wanted, shares: int) -> Wanted:
    """Divide the speed of a CPU by the number of shares, which share its cores; each GPU has one share."""
    if wanted.cluster.devices[0].is_gpu:
        return wanted
    return replace(wanted, speeds=[replace(speed, flops=speed.flops / shares) for speed in wanted.speeds])


def swept(wanted: Wanted, run: WholeRun) -> dict[str, Any]:
    """Return the numbers of the sweeps; empty if there are none."""
    from weftune.cli.plan_sweeps import sweep_numbers

    return sweep_numbers(run, wanted.sweeps, wanted.totals) if wanted.sweeps else {}


def foreseen(wanted: Wanted, choice: Choice, admission: Admission) -> Prediction:
    from weftune.cli.plan_machine import times_of
    from weftune.plan.outlook.forecast import foresee

    return foresee(choice, aboard(wanted, admission), wanted.course, times_of(wanted, choice.machine))


def aboard(wanted: Wanted, admission: Admission) -> list[JobShape]:
    """Return the shapes of the admitted jobs, in the order of admission."""
    by_name = {job.name: job for job in wanted.shapes}
    return [by_name[name] for name in admission.admitted]


def admitted(jobs: Sequence[JobShape], choice: Choice) -> Admission:
    """Return the jobs admitted first, by the scheduler's own rule; raise PlanError if none can be."""
    from weftune.errors import Mistake, PlanError
    from weftune.jobs.store.scheduler import admit

    found = admit(jobs, [], choice.memory.why_not)
    if not found.admitted:
        raise PlanError(
            Mistake(f"job {name}", f"even alone it {why}") for name, why in found.too_large.items()
        )
    return found


def told(admission: Admission, ablations: Sequence[Ablation]) -> dict[str, Any]:
    from weftune.cli.plan_numbers import ablation_numbers

    return {
        "waiting": dict(admission.waiting),
        "too_large": dict(admission.too_large),
        "ablations": ablation_numbers(ablations),
    }


def studied(wanted: Wanted, admission: Admission) -> tuple[Ablation, ...]:
    """Return the simulated worth of each mechanism, whether a run uses it or not."""
    from weftune.errors import PlanError
    from weftune.plan.studies.ablate import ablate
    from weftune.plan.studies.fit import make_ground
    from weftune.plan.studies.simulated import outlook

    jobs = [one.job for one in wanted.jobs if one.name in admission.admitted]
    try:
        return ablate(outlook(make_ground(wanted.shape, wanted.cluster, wanted.speeds), jobs))
    except PlanError:
        return ()


def run_of_shares(shared: ShareOutlook, totals: Mapping[str, JobTotal]) -> WholeRun:
    """Combine the shares into one run, in which every device trains its own jobs."""
    from weftune.plan.outlook.whole_run import WholeRun, at_rate, endings

    ends: dict[str, float] = {}
    for share, part in zip(shared.shares, shared.parts, strict=True):
        first = list(part.window.shapes)
        waiting = [name for name in share.jobs if name not in first]
        ends |= endings(totals, first, waiting, at_rate(totals, part.forecast.tokens_per_second))
    needs = max(part.window.promise.peak_bytes for part in shared.parts)
    return WholeRun(ends, needs, max(part.choice.memory.budget for part in shared.parts))


def job_seconds_of(wanted: Wanted, machine: Machine) -> dict[str, float]:
    """Return the seconds of each job's whole run with every microbatch to itself.

    Jobs are divided into shares by these seconds.
    """
    from weftune.plan.cost.profile_cost import cost_of
    from weftune.plan.layout.split import JobWork, job_seconds, sheet_cost

    shape, profile = wanted.shape, machine.profile
    cost = cost_of(profile, shape) if profile else sheet_cost(shape, wanted.speeds[0])
    return {
        one.name: job_seconds(
            JobWork(
                shape=one.shape, steps=one.total.steps, batches=one.curriculum.course(0, 4, True).batches
            ),
            cost,
            machine.max_tokens,
        )
        for one in wanted.jobs
    }


def speeds_of(cluster: Cluster) -> list[Speed]:
    from weftune.plan.cost.estimate import sheet_speed

    return [sheet_speed(device) for device in cluster.devices]


def described(base: BaseSpec, gpu: bool) -> ModelShape:
    """Return the base's sizes, from its config.json."""
    from weftune.base.architecture import spec_shape
    from weftune.base.config import bytes_per_value, read_config

    return spec_shape(base, read_config(base), bytes_per_value(base, gpu))


def read_cluster(text: str, limit: int | None = None, on_cpu: bool = False) -> Cluster:
    """Return the cluster that `text` names. `limit` applies to GPUs only, not to the memory of a CPU."""
    from weftune.plan.cost.cluster import limited

    cluster = _cluster(text, on_cpu)
    return limited(cluster, limit) if limit is not None and cluster.devices[0].is_gpu else cluster


def _cluster(text: str, on_cpu: bool) -> Cluster:
    from weftune.errors import Mistake, PlanError
    from weftune.plan.cost.cluster import cluster_from, parse_cluster, this_cpu, this_machine

    if text == "auto":
        return this_cpu() if on_cpu else this_machine()
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


def refuse_picture(file: Path) -> None:
    """Refuse an unknown file ending, or a missing drawing library, before anything is planned."""
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
    """Disable the garbage collector: a plan makes hundreds of thousands of records and hardly any reference
    cycle, and collection would take an eighth of its time."""
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
