"""Every command of README and guide can be pasted: its verb, its options and their values are known."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from tests.docs.pages import GUIDE, README, ROOT, commands, table_rows
from weftune.cli.main import app
from weftune.report.read import JobRecord
from weftune.report.snippets import remedies

PROGRAM = typer.main.get_command(app)
VERBS = PROGRAM.commands  # type: ignore[attr-defined]


def weftune_commands(page: Path) -> list[str]:
    return [line for line in commands(page) if "weftune " in f"{line} " and "pip " not in line]


def arguments(line: str) -> list[str]:
    """What follows `weftune` or `python -m weftune` in a command line."""
    words = shlex.split(line)
    return words[words.index("weftune") + 1 :]


def options_of(verb: str) -> set[str]:
    """The options of a verb and, if it is a group, of the verbs in it."""
    found = [VERBS[verb], *getattr(VERBS[verb], "commands", {}).values()]
    return {name for one in found for option in one.params for name in option.opts if name.startswith("--")}


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_every_command_can_be_pasted(page: Path) -> None:
    lines = weftune_commands(page)
    assert len(lines) > 8
    for line in lines:
        assert not set("|<>[]") & set(line), line
        verb, *words = arguments(line)
        VERBS[verb].make_context(verb, words)


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_nothing_is_installed_from_an_index_where_it_is_not_published(page: Path) -> None:
    installed = [
        word for line in commands(page) if "pip install" in line for word in shlex.split(line, comments=True)
    ]
    assert "." in " ".join(installed)
    assert not [word for word in installed if re.match(r"weftune\b", word)]


def test_every_option_of_train_is_in_the_guides_table_and_no_other() -> None:
    told = {re.findall(r"--[\w-]+", row[0])[0] for row in table_rows(GUIDE, "option")}
    assert told == options_of("train") - {"--help"}


def test_every_verb_is_in_the_guides_table_with_options_that_it_has() -> None:
    rows = {row[0].strip("`").removeprefix("weftune "): row[1] for row in table_rows(GUIDE, "command")}
    assert set(rows) == set(VERBS)
    for verb, words in rows.items():
        assert set(re.findall(r"--[\w-]+", words)) <= options_of(verb), verb


def test_every_option_that_the_guide_names_is_one_of_weftune_or_of_torchrun_or_pip() -> None:
    ours = {option for verb in VERBS for option in options_of(verb)}
    lines = [
        line for line in GUIDE.read_text().splitlines() if not re.search("torchrun|rdzv|pip install", line)
    ]
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(lines))) <= ours


@pytest.mark.parametrize("state", ["failed", "paused", "cancelled", "running"])
def test_what_the_report_advises_is_a_command(state: str) -> None:
    job = JobRecord(
        name="one", state=state, reason="its loss is nan", step=1, steps=2, trained_tokens=0,
        best_step=None, eval_loss=None, notes=(),
    )  # fmt: skip
    for remedy in remedies(job):
        verb, *words = arguments(remedy.command)
        VERBS[verb].make_context(verb, words)


def test_the_targets_of_make_that_the_readme_names_are_there() -> None:
    named = {
        line.split()[1] for page in (README, GUIDE) for line in commands(page) if line.startswith("make ")
    }
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"quickstart", "test"} <= named <= targets
