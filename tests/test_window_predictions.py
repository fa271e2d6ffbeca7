"""Every window of a run is predicted before it runs; what plans are made by is recorded and found again."""

import json
import time
from itertools import pairwise

import pytest

from tests import bench
from tests.outputs import lines
from weftune import JobSpec, Options
from weftune.errors import UserError
from weftune.jobs.store.status import FITTED_MODELS
from weftune.plan.cost.profile import write_profile
from weftune.report.read import read_run
from weftune.run.profile import measure_profile


def job(name: str, seed: int, steps: int = 24, **keys) -> JobSpec:
    rows = bench.rows(bench.samples(24, seed=seed, longest=30))
    return JobSpec(name=name, data=rows, steps=steps, batch_size=4, adapter={"rank": 4}, **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "out"
    jobs = [job("a", 1, eval={"fraction": 0.2, "every": 8}), job("b", 2, steps=12)]
    bench.trainer(bench.base(), output, jobs).run()
    return output


def test_every_window_after_the_first_has_a_time_and_every_window_a_peak(trained) -> None:
    windows = read_run(trained).windows
    assert len(windows) == 6
    assert windows[0].predicted_seconds is None
    assert all(window.predicted_seconds for window in windows[1:])
    assert all(window.predicted_peak_bytes and window.peak_bytes for window in windows)
    assert windows[0].compiled_passes == 2, "the first pass and the first look"
    assert all(not window.compiled_passes for window in windows[1:])
    assert [window.jobs for window in windows] == [2, 2, 2, 1, 1, 1]


def test_the_version_that_plans_are_made_by_is_in_every_line_and_in_the_record(trained) -> None:
    told = [json.loads(line) for line in (trained / "windows.jsonl").read_text().splitlines()]
    assert [line["profile"] for line in told] == [0, 1, 2, 2, 3, 3]
    record = json.loads((trained / FITTED_MODELS).read_text())
    assert (record["version"], record["windows"]) == (3, 4)


def test_the_report_shows_predicted_beside_measured(trained) -> None:
    page = (trained / "report.html").read_text()
    assert "Predicted and measured" in page
    assert "whose jobs or lengths changed" in page


def test_where_only_the_highest_peak_so_far_can_be_measured_no_lower_one_is_predicted(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("weftune.trainer.loop.reset_peak", lambda device: False)
    bench.trainer(bench.base(), tmp_path / "out", [job("a", 1)]).run()
    windows = read_run(tmp_path / "out").windows
    for before, after in pairwise(windows):
        assert after.predicted_peak_bytes >= before.peak_bytes


@pytest.mark.parametrize("torn", [False, True])
def test_a_resumed_run_goes_on_with_the_recorded_version_and_a_torn_record_costs_nothing(
    tmp_path, torn
) -> None:
    base, output, seen = bench.base(), tmp_path / "out", []
    bench.trainer(base, output, [job("a", 1)]).run()
    record = json.loads((output / FITTED_MODELS).read_text())
    if torn:
        (output / FITTED_MODELS).write_text("{")
    trainer = bench.trainer(base, output, [job("a", 1), job("b", 2)], options=Options(resume=True))
    trainer.run(lambda event: seen.append(trainer.loop.fitted_models.version))
    assert seen[0] == (0 if torn else record["version"])
    assert len(lines(output)) == 48


def test_with_a_profile_the_first_window_is_predicted_from_it_alone(tmp_path) -> None:
    base, file = bench.base(), tmp_path / "profile.json"
    write_profile(file, measure_profile(base.model.config, base.shape, "tiny", bench.CPU, lambda *_: None))
    bench.trainer(base, tmp_path / "out", [job("a", 1)], options=Options(profile=file)).run()
    first, *others = read_run(tmp_path / "out").windows
    assert first.predicted_seconds
    assert first.source.startswith("from the profile of this cpu")
    assert "refitted" not in first.source
    assert all("refitted" in window.source for window in others)


def test_a_profile_of_another_base_is_refused(tmp_path) -> None:
    base, file = bench.base(), tmp_path / "profile.json"
    file.write_text("{}")
    trainer = bench.trainer(base, tmp_path / "out", [job("a", 1)], options=Options(profile=file))
    with pytest.raises(UserError, match=r"profile\.json is no profile of tiny/llama on this device"):
        trainer.run()


def test_what_a_callback_takes_is_no_part_of_a_window(tmp_path) -> None:
    trainer = bench.trainer(bench.base(), tmp_path / "out", [job("a", 1, steps=4)])
    trainer.run(lambda event: time.sleep(0.5))
    (window,) = read_run(tmp_path / "out").windows
    assert window.seconds < 1.5
