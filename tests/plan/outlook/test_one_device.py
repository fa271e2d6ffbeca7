"""The outlook for one device that the base does not fit: the run's own choice, told with its own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.outlooks import SHAPE, ground, outline
from weftune.plan.layout.need import StreamDevice
from weftune.plan.layout.one_device import choose_company, gpu_place
from weftune.plan.outlook.one_device import (
    SingleOutlook,
    ablate_single,
    first_window,
    single_memory,
    single_outlook,
)
from weftune.plan.outlook.streamed_explain import explain_single
from weftune.plan.program.check import check
from weftune.plan.program.program import Load

GIB = 1 << 30


def place(gib: float, bandwidth: float = 25e9, flops: float = 40e12) -> StreamDevice:
    return gpu_place(int(gib * GIB), 1 << 50, bandwidth, flops)


def alike(count: int, length: int = 512, batch: int = 8, rank: int = 16):
    """Jobs whose rounds are all as large as the largest."""
    found = []
    for number in range(count):
        job = outline(f"job{number}", 100, rank=rank)
        shape = replace(job.shape, order=number, longest=length, batch_tokens=batch * length)
        found.append(replace(job, batches=((length,) * batch,) * 2, shape=shape))
    return found


def foreseen(device: StreamDevice, jobs) -> SingleOutlook:
    chosen = choose_company(SHAPE, [job.shape for job in jobs], device, 8192)
    return single_outlook(ground("T4"), jobs, chosen, device, "told here")


@pytest.fixture(scope="module")
def found():
    """Adapters and inputs stay on the device."""
    return foreseen(place(13), alike(2, batch=1))


@pytest.mark.parametrize(
    ("device", "jobs", "travels", "offloads"),
    [
        (place(13), alike(2, batch=1), False, False),
        (place(13), alike(2), False, True),
        (place(9), alike(4, batch=1, rank=256), True, False),
        (place(7.5), alike(4, length=2000), True, True),
    ],
)
def test_forecast_and_bytes_are_those_of_the_choice(device, jobs, travels, offloads):
    found = foreseen(device, jobs)
    choice, case = found.choice, found.case
    assert (choice.cut.travels, choice.cut.offloads) == (travels, offloads)
    assert found.forecast.step_seconds == choice.step_seconds
    assert found.forecast.bubbles == pytest.approx(choice.unhidden)
    assert case.device_bytes(found.draft) == choice.device_bytes <= device.budget
    assert case.host_bytes(found.draft) == choice.host_bytes
    assert found.draft.cut(choice.cut.travels, choice.cut.offloaded_rows) == choice.cut


def test_nothing_that_it_is_compared_with_is_faster():
    found = foreseen(place(12, bandwidth=3e9), alike(2, length=100, batch=2))
    assert [one.name for one in found.alternatives] == [
        "one after another",
        "largest stages",
        "smallest stages",
    ]
    rows = ablate_single(found)
    assert {row.mechanism for row in rows} == {"streamed stages", "prefetch", "resident stages"}
    assert all(row.cost > 0.05 for row in rows)
    assert all(one.seconds > 1.05 * found.forecast.seconds for one in found.alternatives)


def test_the_first_window_takes_as_many_rounds_as_it_has_times_the_forecast(found):
    """Where adapters stay, the simulator on the very Program and the recurrence of the choice agree."""
    assert not found.choice.cut.travels
    window = first_window(found)
    check(window.program)
    rounds = len(found.jobs[0].batches)
    assert window.timeline.makespan == pytest.approx(rounds * found.choice.step_seconds, rel=1e-6)


def test_what_is_uploaded_are_the_loads_of_the_window(found):
    window = first_window(found)
    loaded = [action.stage for action in window.program.actions if isinstance(action, Load)]
    layers = sum(found.draft.sizes[stage] for stage in loaded)
    rounds = len(found.jobs[0].batches)
    assert found.uploaded_bytes * rounds == layers * found.case.layer_bytes > 0


def test_all_that_the_choice_was_made_for_come_aboard_and_no_more_than_fit():
    device, jobs = place(6), [outline(f"job{at}", 300, rank=1024) for at in range(8)]
    shapes = [replace(job.shape, order=at, batch_tokens=sum(job.batches[0])) for at, job in enumerate(jobs)]
    chosen = choose_company(SHAPE, shapes, device, 8192)
    memory = single_memory(ground("T4"), chosen.choice, device)
    assert 0 < len(chosen.company) < len(jobs)
    assert memory.why_not(chosen.company) is None
    assert memory.why_not(shapes) is not None


def test_the_explanation_says_that_the_run_finds_the_same(found):
    text = "\n".join(explain_single(found))
    assert "`weftune train` finds the same cut for the same 2 of the jobs" in text
    assert f"Token capacity {found.choice.capacity:,}" in text
    assert "Adapters stay on the device. Inputs of stages stay there." in text
    assert "Uploads: " in text
