"""A device is measured through the executor itself, on bases of few layers."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.bench import CPU
from tests.families import tiny
from weftune.base.shape import model_shape
from weftune.plan.cost.profile import cpu_threads
from weftune.plan.cost.profile_cost import profile_cost_model
from weftune.run.profile import CASES, CONCURRENT_CASE, DEPTHS, _Bench, _Peaks, _shallow_base, measure_profile


@pytest.fixture(scope="module")
def found():
    model = tiny("llama", torch.float32, 0)
    shape, heard = model_shape(model, torch.float32), []
    profile = measure_profile(
        model.config, shape, "tiny", CPU, lambda done, total: heard.append((done, total))
    )
    return SimpleNamespace(shape=shape, profile=profile, heard=heard, config=model.config)


def test_every_case_is_measured_at_every_depth_and_progress_is_told(found) -> None:
    shape, profile, heard = found.shape, found.profile, found.heard
    cases = [case for case in CASES if case.length <= shape.context]
    assert len(profile.passes) == len(DEPTHS) * len(cases)
    assert {one.layers for one in profile.passes} == set(DEPTHS)
    assert heard[-1] == (len(profile.passes), len(profile.passes))
    for one, case in zip(profile.passes, cases * len(DEPTHS), strict=True):
        work = one.time.work
        assert (work.tokens, work.samples, work.segments) == (
            case.tokens,
            case.jobs * case.samples,
            case.jobs,
        )
        assert one.time.training == case.training
        assert one.time.forward > 0
        assert (one.time.backward > 0) == case.training


def test_the_profile_is_of_this_device_and_gives_a_time_model(found) -> None:
    shape, profile = found.shape, found.profile
    assert profile.key.device == "cpu"
    assert profile.key.threads == cpu_threads()
    assert profile.steps
    model = profile_cost_model(profile, shape)
    largest = max((one.time.work for one in profile.passes), key=lambda work: work.tokens)
    assert model.pass_seconds(largest) > 0


def test_peaks_are_new_highs_beyond_what_base_and_adapters_take(found) -> None:
    peaks = [one.peak_bytes for one in found.profile.passes]
    assert all(peak >= 0 for peak in peaks)
    assert 0 in peaks, "most passes take less than one before them"
    assert found.profile.first_seconds >= 0


def test_a_peak_is_counted_where_it_is_higher_than_all_before_it() -> None:
    peaks = _Peaks(CPU)
    first = torch.ones(64 << 20, dtype=torch.uint8)
    high = peaks.excess_bytes(0)
    assert high >= first.nbytes - (1 << 20), "all but what the process had freed before"
    assert peaks.excess_bytes(0) < 1 << 20, "nothing was taken since"
    second = torch.ones(64 << 20, dtype=torch.uint8)
    assert peaks.excess_bytes(second.nbytes) >= high - (1 << 20)


@pytest.mark.timed
def test_what_a_process_does_beside_its_first_passes_delays_them(found) -> None:
    def busy() -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass

    with _Bench(_shallow_base(found.config, 1, torch.float32, CPU), _Peaks(CPU)) as bench:
        assert bench.measure_delay(CONCURRENT_CASE, lambda: None) < 0.1
        assert 0.0 < bench.measure_delay(CONCURRENT_CASE, busy) < 0.6


def test_the_config_that_was_given_is_left_as_it_was(found) -> None:
    assert found.config.to_dict() == tiny("llama", torch.float32, 0).config.to_dict()
