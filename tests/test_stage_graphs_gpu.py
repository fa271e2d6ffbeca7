"""Captured passes of stages in a pipeline: microbatches in flight have an instance of their own each."""

import pytest
import torch

from tests import bench
from tests.run import executors
from tests.test_gpu import ready
from weftune.base.spec import BaseSpec
from weftune.base.stages import load_stage
from weftune.core.shapes import LayerRange
from weftune.plan.program.layout import one_device_layout
from weftune.plan.program.program import Forward
from weftune.plan.window.window import plan_window
from weftune.run.passes.adapted import AdaptedBase
from weftune.run.passes.graphs import CapturedPasses
from weftune.run.passes.plain import PlainPasses
from weftune.run.passes.rows import StageVisit, to_device_microbatch
from weftune.run.resident_adapters import ResidentAdapters
from weftune.trainer.job import collate_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not bench.STORIES.exists(), reason="stories15M is not here"),
]

LAYERS = 6
IN_FLIGHT = 3


def went_round(captured):
    """What three rounds of three microbatches in flight come to: last hidden states, gradients, captures."""
    spec = BaseSpec(model=str(bench.STORIES), dtype="bfloat16")
    device = torch.device("cuda", 0)
    held = LayerRange(0, 3, LAYERS), LayerRange(3, LAYERS, LAYERS)
    stages = [AdaptedBase(load_stage(spec, device, one)) for one in held]
    passes, rosters = [], []
    for number, adapted in enumerate(stages):
        assert adapted.can_capture
        kind = CapturedPasses if captured else PlainPasses
        passes.append(kind(adapted, {number: adapted.base}))
        adapters = ResidentAdapters(adapted)
        rosters.append(adapters.roster)
        for index in range(2):
            adapters.attach(executors.job_training(adapted.base, ready(stages[0].base, f"job{index}", index)))
    jobs = [ready(stages[0].base, f"job{index}", index) for index in range(2)]
    by_name = {job.name: job for job in jobs}
    courses = [job.job_window(0, 3, False) for job in jobs]
    plans = plan_window(courses, one_device_layout(), 256, pads_to_ladder=True).microbatches[:IN_FLIGHT]
    rows = [
        executors.in_flight(to_device_microbatch(collate_plan(plan, Forward, by_name), plan.rows, device))
        for plan in plans
    ]
    found = []
    stream = stages[0].stream
    with torch.cuda.stream(stream):
        for _ in range(3):
            between, last = [], []
            for number, here in enumerate(rows):
                between.append(passes[0].forward(StageVisit(number, 0), here, None, True))
            for number, here in enumerate(rows):
                made = passes[1].forward(StageVisit(number, 1), here, between[number], True)
                last.append(made.clone())
            for number, here in enumerate(rows):
                dh_TD = torch.ones_like(last[number]) * (number + 1)
                back = passes[1].backward(StageVisit(number, 1), here, between[number], dh_TD)
                passes[0].backward(StageVisit(number, 0), here, None, back)
            found += last
        gradients = [one.gradient.clone() for roster in rosters for one in roster.trainings.values()]
    torch.cuda.synchronize()
    captures = [one.captures for one in passes]
    for one, adapted in zip(passes, stages, strict=True):
        one.abandon()
        adapted.restore_base()
    return found, gradients, captures


def test_microbatches_in_flight_have_the_very_bits_of_plain_passes():
    plain, gradients, none = went_round(captured=False)
    found, others, captures = went_round(captured=True)
    assert none == [None, None]
    assert captures[0] >= IN_FLIGHT
    assert captures[1] >= IN_FLIGHT
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
    assert all(bool(gradient.any()) for gradient in gradients)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, gradients, strict=True))
