from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weftune.adapters.kinds import KINDS
from weftune.adapters.lora.spec import LoraSpec
from weftune.data.spec import DataSpec, EvalSpec, Source
from weftune.errors import SpecError
from weftune.jobs.spec.keys import SECTIONS
from weftune.jobs.spec.read import parse_run
from weftune.jobs.spec.spec import EarlyStop, JobSpec, changed_keys, resolve_job, to_steps
from weftune.jobs.sweeps.spec import Halving, SweepSpec

ROWS = [{"text": "one"}, {"text": "two"}]


@pytest.fixture
def rows_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n')
    return path


def test_a_job_made_in_python_takes_what_the_file_takes(rows_file: Path) -> None:
    job = JobSpec(
        name="a",
        data="rows.jsonl",
        adapter={"rank": 8, "targets": ["q_proj"]},
        eval={"fraction": 0.1, "every": 0.5},
        early_stop=3,
        steps=10,
    )
    assert job.data == DataSpec(path=str(rows_file))
    assert job.adapter == LoraSpec(rank=8, targets=("q_proj",))
    assert job.eval == EvalSpec(fraction=0.1, every=0.5)
    assert job.early_stop == EarlyStop(patience=3)
    assert (job.steps, job.epochs) == (10, None)


def test_a_job_made_of_records_equals_one_made_of_mappings(rows_file: Path) -> None:
    records = JobSpec(
        name="a",
        data=DataSpec(path=(Source(path="rows.jsonl", weight=2.0),), max_length=64),
        adapter=LoraSpec(rank=4),
    )
    mappings = JobSpec(
        name="a",
        data={"path": [{"path": rows_file, "weight": 2}], "max_length": 64},
        adapter={"rank": np.int64(4), "alpha": np.float32(32)},
    )
    assert records == mappings


def test_rows_can_be_given_themselves() -> None:
    assert JobSpec(name="a", data=ROWS).data.rows is ROWS
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_list(ROWS)
    assert JobSpec(name="a", data=held).data.rows is held
    assert JobSpec(name="a", data={"rows": ROWS, "max_length": 8}).data.max_length == 8
    assert JobSpec(name="a", data=DataSpec(rows=ROWS)).data.rows is ROWS


def test_one_row_is_enough() -> None:
    assert JobSpec(name="a", data=ROWS[:1]).data.rows == ROWS[:1]


def test_a_job_that_says_neither_steps_nor_epochs_sees_its_rows_once() -> None:
    job = JobSpec(name="a", data=ROWS)
    assert (job.epochs, job.steps, job.betas, job.eps) == (1.0, None, (0.9, 0.999), 1e-8)


