"""`weftune plan jobs.yaml --cluster 4xA100-80G`: predict a training run of the jobs on a machine."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weftune.cli import early
from weftune.errors import Mistake, OutputError, PlanError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from weftune.cli.plan_predict import Plan
    from weftune.jobs.spec.spec import RunSpec
    from weftune.plan.cost.cluster import Cluster


def plan(
    jobs: early.JobsFile,
    cluster: Annotated[
        str,
        typer.Option(help="4xA100-80G[:nvlink|pcie], 2+2xRTX3090, a cluster file, or auto: this machine."),
    ] = "auto",
    gpu_memory: early.GpuMemoryOption = None,
    memory: early.MemoryOption = None,
    device: early.DeviceOption = None,
    pipeline: early.PipelineOption = None,
    replicas: early.ReplicasOption = 1,
    shards: early.ShardsOption = "1",
    gpus: early.GpusOption = None,
    capacity: early.CapacityOption = None,
    max_steps: early.MaxStepsOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print a sentence for each decision.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Print how much each mechanism saves, one at a time.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --ablate: also measure it, by training on this machine.")
    ] = False,
    gantt: Annotated[
        Path | None, typer.Option(help="File to draw the timeline to: out.html or out.png.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file to write the numbers to.")] = None,
) -> None:
    """Predict what `weftune train` would do with the jobs: layout, memory, times. No weights are loaded."""
    from weftune.jobs.spec.checks import refuse_kinds_on_shards

    if gantt is not None:
        _refuse_picture(gantt)
    if measure and not ablate:
        raise UserError("--measure: it measures the rows of --ablate; add --ablate")
    if measure and cluster != "auto":
        raise UserError(f"--measure: it trains on this machine; leave out --cluster {cluster}")
    options = early.read_options(
        device=device,
        memory=memory,
        gpu_memory=gpu_memory,
        pipeline=pipeline,
        replicas=replicas,
        shards=shards,
        gpus=gpus,
        capacity=capacity,
    )
    run = early.read_jobs_file(jobs)
    refuse_kinds_on_shards(run.jobs, options.shards)
    early.check_row_files(early.one_trial_per_sweep(run), includes_job_names=True)
    found = read_cluster(cluster, options.gpu_memory, uses_cpu=device == "cpu")

    from rich.console import Console

    from weftune.cli.plan_json import plan_numbers
    from weftune.cli.plan_predict import predict
    from weftune.cli.plan_text import show_plan
    from weftune.launch.plan_case import read_case

    # A plan makes hundreds of thousands of records and hardly any reference cycle: collecting garbage would
    # take an eighth of its time.
    gc.disable()
    try:
        case = read_case(run, found, options, on_this_machine=cluster == "auto", max_steps=max_steps)
        answer = predict(case, needs_sentences=explain, includes_ablations=ablate)
    finally:
        gc.enable()
    console = Console()
    if measure:
        answer = _measure(run, answer, console)
    show_plan(console, answer)
    if gantt is not None:
        if gantt.suffix.lower() == ".png":
            from weftune.report.gantt_png import gantt_png

            picture = gantt_png(answer.timeline(), answer.program, found.name)
        else:
            from weftune.report.gantt import gantt_page

            picture = gantt_page(answer.timeline(), answer.program, found.name).encode()
        _write_file(gantt, picture)
    if json is not None:
        from json import dumps

        _write_file(json, (dumps(plan_numbers(answer), indent=2) + "\n").encode())


def _measure(run: RunSpec, answer: Plan, console: Console) -> Plan:
    """Measure a plan and its ablations on this machine, and return the plan with the measured times."""
    from weftune.launch.choice import with_chosen_division

    if answer.shares is not None:
        raise UserError("--measure: one share of the jobs can be measured; plan it with --gpus 1")
    if answer.choice.is_streamed:
        raise UserError("--measure: the base is streamed, and its alternatives can only be predicted")
    from weftune.launch.measured import measure_plan, select_jobs
    from weftune.plan.outlook.ablate import undisturbed_rounds

    def show(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False)

    case, shapes, forecast = answer.case, answer.window.shapes, answer.forecast
    rounds = undisturbed_rounds(
        answer.choice, list(shapes.values()), lambda name, count: case.job_window(name, count, False)
    )
    jobs, options = select_jobs(run, shapes), with_chosen_division(case.options, answer.choice)
    tokens = forecast.tokens / forecast.steps
    measured = measure_plan(jobs, options, answer.ablations, rounds, tokens, show)
    return replace(answer, ablations=measured.ablations, measured_step_seconds=measured.step_seconds)


def read_cluster(text: str, limit: int | None = None, uses_cpu: bool = False) -> Cluster:
    """Return the cluster that `text` names. `limit` applies to the memory of GPUs only, not of a CPU."""
    from weftune.plan.cost.cluster import (
        cluster_from_values,
        detect_cluster,
        detect_cpu,
        limit_memory,
        parse_cluster,
    )

    if text == "auto":
        cluster = detect_cpu() if uses_cpu else detect_cluster()
    elif not text.lower().endswith((".yaml", ".yml")):
        cluster = parse_cluster(text)
    else:
        import yaml

        try:
            values = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"--cluster {text}: the file cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise PlanError(Mistake(text, f"is no YAML: {' '.join(str(error).split())}")) from None
        cluster = cluster_from_values(values, text)
    return limit_memory(cluster, limit) if limit is not None and cluster.devices[0].is_gpu else cluster


def _refuse_picture(file: Path) -> None:
    """Refuse an unknown file suffix, or a missing drawing library, before anything is planned."""
    ending = file.suffix.lower()
    if ending not in (".html", ".htm", ".png"):
        raise UserError(f"--gantt {file}: the timeline is drawn as .html or .png; such as out.html")
    if ending == ".png":
        from weftune.report.gantt_png import require_pillow

        require_pillow()


def _write_file(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}") from None
