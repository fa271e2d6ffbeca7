"""What a job's folder remembers, and what it refuses to go on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import bench, oracle
from tests.families import tiny
from weftune import JobSpec
from weftune.base.spec import BaseSpec
from weftune.cli.generate import recorded_base
from weftune.core.files import cache_folder
from weftune.errors import OutputError, SpecError
from weftune.jobs.spec.checks import warnings
from weftune.trainer.job import PreparedJob, prepare_job
from weftune.trainer.results import changed_settings, job_file_values, refuse_changes, write_job_file

BASE = BaseSpec(model="/models/tiny", dtype="float32", revision="main", written="../models/tiny")


def ready(**keys: object) -> PreparedJob:
    job = JobSpec(name="a", data=bench.rows(bench.samples(3)), **keys)
    shape = bench.base("llama").shape
    return prepare_job(job, 0, bench.tokenizer(), shape, cache_folder() / "tokens")


def test_the_base_comes_back_from_the_job_file_as_it_was(tmp_path: Path) -> None:
    write_job_file(tmp_path, job_file_values(ready(), BASE))
    assert recorded_base(tmp_path) == BASE


def test_a_base_written_another_way_is_the_same_base_and_a_changed_one_is_named(tmp_path: Path) -> None:
    job = ready()
    write_job_file(tmp_path, job_file_values(job, BASE))
    refuse_changes(tmp_path, job_file_values(job, replace(BASE, written="models/tiny")))
    changes = {"model": "/models/other", "dtype": "bfloat16", "revision": None, "quantize": "nf4"}
    for key, value in changes.items():
        with pytest.raises(OutputError, match=rf"base\.{key} changed"):
            refuse_changes(tmp_path, job_file_values(job, replace(BASE, **{key: value})))


def test_a_finished_job_names_every_setting_that_has_changed_since(tmp_path: Path) -> None:
    job = ready(steps=4)
    write_job_file(tmp_path, job_file_values(job, BASE))
    assert changed_settings(tmp_path, job.spec, replace(BASE, written="models/tiny")) == []
    assert changed_settings(tmp_path, job.spec, BASE, max_steps=4) == []
    assert changed_settings(tmp_path, job.spec, BASE, max_steps=3) == ["steps with --max-steps 4, now 3"]
    other = replace(job.spec, steps=12, clip=0.5)
    changed = ["clip 1.0, now 0.5", "steps 4, now 12", "base.dtype float32, now bfloat16"]
    assert changed_settings(tmp_path, other, replace(BASE, dtype="bfloat16")) == changed
    for path in tmp_path.rglob("job.yaml"):
        path.write_bytes(b"job: [\xff")
    assert changed_settings(tmp_path, other, BASE) == [], "its adapter is there all the same"


def test_a_job_file_from_before_bases_were_remembered_as_written_still_serves(tmp_path: Path) -> None:
    job = ready()
    old = job_file_values(job, BASE)
    del old["base"]["written"]
    write_job_file(tmp_path, old)
    refuse_changes(tmp_path, job_file_values(job, BASE))
    assert recorded_base(tmp_path) == replace(BASE, written=None)


def test_a_start_that_does_not_fit_stops_the_run_before_any_job_has_begun(tmp_path: Path) -> None:
    model = tiny("llama")
    start = oracle.write_start(tmp_path / "start", model, oracle.lora_config(model, 4, 8.0, ["q_proj"]))
    rows = bench.rows(bench.samples(3))
    good = JobSpec(name="good", data=rows, steps=1)
    bad = JobSpec(
        name="bad", data=rows, steps=1, adapter=dict(rank=8, targets=["q_proj"], init_from=str(start))
    )
    with pytest.raises(
        SpecError, match=r"^job bad: adapter\.init_from: .* has rank 4 at .*, the job asks for 8"
    ):
        bench.train(bench.base("llama"), tmp_path / "out", [good, bad])
    assert not (tmp_path / "out" / "good").exists()


def test_a_start_trained_with_another_scale_is_a_warning(tmp_path: Path) -> None:
    model = tiny("llama")
    start = oracle.write_start(tmp_path, model, oracle.lora_config(model, 4, 8.0, ["q_proj"]))
    shape = bench.base("llama").shape

    def warned(**adapter: object) -> list[str]:
        keys = dict(rank=4, targets=["q_proj"], init_from=str(start)) | adapter
        return warnings([JobSpec(name="a", data=bench.rows(bench.samples(3)), adapter=keys)], shape)

    assert not any("scale" in sentence for sentence in warned(alpha=8.0))
    (told,) = (sentence for sentence in warned(alpha=32.0) if "scale" in sentence)
    assert told.startswith(
        "a: its scale at model.layers.0.self_attn.q_proj is 8, but init_from was trained with 2;"
    )
    assert any("trained with 2" in sentence for sentence in warned(alpha=8.0, rslora=True))
