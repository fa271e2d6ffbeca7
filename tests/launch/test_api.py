"""Numbers of processes in Python: what cannot be is refused with a sentence, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weftune
from tests.outputs import jobs_folder
from weftune import Options, Trainer, UserError
from weftune.jobs.spec.spec import RunSpec
from weftune.launch import api
from weftune.run.measure import memory

SETTINGS = Options(device="cpu")


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return jobs_folder(tmp_path, [{"name": "a", "steps": 1}, {"name": "b", "steps": 1}]) / "jobs.yaml"


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"gpus": 0}, 'gpus: must be a whole number from 1, or "all", got 0'),
        ({"gpus": "some"}, "gpus: must be a whole number from 1, or \"all\", got 'some'"),
        ({"pipeline": 1.5}, 'pipeline: must be a whole number from 1, or "auto", got 1.5'),
        ({"replicas": True}, "replicas: must be a whole number from 1, got True"),
        ({"shards": "2"}, "shards: must be a whole number from 1, or \"auto\", got '2'"),
        ({"gpus": "all"}, "--gpus all counts GPUs; with --device cpu write how many"),
        ({"pipeline": 3}, "--pipeline 3: the base has 2 layers"),
        ({"shards": 2}, "(opt) cannot be divided into shards"),
        ({"gpus": 2, "callback": print}, "callback: it would be called in the processes that train"),
        ({"pipeline": 2, "callback": print}, "callback: it would be called in the processes that train"),
        (
            {"options": Options(device="cpu", gpu_memory=1 << 30), "gpus": 2},
            "--gpus and --replicas need all of it on each",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    jobs: Path, numbers: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        weftune.train(jobs, **{"options": SETTINGS, "progress": False, **numbers})
    assert sentence in str(caught.value)
    assert not (jobs.parent / "out").exists()


def test_one_of_everything_is_the_ordinary_run_with_its_callback(jobs: Path) -> None:
    events: list[Any] = []
    results = weftune.train(
        jobs,
        options=SETTINGS,
        progress=False,
        gpus=1,
        pipeline=1,
        replicas=1,
        shards=1,
        callback=events.append,
    )
    assert {event.job for event in events} == set(results) == {"a", "b"}
    assert not (jobs.parent / "out" / "ranks").exists()


def test_the_planner_chooses_one_process_on_a_cpu(jobs: Path) -> None:
    results = weftune.train(jobs, options=SETTINGS, progress=False, shards="auto", pipeline="auto")
    assert set(results) == {"a", "b"}
    assert not (jobs.parent / "out" / "ranks").exists()


def test_on_several_gpus_the_planner_decides_unless_something_ties_the_run_to_this_process(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []

    def choose(run: RunSpec, options: Options, max_steps: int | None) -> tuple[Options, str]:
        asked.append(options)
        return options, "as it is"

    monkeypatch.setattr(memory, "visible_gpus", lambda device: 4)
    monkeypatch.setattr(api, "choose_processes", choose)
    data = [{"text": "w7 w8", "more": lambda: None}] * 8
    content = {"base": str(jobs.parent / "model"), "jobs": [{"name": "a", "steps": 1, "data": data}]}
    output = iter("abc")
    for given, calls, more in ((jobs, 1, {}), (jobs, 1, {"callback": print}), (content, 1, {})):
        keys = {"output": jobs.parent / next(output), "options": SETTINGS, "progress": False, **more}
        weftune.train(given, **keys)
        assert len(asked) == calls


def test_a_kind_that_cannot_be_divided_is_refused_with_its_job(tmp_path: Path) -> None:
    jobs = [{"name": "a", "steps": 1, "adapter": {"kind": "bottleneck", "size": 2}}]
    folder = jobs_folder(tmp_path, jobs)
    with pytest.raises(UserError, match=r"^--shards 2: a has a bottleneck adapter"):
        weftune.train(folder / "jobs.yaml", options=SETTINGS, progress=False, shards=2)


def test_a_trainer_does_not_start_processes_and_names_what_does(tmp_path: Path) -> None:
    trainer = Trainer("demo", output=tmp_path / "out", options=Options(pipeline=2))
    with pytest.raises(UserError, match=r"which a Trainer cannot: give them to weftune\.train"):
        trainer.run()


def test_rows_that_cannot_be_sent_to_a_process_are_refused_with_a_sentence(
    tmp_path: Path, jobs: Path
) -> None:
    data = [{"text": "w7 w8", "more": lambda: None}] * 8
    content = {"base": str(tmp_path / "model"), "jobs": [{"name": "a", "data": data}]}
    with pytest.raises(UserError, match=r"^the jobs cannot be sent to the processes that train them: "):
        weftune.train(content, output=tmp_path / "never", options=SETTINGS, progress=False, gpus=2)
    assert not (tmp_path / "never").exists()
