"""The YAML of README and guide is what `weftune train` reads, and the guide's table has every key."""

from __future__ import annotations

import re
import runpy
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import GUIDE, README, ROOT, SWEEPS, blocks, table_rows
from weftune.adapters.lora.spec import LoraSpec
from weftune.base.spec import RopeScaling
from weftune.data.spec import DataSpec, EvalSpec, GenerateSpec, Source
from weftune.jobs.spec.keys import SECTIONS
from weftune.jobs.spec.read import read_run
from weftune.jobs.spec.spec import EarlyStop, JobSpec, RunSpec
from weftune.jobs.sweeps.halving import rung_counts, rung_steps
from weftune.jobs.sweeps.spec import Halving, SweepSpec
from weftune.objectives.spec import ObjectiveSpec

PREFIX = {
    "run": "", "job": "", "source": "data.path[].", "halving": "sweep.halving.",
    "generate": "eval.generate.", "init_from": "adapter.init_from.", "rope_scaling": "base.rope_scaling.",
}  # fmt: skip
RECORDS: dict[str, type] = {
    "": JobSpec, "adapter.": LoraSpec, "data.": DataSpec, "data.path[].": Source, "eval.": EvalSpec,
    "eval.generate.": GenerateSpec,
    "early_stop.": EarlyStop, "sweep.": SweepSpec, "sweep.halving.": Halving,
    "base.rope_scaling.": RopeScaling,
}  # fmt: skip


@dataclass
class Nothing:
    """A section whose keys have no record with defaults."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has what the examples name."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("rows.jsonl", "rows.csv", "chats.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "adapters" / "earlier").mkdir(parents=True)
    (tmp_path / "adapters" / "earlier" / "adapter_config.json").touch()
    (tmp_path / "adapters" / "earlier" / "adapter_model.safetensors").touch()
    return tmp_path


def read(folder: Path, text: str) -> RunSpec:
    """A block that is no whole file holds keys of a job."""
    keys = yaml.safe_load(text)
    if "jobs" not in keys:
        text = yaml.safe_dump({"base": "demo", "jobs": [{"name": "one", "data": "rows.jsonl"} | keys]})
    (folder / "jobs.yaml").write_text(text, encoding="utf-8")
    return read_run(folder / "jobs.yaml")


def test_the_jobs_file_of_the_readme_works_as_pasted(folder: Path) -> None:
    (text,) = blocks(README, "yaml")
    run = read(folder, text)
    assert [job.name for job in run.jobs] == ["small", "large", "science"]
    assert all(Path(job.data.path).resolve().is_relative_to(ROOT / "examples") for job in run.jobs)


@pytest.mark.parametrize(
    "text", [*blocks(GUIDE, "yaml"), *blocks(SWEEPS, "yaml")], ids=lambda text: text.split("\n")[0]
)
def test_every_example_of_the_guide_is_read(folder: Path, text: str) -> None:
    assert read(folder, text).jobs


def test_the_keys_of_a_sweep_that_its_page_names_are_those_there_are() -> None:
    told = {key for row in table_rows(SWEEPS, "key of `sweep`") for key in re.findall(r"`([\w.]+)`", row[0])}
    nested = {f"halving.{item.name}" for item in fields(Halving)}
    assert told == {item.name for item in fields(SweepSpec)} - {"halving"} | nested


def test_the_example_of_a_sweep_has_eight_trials_and_ends_with_two() -> None:
    run = read_run(ROOT / "examples" / "sweep" / "jobs.yaml")
    (sweep,) = run.sweeps
    assert len(run.jobs) == 8
    assert rung_counts(sweep.spec) == (8, 4, 2)
    assert rung_steps(sweep.spec.halving, run.jobs[0].steps or 0) == (4, 8)


def test_the_guides_table_has_every_key_of_a_jobs_file_and_no_other() -> None:
    told = [row[0].strip("`") for row in table_rows(GUIDE, "key")]
    known = {
        f"{PREFIX.get(section, f'{section}.')}{key}" for section, keys in SECTIONS.items() for key in keys
    }
    assert len(told) == len(set(told))
    assert set(told) == known


def test_the_defaults_of_the_guides_table_are_those_of_a_job() -> None:
    compared = 0
    for key, told, _ in table_rows(GUIDE, "key"):
        found = re.fullmatch(r"`(.*\.)?([^.]+)`", key)
        assert found is not None
        known = {item.name: item for item in fields(RECORDS.get(found[1] or "", Nothing))}
        # One epoch is what neither `epochs` nor `steps` means.
        if found[2] in known and found[2] != "epochs":
            assert value_of(told) == default_of(known[found[2]]), key
            compared += 1
    assert compared > 35


def value_of(cell: str) -> Any:
    """What a cell of the column `default` says; an empty one stands for none."""
    text = cell.strip("`")
    if text.startswith("["):
        return tuple(map(float, text.strip("[]").split(",")))
    try:
        return float(text)
    except ValueError:
        return {"": None, "false": False}.get(text, text)


def default_of(item: Field[Any]) -> Any:
    """None where a key is absent, empty or must be given."""
    if isinstance(item.default, ObjectiveSpec):
        return item.default.kind
    return None if item.default in (MISSING, None, ()) else item.default


def test_the_script_of_the_quickstart_finds_what_it_imports() -> None:
    """It trains for minutes, so that `make quickstart` alone runs it."""
    runpy.run_path(str(ROOT / "examples/quickstart/quickstart.py"), run_name="imported")


def test_the_script_that_draws_the_pictures_finds_what_it_draws_with() -> None:
    pytest.importorskip("PIL")
    from tests.docs import pictures

    assert pictures.EXAMPLE.exists()
    assert all((pictures.PICTURES / name).exists() for name in ("sweep.png", "sweep-terminal.png"))
