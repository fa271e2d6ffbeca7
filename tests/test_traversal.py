"""Two hundred texts that lead out of a folder lead nowhere, wherever a name is taken from them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.traversal import PAYLOADS
from weftune.cli.preview import select_jobs
from weftune.errors import SpecError, UserError
from weftune.jobs.spec.build import is_hub_id, is_revision
from weftune.jobs.spec.keys import name_fault
from weftune.jobs.spec.read import parse_run
from weftune.report.read import read_run as read_output

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.symlink", "os.listdir")
opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event in EVENTS:
        opened.extend(str(argument) for argument in arguments[:2] if isinstance(argument, str | Path))


sys.addaudithook(_note)


@contextmanager
def touching_only(root: Path) -> Iterator[None]:
    """Whatever is opened, made, moved or listed meanwhile lies under `root` (or is Python's own)."""
    global opened
    opened = []
    try:
        yield
        own = (str(root), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
        outside = [path for path in opened if path not in ("r", "rb", "w") and not path.startswith(own)]
        assert not outside
    finally:
        opened = None


def test_no_payload_is_the_name_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for payload in PAYLOADS:
        assert name_fault(payload), payload
        jobs = [{"name": payload, "data": "rows.jsonl"}]
        with touching_only(tmp_path), pytest.raises(SpecError, match="name"):
            parse_run({"base": "demo", "jobs": jobs}, tmp_path)


def test_no_payload_is_an_id_of_the_hub_or_a_revision(tmp_path: Path) -> None:
    for payload in PAYLOADS:
        assert not is_hub_id(payload) or "/" not in payload.replace("a/b", ""), payload
        assert ".." not in payload or not is_hub_id(payload), payload
        if ".." in payload or payload.startswith(("/", "~", chr(92))):
            assert not is_revision(payload), payload
            with pytest.raises(SpecError, match="must be a branch, tag or commit"):
                parse_run({"base": {"model": "demo", "revision": payload}, "jobs": []}, tmp_path)


def test_no_payload_chooses_a_job_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    run = parse_run({"base": "demo", "jobs": [{"name": "a", "data": "rows.jsonl"}]}, tmp_path)
    for payload in PAYLOADS:
        with touching_only(tmp_path), pytest.raises(UserError, match="--job: there is no job"):
            select_jobs(run, payload)


def test_an_output_whose_jobs_are_payloads_is_read_inside_itself_only(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "job.yaml").write_text("job: {steps: 12345}\n")
    names = [payload for payload in PAYLOADS if chr(0) not in payload]
    assert "../secret" in names
    lines = [json.dumps({"job": name, "step": 1, "loss": 1.0, "time": 0.0}) for name in names]
    (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with touching_only(output):
        run = read_output(output)
    assert len(run.jobs) == len(names)
    assert not any(job.spec for job in run.jobs)
