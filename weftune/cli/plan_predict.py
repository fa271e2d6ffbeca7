"""The result of `weftune plan`: predictions for the first window (a few global batches of every job) and for
the whole run, on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from weftune.core.shapes import JobShape
from weftune.errors import PlanError
from weftune.jobs.store.scheduler import Admission
from weftune.launch.choice import (
    admit_first_jobs,
    choose_planned_layout,
    solo_job_seconds,
    stage_times,
    time_source,
    train_flags,
)
from weftune.launch.plan_case import PlanCase
from weftune.plan.layout.choose import (
    LayoutChoice,
    choose_layout,
)
from weftune.plan.outlook.ablate import ablate, compare_forecasts
from weftune.plan.outlook.explain import explain_resident_plan, explain_streamed_plan
from weftune.plan.outlook.first_window import FirstWindow, first_window
from weftune.plan.outlook.forecast import (
    Ablation,
    Forecast,
    Prediction,
    ShareOutlook,
    predict_window,
    share_outlook,
)
from weftune.plan.outlook.streamed import StreamOutlook, ablate_streamed_plan, round_timeline, stream_outlook
from weftune.plan.outlook.whole_run import WholeRun, job_ends, rounds_at_rate
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of `weftune plan`, which can be shown as text or written as JSON."""

    case: PlanCase
    choice: LayoutChoice
    outlook: Prediction | StreamOutlook
    """Prediction of memory and times for all devices or, if the jobs are divided into shares (parts with
    their own processes), for the devices of the first share."""
    shares: ShareOutlook | None
    """Prediction for all shares (subsets of the jobs with their own processes). None if the jobs are not
    divided."""
    window: FirstWindow
    admission: Admission
    run: WholeRun
    source: str
    """Description of where the predicted times come from, such as a profile or a data sheet."""
    flags: str
    """Flags of `weftune train` that request the chosen number of workers."""
    sentences: Sequence[str] = ()
    """Sentences that explain the planner's decisions, one per decision. Empty unless the user requests
    them."""
    ablations: Sequence[Ablation] = ()
    """Effect of disabling each optimisation that the plan uses, one at a time. Empty unless the user requests
    it."""
    measured_step_seconds: tuple[float, float] | None = None
    """Measured seconds per round (one global batch of every job) of the plan itself: before and after the
    plan is measured without single optimisations. None if nothing was measured."""

    @property
    def forecast(self) -> Forecast:
        return self.outlook.forecast

    @property
    def program(self) -> Program:
        return self.outlook.program if isinstance(self.outlook, Prediction) else self.window.program

    def timeline(self) -> Timeline:
        """Return the predicted timeline of `program`, which is drawn as a Gantt chart."""
        if isinstance(self.outlook, Prediction):
            return self.outlook.timeline
        return round_timeline(self.outlook.case, self.choice.layout, self.program)


def predict(case: PlanCase, *, needs_sentences: bool = False, includes_ablations: bool = False) -> Plan:
    """Choose a layout as `weftune train` would, and predict the first window (a few global batches of every
    job) and the whole run."""
    choice = choose_planned_layout(case)
    machine, totals = choice.machine, case.totals
    if machine.shares > 1 and not machine.on_gpu:
        # Shares that train on one CPU divide its cores.
        speeds = [replace(speed, flops=speed.flops / machine.shares) for speed in case.speeds]
        case = replace(case, speeds=speeds)
    admission, source = admit_first_jobs(case.shapes, choice), time_source(case, choice)
    outlook: Prediction | StreamOutlook
    shares = _share_outlook(case, choice) if machine.shares > 1 else None
    if choice.is_streamed and shares is None:
        outlook = stream_outlook(choice)
        window = first_window(choice, _admitted_shapes(case, admission), case.job_window)
        seconds = outlook.forecast.seconds
        ends = job_ends(totals, admission.admitted_names, admission.wait_reasons, lambda _: seconds)
        run = WholeRun(ends, choice.peak_device_bytes, outlook.case.device.budget_bytes)
        sentences = explain_streamed_plan(outlook, source) if needs_sentences else []
        ablations = ablate_streamed_plan(outlook) if includes_ablations else ()
    else:
        outlook = _predict_outlook(case, choice, admission) if shares is None else shares.parts[0]
        window = outlook.window
        if shares is None:
            run = _predict_whole_run(case, [outlook], [admission.wait_reasons])
        else:
            pairs = zip(shares.shares, shares.parts, strict=True)
            later = [[name for name in one.jobs if name not in part.window.shapes] for one, part in pairs]
            run = _predict_whole_run(case, shares.parts, later)
        sentences = explain_resident_plan(outlook, source) if needs_sentences else []
        ablations = _ablations(case, outlook) if includes_ablations else ()
    return Plan(
        case=case,
        choice=choice,
        outlook=outlook,
        shares=shares,
        window=window,
        admission=admission,
        run=run,
        source=source,
        flags=train_flags(case, choice),
        sentences=sentences,
        ablations=ablations,
    )


