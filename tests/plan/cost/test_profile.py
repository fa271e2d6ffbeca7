"""A profile is read as it was written, only for what it holds for, and gives the terms that made it."""

import json
from dataclasses import replace

import pytest

from tests.plan.costs import CONFIG, SHAPE, TRUTH, work
from tests.plan.profiles import KINDS, LAYER, PER_TOKEN, profile
from weftune.base.architecture import model_shape
from weftune.plan.cost.memory import MemoryModel
from weftune.plan.cost.prior import flop_terms
from weftune.plan.cost.profile import (
    VERSION,
    cpu_threads,
    find_local_profile,
    find_profile,
    profile_folder,
    profile_key,
    profile_path,
    read_profile,
    to_json,
    write_profile,
)
from weftune.plan.cost.profile_cost import fit_profile_memory, pass_terms, profile_cost_model


def test_what_was_written_is_read(tmp_path) -> None:
    file = tmp_path / "deep" / "profile.json"
    write_profile(file, profile())
    assert read_profile(file) == profile()
    assert [one.name for one in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: [],
        lambda value: value | {"version": VERSION + 1},
        lambda value: {key: one for key, one in value.items() if key != "steps"},
        lambda value: value | {"seconds": -1},
        lambda value: value | {"passes": [{"layers": "many"}]},
        lambda value: value | {"key": {"device": "cpu"}},
    ],
)
def test_a_file_that_is_no_profile_is_as_good_as_none(tmp_path, damage) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(damage(json.loads(to_json(profile())))))
    assert read_profile(file) is None
    file.write_text("{")
    assert read_profile(file) is None
    assert read_profile(tmp_path / "absent") is None


def test_a_profile_holds_for_its_device_torch_dtype_and_shape_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    key = profile().key
    write_profile(profile_path(profile_folder(), key), profile())
    assert find_profile(key) == profile()
    wider = model_shape(CONFIG | {"intermediate_size": 2048}, "wider", 4)
    for other in (
        replace(key, device="NVIDIA H200"),
        replace(key, threads=4),
        replace(key, torch="0.1"),
        replace(key, bytes_per_value=2),
        profile_key(wider, "cpu", 2),
    ):
        assert find_profile(other) is None
        write_profile(profile_path(profile_folder(), other), profile())
        assert find_profile(other) is None, "a file under another's name is not taken"


def test_the_profile_of_this_machine_is_found_without_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WEFTUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu_threads() == 3
    assert find_local_profile(SHAPE) is None
    mine = replace(profile(), key=profile_key(SHAPE, "cpu", 3))
    write_profile(profile_path(profile_folder(), mine.key), mine)
    assert find_local_profile(SHAPE) == mine
    assert find_local_profile(SHAPE, "NVIDIA H200") is None


def test_passes_over_few_layers_give_the_time_of_all() -> None:
    model = profile_cost_model(profile(), SHAPE)
    for lengths, share, jobs in (([64] * 4, 0.5, 2), ([200, 90, 33], 0.9, 3), ([500], 0.2, 1)):
        one = work(lengths, share, 10**6, jobs)
        truth = KINDS.base_terms(SHAPE.layers)(one)
        assert model.forward(one) == pytest.approx(truth, rel=0.05)
        assert model.evaluation(one) == pytest.approx(truth, rel=0.05)
    assert model.step(1, 5 * 10**6) == pytest.approx(TRUTH.step(1, 5 * 10**6), rel=0.05)
    assert model.is_measured
    assert "cpu, 2 threads" in model.source


def test_one_layer_is_told_from_what_is_around_it() -> None:
    found = pass_terms(profile(), SHAPE).forward
    assert found.layer.token == pytest.approx(LAYER.token, rel=0.1)
    assert found.head.supervised == pytest.approx(KINDS.head.supervised, rel=0.1)


def test_activations_of_the_base_follow_from_the_peaks_of_few_layers() -> None:
    memory = MemoryModel(SHAPE, 10**12)
    fit = fit_profile_memory(profile(), memory)
    fitted = replace(memory, fit=fit)
    added = fitted.peak_bytes([], 1000) - fitted.peak_bytes([], 0)
    assert added == pytest.approx(PER_TOKEN * SHAPE.layers * 1000, rel=0.02)
    assert fit.slack == pytest.approx(0.5, rel=0.05)


def test_what_supervised_rows_take_is_told_from_what_layers_do() -> None:
    """Were it counted with the activations, workers without a head would be given room for logits."""
    memory = MemoryModel(SHAPE, 10**12)
    peaks = {one: 0.8 * memory.logit_bytes(one.time.work.supervised) for one in profile().passes}
    passes = tuple(
        replace(one, peak_bytes=one.peak_bytes + int(more)) if one.peak_bytes else one
        for one, more in peaks.items()
    )
    fit, plain = (
        fit_profile_memory(replace(profile(), passes=passes), memory),
        fit_profile_memory(profile(), memory),
    )
    assert fit.head == pytest.approx(0.8, rel=0.05)
    assert fit.activations == pytest.approx(plain.activations, rel=0.02)
    assert plain.head == pytest.approx(0.0, abs=0.01)


def test_the_process_of_a_worker_is_its_own_and_that_of_an_older_profile_the_only_one(tmp_path) -> None:
    file = tmp_path / "profile.json"
    mine = replace(profile(), process_bytes=500, first_worker_bytes=420, worker_bytes=360)
    write_profile(file, mine)
    assert read_profile(file) == mine
    assert (mine.process_bytes_of(1), mine.process_bytes_of(2), mine.first_only_bytes) == (500, 420, 60)
    older = json.loads(to_json(mine))
    del older["first_worker_bytes"], older["worker_bytes"]
    file.write_text(json.dumps(older))
    found = read_profile(file)
    assert found is not None
    assert (found.process_bytes_of(1), found.process_bytes_of(2), found.first_only_bytes) == (500, 500, 0)


def test_peaks_that_no_token_moves_leave_a_share_of_what_is_known() -> None:
    """An allocator that took a GiB ahead: a token that takes nothing would leave room for all there are."""
    flat = replace(profile(), passes=tuple(replace(one, peak_bytes=10**9) for one in profile().passes))
    memory = MemoryModel(SHAPE, 10**12)
    fit = fit_profile_memory(flat, memory)
    assert fit.activations == pytest.approx(0.1)
    assert 0 < replace(memory, fit=fit).choose_capacity([], 10**12) < 10**12


def test_without_peaks_the_memory_model_stands_as_it_is() -> None:
    blind = replace(profile(), passes=tuple(replace(one, peak_bytes=0) for one in profile().passes))
    memory = MemoryModel(SHAPE, 10**12)
    assert fit_profile_memory(blind, memory) == memory.fit


def test_without_a_single_pass_it_gives_what_is_counted() -> None:
    """A base whose context is shorter than what a profile is measured with."""
    assert pass_terms(replace(profile(), passes=()), SHAPE) == flop_terms(SHAPE)
