"""The outlook for a base that does not fit: the run's own choice, told with its own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.studies.scheme import make_batch
from tests.plan.outlooks import SHAPE, outline
from weftune.plan.layout.choose import Machine, choose_layout
from weftune.plan.layout.need import StreamDevice, draft_from_layout, gpu_device
from weftune.plan.outlook.explain import explain_streamed_plan
from weftune.plan.outlook.first_window import first_window
from weftune.plan.outlook.streamed import (
    StreamOutlook,
    ablate_streamed_plan,
    round_timeline,
    stream_outlook,
)
from weftune.plan.program.check import check
from weftune.plan.program.program import Load
from weftune.plan.window.rounds import JobWindow

GIB = 1 << 30


def place(gib: float, bandwidth: float = 25e9, flops: float = 40e12) -> StreamDevice:
    return gpu_device(int(gib * GIB), 1 << 50, bandwidth, flops, memory_bandwidth=1e12)


def alike(count: int, length: int = 512, batch: int = 8, rank: int = 16):
    """Jobs whose rounds are all as large as the largest."""
    found = []
    for number in range(count):
        job = outline(f"job{number}", 100, rank=rank)
        shape = replace(
            job.shape, file_position=number, max_sample_tokens=length, batch_tokens=batch * length
        )
        found.append(replace(job, batches=((length,) * batch,) * 2, shape=shape))
    return found


def foreseen(device: StreamDevice, jobs, workers: int = 1) -> StreamOutlook:
    machine = Machine(
        on_gpu=True,
        budget_bytes=device.budget_bytes,
        stream_budget_bytes=device.budget_bytes,
        workers=workers,
        measure_gpu=lambda budget, host, workers: device,
    )
    return stream_outlook(choose_layout(SHAPE, [job.shape for job in jobs], machine))


def window(found: StreamOutlook, jobs):
    by_name = {job.name: job for job in jobs}

    def course(name, rounds):
        batches = by_name[name].batches[:rounds]
        made = tuple(make_batch(name, step, lengths) for step, lengths in enumerate(batches, 1))
        return JobWindow(name, 0, made, (), frozenset(), frozenset(), True)

    return first_window(found.choice, found.choice.attached_jobs, course)


JOBS = alike(2, batch=1)


@pytest.fixture(scope="module")
def found():
    """Adapters and inputs stay on the device."""
    return foreseen(place(13), JOBS)


@pytest.mark.parametrize(
    ("device", "jobs", "travels", "offloads"),
    [
        pytest.param(place(15), alike(2), False, True, marks=pytest.mark.slow),
        pytest.param(place(9), alike(4, batch=1, rank=256), True, False, marks=pytest.mark.slow),
        (place(7.5), alike(4, length=2000), True, True),
    ],
)
def test_forecast_and_bytes_are_those_of_the_choice(device, jobs, travels, offloads):
    assert_of_the_choice(foreseen(device, jobs), device, travels, offloads)


def test_so_they_are_where_adapters_and_inputs_stay(found):
    assert_of_the_choice(found, place(13), travels=False, offloads=False)


def assert_of_the_choice(found: StreamOutlook, device: StreamDevice, travels: bool, offloads: bool):
    choice, case = found.choice, found.case
    draft = draft_from_layout(choice.layout)
    assert (choice.layout.adapters_travel, choice.layout.offloads_inputs) == (travels, offloads)
    assert found.forecast.step_seconds == choice.round_seconds
    assert found.forecast.bubbles == pytest.approx(choice.waiting_fraction)
    assert case.device_bytes(draft) == choice.peak_device_bytes <= device.budget_bytes
    assert case.host_bytes(draft) == choice.host_bytes
    assert draft.make_layout(travels, choice.layout.offloaded_rows) == choice.layout


def test_the_same_holds_for_several_workers():
    found = foreseen(place(5), alike(2, batch=2), workers=4)
    choice = found.choice
    assert choice.layout.workers == 4
    assert found.forecast.step_seconds == choice.round_seconds
    assert found.forecast.bubbles == pytest.approx(choice.waiting_fraction)
    assert found.forecast.peaks == (choice.peak_device_bytes - found.case.device.slack_bytes,) * 4
    assert "Stage j is on device j mod 4." in "\n".join(explain_streamed_plan(found, "told here"))


@pytest.mark.slow
def test_nothing_that_it_is_compared_with_is_faster():
    found = foreseen(place(12, bandwidth=3e9), alike(2, length=100, batch=2))
    assert [one.name for one in found.alternatives] == [
        "one after another",
        "largest stages",
        "smallest stages",
    ]
    rows = ablate_streamed_plan(found)
    assert {row.mechanism for row in rows} == {"streamed stages", "prefetch", "resident stages"}
    assert all(row.relative_cost > 0.05 for row in rows)
    assert all(one.seconds > 1.05 * found.forecast.seconds for one in found.alternatives)


def test_the_first_window_takes_as_many_rounds_as_it_has_times_the_forecast(found):
    """Where adapters stay, the simulator on the very Program and the recurrence of the choice agree."""
    assert not found.choice.layout.adapters_travel
    program = window(found, JOBS).program
    check(program)
    timeline = round_timeline(found.case, found.choice.layout, program)
    assert timeline.makespan == pytest.approx(len(JOBS[0].batches) * found.choice.round_seconds, rel=1e-6)


def test_what_is_uploaded_are_the_loads_of_the_window(found):
    loaded = [action.stage for action in window(found, JOBS).program.actions if isinstance(action, Load)]
    layers = sum(found.choice.layout.stages[stage].layer_count for stage in loaded)
    assert found.uploaded_bytes * len(JOBS[0].batches) == layers * found.case.memory.layer_bytes > 0


@pytest.mark.slow
def test_all_that_the_choice_was_made_for_come_aboard_and_no_more_than_fit():
    device, jobs = place(6), [outline(f"job{at}", 300, rank=1024) for at in range(8)]
    jobs = [
        replace(job, shape=replace(job.shape, file_position=at, batch_tokens=sum(job.batches[0])))
        for at, job in enumerate(jobs)
    ]
    choice = foreseen(device, jobs).choice
    assert 0 < len(choice.attached_jobs) < len(jobs)
    assert choice.memory.misfit_reason(choice.attached_jobs) is None
    assert choice.memory.misfit_reason([job.shape for job in jobs]) is not None


def test_the_explanation_says_that_the_run_finds_the_same(found):
    text = "\n".join(explain_streamed_plan(found, "told here"))
    assert "`weftune train` finds the same cut for the same 2 of the jobs" in text
    assert f"Token capacity {found.choice.capacity:,}" in text
    assert "Adapters stay on the device. Inputs of stages stay there." in text
    assert "Uploads: " in text
