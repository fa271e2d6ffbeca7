from __future__ import annotations

import shlex

from weftune import Options
from weftune.jobs.spec.retry import read_changes
from weftune.jobs.store.resumption import PYTHON, UNKNOWN, resume_line, train_command


def test_the_command_of_a_python_run_from_a_file_names_the_file_and_what_it_was_called_with() -> None:
    assert train_command("jobs.yaml", None) == "weftune train jobs.yaml --resume"
    line = train_command("my jobs.yaml", "an output", 9)
    assert line == "weftune train 'my jobs.yaml' --output 'an output' --max-steps 9 --resume"


def test_jobs_and_settings_are_added_to_the_command_as_the_shell_reads_them() -> None:
    line = resume_line(
        "weftune train j.yaml --resume", retry=["a b"], changes={"betas": [0.9, 0.95], "clip": None}
    )
    words = shlex.split(line)
    assert words[:6] == ["weftune", "train", "j.yaml", "--resume", "--retry", "a b"]
    assert words[6::2] == ["--set", "--set"]
    assert read_changes(words[7::2]) == {"betas": [0.9, 0.95], "clip": None}
    assert resume_line(None, restart=["a"]) == f"{UNKNOWN} --restart a"


def test_without_a_jobs_file_the_line_is_the_argument_that_python_takes() -> None:
    line = resume_line(PYTHON, retry=["a"], changes={"clip": 0.5})
    made = eval(line.removeprefix("options=weftune."), {"Options": Options})
    assert made == Options(resume=True, retry=("a",), changes={"clip": 0.5})
