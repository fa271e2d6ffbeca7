"""What a run makes of jobs on one device that their base does not fit: its choice, and what that beats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weftune.plan.cost.estimate import JobOutline
from weftune.plan.cost.memory import longest
from weftune.plan.layout.need import Draft, StreamCase, StreamDevice
from weftune.plan.layout.one_device import CompanyChoice
from weftune.plan.layout.search import largest_drafts, smallest_drafts
from weftune.plan.layout.stream_choice import StreamChoice
from weftune.plan.layout.streamed_memory import StreamedMemory
from weftune.plan.outlook.ablate import Ablation
from weftune.plan.outlook.fit import Ground
from weftune.plan.outlook.forecast import Forecast, in_turn
from weftune.plan.outlook.priced import make_batch
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import Link, PassPrice, PricedCluster, PricedDevice, Prices
from weftune.plan.program.program import Program
from weftune.plan.program.simulate import simulate
from weftune.plan.program.timeline import Timeline
from weftune.plan.window.rounds import Course
from weftune.plan.window.window import plan_window


@dataclass(frozen=True, slots=True)
class SingleOutlook:
    ground: Ground
    jobs: tuple[JobOutline, ...]
    """Those aboard from the start."""
    choice: StreamChoice
    case: StreamCase
    """That the choice was made in."""
    forecast: Forecast
    """Of a round: a global batch of every job that the choice was made for, the longest samples in it."""
    alternatives: tuple[Forecast, ...]
    source: str
    """Where times come from."""

    @property
    def draft(self) -> Draft:
        return draft_of(self.choice.cut)

    @property
    def uploaded_bytes(self) -> int:
        """Of layers in a round: stages in the slots are still there where it turns and where it ends."""
        cut = self.choice.cut
        sizes = [cut.stages[stage].stop - cut.stages[stage].start for stage in cut.on(0).streamed]
        still_there = sum(sizes[: cut.slots[0]]) + sum(sizes[len(sizes) - cut.slots[0] :])
        return (2 * sum(sizes) - still_there) * self.case.layer_bytes


@dataclass(frozen=True, slots=True)
class FirstWindow:
    program: Program
    timeline: Timeline


def single_memory(ground: Ground, choice: StreamChoice, place: StreamDevice) -> StreamedMemory:
    """By which jobs come aboard once the choice is made."""
    return StreamedMemory(
        ground.shape, place.budget, place.taken, place.fused, cut=choice.cut, slack=place.slack
    )


def single_outlook(
    ground: Ground, jobs: Sequence[JobOutline], chosen: CompanyChoice, place: StreamDevice, source: str
) -> SingleOutlook:
    """`jobs` are those aboard."""
    choice, company = chosen.choice, chosen.company
    tokens = max(sum(job.batch_tokens for job in company), longest(company))
    travels, offloads = choice.cut.travels, choice.cut.offloads
    case = StreamCase(ground.shape, company, place, tokens, choice.capacity, travels, offloads)
    draft = draft_of(choice.cut)
    plain = [replace(foreseen(case, one.draft), name=one.name) for one in _plain(case)]
    return SingleOutlook(
        ground=ground,
        jobs=tuple(jobs),
        choice=choice,
        case=case,
        forecast=foreseen(case, draft),
        alternatives=(_one_after_another(case, draft), *plain),
        source=source,
    )


def draft_of(cut: Layout) -> Draft:
    sizes = tuple(stage.stop - stage.start for stage in cut.stages)
    return Draft(sizes, tuple(stage.resident for stage in cut.stages), cut.slots[0])


def foreseen(case: StreamCase, draft: Draft) -> Forecast:
    """A round, by the recurrence that the choice is made by."""
    seconds = case.seconds(draft)
    return Forecast(
        name="weftune",
        seconds=seconds,
        steps=1,
        tokens=case.round_tokens,
        microbatches=math.ceil(case.round_tokens / case.capacity),
        busy=seconds * (1.0 - case.unhidden(draft)),
        devices=1,
        peaks=(case.device_bytes(draft) - case.device.slack,),
        fits=True,
        capacity=case.capacity,
    )


def _one_after_another(case: StreamCase, draft: Draft) -> Forecast:
    """Each job with the base streamed for it alone."""
    alone = (replace(case, jobs=(job,), round_tokens=max(job.batch_tokens, job.longest)) for job in case.jobs)
    return replace(in_turn([foreseen(one, draft) for one in alone]), name="one after another")


@dataclass(frozen=True, slots=True)
class _Plain:
    name: str
    draft: Draft


def _plain(case: StreamCase) -> Iterator[_Plain]:
    """Mobius's two plain cuts, each with the slots that suit it best, where they fit."""
    for name, drafts in (("largest stages", largest_drafts), ("smallest stages", smallest_drafts)):
        fitting = [draft for draft in drafts(case) if case.fits(draft)]
        if fitting:
            yield _Plain(name, min(fitting, key=case.seconds))


def ablate_single(found: SingleOutlook) -> tuple[Ablation, ...]:
    """Other cuts, nothing loaded ahead, nothing resident; all else as it was chosen."""
    case, draft = found.case, found.draft
    rows = [("streamed stages", one.name, one.draft) for one in _plain(case)]
    if draft.slots > 1:
        ahead = "one slot: a stage comes when the one before is given up"
        rows.append(("prefetch", ahead, replace(draft, slots=1)))
    if any(draft.resident):
        streamed = replace(draft, resident=(False,) * len(draft.sizes), slots=max(1, draft.slots))
        rows.append(("resident stages", "every stage comes and goes", streamed))
    return tuple(
        Ablation(mechanism, instead, forecast, forecast.seconds / found.forecast.seconds - 1.0)
        for mechanism, instead, other in rows
        if case.fits(other)
        for forecast in (foreseen(case, other),)
    )


def first_window(found: SingleOutlook) -> FirstWindow:
    """The Program that the run would begin with, but for evaluations and Saves, on paper: passes and Loads.
    What travels for Steps and inputs that are offloaded take no time in it."""
    courses = [
        Course(
            job=job.name,
            step=0,
            batches=tuple(make_batch(job.name, step, each) for step, each in enumerate(job.batches, start=1)),
            evaluation=(),
            evaluate_at=frozenset(),
            save_at=frozenset(),
        )
        for job in found.jobs
    ]
    program = plan_window(courses, found.choice.cut, found.choice.capacity, found.case.device.fused)
    case, sizes = found.case, found.draft.sizes
    by_rows = {rows: _passes(case, sizes, rows) for rows in {one.rows for one in program.microbatches}}
    prices = Prices(
        tuple(by_rows[one.rows] for one in program.microbatches),
        weight_bytes=tuple(size * case.layer_bytes for size in sizes),
    )
    device, link = case.device, Link(case.bandwidth)
    cluster = PricedCluster((PricedDevice(device.budget, link),), roots=(case.bandwidth,))
    return FirstWindow(program, simulate(program, prices, cluster))


def _passes(case: StreamCase, sizes: Sequence[int], rows: int) -> tuple[PassPrice, ...]:
    """One microbatch on every stage."""
    one = replace(case, round_tokens=rows, capacity=rows)
    return tuple(PassPrice(stage.forward, stage.backward) for stage in one.rounds(sizes))