def test_a_mixture_is_not_taken_for_rows(rows_file: Path) -> None:
    job = JobSpec(name="a", data=["rows.jsonl", "owner/name"])
    assert job.data.sources == (Source(path=str(rows_file)), Source(path="owner/name"))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"data": []}, "data: must hold at least one row"),
        ({"data": [1, {"text": "a"}]}, "data: must be rows, each a mapping such as {text: ...}, got 1"),
        ({"data": {"rows": ROWS, "path": "owner/name"}}, "data: give path or rows, not both"),
        ({"data": ROWS, "adapter": {"r": 8}}, "adapter.r: write rank"),
        ({"data": ROWS, "batchsize": 1}, "batchsize: is not a key of a job; did you mean batch_size?"),
        ({"data": ROWS, "learning_rate": np.nan}, "learning_rate: must be a finite number, got nan"),
        ({"data": ROWS, "epochs": 1, "steps": 1}, "steps: give epochs or steps, not both"),
        ({"data": "no.jsonl"}, 'data: there is no file "no.jsonl"'),
        ({}, "needs data"),
        ({"data": ROWS, "seed": -1, "clip": -1}, "clip: must be at least 0, got -1\nseed: must be"),
    ],
)  # fmt: skip
def test_a_mistake_in_python_is_a_sentence(keys: dict, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(name="a", **keys)
    assert str(caught.value).startswith(sentence)


def test_a_job_cannot_be_changed_and_a_changed_copy_is_checked() -> None:
    job = JobSpec(name="a", data=ROWS, steps=5)
    with pytest.raises(AttributeError):
        job.steps = 6  # type: ignore[misc]
    assert replace(job, name="b").steps == 5
    with pytest.raises(SpecError, match="steps: must be at least 1, got 0"):
        replace(job, steps=0)


def test_no_clipping_has_one_spelling() -> None:
    assert JobSpec(name="a", data=ROWS, clip=0).clip is None
    assert JobSpec(name="a", data=ROWS, clip=None).clip is None
    assert JobSpec(name="a", data=ROWS).clip == 1.0


def test_the_listed_keys_are_the_fields_of_the_records() -> None:
    from dataclasses import fields

    from weftune.base.spec import BaseSpec, RopeScaling

    def names(record: type) -> set[str]:
        return {item.name for item in fields(record)}

    # The trials of a sweep are jobs of the run, so no job holds one.
    assert set(SECTIONS["job"]) == names(JobSpec) | {"sweep"}
    assert set(SECTIONS["sweep"]) == names(SweepSpec)
    assert set(SECTIONS["halving"]) == names(Halving)
    # The objective decides whether a scalar head is trained.
    assert {*SECTIONS["adapter"], "modules_to_save"} == set().union(*map(names, KINDS.values()))
    assert set(SECTIONS["data"]) == names(DataSpec) - {"rows"}
    assert set(SECTIONS["base"]) == names(BaseSpec) - {"written"}
    assert set(SECTIONS["rope_scaling"]) == names(RopeScaling)
    assert set(SECTIONS["eval"]) == names(EvalSpec)
    assert set(SECTIONS["source"]) == names(Source)
    assert set(SECTIONS["early_stop"]) == names(EarlyStop)


@pytest.mark.parametrize(
    ("value", "total", "steps"),
    [(0, 100, 0), (0.07, 100, 7), (0.1, 7, 1), (0.5, 3, 2), (1, 100, 1), (25, 10, 25), (0.001, 10, 1)],
)
def test_below_one_is_a_share_of_the_run_and_otherwise_steps(value: float, total: int, steps: int) -> None:
    assert to_steps(value, total) == steps


def test_no_share_of_a_run_is_negative() -> None:
    with pytest.raises(AssertionError):
        to_steps(-0.5, 100)


def test_epochs_become_steps_and_the_last_partial_batch_counts() -> None:
    assert JobSpec(name="a", data=ROWS, epochs=1.1).total_steps(10) == 11
    assert JobSpec(name="a", data=ROWS, epochs=0.01).total_steps(10) == 1
    assert JobSpec(name="a", data=ROWS, steps=3).total_steps(10) == 3
    assert JobSpec(name="a", data=ROWS, epochs=0.01).total_steps(0) == 1


JOBS = st.fixed_dictionaries(
    {"name": st.just("a"), "data": st.fixed_dictionaries({"path": st.sampled_from(["owner/rows", "rows"])})},
    optional={
        "adapter": st.fixed_dictionaries(
            {},
            optional={
                "rank": st.integers(1, 65536),
                "dropout": st.floats(0, 1, exclude_max=True),
                "targets": st.sampled_from(["all-linear", ".*q_proj", ["q_proj", "v_proj"]]),
                "rank_pattern": st.just({"q_proj": 4}),
            },
        ),
        "eval": st.fixed_dictionaries({"fraction": st.floats(0.01, 0.99)}, optional={"every": st.just(5)}),
        "steps": st.integers(1, 10**9),
        "learning_rate": st.floats(1e-30, 1e30),
        "clip": st.none() | st.floats(0, 10),
        "warmup": st.floats(0, 1) | st.integers(0, 1000),
    },
)


@given(JOBS)
def test_a_resolved_job_is_yaml_and_reads_back_as_itself(keys: dict) -> None:
    job = JobSpec(**keys)
    whole = yaml.safe_load(yaml.safe_dump(resolve_job(job), sort_keys=False))
    assert changed_keys(resolve_job(job), whole) == []
    (again,) = parse_run({"base": "demo", "jobs": [whole]}, Path.cwd()).jobs
    assert again == job


def test_a_resolved_job_names_given_rows_by_their_count() -> None:
    assert resolve_job(JobSpec(name="a", data=ROWS))["data"]["rows"] == 2


def test_whatever_a_job_does_not_say_is_as_the_guide_says() -> None:
    assert resolve_job(JobSpec(name="a", data="owner/rows")) == {
        "name": "a",
        "data": {
            "path": "owner/rows", "format": "auto", "columns": {}, "split": None, "limit": None,
            "max_length": DataSpec(path="x").max_length, "train_on": "assistant", "chat_template": None,
            "skip_bad_rows": False,
        },
        "adapter": {
            "kind": "lora", "rank": 16, "alpha": 32.0, "dropout": 0.0, "targets": "all-linear",
            "layers": None, "target_parameters": [], "rslora": False, "loraplus_lr_ratio": 1.0,
            "rank_pattern": {}, "alpha_pattern": {}, "trainable_token_indices": [], "modules_to_save": [],
            "init_from": None,
        },
        "objective": "sft", "eval": None, "epochs": 1.0, "steps": None, "batch_size": 16,
        "learning_rate": 2e-4, "schedule": "linear", "warmup": 0.0, "weight_decay": 0.0,
        "betas": [0.9, 0.999], "eps": 1e-8, "clip": 1.0, "seed": 0, "priority": 0, "early_stop": None,
        "save_every": None, "keep": "last",
    }  # fmt: skip


def test_a_resolved_job_writes_out_its_sources_and_what_stops_it() -> None:
    job = JobSpec(
        name="a",
        data=["owner/rows", {"path": "owner/more", "weight": 2}],
        eval={"fraction": 0.1, "every": 5},
        early_stop=3,
        adapter={"targets": ["q_proj", "v_proj"]},
    )
    whole = resolve_job(job)
    assert whole["data"]["path"] == [
        {"path": "owner/rows", "weight": 1.0},
        {"path": "owner/more", "weight": 2.0},
    ]
    assert whole["early_stop"] == {"patience": 3, "min_delta": 0.0}
    unset = {"path": None, "generate": None, "metric": None}
    assert whole["eval"] == {"fraction": 0.1, "every": 5, **unset}
    assert whole["adapter"]["targets"] == ["q_proj", "v_proj"]


def test_a_job_that_no_file_names_is_pointed_at_by_its_name() -> None:
    run = parse_run({"base": "demo", "jobs": [{"name": "a", "data": "owner/rows"}]}, Path.cwd())
    assert run.locate("a", "adapter", "rank") == "jobs[0]"
    assert run.locate("b", "adapter", "targets", 1) == "job b adapter.targets[1]"
    assert "places" not in repr(run), "they would be longer than all the rest"
    assert replace(run, places={}) == run, "where a key was written changes nothing"


def test_changed_keys_are_named_by_their_way() -> None:
    old = resolve_job(JobSpec(name="a", data="owner/rows", adapter={"rank": 4}))
    new = resolve_job(
        JobSpec(name="a", data="owner/rows", adapter={"rank": 8}, eval={"fraction": 0.1}, steps=3)
    )
    assert changed_keys(old, new) == ["adapter.rank", "epochs", "eval", "steps"]
    assert changed_keys(old, old) == []
    earlier = {**old, "data": {**old["data"], "max_length": 2048}}
    assert changed_keys(earlier, old) == [], "as earlier versions wrote the default"
    assert changed_keys({**old, "data": {**old["data"], "max_length": 2047}}, old) == ["data.max_length"]
    assert changed_keys({}, {"seed": 1}) == ["seed"]
    assert changed_keys({"seed": None}, {}) == ["seed"], "what is not said is not the same as nothing"


def test_a_job_that_began_before_adam_had_keys_goes_on_with_torchs_own() -> None:
    new = resolve_job(JobSpec(name="a", data="owner/rows"))
    old = {key: value for key, value in new.items() if key not in ("betas", "eps")}
    assert changed_keys(old, new) == []
    other = resolve_job(JobSpec(name="a", data="owner/rows", betas=[0.9, 0.95]))
    assert changed_keys(old, other) == ["betas"]
