"""Whatever a user writes is a run or a SpecError, never another exception."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weftune.errors import SpecError
from weftune.jobs.spec.keys import SECTIONS
from weftune.jobs.spec.read import parse_run, read_run

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a/b", "~nobody/x", "\0", "(", "all-linear", "demo", "best", "x" * 5000, "\ud800"])
)
KEYS = st.sampled_from([*sorted({key for keys in SECTIONS.values() for key in keys}), "rows", "r", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3),
    max_leaves=6,
)


def run_or_mistakes(read: Any) -> None:
    try:
        read()
    except SpecError as error:
        mistakes = error.mistakes
    else:
        return
    assert mistakes
    for mistake in mistakes:
        assert mistake.sentence
        assert "\n" not in str(mistake)
        assert len(mistake.sentence) < 500


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.dictionaries(KEYS, VALUES, max_size=3), VALUES)
def test_any_mapping_is_a_run_or_a_list_of_mistakes(job: dict, defaults: dict, base: Any) -> None:
    run = {"base": base, "defaults": defaults, "jobs": [{"name": "a", "data": "owner/rows", **job}]}
    run_or_mistakes(lambda: parse_run(run, Path(os.curdir)))


OVER = st.sampled_from(
    [
        "learning_rate",
        "adapter",
        "adapter.rank",
        "adapter.targets",
        "steps",
        "early_stop",
        "betas",
        "a.b",
        ".",
        "",
    ]
)
CHOICES = (
    st.lists(VALUES, max_size=3) | st.dictionaries(st.sampled_from(["min", "max", "log"]), SCALARS) | VALUES
)
SWEEPS = st.fixed_dictionaries(
    {"over": st.dictionaries(OVER, CHOICES, max_size=3) | VALUES},
    optional={
        "search": st.sampled_from(["grid", "random"]) | VALUES,
        "trials": st.integers(1, 4) | VALUES,
        "halving": st.fixed_dictionaries({}, optional={"at": VALUES, "keep": VALUES, "judge": VALUES})
        | VALUES,
        "keep": VALUES,
        "metric": st.just("eval_loss") | VALUES,
        "mode": st.just("min") | VALUES,
    },
)


@settings(max_examples=300, deadline=None)
@given(SWEEPS, st.dictionaries(KEYS, VALUES, max_size=2))
def test_any_sweep_is_a_run_or_a_list_of_mistakes(sweep: dict, job: dict) -> None:
    keys = {"name": "a", "data": "owner/rows", "eval": {"fraction": 0.1}, **job, "sweep": sweep}
    run_or_mistakes(lambda: parse_run({"base": "demo", "jobs": [keys]}, Path(os.curdir)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="abjo:-[]{}&*!<>|#'\"~.,0123e \n\t%@?", max_size=60))
def test_any_text_is_a_run_or_a_list_of_mistakes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "jobs.yaml"
    file.write_text(text, encoding="utf-8")
    run_or_mistakes(lambda: read_run(file))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", 1j, range(3)])
def test_what_yaml_cannot_hold_is_a_mistake_too(value: Any) -> None:
    for key in ("adapter", "steps", "eval", "name", "keep"):
        run = {"base": "demo", "jobs": [{"name": "a", "data": "owner/rows", key: value}]}
        with pytest.raises(SpecError):
            parse_run(run, Path(os.curdir))


@pytest.mark.parametrize(
    "path", ["~no-such-user/x", "\0", "\ud800", "x" * 5000, "a/" * 3000, "\n", "/", ".", "~"]
)
@pytest.mark.parametrize("key", ["data", "chat_template", "eval", "init_from", "output", "base"])
def test_any_path_is_a_run_or_a_mistake(path: str, key: str) -> None:
    job: dict[str, Any] = {"name": "a", "data": {"path": "owner/rows"}}
    run: dict[str, Any] = {"base": "demo", "jobs": [job]}
    if key in ("output", "base"):
        run[key] = path
    elif key == "data":
        job["data"] = path
    elif key == "chat_template":
        job["data"][key] = path
    else:
        job |= {"eval": {"path": path}} if key == "eval" else {"adapter": {key: path}}
    run_or_mistakes(lambda: parse_run(run, Path(os.curdir)))