def _admitted_shapes(case: PlanCase, admission: Admission) -> list[JobShape]:
    """Return the shapes (sizes) of the admitted jobs, in the order of admission."""
    by_name = {job.name: job for job in case.shapes}
    return [by_name[name] for name in admission.admitted_names]


def _predict_outlook(case: PlanCase, choice: LayoutChoice, admission: Admission) -> Prediction:
    return predict_window(
        choice, _admitted_shapes(case, admission), case.job_window, stage_times(case, choice.machine)
    )


def _share_outlook(case: PlanCase, choice: LayoutChoice) -> ShareOutlook:
    """Divide the jobs into shares (subsets with their own processes) by the predicted seconds of each job's
    whole training, and return a prediction for all shares."""
    machine = choice.machine
    workers = machine.division.workers_per_share
    seconds = {name: alone / workers for name, alone in solo_job_seconds(case, machine).items()}

    def predict_alone(jobs: Sequence[JobShape]) -> Prediction:
        own = choose_layout(case.shape, jobs, replace(machine, shares=1))
        return _predict_outlook(case, own, admit_first_jobs(jobs, own))

    return share_outlook(case.shapes, seconds, machine.shares, predict_alone)


def _predict_whole_run(
    case: PlanCase, parts: Sequence[Prediction], waiting_jobs: Sequence[Iterable[str]]
) -> WholeRun:
    """Predict the whole run if several groups of devices train different jobs. `parts` has a prediction for
    each group, and `waiting_jobs` the names of the jobs that wait for admission there."""
    ends: dict[str, float] = {}
    for part, names in zip(parts, waiting_jobs, strict=True):
        rate = rounds_at_rate(case.totals, part.forecast.tokens_per_second)
        ends |= job_ends(case.totals, part.window.shapes, names, rate)
    need_bytes = max(part.window.prediction.peak_bytes for part in parts)
    return WholeRun(ends, need_bytes, max(part.choice.memory.budget_bytes for part in parts))


def _ablations(case: PlanCase, prediction: Prediction) -> tuple[Ablation, ...]:
    """Return the effect of disabling each optimisation that a plan uses. If the jobs are divided into shares
    (parts with their own processes), this is the plan of the first share."""
    machine, jobs = prediction.choice.machine, list(prediction.window.shapes.values())
    rows = ablate(
        prediction,
        lambda name, rounds: case.job_window(name, rounds, False),
        stage_times(case, machine),
    )
    for mechanism, number, without in (
        ("replicas", machine.replicas, replace(machine, replicas=1)),
        ("shards", machine.shards, replace(machine, shards=1)),
    ):
        if number == 1:
            continue
        own = replace(without, workers=machine.workers * number)
        with suppress(PlanError):
            choice = choose_layout(case.shape, jobs, own)
            other = _predict_outlook(case, choice, admit_first_jobs(jobs, choice))
            row = compare_forecasts(prediction, mechanism, f"{own.workers} stages instead", other.forecast)
            rows.append(replace(row, options={"pipeline": own.workers, mechanism: 1}))
    return tuple(rows)


def device_needs_bytes(prediction: Prediction) -> list[int]:
    """Return the predicted memory use of each device, in bytes, when microbatches have their maximum size.
    Every device is assumed to hold the adapters of all jobs that are admitted first."""
    memory, program = prediction.choice.memory, prediction.program
    needs = memory.worker_needs(list(prediction.window.shapes.values()), program.capacity, program.recompute)
    return [need.total_bytes(memory.fit) for need in needs]
